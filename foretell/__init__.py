"""Speculative decoding that makes language models faster without changing one token."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foretell._version import __version__

if TYPE_CHECKING:
    from foretell._draft import Draft, Drafter
    from foretell._drop_in import generate
    from foretell._engine import Chat, Engine
    from foretell._errors import (
        CapabilityError,
        ContextLengthError,
        CorruptModelError,
        DownloadError,
        EmptyPromptError,
        ForetellError,
        InputError,
        InsufficientMemoryError,
        MissingExtraError,
        ModelError,
        ModelNotFoundError,
        OptionError,
        TokenizerError,
        UnsupportedModelError,
        VocabularyMismatchError,
    )
    from foretell._logprobs import TokenLogprobs
    from foretell._model import Capabilities, Model, Output, Rows, Session
    from foretell._result import Event, FinishReason, Generation, Stats
    from foretell._sampling import SamplingParams
    from foretell._tokenizer import Tokenizer
    from foretell._verify import Accepted, Origin

__all__ = [
    "Accepted",
    "Capabilities",
    "CapabilityError",
    "Chat",
    "ContextLengthError",
    "CorruptModelError",
    "DownloadError",
    "Draft",
    "Drafter",
    "EmptyPromptError",
    "Engine",
    "Event",
    "FinishReason",
    "ForetellError",
    "Generation",
    "InputError",
    "InsufficientMemoryError",
    "MissingExtraError",
    "Model",
    "ModelError",
    "ModelNotFoundError",
    "OptionError",
    "Origin",
    "Output",
    "Rows",
    "SamplingParams",
    "Session",
    "Stats",
    "TokenLogprobs",
    "Tokenizer",
    "TokenizerError",
    "UnsupportedModelError",
    "VocabularyMismatchError",
    "__version__",
    "generate",
]

# Loaded when first asked for, so that the command line answers Ctrl-C from its first moment on.
_HOMES = {
    "_draft": "Draft Drafter",
    "_drop_in": "generate",
    "_engine": "Chat Engine",
    "_errors": """
        CapabilityError ContextLengthError CorruptModelError DownloadError EmptyPromptError
        ForetellError InputError InsufficientMemoryError MissingExtraError ModelError
        ModelNotFoundError OptionError TokenizerError UnsupportedModelError
        VocabularyMismatchError
    """,
    "_logprobs": "TokenLogprobs",
    "_model": "Capabilities Model Output Rows Session",
    "_result": "Event FinishReason Generation Stats",
    "_sampling": "SamplingParams",
    "_tokenizer": "Tokenizer",
    "_verify": "Accepted Origin",
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names.split():
            value = globals()[name] = getattr(import_module(f"foretell.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
