"""Loading a causal model of transformers: an object, a folder or a name on the hub."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from foretell._errors import CorruptModelError, ModelError, ModelNotFoundError, OptionError, shown
from foretell._tokenizer import Tokenizer
from foretell.backends.transformers._model import (
    TransformersModel,
    eos_token_ids,
    max_length,
)
from foretell.backends.transformers._tokenizer import tokenizer_of

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load(
    source: Any,
    *,
    tokenizer: Any = None,
    dtype: str = "native",
    device: str | None = None,
    exact: bool | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    threads: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> TransformersModel:
    """A loaded PreTrainedModel, a folder, or a name on the hub.

    ``dtype``: "float32", "bfloat16", "float16", or "native": on the CPU float32, to which the
    weights of a file convert without loss, elsewhere what the file has. ``device``: where torch
    runs it, "cpu" by default. ``exact``: see TransformersModel. ``trust_remote_code`` runs code
    that comes with the model; off. Raises ModelError and its kinds, OptionError.
    """
    if isinstance(source, transformers.PreTrainedModel):
        for name, value in (("device", device), ("attn_implementation", attn_implementation)):
            if value is not None:
                raise OptionError(
                    f"{name} is for loading, and the model is loaded; move or load it as you want "
                    "it, and leave the option out"
                )
        if dtype != "native":
            raise OptionError("dtype is for loading, and the model is loaded; leave it out")
        name = str(getattr(source.config, "_name_or_path", "") or type(source).__name__)
        return TransformersModel(
            source, _tokenizer(tokenizer, name), exact=exact, threads=threads, progress=progress
        )
    if not isinstance(source, str | Path):
        raise OptionError(
            f"the model is {shown(source)}; pass a PreTrainedModel, a folder or a name on the hub"
        )
    where = check_device(device)
    if dtype != "native" and dtype not in DTYPES:
        raise OptionError(
            f"dtype is {shown(dtype)}; the transformers backend has native, "
            f"{', '.join(DTYPES)} (int8 is the cpu backend's)"
        )
    chosen: Any = DTYPES.get(dtype, torch.float32 if where.type == "cpu" else "auto")
    if progress is not None:
        progress(f"loading {source} with transformers {transformers.__version__}")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            dtype=chosen,
            trust_remote_code=trust_remote_code,
            **({} if attn_implementation is None else {"attn_implementation": attn_implementation}),
        )
    except SafetensorError as error:
        raise CorruptModelError(
            f"the weights of {source} are damaged ({error}); fetch them again"
        ) from error
    except Exception as error:  # whatever a damaged file, or code that came with one, leads to
        raise _not_loaded(source, error) from error
    if tokenizer is None:
        # Without a tokenizer prompts are token ids; whoever needs one says so then.
        with contextlib.suppress(OSError, ValueError, KeyError, ImportError, TypeError):
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                source, trust_remote_code=trust_remote_code
            )
    model = model.to(where)
    return TransformersModel(
        model,
        _tokenizer(tokenizer, str(source)),
        exact=exact,
        attention=attn_implementation,
        threads=threads,
        progress=progress,
    )


def read_text(
    source: str, *, tokenizer: str | Path | None = None, trust_remote_code: bool = False
) -> tuple[Tokenizer | None, tuple[int, ...], int]:
    """A model's tokenizer, the tokens that end an answer, and its context, without its weights.

    Raises ModelNotFoundError, ModelError and TokenizerError.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code
        )
        theirs = tokenizer or transformers.AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # whatever a damaged file, or code that came with one, leads to
        raise _not_loaded(source, error) from error
    try:
        generation = transformers.GenerationConfig.from_pretrained(source)
    except OSError:  # not every model has one
        generation = None
    inner = config.get_text_config(decoder=True)
    return (
        _tokenizer(theirs, source),
        eos_token_ids(generation, inner),
        max_length(inner),
    )


def _not_loaded(source: object, error: Exception) -> ModelError:
    text = str(error).strip().splitlines() or [type(error).__name__]
    kind = ModelNotFoundError if isinstance(error, OSError) else ModelError
    return kind(f"transformers cannot load {source}: {text[0]}")


def check_device(device: str | None) -> torch.device:
    """Where to run a model. Raises OptionError for what torch cannot use."""
    try:
        where = torch.device(device or "cpu")
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, ValueError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise OptionError(f"device is {shown(device)}, which torch cannot use: {reason}") from error
    return where


def _tokenizer(tokenizer: Any, source: str) -> Tokenizer | None:
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        return Tokenizer.from_file(tokenizer)
    return tokenizer_of(tokenizer, source)
