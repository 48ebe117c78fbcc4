"""Drafts what the target itself thought likely after the same token, or the same two."""

from __future__ import annotations

import struct
from bisect import bisect
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from heapq import heappop, heappush

from foretell._draft import Draft
from foretell._errors import OptionError
from foretell._fork import ForkLock
from foretell._model import Output
from foretell._proposal import EvidenceDrafter, Proposal
from foretell._verify import Accepted

LEAST_PATH_PROBABILITY = 0.02  # beyond that no model is so cheap that verifying pays

# --- Evidence ------------------------------------------------------------------------

_RANKS = ("first", "second", "third", "later")
_GAPS = (0.5, 1.5, 3.0, 6.0)  # between logits
_GAP_NAMES = ("close", "near", "clear", "far", "very far")
_KINDS = tuple(
    tuple(tuple(f"{rank}, {gap}{after}" for gap in _GAP_NAMES) for rank in _RANKS)
    for after in ("", ", after two")
)
# Where calibration starts from, after one token and after two; the rows are ranks, the columns
# gaps. Rounded from what a small model did with a few dozen prompts that nothing is measured on.
_ESTIMATES = (
    (
        (0.17, 0.27, 0.28, 0.42, 0.42),
        (0.14, 0.10, 0.06, 0.06, 0.05),
        (0.06, 0.06, 0.03, 0.03, 0.03),
        (0.06, 0.05, 0.03, 0.03, 0.03),
    ),
    (
        (0.33, 0.46, 0.65, 0.82, 0.92),
        (0.19, 0.11, 0.09, 0.02, 0.01),
        (0.10, 0.06, 0.05, 0.03, 0.01),
        (0.07, 0.06, 0.04, 0.02, 0.01),
    ),
)


class Recycling(EvidenceDrafter):
    """Token Recycling (Luo et al. 2024): the target's own top tokens, kept for the next time.

    After every pass the ``k`` most likely successors of each token that was run, those of
    rejected branches included, are written down: for the token, and for it together with the one
    before it. The last word counts. Drafts a tree of them, by two tokens where these are known,
    else by one. The evidence of a successor is its rank, how far its logit was behind the first
    one's (of the first: how far ahead of the second), and whether two tokens led to it.

    With a ``memory`` what earlier requests of the ``owner`` saw is known from the start.
    """

    name = "recycling"
    observes_every_pass = False

    def __init__(
        self, k: int = 4, memory: RecyclingMemory | None = None, owner: str | None = ""
    ) -> None:
        if not 2 <= k <= 8:
            raise OptionError(f"k is {k}; use 2 to 8 successors")
        self._k = k
        self._kept = memory
        self._owner = owner
        self._known = RecyclingMemory() if memory is None or owner is None else memory
        self._prefix = _owner_bits(owner)
        self._before = self._last = 0

    def spawn(self) -> Recycling:
        return self.for_owner(self._owner)

    def for_owner(self, owner: str | None) -> Recycling:
        """Like ``spawn``, for a request of somebody else's; None: for one without memory."""
        return Recycling(self._k, self._kept, owner)

    def start(self, prompt: Sequence[int]) -> None:
        self._stand_behind(prompt)

    def observe(self, draft: Draft, output: Output, accepted: Accepted) -> None:
        from foretell._largest import largest  # Numba is slow to import

        k = min(self._k, output.logits.shape[1])
        if k < 2:
            return
        ids, logits = (found.tolist() for found in largest(output.logits, k))
        ran = (self._last, *draft.tokens)
        parents = draft.parents or range(-1, len(draft))
        kept = set(accepted.nodes)
        written = []
        # The accepted ones come last: where a token was run twice, their word counts.
        for node in sorted(range(len(ran)), key=kept.__contains__):
            first, *others = logits[node]
            gaps = (first - others[0], *(first - logit for logit in others))
            successors = _pack(ids[node], [bisect(_GAPS, gap) for gap in gaps])
            before = ran[parents[node]] if node else self._before
            written.append((self._prefix | ran[node], successors))
            written.append((self._prefix | _pair(before, ran[node]), successors))
        self._known.write(written)
        self._stand_behind((self._before, self._last, *accepted.tokens))

    def suggest(self, context: Sequence[int], limit: int) -> Proposal:
        self._stand_behind(context)
        tokens: list[int] = []
        parents = [-1]
        probabilities: list[float] = []
        kinds: list[str] = []
        heap: list[tuple[float, int, int, int, int, float, str]] = []
        arrivals = 0
        known, prefix = self._known.get, self._prefix
        path, before, token = -1.0, self._before, self._last
        while True:
            node = len(tokens)
            found = known(prefix | _pair(before, token))
            after_two = found is not None
            if found is None:
                found = known(prefix | token, b"")
            for rank, (successor, gap) in enumerate(_unpack(found)):
                row = min(rank, len(_RANKS) - 1)
                estimate = _ESTIMATES[after_two][row][gap]
                if path * estimate <= -LEAST_PATH_PROBABILITY:
                    arrivals += 1  # settles ties: first come, first served
                    kind = _KINDS[after_two][row][gap]
                    entry = (path * estimate, arrivals, node, token, successor, estimate, kind)
                    heappush(heap, entry)
            if not heap or node >= limit:
                break
            path, _, parent, before, token, estimate, kind = heappop(heap)
            tokens.append(token)
            parents.append(parent)
            probabilities.append(estimate)
            kinds.append(kind)
        return Proposal.trusted(tokens, parents, probabilities, kinds)

    def _stand_behind(self, context: Sequence[int]) -> None:
        self._last = context[-1]
        self._before = context[-2] if len(context) > 1 else -1


# --- What is known -------------------------------------------------------------------


class RecyclingMemory:
    """Successors that requests saw, each owner's apart; safe to use from several threads.

    At most ``max_entries`` tokens and pairs of tokens are known, of all owners together (then
    what was written longest ago is forgotten), at about 160 bytes each with 4 successors: 1.3 MB
    with the default.
    """

    def __init__(self, max_entries: int = 8192) -> None:
        if max_entries < 1:
            raise OptionError(f"max_entries is {max_entries}; use 1 or more")
        self.max_entries = max_entries
        self._lock = ForkLock()
        self._successors: dict[int, bytes] = {}
        self.get = self._successors.get

    def __len__(self) -> int:
        return len(self._successors)

    def write(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Put successors in the place of what was known of their keys."""
        known = self._successors
        with self._lock:
            for key, successors in entries:
                known.pop(key, None)  # so that the oldest stay in front
                known[key] = successors
                if len(known) > self.max_entries:
                    del known[next(iter(known))]


def _owner_bits(owner: str | None) -> int:
    """What tells an owner's keys from everybody else's; the low 64 bits are 0."""
    name = (owner or "").encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(name, digest_size=16).digest()) << 64


def _pair(before: int, token: int) -> int:
    """The key of two tokens, of which the first is -1 at the beginning of a text."""
    return (before + 2) << 32 | token


_PAIRS = [struct.Struct(f"{2 * k}i") for k in range(9)]


def _pack(ids: Sequence[int], gaps: Sequence[int]) -> bytes:
    """Successors and the classes of their gaps in little memory."""
    return _PAIRS[len(ids)].pack(*ids, *gaps)


def _unpack(successors: bytes) -> Iterable[tuple[int, int]]:
    """Each successor with the class of its gap, the most likely first."""
    k = len(successors) // 8
    numbers = _PAIRS[k].unpack(successors)
    return zip(numbers[:k], numbers[k:], strict=True)
