"""The JSON of a run: what is in it, checked when it is read. docs/json.md explains the fields."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from foretell._errors import InputError, shown

FORMAT: Final = "foretell-bench/1"
NUMBER: Final = (int, float)
NOTHING: Final = type(None)
MOST_BYTES: Final = 256 << 20
MOST: Final = 1e18
"""Nothing is counted or measured beyond it, and what is made of such numbers stays finite."""
LEAST_SECONDS: Final = 1e-9

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
    write(to_text(record), path)


def write(text: str, path: Path) -> None:
    """A file with this text, whole or not at all. Raises InputError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        if _is_special(path):  # must not be replaced by a file
            path.write_text(text, encoding="utf-8", errors="replace")
            return
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def check_places(written: Iterable[Path | None], read: Iterable[Path | None]) -> None:
    """Raise InputError where results could not be written, before anything is measured.

    Nor may they take the place of what is read, or of one another.
    """
    taken = {path.resolve() for path in read if path is not None}
    for path in written:
        if path is None:
            continue
        if path.is_dir():
            raise InputError(f"{path} is a folder; name a file")
        if not path.absolute().parent.is_dir():
            raise InputError(f"there is no folder {path.absolute().parent}; make it first")
        if path.resolve() in taken and not _is_special(path):
            raise InputError(f"{path} would be overwritten; name another file for the results")
        taken.add(path.resolve())


def _is_special(path: Path) -> bool:
    """Whether something other than a file is there: /dev/null, a pipe."""
    return path.exists() and not path.is_file()


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
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise InputError(f"{path} is larger than {MOST_BYTES >> 20} MB, as no record is")
        record = json.loads(content.decode("utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except InputError:
        raise
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
    problem = _fields(record, TOP, "") or _numbers(record)
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
    for when, averages in record["load_average"].items():
        if not averages:
            return f"load_average.{when} is empty"
    for index, output in enumerate(record["outputs"]):
        if not isinstance(output, str) and not _is_list_of(output, is_count):
            return f"outputs[{index}] is neither tokens nor a text"
    return _problem_with_passes(record["passes"]) or _problem_with_requests(record)


def _problem_with_passes(passes: Sequence[Any]) -> str | None:
    for index, entry in enumerate(passes):
        for kind, fields in (("widths", WIDTH), ("parts", PART)):
            for number, one in enumerate(entry[kind]):
                problem = _fields(one, fields, f"passes[{index}].{kind}[{number}].")
                if problem is not None:
                    return problem
        times = [one[name] for one in entry["widths"] for name in ("seconds", "limit_seconds")]
        if not times or min(times) < LEAST_SECONDS:
            return f"passes[{index}].widths has no times, or such as no pass takes"
        if not all(is_amount(value) for one in entry["parts"] for value in one["seconds"].values()):
            return f"passes[{index}].parts has a part whose time is none"
    return None


def _problem_with_requests(record: Mapping[str, Any]) -> str | None:
    names = [engine["name"] for engine in record["engines"]]
    if len(set(names)) != len(names):
        return "two engines have the same name"
    for index, request in enumerate(record["requests"]):
        if request["engine"] not in names:
            return f"requests[{index}] is of an engine that is not listed"
        if not 0 <= request["output"] < len(record["outputs"]):
            return f"requests[{index}].output is none of the outputs"
        times = (request["decode_seconds"], request["total_seconds"])
        if min(*times, request["num_tokens"], request["decode_tokens"]) < 0:
            return f"requests[{index}] has a negative time or count"
        if any(0 < seconds < LEAST_SECONDS for seconds in times):
            return f"requests[{index}] has a time that is too short for any answer"
        for name, value in request["stats"].items():
            if not is_number(value) and not _is_list_of(value, is_number):
                return f"requests[{index}].stats.{name} is {shown(value)}"
            if name == "num_accepted_tokens_per_pos" and is_number(value):
                return f"requests[{index}].stats.{name} is no list"
    return None


def is_number(value: object) -> bool:
    """Whether it is a number that can be reckoned with."""
    if isinstance(value, bool) or not isinstance(value, NUMBER):
        return False
    return -MOST <= value <= MOST and math.isfinite(value)


def is_amount(value: object) -> bool:
    """Whether it is such a number, and not negative."""
    return isinstance(value, NUMBER) and is_number(value) and value >= 0


def is_count(value: object) -> bool:
    """Whether it is a whole such number."""
    return isinstance(value, int) and is_amount(value)


def _is_list_of(value: object, is_one: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(is_one(one) for one in value)


def _numbers(record: Mapping[str, Any]) -> str | None:
    """What is wrong with some number, wherever it stands."""
    left: list[tuple[str, Any]] = list(record.items())
    while left:
        place, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{place}.{name}", one) for name, one in value.items()]
        elif isinstance(value, list):
            left += [(f"{place}[{index}]", one) for index, one in enumerate(value)]
        elif isinstance(value, NUMBER) and not isinstance(value, bool) and not is_number(value):
            return f"{place} is {shown(value)}, more than anything that is measured"
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
