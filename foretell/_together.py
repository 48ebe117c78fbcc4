"""Whether anybody in a shared pass is asked for a draft: decided once for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from foretell._costs import Budget, PassCosts

MARGIN = 0.02
"""How much faster than plain decoding the best drafts would have to make a pass."""
LIKELY = 0.8
"""What a drafted token is believed here, more than most deserve: what is won by better ones is less
than what is lost where the cost of a row more is underestimated."""
EVERY = 16
"""Passes of as many requests after which it is decided anew."""
FARTHEST = 64
"""Further rows to look at. What more of them cost is a straight line."""
NO_LIMIT = 1 << 30
WIDE, STEADY = 8, 0.9
"""From so many rows on a row more costs at least this part of what it does over a wide range of
passes, whatever those next to this one took: few of them were measured, at different moments."""


class Known(Protocol):
    """What an engine's requests have measured together."""

    costs: PassCosts
    budget: Budget


class Asked(Protocol):
    """A policy, for those who decide about several."""

    @property
    def asking_seconds(self) -> float: ...


class Together:
    """Decides for the requests of a pass whether any of them is asked for a draft.

    In a pass that many share a row more costs its full share, hardly a draft pays, and asking,
    deciding and watching take their time once for every request. So nobody is asked where drafts
    whose every token is likely would save less than asking for them takes. Where that
    rests on row counts that were never measured, a node each is tried now and then, when the
    budget has what that could lose. Where somebody may be asked, each policy sees for itself
    whether its drafters pay.

    A matter of speed alone. Engines whose threads run batches at the same time share one.
    """

    def __init__(self, known: Known) -> None:
        self._known = known
        self._decided: dict[int, tuple[int, bool]] = {}
        self._passes = 0
        self._trying = False
        self.worth: dict[tuple[str, int], float] = {}
        """Seconds that an ask of a drafter saves, in passes of about as many requests."""

    def curve(self, first: int, count: int, context: float) -> list[float]:
        """Seconds of passes of ``first``, ``first`` + 1, ... rows, rather too much than too little.

        A row count that was never measured costs its share of ``first``; in wide passes none
        costs much less than the trend says. Where they are to be measured, a guess will do.
        """
        costs = self._known.costs
        curve = costs.curve(first, count, context)
        if self._trying:
            return curve
        share, trend = curve[0] / first, 0.0
        if first >= WIDE:
            trend = STEADY * costs.trend(first // 2, 2 * first + 16)
        for more in range(1, count):
            least = trend if costs.age(first + more) < math.inf else max(trend, share)
            curve[more] = max(curve[more], curve[0] + least * more)
        for more in range(count - 2, 0, -1):
            curve[more] = min(curve[more], curve[more + 1])
        return curve

    def most_nodes(self, policies: Sequence[Asked], rows: int, context: float) -> int:
        """How many nodes each policy may draft in a pass of ``rows`` rows without them.

        0 if nobody is to be asked. ``context`` is how many cached tokens the rows see on average.
        """
        costs, budget = self._known.costs, self._known.budget
        self._trying = False
        if not costs.known:
            return NO_LIMIT  # each of them knows what to do then
        self._passes += 1
        decided, pays = self._decided.get(rows, (-EVERY, False))
        if self._passes - decided < EVERY:
            return NO_LIMIT if pays else 0
        count = min(2 * len(policies), FARTHEST)
        cost = sum(policy.asking_seconds for policy in policies)
        pays = self._most(self.curve(rows, count + 1, context), rows, len(policies)) > cost
        self._decided[rows] = self._passes, pays
        if pays or not any(costs.age(rows + more) == math.inf for more in range(1, count + 1)):
            return NO_LIMIT if pays else 0
        guessed = costs.curve(rows, count + 1, context)
        loss = cost + len(policies) * guessed[0] / rows
        if self._most(guessed, rows, len(policies)) <= cost or not budget.allows(loss):
            return 0
        budget.spend(loss)
        self._trying = True
        return 1

    def _most(self, curve: Sequence[float], rows: int, asked: int) -> float:
        """Seconds that drafts would save if each of their tokens were LIKELY."""
        each = curve[0] / rows / (1.0 + MARGIN)
        tokens, path, most = float(rows), 1.0, 0.0
        for more, seconds in enumerate(curve[1:]):
            if more % asked == 0:  # everyone's next token, less likely than the one before
                path *= LIKELY
            tokens += path
            most = max(most, tokens * each - seconds)
        return most


def width(requests: int) -> int:
    """Passes of about as many requests have one width; that of a request alone is 1."""
    return requests.bit_length()
