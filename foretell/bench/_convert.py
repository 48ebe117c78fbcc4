"""The same model with every matrix in one type, so that engines can be compared at equal width."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7}


def convert(source: Path, target: Path, kind: str) -> None:
    """The same model with every matrix in one type, and all else as it was."""
    reader = gguf.GGUFReader(source)
    stored_kind = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = FILE_TYPES[kind] if field.name == "general.file_type" else field.contents()
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            stored = gguf.quants.quantize(values, stored_kind)
            writer.add_tensor(tensor.name, stored, raw_dtype=stored_kind)
        else:
            writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(source: Path, kind: str, folder: Path) -> Path:
    """The GGUF file ``source`` as ``kind`` (F32, F16, Q8_0) in ``folder``, made if not there."""
    target = folder / f"{source.name.removesuffix('.gguf')}-as-{kind}.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        convert(source, partial, kind)
        partial.rename(target)
    return target
