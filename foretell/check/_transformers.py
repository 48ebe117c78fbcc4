"""Assisted generation of transformers; the only file that imports it and torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foretell._errors import MissingExtraError, ModelNotFoundError, OptionError
from foretell._extras import install_command
from foretell._loading import require_files
from foretell.check._others import NEAR_TIE, NEAR_TIE_FLOAT32, TOP, Answer

LOOKUP_TOKENS = 5
DTYPES = {"native": "auto", "float32": "float32", "bfloat16": "bfloat16"}


class Transformers:
    """A causal model of transformers, plain or with assisted generation. An OtherEngine.

    ``assistance`` are the arguments of ``generate`` that switch it on; see ``pair``.
    """

    def __init__(
        self, model: Any, tokenizer: Any, assistance: Mapping[str, Any], about: Mapping[str, Any]
    ) -> None:
        self._model, self._tokenizer, self._assistance = model, tokenizer, dict(assistance)
        self.name = "transformers, assisted" if assistance else "transformers, plain"
        self.about = about
        is_float32 = about.get("dtype") == "float32"
        self.near_tie = NEAR_TIE_FLOAT32 if is_float32 else NEAR_TIE

    def greedy(self, prompt: str, max_tokens: int) -> Answer:
        import torch

        tokens, logits = self._generate(prompt, max_tokens, do_sample=False)
        pieces = tuple(f"{self._tokenizer.decode([token])}<{token}>" for token in tokens)
        logprobs: list[float] = []
        top: list[dict[str, float]] = []
        for token, row in zip(tokens, logits, strict=True):
            scores = torch.log_softmax(row.double(), dim=-1)
            best = scores.topk(min(TOP, len(scores)))
            logprobs.append(float(scores[token]))
            top.append(
                {
                    f"{self._tokenizer.decode([int(i)])}<{int(i)}>": float(p)
                    for p, i in zip(best.values, best.indices, strict=True)
                }
            )
        return Answer(self._tokenizer.decode(tokens), pieces, tuple(logprobs), tuple(top))

    def sample(self, prompt: str, max_tokens: int, seed: int) -> str:
        import torch

        torch.manual_seed(seed)
        tokens, _ = self._generate(
            prompt, max_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0
        )
        return repr(tokens)

    def _generate(
        self, prompt: str, max_tokens: int, **options: Any
    ) -> tuple[list[int], list[Any]]:
        inputs = self._tokenizer(prompt, return_tensors="pt")
        output = self._model.generate(
            **inputs,
            max_new_tokens=max_tokens,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
            **self._assistance,
        )
        start = inputs["input_ids"].shape[1]
        tokens = [int(token) for token in output.sequences[0, start:]]
        return tokens, [row[0] for row in output.logits]


def pair(
    source: str | Path, draft: str | Path | None = None, *, dtype: str = "native"
) -> tuple[Transformers, Transformers]:
    """The same model without and with assistance: by ``draft``, else by prompt lookup.

    ``dtype`` is "native" (as in the files), "float32" or "bfloat16". Raises MissingExtraError,
    OptionError, and ModelNotFoundError for what transformers cannot load.
    """
    if dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r}; with transformers use {', '.join(DTYPES)}")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            f"transformers is not installed ({error}): {install_command('transformers')}"
        ) from error
    require_files(source)
    assistance: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    try:
        options = {"dtype": DTYPES[dtype]}
        model = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        if draft is not None:
            assistant = transformers.AutoModelForCausalLM.from_pretrained(draft, **options)
            assistance = {"assistant_model": assistant}
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"transformers cannot load {source}: {error}") from error
    about = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": {"source": str(source), "draft": None if draft is None else str(draft)},
    }
    return Transformers(model, tokenizer, {}, about), Transformers(
        model, tokenizer, assistance, about
    )
