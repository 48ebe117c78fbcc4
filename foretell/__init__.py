"""Speculative decoding that makes language models faster without changing one token."""

from foretell._draft import Draft, Drafter
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
from foretell._version import __version__

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
]
