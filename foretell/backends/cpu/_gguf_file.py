"""The GGUF container: metadata and tensor table of one file.

Follows the GGUF specification (ggml, docs/gguf.md), versions 2 and 3. The gguf package's own reader
is not used: it takes two seconds for a 50,000-token vocabulary, and a damaged file of a few bytes
can keep it looping over an array of 2**60 elements. Here every length is checked against the size
of the file before anything is read or reserved. Types, block sizes and dequantization are the
package's.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from foretell._errors import CorruptModelError, UnsupportedModelError

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufEntry:
    """Where a tensor lies: `shape` outermost axis first, `start` and `num_bytes` in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int


class GgufFile:
    """A mapped GGUF file.

    `metadata` maps keys to str, int, float, bool, lists of str, or `array.array`s of numbers;
    `entries` are the tensors by GGUF name. Raises CorruptModelError for a file that is not whole,
    and UnsupportedModelError for other versions, byte orders and tensor types.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.bytes: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise CorruptModelError(f"{path}: the file cannot be read ({error})") from error
        self._view = self.bytes.data
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.entries: dict[str, GgufEntry] = {}
        num_tensors, num_values = self._read_header()
        for _ in range(num_values):
            self._read_value()
        records = [self._read_tensor_record() for _ in range(num_tensors)]
        self._place(records)

    def corrupt(self, what: str) -> CorruptModelError:
        return CorruptModelError(
            f"{self.path}: {what}; the GGUF file is truncated or damaged, download it again"
        )

    def _read_header(self) -> tuple[int, int]:
        if bytes(self._view[:4]) != b"GGUF":
            raise CorruptModelError(
                f"{self.path}: this is not a GGUF file (it does not begin with 'GGUF')"
            )
        self._at = 4
        version = self._number("<I")
        if version & 0xFFFF == 0:
            raise UnsupportedModelError(
                f"{self.path}: the GGUF file is big-endian; use the little-endian file of the model"
            )
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self.path}: GGUF version {version}; versions 2 and 3 are read, so convert the "
                "model with a current llama.cpp"
            )
        return self._number("<Q"), self._number("<Q")

    def _read_value(self) -> None:
        key = self._text("a metadata key")
        if key in self.metadata:
            raise self.corrupt(f"the metadata key {key!r} appears twice")
        kind = self._number("<I")
        if kind == _STRING:
            self.metadata[key] = self._text(f"the metadata value {key!r}")
        elif kind == _ARRAY:
            self.metadata[key] = self._array(key)
        elif kind in _SCALARS:
            value = self._numbers(kind, 1)[0].item()
            self.metadata[key] = bool(value) if kind == _BOOL else value
        else:
            raise self.corrupt(f"the metadata value {key!r} has the unknown type {kind}")

    def _array(self, key: str) -> list[str] | array[Any]:
        kind = self._number("<I")
        length = self._number("<Q")
        if kind in _SCALARS:
            # Unlike NumPy's, these arrays compare as a whole: any value may be in any key.
            numbers = self._numbers(kind, length)
            return array(numbers.dtype.char, numbers.tobytes())
        if kind != _STRING:
            raise self.corrupt(f"the metadata array {key!r} has elements of the type {kind}")
        if length > (len(self._view) - self._at) // 8:
            raise self.corrupt(f"the metadata array {key!r} claims {length} strings")
        # Vocabularies are long: this loop is the time it takes to open a file.
        view, at, end = self._view, self._at, len(self._view)
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(length):
            if at + 8 > end:
                raise self.corrupt(f"the metadata array {key!r} ends early")
            stop = at + 8 + unpack(view, at)[0]
            if stop > end:
                raise self.corrupt(f"the metadata array {key!r} ends early")
            # An undecodable string matters only to whoever uses it, and is an error there.
            strings.append(str(view[at + 8 : stop], "utf-8", "surrogateescape"))
            at = stop
        self._at = at
        return strings

    def _read_tensor_record(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("a tensor name")
        num_dimensions = self._number("<I")
        if not 0 < num_dimensions <= _MAX_DIMENSIONS:
            raise self.corrupt(f"the tensor {name!r} has {num_dimensions} dimensions")
        # GGUF lists the innermost axis first.
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._number("<I"), self._number("<Q")

    def _place(self, records: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise self.corrupt(f"general.alignment is {alignment!r}, not a power of two")
        data_start = -(-self._at // alignment) * alignment
        for name, shape, raw_type, offset in records:
            if name in self.entries:
                raise self.corrupt(f"the tensor {name!r} appears twice")
            try:
                kind = GGMLQuantizationType(raw_type)
            except ValueError:
                raise UnsupportedModelError(
                    f"{self.path}: the tensor {name!r} has the unknown type {raw_type}; use a file "
                    "in a common quantization such as Q4_K_M or Q8_0"
                ) from None
            block_size, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block_size:
                raise self.corrupt(
                    f"rows of the tensor {name!r} have {shape[-1]} elements, which {kind.name} "
                    f"cannot store in blocks of {block_size}"
                )
            num_elements = 1
            for size in shape:
                num_elements *= size
            num_bytes = num_elements // block_size * block_bytes
            start = data_start + offset
            if start + num_bytes > len(self._view):
                raise self.corrupt(
                    f"the tensor {name!r} ends at byte {start + num_bytes}, but the file has "
                    f"{len(self._view)}"
                )
            if offset % alignment:
                raise self.corrupt(f"the tensor {name!r} begins at the unaligned offset {offset}")
            self.entries[name] = GgufEntry(name, shape, kind, start, num_bytes)

    def _number(self, layout: str) -> int:
        size = struct.calcsize(layout)
        if self._at + size > len(self._view):
            raise self.corrupt(f"it ends inside its header, at byte {len(self._view)}")
        (value,) = struct.unpack_from(layout, self._view, self._at)
        self._at += size
        return int(value)

    def _numbers(self, kind: int, length: int) -> npt.NDArray[Any]:
        dtype = _SCALARS[kind]
        if length > (len(self._view) - self._at) // dtype.itemsize:
            raise self.corrupt(f"it ends inside its header, at byte {len(self._view)}")
        values = np.frombuffer(self._view, dtype, length, self._at)
        self._at += length * dtype.itemsize
        return values

    def _text(self, what: str) -> str:
        length = self._number("<Q")
        if length > len(self._view) - self._at:
            raise self.corrupt(f"{what} claims {length} bytes")
        try:
            text = str(self._view[self._at : self._at + length], "utf-8")
        except UnicodeDecodeError:
            raise self.corrupt(f"{what} is not UTF-8") from None
        self._at += length
        return text
