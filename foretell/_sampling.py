"""What a request asks for, and the target's choice.

The only randomness of the package will live here; there is none yet: decoding is greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell._errors import CorruptModelError, OptionError

Choose = Callable[[npt.NDArray[np.float32], Sequence[int], int], int]
"""The target's choice: ``choose(logits_row, history, position)``, a pure function."""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request, validated on construction; unknown names raise.

    ``max_tokens``: most tokens to emit (None: until the model stops or its context is full).
    ``stop``: strings that end the text; they are not part of it. ``stop_token_ids``: tokens that
    end it besides the model's own end-of-sequence tokens, which ``ignore_eos`` switches off.
    Both are kept as tuples.
    ``temperature``: 0, greedy decoding.
    """

    max_tokens: int | None = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    temperature: float = 0.0

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple_of(stop, str, "stop", "a string or list of them"))
        ids = _tuple_of(self.stop_token_ids, int, "stop_token_ids", "a list of token ids")
        object.__setattr__(self, "stop_token_ids", ids)
        if self.max_tokens is not None and not (is_int(self.max_tokens) and self.max_tokens >= 1):
            raise OptionError(
                f"max_tokens is {self.max_tokens!r}; use a whole number from 1, or None"
            )
        if "" in self.stop:
            raise OptionError("stop holds an empty string, which would end every text at once")
        if not isinstance(self.ignore_eos, bool):
            raise OptionError(f"ignore_eos is {self.ignore_eos!r}; use True or False")
        if isinstance(self.temperature, bool) or self.temperature != 0:
            raise OptionError(
                f"temperature is {self.temperature!r}; only greedy decoding (temperature 0) is "
                "available"
            )

    @classmethod
    def from_options(cls, base: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
        """``base``, or the defaults, with keyword ``options`` on top; unknown ones raise."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise OptionError(f"unknown option {name!r}; the options are {', '.join(known)}")
        if base is not None and not isinstance(base, SamplingParams):
            raise OptionError(f"sampling is {base!r}; pass a SamplingParams")
        return replace(base or cls(), **options)


def make_choose(params: SamplingParams) -> Choose:
    """The target's choice under ``params``."""
    return greedy


def greedy(logits: npt.NDArray[np.float32], history: Sequence[int], position: int) -> int:
    """The id with the largest logit, ties to the lowest id; a NaN is an error."""
    token = int(np.argmax(logits))
    if np.isnan(logits[token]):  # argmax gives the first NaN precedence over every number
        raise CorruptModelError(
            f"the model gave NaN for token {token} at position {position}; its weights or the "
            "cache are damaged"
        )
    return token


def is_int(value: object) -> bool:
    """Whether ``value`` is a whole number and not a bool, which Python takes for one."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _tuple_of(values: object, kind: type, name: str, what: str) -> tuple[Any, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise OptionError(f"{name} is {values!r}; use {what}")
    for value in values:
        if not (is_int(value) if kind is int else isinstance(value, kind)):
            raise OptionError(f"{name} holds {value!r}; use {what}")
    return tuple(values)
