"""What things cost on this machine, measured while they happen."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from foretell._fork import ForkLock

GUESSED_SLOPE = 0.12  # of one row, for each row more, where nothing was measured yet
OWN_KEYS = 3  # reading a session's keys and values costs about as much as three rows' use of them
WINDOW = 31  # samples a median is taken of
SURE = 5  # samples from which on a median says how late a pass is
SETTLING = 8  # first passes after a profile was read
SLOWEST_PACE = 8.0
MOST_ROWS = 1 << 16  # in a saved profile; no pass is so large


class PassCosts:
    """T(k, c): seconds of a pass of ``k`` rows, each of which sees ``c`` cached tokens.

    T(k, c) = pace x (base(k) + slope x (k + OWN_KEYS) x c). ``base`` is a median of the last
    WINDOW passes of as many rows; row counts that never were are read off their neighbours, the
    first time from a guess, and a pass never costs more than one of more rows. ``slope`` is
    fitted to how times move with the context while the row count stays. ``pace`` follows what
    slows all passes alike, a busy machine, so that passes measured at different moments can be
    compared. Safe to use from several threads. In a forked process the medians are kept, and the
    pace begins anew: the child has another share of the machine.
    """

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._samples: dict[int, _Median] = {}
        self._centres: dict[int, tuple[float, float]] = {}
        self._slope = 0.0
        self._covariance = self._variance = 0.0
        self._log_pace = 0.0
        self._unsettled = 0
        self._table: list[float] = [0.0]
        self._trends: dict[tuple[int, int], tuple[int, float]] = {}
        self.num_passes = 0
        _EVERY.add(self)

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._samples)

    @property
    def pace(self) -> float:
        """How slow the machine is at present, 1 being as when ``base`` was measured."""
        return math.exp(self._log_pace)

    def seconds(self, rows: int, context: float) -> float:
        """The cost of a pass to expect."""
        if rows >= len(self._table):
            self._fill(rows)
        return self.pace * (self._table[rows] + self._slope * (rows + OWN_KEYS) * context)

    def curve(self, first: int, count: int, context: float) -> list[float]:
        """Seconds of passes of ``first``, ``first`` + 1, ... rows."""
        last = first + count - 1
        if last >= len(self._table):
            self._fill(last)
        pace, each = self.pace, self._slope * context
        return [pace * (self._table[k] + each * (k + OWN_KEYS)) for k in range(first, last + 1)]

    def trend(self, first: int, last: int) -> float:
        """Seconds of a row more, on the whole, in passes of ``first`` to ``last`` rows.

        The slope of a straight line through what was measured of them; 0 where that is too little.
        """
        known = self._trends.get((first, last))
        if known is None or self.num_passes - known[0] >= WINDOW:
            found = [
                (rows, samples.value, min(samples.count, 8))
                for rows, samples in list(self._samples.items())
                if first <= rows <= last and samples.count >= 3
            ]
            known = self._trends[first, last] = self.num_passes, _slope(found)
        return self.pace * known[1]

    def age(self, rows: int) -> float:
        """Passes since one of as many rows was last measured; infinite if less than thrice."""
        samples = self._samples.get(rows)
        if samples is None or samples.count < 3:
            return math.inf
        return self.num_passes - samples.latest

    def observe(self, rows: int, context: float, seconds: float) -> None:
        """A pass took ``seconds``."""
        with self._lock:
            self.num_passes += 1
            samples = self._samples.get(rows)
            if samples is not None and self.num_passes % 2 and samples.count == WINDOW:
                return  # every second one will do, and looking at it takes time
            if samples is None:
                # The guess counts as one sample: the first pass of its kind is often a slow one.
                samples = self._samples[rows] = _Median()
                if self._table[1:]:
                    if rows >= len(self._table):
                        self._fill(rows)
                    samples.add(self._table[rows])
            elif samples.count >= SURE:
                self._follow(math.log(seconds / self.seconds(rows, context)))
            usual = seconds / self.pace
            self._fit_slope(rows, context, usual)
            samples.add(max(usual - self._slope * (rows + OWN_KEYS) * context, 0.2 * usual))
            samples.latest = self.num_passes
            if samples.count < 8 or self.num_passes % 8 == 0:  # filling the table takes time
                self._fill(max(len(self._table) - 1, rows, 16))

    def _follow(self, late: float) -> None:
        """Move the pace: a pass took exp(``late``) times what was expected.

        What a profile says was measured on the same machine at another pace, so its first passes
        count for much. The pace stays where it is until passes say otherwise: if it went back to
        1, row counts that are seldom seen would soon look slow or fast beside those that are.
        """
        share, most = (0.5, 1.0) if self._unsettled else (0.2, 0.25)
        self._unsettled = max(self._unsettled - 1, 0)
        bound = math.log(SLOWEST_PACE)
        self._log_pace += share * min(max(late, -most), most)
        self._log_pace = min(max(self._log_pace, -bound), bound)

    def _fit_slope(self, rows: int, context: float, seconds: float) -> None:
        """Regress times on contexts, passes of each row count around their own centre."""
        centre = self._centres.get(rows)
        if centre is None:
            self._centres[rows] = (context, seconds)
            return
        away, late = context - centre[0], min(seconds - centre[1], 0.5 * centre[1])
        self._centres[rows] = (centre[0] + 0.02 * away, centre[1] + 0.02 * late)
        weight = rows + OWN_KEYS
        late = max(late, -0.5 * centre[1])
        self._covariance = 0.998 * self._covariance + weight * away * late
        self._variance = 0.998 * self._variance + (weight * away) ** 2
        # As if there were as many passes again that show no slope, 100 tokens off their centre.
        self._slope = max(0.0, self._covariance / (self._variance + 100 * (weight * 100) ** 2))

    def _fill(self, rows: int) -> None:
        """Work out ``base`` for 1 .. ``rows`` rows."""
        known = sorted(self._samples)
        if not known:
            self._table = [0.0] + [_guess(k) for k in range(1, rows + 1)]
            return
        factors = [self._samples[k].value / _guess(k) for k in known]
        table, place = [0.0], 0
        for k in range(1, rows + 1):
            while place < len(known) - 1 and known[place + 1] <= k:
                place += 1
            factor = factors[place]
            if known[place] < k and place < len(known) - 1:
                share = (k - known[place]) / (known[place + 1] - known[place])
                factor += share * (factors[place + 1] - factor)
            table.append(factor * _guess(k))
        for k in range(rows - 1, 0, -1):
            table[k] = min(table[k], table[k + 1])
        self._table = table

    def to_dict(self) -> dict[str, Any]:
        """What a profile keeps."""
        with self._lock:
            return {
                "rows": {
                    str(k): samples.value * self.pace
                    for k, samples in sorted(self._samples.items())
                    if samples.count >= 3
                },
                "slope": self._slope * self.pace,
            }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> PassCosts:
        """Costs to start from; raises ValueError, TypeError or KeyError for what is none."""
        costs = cls()
        slope = float(saved["slope"])
        for rows, seconds in saved["rows"].items():
            count, value = int(rows), float(seconds)
            if not 0 < count <= MOST_ROWS or not 0.0 < value < 1e4 or not 0.0 <= slope < 1.0:
                raise ValueError(f"{value} seconds for a pass of {count} rows")
            samples = costs._samples[count] = _Median()
            for _ in range(SURE):
                samples.add(value)
        costs._unsettled = SETTLING
        costs._slope = slope
        # As good as a few hundred passes: it takes as many to change it.
        costs._variance = 200.0 * (5 * 300.0) ** 2
        costs._covariance = slope * (costs._variance + 100 * (5 * 100) ** 2)
        if costs._samples:
            costs._fill(16)
        return costs


def _slope(points: Sequence[tuple[int, float, int]]) -> float:
    """Of a line through (x, y, weight), least squares; 0 for fewer than four, and downwards."""
    if len(points) < 4:
        return 0.0
    weight = sum(w for _, _, w in points)
    x_mean = sum(w * x for x, _, w in points) / weight
    y_mean = sum(w * y for _, y, w in points) / weight
    spread = sum(w * (x - x_mean) ** 2 for x, _, w in points)
    return max(sum(w * (x - x_mean) * (y - y_mean) for x, y, w in points) / spread, 0.0)


def _guess(rows: int) -> float:
    """Cost of a pass in passes of one row, before any was measured."""
    return 1.0 + GUESSED_SLOPE * (rows - 1)


_EVERY: WeakSet[PassCosts] = WeakSet()


def _begin_anew() -> None:
    for costs in list(_EVERY):
        costs._log_pace = 0.0


os.register_at_fork(after_in_child=_begin_anew)


class _Median:
    """The median of the last WINDOW values. Whole at every moment, should a fork copy it."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._value: float | None = None
        self.latest = 0

    @property
    def count(self) -> int:
        return len(self._recent)

    @property
    def value(self) -> float:
        value = self._value
        if value is None:
            values = sorted(self._recent)
            middle = len(values) // 2
            value = (
                values[middle] if len(values) % 2 else 0.5 * sum(values[middle - 1 : middle + 1])
            )
            self._value = value
        return value

    def add(self, value: float) -> None:
        self._recent.append(value)
        self._value = None


@dataclass
class DrafterCosts:
    """What asking a drafter costs, and what it brings, in seconds."""

    asks: int = 0
    worth: float | None = None
    """Seconds that an ask saves; None before the first one."""
    catch_up: float | None = None
    """Seconds for each token of context it had not seen, where that can be told."""
    _each: _Median = field(default_factory=_Median)
    _watching: _Median = field(default_factory=_Median)
    _expected: float = 20.0
    _kept: float = 20.0

    @property
    def each(self) -> float:
        """Seconds of an ask, or of a token where a drafter works token by token."""
        return self._each.value if self._each.count else 0.0

    @property
    def total(self) -> float:
        """The same with what it does after a pass."""
        return self.each + (self._watching.value if self._watching.count else 0.0)

    @property
    def trust(self) -> float:
        """Acceptance of its nodes in drafts, over what their path probabilities promised.

        Below 1 even where all probabilities are right on average, because nodes are chosen for
        looking likely.
        """
        return min(self._kept / self._expected, 1.1)

    def add(self, seconds: float) -> None:
        """An ask, or a token of one, took so long."""
        self.asks += 1
        self._each.add(seconds)

    def watch(self, seconds: float) -> None:
        """It looked at the outcome of a pass for so long."""
        self._watching.add(seconds)

    def to_dict(self) -> dict[str, Any]:
        """What a profile keeps."""
        return {
            "each": self.each,
            "watching": self.total - self.each,
            "worth": self.worth,
            "catch_up": self.catch_up,
            "trust": self.trust,
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> DrafterCosts:
        """Costs to start from; raises ValueError, TypeError or KeyError for what is none."""
        numbers = dict.fromkeys(("each", "watching", "worth", "catch_up", "trust"), 0.0)
        for name in numbers:
            if saved[name] is not None or name not in ("worth", "catch_up"):
                numbers[name] = float(saved[name])
            if not -1e4 < numbers[name] < 1e4:
                raise ValueError(f"{name} is {numbers[name]}")
        costs = cls()
        costs.worth = None if saved["worth"] is None else numbers["worth"]
        costs.catch_up = None if saved["catch_up"] is None else max(numbers["catch_up"], 0.0)
        for _ in range(3):
            costs.add(max(numbers["each"], 0.0))
            costs.watch(max(numbers["watching"], 0.0))
        costs._kept *= min(max(numbers["trust"], 0.1), 1.1)
        return costs

    def chosen(self, probability: float, kept: bool) -> None:
        """A node of its was drafted, and kept or not."""
        self._expected = 0.998 * self._expected + probability
        self._kept = 0.998 * self._kept + kept


class Budget:
    """At most SHARE of the time goes into finding out what may be of use later.

    Every second of decoding earns SHARE of a second; what something unproven costs beyond what is
    known to be best is spent from that.
    """

    SHARE = 0.01

    def __init__(self) -> None:
        self.earned = 0.0
        self.spent = 0.0

    def earn(self, seconds: float) -> None:
        """Decoding went on for so long."""
        self.earned += self.SHARE * seconds

    def spend(self, seconds: float) -> None:
        """Something was tried that cost so much more."""
        self.spent += max(seconds, 0.0)

    def allows(self, seconds: float) -> bool:
        """Whether so much is left."""
        return self.spent + seconds <= self.earned
