"""Every error a user can meet.

::

    ForetellError
    |- InputError (ValueError)           a request that cannot be carried out
    |  |- EmptyPromptError               nothing to continue
    |  |- ContextLengthError             prompt longer than the model's context
    |  `- OptionError                    unknown or impossible option or value
    |- ModelError                        a model that cannot be used
    |  |- ModelNotFoundError             no such file, folder, name
    |  |- CorruptModelError              truncated, damaged, inconsistent, NaN
    |  |- UnsupportedModelError          a known format, but not a known model
    |  `- TokenizerError                 no usable tokenizer for the model
    |- VocabularyMismatchError           draft and target speak different ids
    |- CapabilityError                   a backend cannot do what was asked
    |- InsufficientMemoryError           needs more memory than is available
    |- DownloadError                     a pull failed; nothing half-made stays
    `- MissingExtraError (ImportError)   an optional dependency is not installed

A message says what was wrong, why that cannot work, and what to type instead.
"""

from __future__ import annotations

_LONGEST_SHOWN = 200  # characters of a value in a message


def shown(value: object) -> str:
    """``repr`` for a message: cut where it is long, and never an error of its own."""
    try:
        text = repr(value)
    except Exception:  # whole numbers of thousands of digits have none
        return f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


class ForetellError(Exception):
    """Base of every error this package raises on purpose."""


class InputError(ForetellError, ValueError):
    """A request that cannot be carried out as it stands."""


class EmptyPromptError(InputError):
    """The prompt holds no tokens, so there is nothing to continue."""


class ContextLengthError(InputError):
    """The prompt does not fit the model's context; nothing is ever cut silently."""


class OptionError(InputError):
    """An option that does not exist, or a value it cannot have."""


class ModelError(ForetellError):
    """A model that cannot be used."""


class ModelNotFoundError(ModelError):
    """No model under that name, path or id."""


class CorruptModelError(ModelError):
    """A model file that is truncated, damaged or contradicts itself."""


class UnsupportedModelError(ModelError):
    """A model this backend would compute wrongly, and therefore does not run."""


class TokenizerError(ModelError):
    """The model's tokenizer is missing, unknown or does not fit it."""


class VocabularyMismatchError(ForetellError):
    """Draft and target give different meanings to the same token ids."""


class CapabilityError(ForetellError):
    """The backend cannot do what was asked; found before the first token."""


class InsufficientMemoryError(ForetellError):
    """More memory is needed than the machine has available."""


class DownloadError(ForetellError):
    """A pull failed. Nothing half-made was left behind."""


class MissingExtraError(ForetellError, ImportError):
    """An optional dependency is not installed; the message has the pip command."""
