"""How often a drafter is right, learned while it works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

LEAST, MOST = 0.005, 0.98
MOST_SAVED = 1000


@dataclass
class _Record:
    """Fading counts of what was right and wrong, and of what estimates had led to expect."""

    right: float = 0.0
    wrong: float = 0.0
    expected_right: float = 0.0
    expected_wrong: float = 0.0

    @classmethod
    def of(cls, counts: list[Any]) -> _Record:
        """A saved one. Raises ValueError or TypeError for what is none."""
        numbers = [float(count) for count in counts]
        if not all(0.0 <= number < 1e6 for number in numbers):
            raise ValueError(f"{numbers} are no counts")
        return cls(*numbers)

    def add(self, right: bool, estimate: float, keep: float) -> None:
        self.right = self.right * keep + right
        self.wrong = self.wrong * keep + (not right)
        self.expected_right = self.expected_right * keep + estimate
        self.expected_wrong = self.expected_wrong * keep + (1.0 - estimate)


class Calibration:
    """Turns what a drafter says of its tokens into what experience says; online, and it forgets.

    Every proposed token has an estimate and a kind of evidence. Where the target then made its
    choice, the token was right or wrong, and that counts for its drafter and for its kind:

    1. The drafter as a whole: one that was right half as often as its estimates said is believed
       half; one that was wrong half as often as they said, half as wrong.
    2. The kind: from there to its own rate of success, as observations of it add up.

    An estimate weighs as much as ``weight`` observations. Of either count about the last
    ``memory`` observations matter. So a drafter that always says 0.99 and is always wrong is
    believed less after every step, on evidence of any kind, and a kind that is better or worse
    than its drafter is found out. With a ``prior``, a calibration that lives longer (an engine's,
    where this one is a request's), its answer takes the place of the estimate, and it learns too.
    """

    def __init__(
        self, prior: Calibration | None = None, *, weight: float = 4.0, memory: float = 100.0
    ) -> None:
        self._prior = prior
        self._weight = weight
        self._keep = 1.0 - 1.0 / memory
        self._drafters: dict[str, _Record] = {}
        self._kinds: dict[tuple[str, str], _Record] = {}

    def probability(self, drafter: str, kind: str, estimate: float) -> float:
        """The chance that a token with this evidence is right, within LEAST..MOST."""
        weight = self._weight
        chance = self._believed(drafter, kind, estimate)
        overall = self._drafters.get(drafter)
        if overall is not None:
            if overall.right < overall.expected_right:
                chance *= (overall.right + weight) / (overall.expected_right + weight)
            else:
                doubt = (overall.wrong + weight) / (overall.expected_wrong + weight)
                chance = 1.0 - (1.0 - chance) * doubt
        record = self._kinds.get((drafter, kind))
        if record is not None:
            seen = record.right + record.wrong
            chance = (weight * chance + record.right) / (weight + seen)
        return min(max(chance, LEAST), MOST)

    def observe(self, drafter: str, kind: str, estimate: float, right: bool) -> None:
        """The target chose where this token was proposed: it was right, or wrong."""
        believed = self._believed(drafter, kind, estimate)
        overall = self._drafters.get(drafter)
        if overall is None:
            overall = self._drafters[drafter] = _Record()
        record = self._kinds.get((drafter, kind))
        if record is None:
            record = self._kinds[drafter, kind] = _Record()
        overall.add(right, believed, self._keep)
        record.add(right, believed, self._keep)
        if self._prior is not None:
            self._prior.observe(drafter, kind, estimate, right)

    def _believed(self, drafter: str, kind: str, estimate: float) -> float:
        """What to expect before this calibration's own experience."""
        if self._prior is not None:
            return self._prior.probability(drafter, kind, estimate)
        return min(max(estimate, LEAST), MOST)

    def to_dict(self) -> dict[str, Any]:
        """What a profile keeps; without the prior's."""
        kinds = list(self._kinds.items())[:MOST_SAVED]
        return {
            "drafters": [[name, *astuple(one)] for name, one in list(self._drafters.items())],
            "kinds": [[*names, *astuple(one)] for names, one in kinds],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Begin with what was saved; raises ValueError, TypeError or KeyError for what is none."""
        drafters = {str(name): _Record.of(counts) for name, *counts in saved["drafters"]}
        kinds = {
            (str(name), str(kind)): _Record.of(counts) for name, kind, *counts in saved["kinds"]
        }
        self._drafters, self._kinds = drafters, kinds
