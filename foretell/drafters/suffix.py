"""Drafts what followed the same words earlier, and in how many places it did."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import itemgetter
from pathlib import Path
from typing import TypeAlias

from foretell._errors import InputError, OptionError
from foretell._fork import ForkLock
from foretell._proposal import EvidenceDrafter, Proposal

NGRAMS = (4, 2, 1)  # indexed lengths; longer matches are found through the first
LONGEST_MATCH = 16
MOST_PLACES = 8
LEAST_PATH_PROBABILITY = 0.02  # beyond that no model is so cheap that verifying pays
SEPARATOR = -1  # between texts, and in place of a removed one; matches nothing

Tokens: TypeAlias = "array[int]"


Place: TypeAlias = tuple[int, Tokens, int]
"""Where the end of the context occurred before: how many tokens match (at most LONGEST_MATCH),
the text, and the index of the token that followed."""


class Suffix(EvidenceDrafter):
    """Suffix matching (SuffixDecoding, Oliaro et al. 2024) in the request and earlier outputs.

    The end of the context is looked up in everything before it, and in the ``owner``'s texts in
    ``memory`` if there is one. Of the places with the longest matches, the latest MOST_PLACES
    vote for what follows, a place with one more matching token counting twice; they are followed
    token by token, and where they part, so does the draft. A token's evidence is the length of
    the match, the share of the votes and whether more than one place says so.

    A step costs the same whatever the length of the context. Memory: at most about 40 bytes a
    token.
    """

    name = "suffix"
    observes_every_pass = False

    def __init__(self, memory: SuffixMemory | None = None, owner: str = "") -> None:
        self._memory = memory
        self._owner = owner
        self._index = NgramIndex()
        self._prompt_length = 0

    def spawn(self) -> Suffix:
        return Suffix(self._memory, self._owner)

    def for_owner(self, owner: str | None) -> Suffix:
        """Like ``spawn``, for a request of somebody else's; None: for one without memory."""
        return Suffix() if owner is None else Suffix(self._memory, owner)

    def start(self, prompt: Sequence[int]) -> None:
        self._index = NgramIndex(len(prompt))
        self._prompt_length = len(prompt)

    def suggest(self, context: Sequence[int], limit: int) -> Proposal:
        index = self._index
        index.extend(context[len(index.tokens) :])
        tail = index.tokens[-LONGEST_MATCH:]
        places = index.places(tail)
        if self._memory is not None:
            places += self._memory.places(tail, self._owner)
            places.sort(key=_MATCH, reverse=True)
        return _follow(places[:MOST_PLACES], limit)

    def finish(self, context: Sequence[int]) -> None:
        """The request is over: put its output into the memory, for the owner's next requests."""
        if self._memory is not None:
            self._memory.add(context[self._prompt_length :], self._owner)


# --- What follows, and on what evidence ----------------------------------------------

_LENGTHS = (
    "1 token matches",
    *(f"{count} tokens match" for count in ("2", "3", "4", "5-6", "7-9", "10 or more")),
)
_LENGTH_CLASS = (0, 0, 1, 2, 3, 4, 4, 5, 5, 5) + (6,) * (LONGEST_MATCH - 9)
_SHARES = ("rarely", "sometimes", "mostly", "always")
_ALWAYS = len(_SHARES) - 1
_KINDS = tuple(
    tuple((f"{length}, {share} so, once", f"{length}, {share} so") for share in _SHARES)
    for length in _LENGTHS
)
# Where calibration starts from, once and in several places. The rows are lengths, the columns
# shares; rounded from what a small model did with a few dozen prompts that nothing is measured on.
_ESTIMATES = (
    ((0.04, 0.06), (0.11, 0.17), (0.25, 0.36), (0.36, 0.55)),
    ((0.08, 0.08), (0.24, 0.36), (0.35, 0.65), (0.60, 0.78)),
    ((0.08, 0.08), (0.32, 0.33), (0.55, 0.58), (0.75, 0.82)),
    ((0.08, 0.08), (0.32, 0.33), (0.60, 0.67), (0.75, 0.88)),
    ((0.08, 0.08), (0.33, 0.40), (0.60, 0.80), (0.77, 0.92)),
    ((0.08, 0.08), (0.33, 0.40), (0.70, 0.80), (0.84, 0.92)),
    ((0.08, 0.08), (0.33, 0.40), (0.70, 0.90), (0.89, 0.96)),
)
_MATCH = itemgetter(0)
_VOTES = tuple(2.0**match for match in range(LONGEST_MATCH + 1))


def _share_class(share: float) -> int:
    return _ALWAYS if share > 0.99 else 2 if share > 0.5 else 1 if share > 0.2 else 0


def _following(places: list[Place], ahead: int) -> Iterator[tuple[int, float, str, list[Place]]]:
    """Every token that comes ``ahead`` tokens on: its estimate, its kind, and where it does."""
    if len(places) == 1:  # as below, in a fraction of the time
        match, text, start = places[0]
        if start + ahead < len(text) and (token := text[start + ahead]) != SEPARATOR:
            length = _LENGTH_CLASS[min(match + ahead, LONGEST_MATCH)]
            yield token, _ESTIMATES[length][_ALWAYS][0], _KINDS[length][_ALWAYS][0], places
        return
    groups: dict[int, list[Place]] = {}
    votes: dict[int, float] = {}
    for place in places:
        match, text, start = place
        token = text[start + ahead] if start + ahead < len(text) else SEPARATOR
        if token == SEPARATOR:
            continue
        if token in groups:
            groups[token].append(place)
            votes[token] += _VOTES[match]
        else:
            groups[token] = [place]
            votes[token] = _VOTES[match]
    total = sum(votes.values())
    found = []
    for token, group in groups.items():
        length = _LENGTH_CLASS[min(group[0][0] + ahead, LONGEST_MATCH)]  # the longest is first
        share = _share_class(votes[token] / total)
        several = len(group) > 1
        found.append((token, _ESTIMATES[length][share][several], _KINDS[length][share][several]))
    most = max(1.0, sum(estimate for _, estimate, _ in found))  # only one of them comes next
    for token, estimate, kind in found:
        yield token, estimate / most, kind, groups[token]


def _follow(places: list[Place], limit: int) -> Proposal:
    """The tree of what follows at ``places``, the most probable path first."""
    tokens: list[int] = []
    parents = [-1]
    probabilities: list[float] = []
    kinds: list[str] = []
    heap: list[tuple[float, int, int, int, int, float, str, list[Place]]] = []
    arrivals = 0
    path, ahead = -1.0, 0
    while True:
        node = len(tokens)
        for token, chance, kind, group in _following(places, ahead):
            if path * chance <= -LEAST_PATH_PROBABILITY:
                arrivals += 1  # settles ties: first come, first served
                entry = (path * chance, arrivals, node, ahead + 1, token, chance, kind, group)
                heappush(heap, entry)
        if not heap or node >= limit:
            break
        path, _, parent, ahead, token, chance, kind, places = heappop(heap)
        tokens.append(token)
        parents.append(parent)
        probabilities.append(chance)
        kinds.append(kind)
    return Proposal.trusted(tokens, parents, probabilities, kinds)


# --- Where n-grams occur -------------------------------------------------------------


class NgramIndex:
    """Where n-grams of a growing text occur: for each n a chain of places, the latest first.

    Hash chains, as compressors keep them: ``heads[hash]`` is where the latest n-gram with that
    hash ends, ``earlier[end]`` where the one before it does. Appending a token takes constant
    time, amortized over the moments when the tables are doubled.
    """

    def __init__(self, room: int = 0) -> None:
        self.tokens: Tokens = array("i")
        self._allocate(room)

    def _allocate(self, room: int) -> None:
        size = 1 << max(6, (room - 1).bit_length())
        self._mask = size - 1
        self._heads = [array("i", [-1]) * size for _ in NGRAMS]
        self._earlier: list[Tokens] = [array("i") for _ in NGRAMS]

    @property
    def num_bytes(self) -> int:
        """Memory of the tables."""
        return 4 * (len(self.tokens) * (1 + len(NGRAMS)) + len(NGRAMS) * (self._mask + 1))

    def extend(self, new: Sequence[int]) -> None:
        """Append tokens. An n-gram with a SEPARATOR in it is not indexed."""
        tokens = self.tokens
        start = len(tokens)
        tokens.extend(new)
        if len(tokens) > 2 * (self._mask + 1):
            self._allocate(len(tokens))
            start = 0
        mask = self._mask
        chains = list(zip(NGRAMS, self._heads, self._earlier, strict=True))
        for end in range(start, len(tokens)):
            window = tokens[max(end + 1 - NGRAMS[0], 0) : end + 1].tolist()
            for n, heads, earlier in chains:
                ngram = tuple(window[-n:])
                if len(ngram) < n or SEPARATOR in ngram:
                    earlier.append(-1)
                    continue
                bucket = hash(ngram) & mask
                earlier.append(heads[bucket])
                heads[bucket] = end

    def places(self, tail: Tokens) -> list[Place]:
        """Where the end of ``tail`` occurs with something after it.

        Of each n-gram the MOST_PLACES latest occurrences are looked at, fewer where longer ones
        have yielded that many. The longest matches come first, then the latest places.
        """
        tokens = self.tokens
        last = len(tokens) - 1
        found: dict[int, Place] = {}
        for n, heads, earlier in zip(NGRAMS, self._heads, self._earlier, strict=True):
            if n > len(tail):
                continue
            wanted = tail[-n:]
            end = heads[hash(tuple(wanted)) & self._mask]
            if 0 <= end == last:  # the tail itself, which nothing follows yet
                end = earlier[end]
            for _ in range(MOST_PLACES):
                if end < 0:
                    break
                if (
                    end not in found
                    and tokens[end + 1 - n : end + 1] == wanted
                    and tokens[end + 1] != SEPARATOR
                ):
                    match, longest = n, min(len(tail), end + 1)
                    while match < longest and tokens[end - match] == tail[-1 - match]:
                        match += 1
                    found[end] = (match, tokens, end + 1)
                end = earlier[end]
            if len(found) >= MOST_PLACES:
                break
        # Within a chain the latest is first already, and sorting is stable.
        return sorted(found.values(), key=_MATCH, reverse=True)[:MOST_PLACES]


# --- Earlier outputs -----------------------------------------------------------------

FORMAT = "foretell suffix memory 1"
SMALLEST_CHARGE = 64  # tokens; a short text, and an owner of one, take memory too


@dataclass
class _Owner:
    """One owner's texts, one after another in an index."""

    index: NgramIndex = field(default_factory=NgramIndex)
    starts: list[int] = field(default_factory=list)
    serials: list[int] = field(default_factory=list)
    """Of the text at each start; removed ones stay until the index is made anew."""
    live: int = 0
    """Tokens of the texts that are still there."""


class SuffixMemory:
    """Earlier outputs to draft from, each owner's apart; safe to use from several threads.

    No draft ever comes from a text of another owner. ``max_tokens`` bounds all texts
    together (one of fewer than SMALLEST_CHARGE tokens counts as so many); beyond it the text that
    was not used for longest goes, whoever owns it. A text is used when it is added, and when it
    offers the longest match. Memory: at most about 100 bytes for each of ``max_tokens``.

    ``model`` names whose token ids these are; a saved memory is loaded for the same one alone.
    """

    def __init__(self, max_tokens: int = 1 << 17, *, model: str = "") -> None:
        if max_tokens < SMALLEST_CHARGE:
            raise OptionError(f"max_tokens is {max_tokens}; use {SMALLEST_CHARGE} or more")
        self.max_tokens = max_tokens
        self.model = model
        self._lock = ForkLock()
        self._owners: dict[str, _Owner] = {}
        self._texts: OrderedDict[int, tuple[str, int, int]] = OrderedDict()  # owner, start, stop
        self._next_serial = 0
        self._charged = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        with self._lock:
            return sum(owner.live for owner in self._owners.values())

    @property
    def num_bytes(self) -> int:
        """Memory of the tables."""
        with self._lock:
            return sum(owner.index.num_bytes for owner in self._owners.values())

    def add(self, tokens: Sequence[int], owner: str = "") -> None:
        """Keep a text; of one longer than ``max_tokens`` only its end."""
        text = list(tokens[-self.max_tokens :])
        if not text:
            return
        if min(text) < 0:
            raise InputError(f"token id {min(text)} is negative; only real tokens are remembered")
        with self._lock:
            while self._charged + _charge(len(text)) > self.max_tokens:
                self._remove_oldest()
            self._append(self._owners.setdefault(owner, _Owner()), self._next_serial, owner, text)
            self._next_serial += 1
            self._charged += _charge(len(text))

    def texts(self, owner: str = "") -> list[list[int]]:
        """An owner's texts, the one used last at the end."""
        with self._lock:
            return [self._text(serial) for serial, of in self._texts.items() if of[0] == owner]

    def places(self, tail: Tokens, owner: str = "") -> list[Place]:
        """Where the end of ``tail`` occurs in the owner's texts, the longest matches first."""
        with self._lock:
            known = self._owners.get(owner)
            if known is None:
                return []
            places = known.index.places(tail)
            if places:
                at = bisect_right(known.starts, places[0][2] - 1) - 1
                self._texts.move_to_end(known.serials[at])
            return places

    def _append(self, known: _Owner, serial: int, owner: str, text: list[int]) -> None:
        start = len(known.index.tokens)
        known.index.extend([*text, SEPARATOR])
        known.starts.append(start)
        known.serials.append(serial)
        known.live += len(text)
        self._texts[serial] = (owner, start, start + len(text))

    def _text(self, serial: int) -> list[int]:
        owner, start, stop = self._texts[serial]
        return self._owners[owner].index.tokens[start:stop].tolist()

    def _remove_oldest(self) -> None:
        _, (owner, start, stop) = self._texts.popitem(last=False)
        known = self._owners[owner]
        self._charged -= _charge(stop - start)
        known.live -= stop - start
        if not known.live:
            del self._owners[owner]
            return
        known.index.tokens[start:stop] = array("i", [SEPARATOR]) * (stop - start)
        if known.live < len(known.index.tokens) // 2:
            self._compact(owner)

    def _compact(self, owner: str) -> None:
        """Make an owner's index anew, without what was removed."""
        old = self._owners[owner]
        new = self._owners[owner] = _Owner(NgramIndex(len(old.index.tokens)))
        for serial in old.serials:
            if serial in self._texts:
                _, start, stop = self._texts[serial]
                text = old.index.tokens[start:stop].tolist()
                self._append(new, serial, owner, text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all texts to a file, whole or not at all."""
        with self._lock:
            texts = [[of[0], self._text(serial)] for serial, of in self._texts.items()]
        body = json.dumps({"format": FORMAT, "model": self.model, "texts": texts})
        digest = hashlib.sha256(body.encode()).hexdigest()
        target = Path(path)
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            partial.write_text(f"{digest}\n{body}\n", "utf-8")
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], max_tokens: int = 1 << 17, *, model: str = ""
    ) -> SuffixMemory:
        """A memory with the texts of a file; with less room, those used last.

        Raises InputError for a file that is damaged or not a saved memory, or of another model.
        """
        try:
            digest, _, body = Path(path).read_text("utf-8").rstrip("\n").partition("\n")
        except UnicodeDecodeError:
            digest, body = "", ""
        if hashlib.sha256(body.encode()).hexdigest() != digest:
            raise InputError(
                f"{path} is damaged or not a saved suffix memory; delete it, and the next one "
                "starts empty"
            )
        saved = json.loads(body)
        if saved["format"] != FORMAT:
            raise InputError(f"{path} was saved in another format; delete it to start empty")
        if saved["model"] != model:
            raise InputError(
                f"{path} holds tokens of the model '{saved['model']}', not of '{model}'; "
                "keep one file for each model"
            )
        memory = cls(max_tokens, model=model)
        for owner, text in saved["texts"]:
            memory.add(text, owner)
        return memory


def _charge(count: int) -> int:
    return max(count, SMALLEST_CHARGE)
