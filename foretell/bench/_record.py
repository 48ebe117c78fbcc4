"""The JSON of a run: what is in it, checked when it is read. docs/json.md explains the fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from foretell._errors import InputError

FORMAT: Final = "foretell-bench/1"
NUMBER: Final = (int, float)
NOTHING: Final = type(None)

TOP: Final[Mapping[str, tuple[type, ...]]] = {
    "format": (str,),
    "command": (str,),
    "started": (str,),
    "seconds": NUMBER,
    "interrupted": (bool,),
    "machine": (dict,),
    "versions": (dict,),
    "load_average": (dict,),
    "cores_used_by_others": NUMBER,
    "model": (dict,),
    "workload": (dict,),
    "settings": (dict,),
    "engines": (list,),
    "skipped": (list,),
    "left_out": (list,),
    "failures": (list,),
    "outputs": (list,),
    "requests": (list,),
    "passes": (list,),
}
SETTINGS: Final[Mapping[str, tuple[type, ...]]] = {
    "max_tokens": (int,),
    "threads": (int,),
    "repetitions": (int,),
    "chat_template": (bool,),
    "sampling": (str, dict),
}
PASSES: Final[Mapping[str, tuple[type, ...]]] = {
    "dtype": (str,),
    "widths": (list,),
    "parts": (list,),
}
WIDTH: Final[Mapping[str, tuple[type, ...]]] = {
    "width": (int,),
    "seconds": NUMBER,
    "limit_seconds": NUMBER,
}
PART: Final[Mapping[str, tuple[type, ...]]] = {"width": (int,), "seconds": (dict,)}
ENGINE: Final[Mapping[str, tuple[type, ...]]] = {
    "name": (str,),
    "kind": (str,),
    "mode": (str,),
    "dtype": (str,),
    "drafters": (list,),
    "plain": (str, NOTHING),
    "versions": (dict,),
}
REQUEST: Final[Mapping[str, tuple[type, ...]]] = {
    "engine": (str,),
    "question": (str,),
    "category": (str,),
    "turn": (int,),
    "repetition": (int,),
    "prompt_tokens": (int,),
    "num_tokens": (int,),
    "decode_tokens": (int,),
    "decode_seconds": NUMBER,
    "total_seconds": NUMBER,
    "waiting": NUMBER,
    "output": (int,),
    "stats": (dict,),
}


LISTS: Final[Mapping[str, Mapping[str, tuple[type, ...]]]] = {
    "engines": ENGINE,
    "requests": REQUEST,
    "passes": PASSES,
    "skipped": {"name": (str,), "reason": (str,)},
    "left_out": {"question": (str,), "reason": (str,)},
    "failures": {"engine": (str,), "question": (str, NOTHING), "error": (str,)},
}


def save(record: Mapping[str, Any], path: Path) -> None:
    """Write it whole or not at all. Raises InputError where it cannot be written."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(to_text(record), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def check_place(path: Path) -> None:
    """Raise InputError where a record could not be written, before anything is measured."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise InputError(f"there is no folder {path.absolute().parent}; make it first")


def to_text(record: Mapping[str, Any]) -> str:
    """JSON with a line for each field, and for each entry of a list."""
    lines = []
    for name, value in record.items():
        if isinstance(value, list) and value:
            inner = ",\n".join("  " + json.dumps(entry) for entry in value)
            lines.append(f"{json.dumps(name)}: [\n{inner}\n]")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load(path: Path) -> dict[str, Any]:
    """Read a record and check it. Raises InputError, which names the file and what is wrong."""
    try:
        record = json.loads(path.read_text("utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON: {error}") from None
    problem = problem_with(record)
    if problem is not None:
        raise InputError(f"{path} is no record of foretell bench: {problem}")
    checked: dict[str, Any] = record
    return checked


def problem_with(record: Any) -> str | None:
    """What keeps a value from being a record, or None."""
    if not isinstance(record, dict):
        return "it is not an object"
    if record.get("format") != FORMAT:
        return (
            f"its format is {str(record.get('format'))[:40]!r}, and this version reads {FORMAT!r}"
        )
    problem = _fields(record, TOP, "")
    if problem is not None:
        return problem
    nested: list[tuple[str, Any, Mapping[str, tuple[type, ...]]]] = [
        ("settings", record["settings"], SETTINGS),
        ("workload", record["workload"], {"name": (str,)}),
        ("load_average", record["load_average"], {"before": (list,), "after": (list,)}),
    ]
    for kind, fields in LISTS.items():
        nested += [(f"{kind}[{i}]", entry, fields) for i, entry in enumerate(record[kind])]
    for place, entry, fields in nested:
        problem = _fields(entry, fields, f"{place}.")
        if problem is not None:
            return problem
    for index, passes in enumerate(record["passes"]):
        for kind, fields in (("widths", WIDTH), ("parts", PART)):
            for number, entry in enumerate(passes[kind]):
                problem = _fields(entry, fields, f"passes[{index}].{kind}[{number}].")
                if problem is not None:
                    return problem
    names = [engine["name"] for engine in record["engines"]]
    if len(set(names)) != len(names):
        return "two engines have the same name"
    for index, request in enumerate(record["requests"]):
        if request["engine"] not in names:
            return f"requests[{index}] is of an engine that is not listed"
        if not 0 <= request["output"] < len(record["outputs"]):
            return f"requests[{index}].output is none of the outputs"
        if min(request["decode_seconds"], request["total_seconds"], request["num_tokens"]) < 0:
            return f"requests[{index}] has a negative time or count"
    return None


def _fields(entry: Any, fields: Mapping[str, tuple[type, ...]], place: str) -> str | None:
    if not isinstance(entry, dict):
        return f"{place.rstrip('.')} is not an object"
    for name, types in fields.items():
        if name not in entry:
            return f"{place}{name} is missing"
        value = entry[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            return f"{place}{name} is {str(value)[:40]!r}"
    return None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number")
