"""What things cost on this machine, measured while they happen."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

GUESSED_SLOPE = 0.12  # of one row, for each row more, where nothing was measured yet
OWN_KEYS = 3  # reading a session's keys and values costs about as much as three rows' use of them
WINDOW = 31  # samples a median is taken of
SLOWEST_PACE, FASTEST_PACE = 8.0, 1 / 8


class PassCosts:
    """T(k, c): seconds of a pass of ``k`` rows, each of which sees ``c`` cached tokens.

    T(k, c) = pace x (base(k) + slope x (k + OWN_KEYS) x c). ``base`` is a median of the last
    WINDOW passes of as many rows; row counts that never were are read off their neighbours, the
    first time from a guess, and a pass never costs more than one of more rows. ``slope`` is
    fitted to how times move with the context while the row count stays. ``pace`` follows what
    slows all passes alike, a busy machine, so that passes measured at different moments can be
    compared. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._samples: dict[int, _Median] = {}
        self._centres: dict[int, tuple[float, float]] = {}
        self._slope = 0.0
        self._covariance = self._variance = 0.0
        self._log_pace = 0.0
        self._table: list[float] = [0.0]
        self.num_passes = 0

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
            if samples is None:
                # The guess counts as one sample: the first pass of its kind is often a slow one.
                samples = self._samples[rows] = _Median()
                if self._table[1:]:
                    if rows >= len(self._table):
                        self._fill(rows)
                    samples.add(self._table[rows])
            elif samples.count >= 5:
                expected = self.seconds(rows, context)
                late = math.log(seconds / expected)
                self._log_pace += 0.15 * min(max(late, -0.25), 0.25)
                self._log_pace *= 0.995  # what lasts is for the medians to learn
                bound = math.log(SLOWEST_PACE)
                self._log_pace = min(max(self._log_pace, -bound), bound)
                seconds = min(seconds, 2.0 * expected)
            usual = seconds / self.pace
            self._fit_slope(rows, context, usual)
            samples.add(max(usual - self._slope * (rows + OWN_KEYS) * context, 0.2 * usual))
            samples.latest = self.num_passes
            if samples.count < 8 or self.num_passes % 8 == 0:  # filling the table takes time
                self._fill(max(len(self._table) - 1, rows, 16))

    def _fit_slope(self, rows: int, context: float, seconds: float) -> None:
        """Regress times on contexts, passes of each row count around their own centre."""
        centre = self._centres.get(rows)
        if centre is None:
            self._centres[rows] = (context, seconds)
            return
        away, late = context - centre[0], seconds - centre[1]
        self._centres[rows] = (centre[0] + 0.02 * away, centre[1] + 0.02 * late)
        weight = rows + OWN_KEYS
        late = min(max(late, -0.5 * centre[1]), 0.5 * centre[1])
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
            if count < 1 or not 0.0 < value < 1e4 or not 0.0 <= slope < 1.0:
                raise ValueError(f"{value} seconds for a pass of {count} rows")
            samples = costs._samples[count] = _Median()
            for _ in range(3):
                samples.add(value)
        costs._slope = slope
        # As good as a few hundred passes: it takes as many to change it.
        costs._variance = 200.0 * (5 * 300.0) ** 2
        costs._covariance = slope * (costs._variance + 100 * (5 * 100) ** 2)
        if costs._samples:
            costs._fill(16)
        return costs


def _guess(rows: int) -> float:
    """Cost of a pass in passes of one row, before any was measured."""
    return 1.0 + GUESSED_SLOPE * (rows - 1)


class _Median:
    """The median of the last WINDOW values."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self.latest = 0

    @property
    def count(self) -> int:
        return len(self._sorted)

    @property
    def value(self) -> float:
        middle = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return self._sorted[middle]
        return 0.5 * (self._sorted[middle - 1] + self._sorted[middle])

    def add(self, value: float) -> None:
        if len(self._recent) == WINDOW:
            self._sorted.remove(self._recent.popleft())
        self._recent.append(value)
        insort(self._sorted, value)


@dataclass
class DrafterCosts:
    """What asking a drafter costs, and what it brought, per ask and in seconds."""

    asks: int = 0
    worth: float | None = None
    """Seconds an ask saves, as estimates have it; None before the first one."""
    _each: _Median = field(default_factory=_Median)
    catch_up: float | None = None
    """Seconds for each token of context it had not seen, where that can be told."""

    @property
    def each(self) -> float:
        """Seconds of an ask, or of a token where a drafter works token by token."""
        return self._each.value if self._each.count else 0.0

    def add(self, seconds: float) -> None:
        """An ask, or a token of one, took so long."""
        self.asks += 1
        self._each.add(seconds)


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
