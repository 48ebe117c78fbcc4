"""The suffix drafter's inner part: where the end of a text occurred before, and what came next.

Compiled, because at every step it touches many places of a long text. The same functions run
uncompiled, to the same results. What they work on is a *table*, one array of int32 for a growing
text:

    length, capacity, buckets        of the tokens that are indexed, of the table
    capacity tokens
    capacity x 3 places              for each of NGRAMS the place before with the same hash
    3 x buckets places               for each of NGRAMS where the latest with a hash ends

These are hash chains, as compressors keep them. A place is the index of an n-gram's last token;
-1 is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from foretell._fork import ForkLock

Table = npt.NDArray[np.int32]

NGRAMS = (4, 2, 1)  # indexed lengths; longer matches are found through the first
LONGEST_MATCH = 16
MOST_PLACES = 8
LEAST_PATH_PROBABILITY = 0.02  # beyond that no model is so cheap that verifying pays
SEPARATOR = -1  # between texts, and in place of a removed one; matches nothing
HEADER = 3

LENGTH_CLASS = (0, 0, 1, 2, 3, 4, 4, 5, 5, 5) + (6,) * (LONGEST_MATCH - 9)
ALWAYS = 3
# Where calibration starts from, once and in several places. The rows are lengths, the columns
# shares; rounded from what a small model did with a few dozen prompts that nothing is measured on.
ESTIMATES = np.array(
    (
        ((0.04, 0.06), (0.11, 0.17), (0.25, 0.36), (0.36, 0.55)),
        ((0.08, 0.08), (0.24, 0.36), (0.35, 0.65), (0.60, 0.78)),
        ((0.08, 0.08), (0.32, 0.33), (0.55, 0.58), (0.75, 0.82)),
        ((0.08, 0.08), (0.32, 0.33), (0.60, 0.67), (0.75, 0.88)),
        ((0.08, 0.08), (0.33, 0.40), (0.60, 0.80), (0.77, 0.92)),
        ((0.08, 0.08), (0.33, 0.40), (0.70, 0.80), (0.84, 0.92)),
        ((0.08, 0.08), (0.33, 0.40), (0.70, 0.90), (0.89, 0.96)),
    )
).ravel()
MOST_NODES = MOST_PLACES * int(1 + np.log(LEAST_PATH_PROBABILITY) / np.log(ESTIMATES.max()))
"""No draft is larger: at each place it follows a path, whose probability falls with every token."""


def table_for(room: int) -> Table:
    """An empty table for at least ``room`` tokens, of at most 28 bytes for each and 500."""
    capacity = max(room, 16)
    buckets = 1 << (capacity.bit_length() - 1)
    table = np.full(HEADER + 4 * capacity + len(NGRAMS) * buckets, -1, np.int32)
    table[:HEADER] = 0, capacity, buckets
    return table


def suggest(own: Any, theirs: Any, length: int, limit: int, nodes: Any, chances: Any) -> int:
    """Index ``own`` up to ``length`` tokens, then draft at most ``limit`` nodes after its end.

    They follow the places in ``own`` and in the table ``theirs`` where that end occurs. ``nodes``
    gets token, parent and evidence of each, after a first entry: where in ``theirs`` the longest
    match goes on, or -1. ``chances`` gets their probabilities. Returns how many they are. With a
    negative ``limit`` nothing but the indexing is done.
    """
    _append(own, length)
    if limit < 0:
        return 0
    matches = np.empty((2, MOST_PLACES + 1), np.int64)
    starts = np.empty((2, MOST_PLACES + 1), np.int64)
    here = _find(own, own, matches[0], starts[0])
    there = _find(own, theirs, matches[1], starts[1])
    nodes[0] = starts[1, 0] if there > 0 else -1
    # The longest first, of equals those of this very text; ``sides`` tells whose they are.
    match = np.empty(MOST_PLACES, np.int64)
    start = np.empty(MOST_PLACES, np.int64)
    side = np.empty(MOST_PLACES, np.int64)
    count, i, j = 0, 0, 0
    while count < MOST_PLACES and (i < here or j < there):
        if j >= there or (i < here and matches[0, i] >= matches[1, j]):
            match[count], start[count], side[count] = matches[0, i], starts[0, i], 0
            i += 1
        else:
            match[count], start[count], side[count] = matches[1, j], starts[1, j], 1
            j += 1
        count += 1
    return _follow(own, theirs, match, start, side, count, limit, nodes, chances)


def _bucket(table: Any, end: int, n: int, buckets: int) -> int:
    """The hash of the n-gram that ends there; -1 where it is none or holds a SEPARATOR."""
    if end + 1 < n:
        return -1
    mixed = 0
    for at in range(HEADER + end + 1 - n, HEADER + end + 1):
        token = int(table[at])
        if token == SEPARATOR:
            return -1
        mixed = ((mixed ^ token) * 0x7FEB352D + n) & 0xFFFFFFFF
        mixed ^= mixed >> 15
    return mixed & (buckets - 1)


def _append(table: Any, length: int) -> None:
    """Index the tokens that lie behind those that are, up to ``length``."""
    capacity, buckets = int(table[1]), int(table[2])
    chains, heads = HEADER + capacity, HEADER + 4 * capacity
    for end in range(int(table[0]), length):
        for which in range(3):
            bucket = _bucket(table, end, NGRAMS[which], buckets)
            if bucket >= 0:
                head = heads + which * buckets + bucket
                table[chains + 3 * end + which] = table[head]
                table[head] = end
    table[0] = length


def _find(own: Any, table: Any, matches: Any, starts: Any) -> int:
    """Where the end of ``own`` occurs in ``table`` with something after it.

    Of each n-gram the MOST_PLACES latest occurrences are looked at, fewer where longer ones have
    yielded that many. The longest matches come first, then the latest places; writes down how
    many tokens match and the index of the one that follows, and returns the number of places.
    """
    last, end_of_own = int(table[0]) - 1, HEADER + int(own[0]) - 1
    capacity, buckets = int(table[1]), int(table[2])
    chains, heads = HEADER + capacity, HEADER + 4 * capacity
    found = np.empty(3 * MOST_PLACES, np.int64)
    lengths = np.empty(3 * MOST_PLACES, np.int64)
    count = 0
    for which in range(3):
        n = NGRAMS[which]
        bucket = _bucket(own, int(own[0]) - 1, n, buckets)
        if bucket < 0 or last < 0:
            continue
        end = int(table[heads + which * buckets + bucket])
        if 0 <= end == last:  # the tail itself, which nothing follows yet
            end = int(table[chains + 3 * end + which])
        for _ in range(MOST_PLACES):
            if end < 0:
                break
            known = False
            for i in range(count):
                known = known or found[i] == end
            if not known and table[HEADER + end + 1] != SEPARATOR:
                match, longest = 0, min(int(own[0]), end + 1, LONGEST_MATCH)
                while match < longest and table[HEADER + end - match] == own[end_of_own - match]:
                    match += 1
                if match >= n:
                    found[count], lengths[count] = end, match
                    count += 1
            end = int(table[chains + 3 * end + which])
        if count >= MOST_PLACES:
            break
    kept = 0
    for i in range(count):  # sorting by insertion, which is stable
        place = kept
        while place > 0 and matches[place - 1] < lengths[i]:
            matches[place], starts[place] = matches[place - 1], starts[place - 1]
            place -= 1
        matches[place], starts[place] = lengths[i], found[i] + 1
        kept = min(kept + 1, MOST_PLACES)
    return kept


def _follow(
    own: Any,
    theirs: Any,
    match: Any,
    start: Any,
    side: Any,
    count: int,
    limit: int,
    nodes: Any,
    chances: Any,
) -> int:
    """The tree of what follows at the places, the most probable path first.

    Of the frontier each entry has the places that led to it, one bit for each; no place leads to
    two of them, so there are never more entries than places.
    """
    paths = np.empty(MOST_PLACES, np.float64)
    entry_chances = np.empty(MOST_PLACES, np.float64)
    frontier = np.empty((MOST_PLACES, 6), np.int64)
    tokens = np.empty(MOST_PLACES, np.int64)
    groups = np.empty(MOST_PLACES, np.int64)
    votes = np.empty(MOST_PLACES, np.float64)
    evidence = np.empty(MOST_PLACES, np.int64)
    waiting, arrivals, size = 0, 0, 0
    path, ahead, group = 1.0, 0, (1 << count) - 1
    while True:
        # What comes next there, and how many of the votes each has: a place with one more
        # matching token counts twice.
        different, total = 0, 0.0
        for place in range(count):
            if not group >> place & 1:
                continue
            text = theirs if side[place] else own
            at = start[place] + ahead
            token = text[HEADER + at] if at < text[0] else SEPARATOR
            if token == SEPARATOR:
                continue
            which = 0
            while which < different and tokens[which] != token:
                which += 1
            if which == different:
                length = LENGTH_CLASS[min(match[place] + ahead, LONGEST_MATCH)]  # of the longest
                tokens[which], groups[which], votes[which] = token, 0, 0.0
                evidence[which] = length
                different += 1
            groups[which] |= 1 << place
            votes[which] += 2.0 ** match[place]
            total += 2.0 ** match[place]
        most = 0.0
        for which in range(different):
            share = votes[which] / total
            column = 2 * (3 if share > 0.99 else 2 if share > 0.5 else 1 if share > 0.2 else 0)
            several = groups[which] & (groups[which] - 1) != 0
            evidence[which] = 8 * evidence[which] + column + several
            most += ESTIMATES[evidence[which]]
        most = max(most, 1.0)  # only one of them comes next
        for which in range(different):
            chance = ESTIMATES[evidence[which]] / most
            if path * chance >= LEAST_PATH_PROBABILITY:
                paths[waiting], entry_chances[waiting] = path * chance, chance
                entry = frontier[waiting]
                entry[0], entry[1], entry[2] = arrivals, size, ahead + 1
                entry[3], entry[4], entry[5] = tokens[which], groups[which], evidence[which]
                arrivals += 1
                waiting += 1
        if waiting == 0 or size >= limit:
            return size
        best = 0
        for i in range(1, waiting):  # of equals the one that came first
            if paths[i] > paths[best] or (
                paths[i] == paths[best] and frontier[i, 0] < frontier[best, 0]
            ):
                best = i
        path, ahead, group = paths[best], frontier[best, 2], frontier[best, 4]
        nodes[1 + 3 * size] = frontier[best, 3]
        nodes[2 + 3 * size] = frontier[best, 1]
        nodes[3 + 3 * size] = frontier[best, 5]
        chances[size] = entry_chances[best]
        size += 1
        waiting -= 1
        paths[best], entry_chances[best] = paths[waiting], entry_chances[waiting]
        frontier[best] = frontier[waiting]


_lock = ForkLock()
_compiled: Callable[..., int] | None = None


def compiled() -> Callable[..., int]:
    """``suggest`` as machine code, compiled or loaded from disk the first time."""
    global _compiled
    with _lock:
        if _compiled is None:
            # Slow to import, and not needed before the first draft.
            from numba import types
            from numba.extending import register_jitable

            from foretell._kernel_cache import Kernel

            for part in (_bucket, _append, _find, _follow):
                register_jitable(part)
            table = types.int32[::1]
            signature = types.int64(
                table, table, types.int64, types.int64, table, types.float64[::1]
            )
            kernel = Kernel(cast(Any, suggest), signature)
            _compiled = cast("Callable[..., int]", kernel.prepare())
        return _compiled
