"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """The whole of a report in a word; ``message`` is the sentence for people."""

    message: str
    exit_code: int

    def __new__(cls, value: str, message: str, exit_code: int) -> Verdict:
        member = str.__new__(cls, value)
        member._value_ = value
        member.message = message
        member.exit_code = exit_code
        return member

    LOSSLESS = "lossless", "Nothing differs from what is guaranteed.", 0
    NEAR_TIES = (
        "near-ties",
        "Something differs, but by no more than rounding explains: near-ties between the two best "
        "tokens, or the last digits of log-probabilities. No algorithmic error was found.",
        0,
    )
    VIOLATION = "violation", "A guarantee is broken; the cases say where.", 1
    UNDECIDED = (
        "undecided",
        "Outputs differ, and there are no log-probabilities to tell an error from a near-tie.",
        2,
    )
    BLIND = (
        "blind",
        "The kit missed a planted error or called a right decoder wrong, so its other results "
        "prove nothing.",
        2,
    )


class Result(StrEnum):
    """How a case came out."""

    PASSED = "passed"
    NEAR_TIE = "near-tie"
    FAILED = "failed"
    UNDECIDED = "undecided"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Case:
    """One thing that was tested. ``detail`` is for people, ``numbers`` for machines."""

    method: str
    name: str
    rule: str | None
    result: Result
    detail: str
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "method": self.method,
            "name": self.name,
            "rule": self.rule,
            "result": str(self.result),
            "detail": self.detail,
            "numbers": dict(self.numbers),
        }


@dataclass(frozen=True)
class Planted:
    """A planted error under one rule: whether it is one there, and whether it was called one."""

    name: str
    about: str
    rule: str
    method: str
    is_error: bool
    was_found: bool
    detail: str

    @property
    def right(self) -> bool:
        """Whether the kit said the truth."""
        return self.is_error == self.was_found

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "name": self.name,
            "about": self.about,
            "rule": self.rule,
            "method": self.method,
            "is_error": self.is_error,
            "was_found": self.was_found,
            "detail": self.detail,
        }


@dataclass(frozen=True)
class Report:
    """Everything a check found; ``about`` says what it was run on, and with which seeds."""

    about: Mapping[str, Any]
    cases: tuple[Case, ...]
    planted: tuple[Planted, ...] = ()
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The worst there is; a kit that is blind can say nothing else."""
        results = {case.result for case in self.cases}
        if not all(planted.right for planted in self.planted):
            return Verdict.BLIND
        if Result.FAILED in results:
            return Verdict.VIOLATION
        if Result.UNDECIDED in results:
            return Verdict.UNDECIDED
        return Verdict.NEAR_TIES if Result.NEAR_TIE in results else Verdict.LOSSLESS

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            **self.about,
            "cases": [case.to_dict() for case in self.cases],
            "planted": [planted.to_dict() for planted in self.planted],
            "seconds": self.seconds,
            "verdict": str(self.verdict),
        }
