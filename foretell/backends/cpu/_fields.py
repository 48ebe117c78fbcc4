"""Typed reading of a model's settings: every wrong value becomes an error that names its field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from foretell._errors import CorruptModelError, ModelError

_REQUIRED: Final[Any] = object()


class Fields:
    """Settings by name, with `source` (a file, or a part of one) to name in errors.

    Without a default a field must be there. A JSON null counts as missing only where a method says
    so. Raises CorruptModelError.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        if not isinstance(values, Mapping):
            raise CorruptModelError(
                f"{source}: a JSON object with the model's settings is needed, "
                f"not {type(values).__name__}"
            )
        self._values = values
        self.source = source

    def has(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Any:
        """The value as it is, or None."""
        return self._values.get(name)

    def size(self, name: str, default: int = _REQUIRED) -> int:
        """A positive integer below 2**31."""
        value = self._lookup(name, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self._wrong(name, value, "a positive integer")
        return value

    def optional_size(self, name: str, default: int | None) -> int | None:
        """A positive integer, or None where the file says null."""
        return None if self._lookup(name, default) is None else self.size(name, default or 0)

    def count(self, name: str, default: int = _REQUIRED) -> int:
        """An integer that may be zero."""
        value = self._lookup(name, default)
        if type(value) is not int or not 0 <= value < 2**31:
            raise self._wrong(name, value, "an integer, zero or more")
        return value

    def number(self, name: str, default: float = _REQUIRED) -> float:
        """A positive finite number."""
        value = self._lookup(name, default)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared before converting: an integer of JSON can be too big for a float.
        if not number or not 0 < value < 1e300 or not math.isfinite(value):
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool = _REQUIRED) -> bool:
        value = self._lookup(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str = _REQUIRED) -> str:
        value = self._lookup(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def nested(self, name: str) -> Fields:
        """An object inside this one; missing or null reads as empty."""
        value = self._values.get(name)
        return Fields({} if value is None else value, f"{self.source}, {name}")

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put the source in front of errors that do not name it."""
        try:
            yield
        except ModelError as error:
            if str(error).startswith(self.source):
                raise
            raise type(error)(f"{self.source}: {error}") from error

    def _lookup(self, name: str, default: Any) -> Any:
        if name in self._values:
            return self._values[name]
        if default is _REQUIRED:
            raise CorruptModelError(f"{self.source}: {name} is missing")
        return default

    def _wrong(self, name: str, value: Any, expected: str) -> CorruptModelError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return CorruptModelError(f"{self.source}: {name} is {shown}, but it must be {expected}")
