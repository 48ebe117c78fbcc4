"""The demo model's greedy tokens are those of transformers in float32.

Both sum in another order, so where the two best logits lie within rounding of
each other either may come first. Such a near-tie ends the comparison of its
prompt, and only such a one may.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from demo import demo_file

from foretell import Engine, Rows

torch = pytest.importorskip("torch", reason="needs: pip install torch")
transformers = pytest.importorskip("transformers", reason="needs: pip install transformers")
# transformers reads GGUF files with the help of accelerate. Where torch is there and accelerate
# is not, the tests fail and say so: a skip would quietly take away the proof.

MAX_TOKENS = 64
NEAR_TIE = 1e-3
# At least this many of the 20 prompts must be compared to their very end.
FEWEST_EQUAL = 18

QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate to German: The weather is nice today and we are going to the lake.",
    "Give me three tips for sleeping better.",
    "If a train travels 60 miles in 1.5 hours, what is its average speed?",
    "Write a short poem about a lighthouse.",
    "Summarize: Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. "
    "It takes place in the chloroplasts of plants and algae.",
    "List the planets of the solar system in order.",
    "What is the difference between a list and a tuple in Python?",
    "Who wrote the novel Frankenstein?",
    "Correct the grammar: she don't likes apples neither.",
)
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n",
    '{"name": "Ada", "age": 36, "city": "London"}\n{"name": "Alan", "age": 41,',
    "1, 1, 2, 3, 5, 8, 13,",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n- a pinch of salt\n\nDirections:\n1.",
    "In 1969, the first humans landed on the Moon. The mission was called",
    "Água mole em pedra dura, tanto bate até que",
)


@pytest.fixture(scope="module")
def demo() -> Path:
    return demo_file()


@pytest.fixture(scope="module")
def oracle(demo: Path) -> Any:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        demo.parent, gguf_file=demo.name, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), f"transformers did not take the file as it is: {info}"
    # It shall write on past an end of text, as ignore_eos has it here.
    model.generation_config.eos_token_id = None
    return model.eval()


@pytest.fixture(scope="module")
def oracle_tokenizer(demo: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(demo.parent, gguf_file=demo.name)


@pytest.fixture(scope="module")
def prompts(oracle_tokenizer: Any) -> list[list[int]]:
    chats = [
        oracle_tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS
    ]
    return [oracle_tokenizer(text)["input_ids"] for text in (*chats, *TEXTS)]


@pytest.fixture(scope="module")
def engine(demo: Path) -> Engine:
    return Engine(demo, dtype="float32")


def greedy_of_transformers(model: Any, prompt: list[int]) -> tuple[list[int], Any]:
    """The tokens that follow, and the row of logits each was chosen from."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


def test_text_and_chats_become_the_same_tokens(engine: Engine, prompts: list[list[int]]) -> None:
    chats = [engine.encode(messages=[{"role": "user", "content": text}]) for text in QUESTIONS]
    assert chats + [engine.encode(text) for text in TEXTS] == prompts


def test_greedy_tokens_are_those_of_transformers_up_to_near_ties(
    engine: Engine, oracle: Any, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    equal = 0
    report = []
    for number, prompt in enumerate(prompts):
        theirs, logits = greedy_of_transformers(oracle, prompt)
        ours = engine.generate(
            prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True
        ).token_ids
        assert len(ours) == len(theirs) == MAX_TOKENS
        if ours == theirs:
            equal += 1
            continue
        at = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        gap = float(logits[at, theirs[at]] - logits[at, ours[at]])
        report.append(f"prompt {number}: another choice at token {at}, logit gap {gap:.1e}")
        assert gap < NEAR_TIE, report[-1]
    with capsys.disabled():
        summary = f"{equal} of {len(prompts)} prompts equal for all {MAX_TOKENS} tokens"
        print("", summary, *report, sep="\n")
    assert equal >= FEWEST_EQUAL


def test_the_transformers_backend_chooses_the_cpu_backends_tokens_up_to_near_ties(
    engine: Engine, oracle: Any, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    other = Engine(oracle)
    assert other.model.near_tie_gap == 0, other.model.exactness  # type: ignore[attr-defined]
    equal = 0
    report = []
    for number, prompt in enumerate(prompts):
        ours, theirs = (
            one.generate(prompt, max_tokens=MAX_TOKENS // 2, ignore_eos=True).token_ids
            for one in (engine, other)
        )
        if ours == theirs:
            equal += 1
            continue
        at = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        rows = Rows(engine.model.new_session(), [*prompt, *ours[:at]], logits="last")
        logits = engine.model.forward([rows]).logits[0]
        gap = float(logits[ours[at]] - logits[theirs[at]])
        report.append(f"prompt {number}: another choice at token {at}, logit gap {gap:.1e}")
        assert 0 <= gap < NEAR_TIE, report[-1]
    with capsys.disabled():
        print("", f"{equal} of {len(prompts)} prompts equal", *report, sep="\n")
    assert equal >= FEWEST_EQUAL
