"""Opening a model: a folder, a GGUF file, a name on the hub or the demo, all as one Checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretell import _hub
from foretell._errors import (
    CorruptModelError,
    ModelNotFoundError,
    OptionError,
    TokenizerError,
    shown,
)
from foretell._tokenizer import Tokenizer
from foretell.backends.cpu import _gguf, _gguf_tokenizer, _huggingface
from foretell.backends.cpu._config import DecoderConfig
from foretell.backends.cpu._layout import expected_tensors, settle
from foretell.backends.cpu._tensor import TensorSource


@dataclass
class Checkpoint:
    """A model that was checked but not yet read.

    `tensors` are exactly `expected_tensors(config)`, by Hugging Face's names, each readable on its
    own. `eos_token_ids` end a generation. `tokenizer` is None where the model came without one.
    """

    config: DecoderConfig
    tensors: Mapping[str, TensorSource]
    tokenizer: Tokenizer | None
    source: str
    eos_token_ids: tuple[int, ...]


def open_checkpoint(
    source: str | Path,
    *,
    tokenizer: str | Path | None = None,
    revision: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Find and check a model without reading its weights.

    `source` is "demo", a folder with config.json and safetensors, a .gguf file, or a repository on
    the hub ("org/name", at `revision`). `tokenizer` is a tokenizer.json to use instead of the
    model's own. `progress` is told in sentences about anything slow (a download).

    Raises ModelNotFoundError, DownloadError, UnsupportedModelError, CorruptModelError,
    TokenizerError and OptionError; the message names the file and the field or tensor.
    """
    path = _resolve(source, revision, progress)
    own = None if tokenizer is None else Tokenizer.from_file(tokenizer)
    checkpoint = _open_folder(path, own) if path.is_dir() else _open_gguf(path, own)
    _check_fit(checkpoint)
    return checkpoint


def _resolve(
    source: str | Path, revision: str | None, progress: Callable[[str], None] | None
) -> Path:
    if not isinstance(source, str | Path):
        raise OptionError(
            f"the model is {shown(source)}; give a folder, a .gguf file, a repository on the hub "
            "(organization/name) or 'demo'"
        )
    path = Path(source)
    try:
        if path.exists():
            return path
    except OSError as error:  # too long a name, a folder that must not be read
        raise ModelNotFoundError(
            f"{shown(str(source))} cannot be looked for ({error.strerror})"
        ) from error
    name = str(source)
    if name == _hub.DEMO:
        return _hub.demo_path(progress)
    if isinstance(source, Path) or not _hub.is_repository_name(name):
        raise ModelNotFoundError(
            f"there is no file or folder {shown(name)}"
            + (
                _hub.suggestion(name)
                or "; give a folder with config.json, a .gguf file, a repository on the hub "
                "(organization/name) or 'demo'"
            )
        )
    return _hub.snapshot_path(name, revision=revision)


def _open_folder(folder: Path, tokenizer: Tokenizer | None) -> Checkpoint:
    if not (folder / "config.json").is_file():
        files = sorted(path.name for path in folder.glob("*.gguf"))
        hint = (
            f"it holds GGUF files, name one of them: {folder / files[0]}"
            if files
            else "give a folder as Hugging Face publishes it, or a .gguf file"
        )
        raise ModelNotFoundError(f"{folder} has no config.json; {hint}")
    config = _huggingface.read_config(folder)
    config, tensors = settle(config, _huggingface.read_tensors(folder), str(folder))
    if tokenizer is None and (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    return Checkpoint(
        config, tensors, tokenizer, str(folder), _folder_eos_token_ids(folder, tokenizer)
    )


def _open_gguf(path: Path, tokenizer: Tokenizer | None) -> Checkpoint:
    if not path.is_file():
        raise ModelNotFoundError(f"{path} is neither a file nor a folder")
    if path.suffix in (".json", ".safetensors", ".jinja"):
        raise ModelNotFoundError(f"{path} is one file of a model; pass its folder, {path.parent}")
    file = _gguf.GgufFile(path)
    config = _gguf.read_config(file)
    config, tensors = settle(config, _gguf.read_tensors(file, config), str(path))
    ids = _gguf_tokenizer.read_eos_token_ids(file.metadata, config.vocab_size, str(path))
    if tokenizer is None:
        tokenizer = _gguf_tokenizer.read_tokenizer(file.metadata, str(path))
    elif not tokenizer.has_chat_template:
        # A tokenizer.json given on its own; the model's template is still the right one.
        tokenizer.chat_template = _gguf_tokenizer.read_chat_template(file.metadata)
    own = () if tokenizer is None else tokenizer.eos_token_ids
    return Checkpoint(config, tensors, tokenizer, str(path), tuple(dict.fromkeys([*ids, *own])))


def _folder_eos_token_ids(folder: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """generation_config.json wins over config.json; the tokenizer's own end always ends."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            ids = _ids(_huggingface.read_json(path).get("eos_token_id"), path)
        if ids:
            break
    own = () if tokenizer is None else tokenizer.eos_token_ids
    return tuple(dict.fromkeys([*ids, *own]))


def _ids(value: Any, path: Path) -> list[int]:
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise CorruptModelError(
                f"{path}: eos_token_id is {value!r}, but it must be a token id or a list of them"
            )
    return ids


def _check_fit(checkpoint: Checkpoint) -> None:
    tokenizer, rows = checkpoint.tokenizer, checkpoint.config.vocab_size
    # More rows than tokens is padding; more tokens than rows is another model's tokenizer.
    if tokenizer is not None and tokenizer.vocab_size > rows:
        raise TokenizerError(
            f"{tokenizer.source} has ids up to {tokenizer.vocab_size - 1}, but the model "
            f"{checkpoint.source} knows {rows} tokens; give the tokenizer.json of this model"
        )


__all__ = [
    "Checkpoint",
    "TensorSource",
    "expected_tensors",
    "open_checkpoint",
]
