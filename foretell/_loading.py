"""Which backend runs a model, and why."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretell._errors import (
    MissingExtraError,
    ModelNotFoundError,
    OptionError,
    UnsupportedModelError,
    shown,
)
from foretell._extras import install_command
from foretell._hub import DEMO, require_repository, suggestion
from foretell._model import Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Progress = Callable[[str], None]

BACKENDS = ("auto", "cpu", "transformers")
# Transformers takes names without an organization, too.
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded; validated on construction.

    ``device``, ``exact``, ``trust_remote_code`` and ``attn_implementation`` are the transformers
    backend's, ``cache_dtype`` is the cpu backend's; an option of the other backend is refused.
    """

    dtype: str = "native"
    threads: int | None = None
    cache_dtype: str = "float32"
    backend: str = "auto"
    device: str | None = None
    exact: bool | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None

    def __post_init__(self) -> None:
        for name in ("dtype", "cache_dtype"):
            if not isinstance(getattr(self, name), str):
                raise OptionError(f"{name} is {shown(getattr(self, name))}; use one of its names")
        if self.backend not in BACKENDS:
            raise OptionError(
                f"backend is {shown(self.backend)}; use {', '.join(map(repr, BACKENDS))}"
            )
        for name in ("device", "attn_implementation"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise OptionError(f"{name} is {shown(value)}; use a name that torch knows, or None")
        if self.exact not in (None, True, False):
            raise OptionError(f"exact is {shown(self.exact)}; use True, False or None")
        if not isinstance(self.trust_remote_code, bool):
            raise OptionError(
                f"trust_remote_code is {shown(self.trust_remote_code)}; use True or False"
            )

    @property
    def wants_transformers(self) -> bool:
        """Whether no other backend is to be tried."""
        asked = self.backend == "transformers"
        return asked or (self.backend == "auto" and self.of_transformers is not None)

    @property
    def of_transformers(self) -> str | None:
        """An option that only the transformers backend has, as it was given."""
        if self.device not in (None, "cpu"):
            return f"device={self.device!r}"
        if self.dtype == "float16":
            return "dtype='float16'"
        for name in ("attn_implementation", "exact"):
            if getattr(self, name) is not None:
                return f"{name}={getattr(self, name)!r}"
        return "trust_remote_code=True" if self.trust_remote_code else None


def load_model(
    model: str | Path | Model | PreTrainedModel,
    options: LoadOptions,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> tuple[Model, str]:
    """A loaded model, and a sentence on who runs it and why.

    Raises ModelError and its kinds, OptionError, MissingExtraError, InsufficientMemoryError.
    """
    if isinstance(model, Model):
        return model, "the model was given as an object of a backend's own"
    loaded = _is_loaded(model)
    backend, why = options.backend, "asked for"
    if loaded:
        if backend == "cpu":
            raise OptionError(
                "backend='cpu' reads a model's files, and this model is loaded already; pass its "
                "folder, or leave backend out"
            )
        backend, why = "transformers", "the model is an object of transformers"
    elif backend == "auto":
        only = options.of_transformers
        if only is not None:
            backend, why = "transformers", f"{only} is an option of this backend alone"
    elif backend == "cpu" and options.of_transformers is not None:
        raise OptionError(
            f"{options.of_transformers} is for backend='transformers', which is not the one asked "
            "for; leave one of them out"
        )
    if backend == "transformers":
        return _with_transformers(model, options, tokenizer, progress), _said(backend, why)
    from foretell.backends import cpu  # compiling takes a moment; a Model of one's own needs none

    try:
        found: Model = cpu.load(
            model,
            tokenizer=tokenizer,
            progress=progress,
            dtype=options.dtype,
            threads=options.threads,
            cache_dtype=options.cache_dtype,
        )
    except UnsupportedModelError as error:
        if backend == "cpu" or is_gguf(model):
            raise
        if not is_installed():
            raise UnsupportedModelError(
                f"{error} The transformers backend may run it: {install_command('transformers')}"
            ) from error
        why = f"the cpu backend does not know it ({error})"
        if progress is not None:
            progress(_said("transformers", why))
        return _with_transformers(model, options, tokenizer, progress), _said("transformers", why)
    if backend == "auto":
        why = "it computes models of this family, on the processor"
    return found, _said("cpu", why)


def _said(backend: str, why: str) -> str:
    return f"{backend}: {why}"


def _with_transformers(
    model: Any, options: LoadOptions, tokenizer: Any, progress: Progress | None
) -> Model:
    if options.cache_dtype != "float32":
        raise OptionError(
            f"cache_dtype={options.cache_dtype!r} is for the cpu backend; the transformers backend "
            "keeps keys and values in the model's own type"
        )
    if options.dtype == "int8":
        raise OptionError(
            "dtype='int8' is for the cpu backend; the transformers backend has native, float32, "
            "bfloat16 and float16"
        )
    if options.device is not None and is_installed() and not is_gguf(model):  # before the hub
        from foretell.backends import transformers

        transformers.check_device(options.device)
    require_transformers(model)
    from foretell.backends import transformers

    return transformers.load(
        model,
        tokenizer=tokenizer,
        dtype=options.dtype,
        device=options.device,
        exact=options.exact,
        trust_remote_code=options.trust_remote_code,
        attn_implementation=options.attn_implementation,
        threads=options.threads,
        progress=progress,
    )


def require_transformers(model: object) -> None:
    """Raise what keeps a model from being loaded by transformers, as far as that is quickly seen.

    Raises MissingExtraError, and what ``require_files`` raises.
    """
    require_files(model)
    if not is_installed():
        raise MissingExtraError(
            "the transformers backend needs torch and transformers: "
            f"{install_command('transformers')}"
        )


def require_files(model: object) -> None:
    """Refuse at once what transformers would look for on the hub, or misread.

    Raises ModelNotFoundError, DownloadError, and OptionError for models of the cpu backend.
    """
    if not isinstance(model, str | Path):
        return
    path, name = Path(model), str(model)
    if is_gguf(model):
        what = "the demo model is" if name == DEMO else f"{name} is"
        raise OptionError(
            f"{what} a GGUF file, which the cpu backend reads and the transformers backend does "
            "not; leave backend out and the options that are transformers' alone, or name a folder "
            "with config.json or a model on the hub (organization/name)"
        )
    if path.is_file():
        raise ModelNotFoundError(f"{name} is a file; give the folder of the model")
    if path.is_dir():
        if not any((path / config).is_file() for config in ("config.json", "adapter_config.json")):
            raise ModelNotFoundError(
                f"{name} has no config.json; give a folder as Hugging Face publishes it"
            )
        return
    is_name = isinstance(model, str) and _HUB_NAME.fullmatch(name)
    if not is_name or path.suffix in (".gguf", ".safetensors"):
        raise ModelNotFoundError(
            f"there is no folder {shown(name)}"
            + (
                suggestion(name)
                or "; give a folder with config.json, or a model on the hub (organization/name)"
            )
        )
    require_repository(name)


def is_gguf(model: object) -> bool:
    """Whether it is a GGUF file, as the demo model is."""
    if not isinstance(model, str | Path):
        return False
    path = Path(model)
    return (str(model) == DEMO and not path.exists()) or (path.suffix == ".gguf" and path.is_file())


def _is_loaded(model: object) -> bool:
    """Whether it is a PreTrainedModel, without importing what may not be installed."""
    theirs: Any = sys.modules.get("transformers")
    return theirs is not None and isinstance(model, theirs.PreTrainedModel)


def is_installed() -> bool:
    """Whether the transformers backend could be loaded."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
