"""The transformers backend beside transformers itself, on the demo model in float32.

    python benchmarks/transformers_backend.py --output transformers_backend.json

Needs torch, transformers and accelerate. Two things are measured, everything in one process and in
turns, with the same number of threads:

- passes: k tokens behind a context, through Foretell's exact operations and through the model as
  transformers has it;
- generation: the same prompts decoded by both, plainly, with prompt lookup, and with the same draft
  model (the target's own first layers, as a model of its own). Lengths are fixed and equal where a
  draft is; `auto` is Foretell's default, which drafts what pays. Ratios are taken within a round.

Tokens are compared too: Foretell's with one another, which must be equal, and with those of
transformers, where a near-tie may end the comparison (its gap is in the record).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from foretell import Engine, Rows
from foretell.backends.transformers import TransformersModel
from foretell.bench._machine import command_line, load_average, machine, seconds_of_others, versions

WIDTHS = (1, 2, 4, 8, 16)
LETTER = (
    "The ferry leaves the harbour at nine in the morning. It arive on the island at ten. "
    "The last ferry leaves the island at six in the evening, and who misses it have to stay."
)
CODE = (
    "def area(width, height):\n    return width * height\n\n"
    "def volume(width, height, depth):\n    return width * height * depth\n"
)
QUESTIONS = (
    f"Correct the grammar of this text:\n\n{LETTER}",
    f"Add a docstring to each of these functions:\n\n{CODE}",
    f"Repeat this text word by word:\n\n{LETTER}",
    f"When does the last ferry leave? Quote the sentence that says so.\n\n{LETTER}",
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for sleeping better.",
)


def load(path: str) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer: a folder, a GGUF file or "demo"."""
    if path == "demo":
        from foretell._demo import demo_path

        path = str(demo_path())
    file = Path(path)
    where: dict[str, Any] = {}
    if file.suffix == ".gguf":
        path, where = str(file.parent), {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **where)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path, **where)


def first_layers(model: Any, count: int) -> Any:
    """A model of its own that shares the weights of the first layers."""
    config = type(model.config)(**model.config.to_dict())
    config.num_hidden_layers = count
    config.layer_types = None
    small = type(model)(config).eval()
    known = model.state_dict()
    small.load_state_dict({name: known[name] for name in small.state_dict()})
    small.generation_config = transformers.GenerationConfig.from_dict(
        model.generation_config.to_dict()
    )
    return small


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


class Passes:
    """T(k) of both, behind the same context."""

    def __init__(self, model: Any, ours: TransformersModel, context: int) -> None:
        self._model, self._ours = model, ours
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(ours.vocab_size, (context,), generator=generator).tolist()
        self._session = ours.new_session()
        ours.forward([Rows(self._session, self._tokens, logits="none")])
        self._session.keep(range(context))
        self._cache = transformers.DynamicCache(config=model.config)
        with torch.inference_mode():
            model(input_ids=torch.tensor([self._tokens]), past_key_values=self._cache)

    def round(self, widths: tuple[int, ...]) -> dict[str, dict[int, float]]:
        times: dict[str, dict[int, float]] = {"foretell": {}, "transformers": {}}
        for width in widths:
            block = self._tokens[:width]
            rows = [Rows(self._session, block)]
            times["foretell"][width] = min(
                seconds_of(lambda rows=rows: self._ours.forward(rows))[0] for _ in range(3)
            )
            times["transformers"][width] = min(self._theirs(block) for _ in range(3))
        return times

    def _theirs(self, block: list[int]) -> float:
        ids = torch.tensor([block])
        with torch.inference_mode():
            seconds, _ = seconds_of(
                lambda: self._model(input_ids=ids, past_key_values=self._cache).logits.numpy()
            )
        self._cache.crop(-len(block))
        return seconds


def candidates(
    model: Any, engines: dict[str, Engine], draft: Any, length: int, max_tokens: int
) -> dict[str, Callable[[list[int]], list[int]]]:
    """Every way to decode a prompt, as a function from its tokens to what follows."""

    def foretell(engine: Engine, **options: Any) -> Callable[[list[int]], list[int]]:
        return lambda prompt: (
            engine.generate(prompt, max_tokens=max_tokens, ignore_eos=True, **options).token_ids
        )

    def theirs(**options: Any) -> Callable[[list[int]], list[int]]:
        def run(prompt: list[int]) -> list[int]:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                output = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max_tokens,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                    **options,
                )
            return output[0, len(prompt) :].tolist()

        return run

    draft.generation_config.num_assistant_tokens = length
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return {
        "foretell plain": foretell(engines["lookup"], num_draft_tokens=0),
        "foretell prompt lookup": foretell(engines["lookup"], num_draft_tokens=length),
        "foretell draft model": foretell(engines["draft"], num_draft_tokens=length),
        "foretell auto": foretell(engines["auto"]),
        "transformers plain": theirs(),
        "transformers prompt lookup": theirs(prompt_lookup_num_tokens=length),
        "transformers draft model": theirs(assistant_model=draft),
    }


RATIOS = {
    "plain": ("transformers plain", "foretell plain"),
    "prompt lookup": ("transformers prompt lookup", "foretell prompt lookup"),
    "draft model": ("transformers draft model", "foretell draft model"),
    "auto over foretell plain": ("foretell plain", "foretell auto"),
    "auto over transformers prompt lookup": ("transformers prompt lookup", "foretell auto"),
}


def compare_tokens(
    ours: TransformersModel, prompt: list[int], answers: dict[str, list[int]]
) -> dict[str, Any]:
    """Whether Foretell's answers are equal, and where transformers' plain one leaves them."""
    expected = answers["foretell plain"]
    equal = all(tokens == expected for name, tokens in answers.items() if name.startswith("fore"))
    theirs = answers["transformers plain"]
    for at, (one, other) in enumerate(zip(expected, theirs, strict=False)):
        if one != other:
            rows = ours.forward(
                [Rows(ours.new_session(), [*prompt, *expected[:at]], logits="last")]
            )
            gap = abs(float(rows.logits[0, one] - rows.logits[0, other]))
            return {"foretell_equal": equal, "transformers_differs_at": at, "gap": gap}
    return {"foretell_equal": equal, "transformers_differs_at": None, "gap": None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--length", type=int, default=5, help="tokens of a draft")
    parser.add_argument("--draft-layers", type=int, default=6)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    load_before, others = load_average(), -seconds_of_others()
    started = time.perf_counter()
    model, tokenizer = load(options.model)
    draft = first_layers(model, options.draft_layers)
    ours = TransformersModel(model, threads=options.threads)
    small = TransformersModel(draft, threads=options.threads, self_test=False)
    engines = {
        "auto": Engine(ours),
        "lookup": Engine(ours, drafters=["prompt_lookup"]),
        "draft": Engine(ours, small, drafters=["draft_model"]),
    }
    prompts = []
    for question in QUESTIONS[: options.prompts]:
        text = question
        if tokenizer.chat_template is not None:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
        prompts.append(tokenizer(text)["input_ids"])
    ways = candidates(model, engines, draft, options.length, options.max_tokens)
    passes = Passes(model, ours, options.context)
    passes.round(WIDTHS)
    for way in ways.values():  # warm-up
        way(prompts[0])
    rounds: list[dict[str, Any]] = []
    answers: list[dict[str, list[int]]] = [{} for _ in prompts]
    for _ in range(options.rounds):
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for prompt, answer in zip(prompts, answers, strict=True):
            for name, way in ways.items():
                taken, answer[name] = seconds_of(lambda way=way, prompt=prompt: way(prompt))
                seconds[name].append(taken)
        rounds.append({"passes": passes.round(WIDTHS), "seconds": seconds})
    wall = time.perf_counter() - started
    others += seconds_of_others()

    def ratios(over: str, under: str) -> list[float]:
        return [sum(r["seconds"][over]) / sum(r["seconds"][under]) for r in rounds]

    results = {
        "pass_ms": {
            side: {
                width: 1e3 * statistics.median(r["passes"][side][width] for r in rounds)
                for width in WIDTHS
            }
            for side in ("foretell", "transformers")
        },
        "pass_speedup": {
            width: statistics.median(
                r["passes"]["transformers"][width] / r["passes"]["foretell"][width] for r in rounds
            )
            for width in WIDTHS
        },
        "speedup": {
            name: {"median": statistics.median(found), "range": [min(found), max(found)]}
            for name, found in ((name, ratios(*pair)) for name, pair in RATIOS.items())
        },
        "tokens_per_second": {
            name: options.max_tokens
            * len(prompts)
            / statistics.median(sum(r["seconds"][name]) for r in rounds)
            for name in ways
        },
        "auto_over_plain_by_prompt": [
            statistics.median(
                r["seconds"]["foretell plain"][index] / r["seconds"]["foretell auto"][index]
                for r in rounds
            )
            for index in range(len(prompts))
        ],
        "tokens": [
            compare_tokens(ours, prompt, answer)
            for prompt, answer in zip(prompts, answers, strict=True)
        ],
    }
    targets = {
        "plain decoding is not slower": results["speedup"]["plain"]["median"] >= 1.0,
        "a pass of 8 tokens is 1.5 times as fast": results["pass_speedup"][8] >= 1.5,
        "prompt lookup is faster": results["speedup"]["prompt lookup"]["median"] > 1.0,
        "the draft model is faster": results["speedup"]["draft model"]["median"] > 1.0,
        "auto is not slower than plain": (
            results["speedup"]["auto over foretell plain"]["median"] >= 1.0
        ),
        "Foretell's tokens are equal": all(entry["foretell_equal"] for entry in results["tokens"]),
    }
    record = {
        "command": command_line(
            "benchmarks/transformers_backend.py", sys.argv[1:], ["--output", "--model"]
        ),
        "machine": machine(),
        "versions": {
            **versions(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": options.model if options.model == "demo" else type(model).__name__,
        "exactness": ours.exactness,
        "settings": {
            name: getattr(options, name)
            for name in (
                "threads",
                "rounds",
                "prompts",
                "max_tokens",
                "context",
                "length",
                "draft_layers",
            )
        },
        "load_average": [load_before, load_average()],
        "cores_used_by_others": others / wall,
        "results": results,
        "targets": targets,
        "rounds": rounds,
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    show(results, targets)
    return 0


def show(results: dict[str, Any], targets: dict[str, bool]) -> None:
    for width in WIDTHS:
        ours, theirs = (results["pass_ms"][side][width] for side in ("foretell", "transformers"))
        print(
            f"a pass of {width:2}: {ours:7.1f} ms, transformers {theirs:7.1f} ms, "
            f"{results['pass_speedup'][width]:.2f}x"
        )
    for name, rate in results["tokens_per_second"].items():
        print(f"{name:28} {rate:6.1f} tokens/s")
    for name, found in results["speedup"].items():
        low, high = found["range"]
        print(f"{name:40} {found['median']:.2f}x  ({low:.2f} to {high:.2f})")
    for name, reached in targets.items():
        print(f"{'reached' if reached else 'MISSED ':8} {name}")


if __name__ == "__main__":
    sys.exit(main())
