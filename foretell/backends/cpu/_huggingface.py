"""Folders as Hugging Face publishes them: config.json and safetensors, one file or many.

The safetensors package checks a file as a whole; the tensors are then read through a memory map,
since its NumPy interface knows no bfloat16. Format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from foretell._errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from foretell.backends.cpu._config import DecoderConfig
from foretell.backends.cpu._tensor import TensorSource

_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# A config or an index is a few megabytes at most; a larger file is not one.
_MAX_JSON_BYTES = 1 << 28


class SafetensorsTensor(TensorSource):
    """A tensor of a safetensors file, mapped."""

    def __init__(self, name: str, stored: npt.NDArray[Any], dtype_name: str, file: str) -> None:
        super().__init__(name, stored.shape, dtype_name, file)
        self._stored = stored

    def raw(self, rows: slice | None = None) -> npt.NDArray[Any]:
        start, stop = self._bounds(rows)
        return self._stored[start:stop]

    def _decode(self, start: int, stop: int) -> npt.NDArray[Any]:
        stored = self._stored[start:stop]
        if self.dtype_name == "BF16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CorruptModelError."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CorruptModelError(f"{path}: far too large for a JSON file of a model")
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptModelError(
            f"{path}: not a readable JSON file ({error}); download the model again"
        ) from error
    if not isinstance(value, dict):
        raise CorruptModelError(f"{path}: holds {type(value).__name__} where an object is needed")
    return value


def read_config(folder: Path) -> DecoderConfig:
    """The model's shape. Raises UnsupportedModelError and CorruptModelError."""
    path = folder / "config.json"
    return DecoderConfig.from_huggingface(read_json(path), source=str(path))


def read_tensors(folder: Path) -> dict[str, TensorSource]:
    """The folder's tensors by name, mapped but not read.

    Raises ModelNotFoundError where there are no safetensors, CorruptModelError for damaged files
    and an index that does not fit them.
    """
    if (folder / _SINGLE).is_file():
        return _read_file(folder / _SINGLE)
    if (folder / _INDEX).is_file():
        return _read_shards(folder)
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise ModelNotFoundError(
            f"{folder} has its weights in {pickles[0]} only. That is a pickle, which can run any "
            f"code when it is loaded, so it is never loaded here; convert it to {_SINGLE} "
            "(transformers: model.save_pretrained(folder)) or use a repository with safetensors"
        )
    raise ModelNotFoundError(
        f"{folder} has neither {_SINGLE} nor {_INDEX}; give a folder as Hugging Face publishes "
        "it, or a .gguf file"
    )


def _read_shards(folder: Path) -> dict[str, TensorSource]:
    index = folder / _INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CorruptModelError(f"{index}: weight_map is missing or empty")
    shards: dict[str, dict[str, TensorSource]] = {}
    for tensor, shard in places.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise CorruptModelError(
                f"{index}: weight_map sends {tensor!r} to {shard!r}; only names of .safetensors "
                "files in the same folder are followed"
            )
        if shard not in shards:
            if not (folder / shard).is_file():
                raise CorruptModelError(
                    f"{index}: names {shard}, which is not in {folder}; download the model again"
                )
            shards[shard] = _read_file(folder / shard)
        if tensor not in shards[shard]:
            raise CorruptModelError(
                f"{index}: says that {shard} holds {tensor}, but it does not; download the model "
                "again"
            )
    tensors = {name: source for shard in shards.values() for name, source in shard.items()}
    return tensors | {name: shards[shard][name] for name, shard in places.items()}


def _is_plain_name(name: str) -> bool:
    return name.endswith(".safetensors") and not any(mark in name for mark in "/\\:\0")


def _read_file(path: Path) -> dict[str, TensorSource]:
    try:
        with safe_open(path, framework="numpy"):
            pass  # opening checks the header, every offset and the length of the file
        memory = np.memmap(path, np.uint8, mode="r")
        header_size = int.from_bytes(memory[:8].tobytes(), "little")
        header = json.loads(memory[8 : 8 + header_size].tobytes())
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CorruptModelError(
            f"{path}: not a whole safetensors file ({error}); download the model again"
        ) from error
    data = memory[8 + header_size :]
    header.pop("__metadata__", None)
    return {name: _tensor(name, entry, data, str(path)) for name, entry in header.items()}


def _tensor(name: str, entry: dict[str, Any], data: npt.NDArray[np.uint8], file: str) -> Any:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise UnsupportedModelError(
            f"{file}: the tensor {name} has the type {entry['dtype']}; F32, F16, BF16 and F64 are "
            "read, so use an unquantized checkpoint or a GGUF file"
        )
    begin, end = entry["data_offsets"]
    stored = data[begin:end].view(dtype).reshape(tuple(entry["shape"]))
    return SafetensorsTensor(name, stored, entry["dtype"], file)
