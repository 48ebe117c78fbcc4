"""Drafts what followed the same words earlier, and in how many places it did."""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from foretell._errors import InputError, OptionError
from foretell._fork import ForkLock
from foretell._occurrences import (
    HEADER,
    MOST_NODES,
    SEPARATOR,
    Table,
    compiled,
    table_for,
)
from foretell._proposal import EvidenceDrafter, Proposal

Chances: TypeAlias = npt.NDArray[np.float64]

FEW = 8  # tokens that are sooner written one by one
ROOM = 256  # tokens of output that an index has room for before it grows


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
        self._nodes = np.empty(1 + 3 * MOST_NODES, np.int32)
        self._chances = np.empty(MOST_NODES, np.float64)

    def spawn(self) -> Suffix:
        return Suffix(self._memory, self._owner)

    def for_owner(self, owner: str | None) -> Suffix:
        """Like ``spawn``, for a request of somebody else's; None: for one without memory."""
        return Suffix() if owner is None else Suffix(self._memory, owner)

    def start(self, prompt: Sequence[int]) -> None:
        self._index = NgramIndex(len(prompt) + ROOM)
        self._index.extend(prompt)  # also has the kernel at hand before the first draft
        self._prompt_length = len(prompt)

    def suggest(self, context: Sequence[int], limit: int) -> Proposal:
        index = self._index
        index.write(context[index.length :])
        nodes, chances = self._nodes, self._chances
        if self._memory is None:
            count = index.suggest(_NOTHING, limit, nodes, chances)
        else:
            count = self._memory.suggest(index, self._owner, limit, nodes, chances)
        if not count:
            return _NO_IDEA
        found = nodes[1 : 1 + 3 * count].tolist()
        return Proposal.trusted(
            found[::3],
            [-1, *found[1::3]],
            chances[:count].tolist(),
            [_KINDS[evidence] for evidence in found[2::3]],
        )

    def finish(self, context: Sequence[int]) -> None:
        """The request is over: put its output into the memory, for the owner's next requests."""
        if self._memory is not None:
            self._memory.add(context[self._prompt_length :], self._owner)


_LENGTHS = (
    "1 token matches",
    *(f"{count} tokens match" for count in ("2", "3", "4", "5-6", "7-9", "10 or more")),
)
_KINDS = tuple(
    f"{length}, {share} so{often}"
    for length in _LENGTHS
    for share in ("rarely", "sometimes", "mostly", "always")
    for often in (", once", "")
)
"""Kinds of evidence, in the order of the kernel's ``ESTIMATES``."""
_NO_IDEA = Proposal.trusted((), (-1,), (), ())


# --- Where n-grams occur -------------------------------------------------------------


class NgramIndex:
    """Where n-grams of a growing text occur: for each n a chain of places, the latest first.

    Appending a token takes constant time, amortized over the moments when the table grows.
    """

    def __init__(self, room: int = 0) -> None:
        self.table = table_for(room)
        self.length = 0
        self._capacity = int(self.table[1])
        self._kernel: Callable[..., int] | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return self.table.nbytes

    @property
    def tokens(self) -> Table:
        """The text, to be read and to be written to; until the next ``write``."""
        return self.table[HEADER : HEADER + self.length]

    def write(self, new: Sequence[int]) -> None:
        """Append tokens, not indexed yet."""
        start, stop = self.length, self.length + len(new)
        if stop > self._capacity:
            earlier = self.tokens
            self.table = table_for(stop + stop // 4)
            self.table[HEADER : HEADER + start] = earlier
            self._capacity = int(self.table[1])
        if len(new) < FEW:
            for at, token in enumerate(new, HEADER + start):
                self.table[at] = token
        else:
            self.table[HEADER + start : HEADER + stop] = new
        self.length = stop

    def extend(self, new: Sequence[int]) -> None:
        """Append tokens. An n-gram with a SEPARATOR in it is not indexed."""
        self.write(new)
        self.suggest(_NOTHING, -1, _NOTHING, _NO_CHANCES)

    def suggest(self, theirs: Table, limit: int, nodes: Table, chances: Chances) -> int:
        """Draft what follows the end of the text: see the kernel, which indexes it first."""
        if self._kernel is None:
            self._kernel = compiled()
        # Up to this length, however much was written: an interrupt may come between the two.
        return self._kernel(self.table, theirs, self.length, limit, nodes, chances)


_NOTHING = table_for(0)
_NO_CHANCES = np.empty(0, np.float64)


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

    def suggest(
        self, index: NgramIndex, owner: str, limit: int, nodes: Table, chances: Chances
    ) -> int:
        """Like that of ``index``, with the owner's texts to draft from, too."""
        with self._lock:
            known = self._owners.get(owner)
            if known is None:
                return index.suggest(_NOTHING, limit, nodes, chances)
            count = index.suggest(known.index.table, limit, nodes, chances)
            start = int(nodes[0])
            if start >= 0:
                at = bisect_right(known.starts, start - 1) - 1
                self._texts.move_to_end(known.serials[at])
            return count

    def _append(self, known: _Owner, serial: int, owner: str, text: list[int]) -> None:
        start = known.index.length
        known.index.extend([*text, SEPARATOR])
        known.starts.append(start)
        known.serials.append(serial)
        known.live += len(text)
        self._texts[serial] = (owner, start, start + len(text))

    def _text(self, serial: int) -> list[int]:
        owner, start, stop = self._texts[serial]
        text: list[int] = self._owners[owner].index.tokens[start:stop].tolist()
        return text

    def _remove_oldest(self) -> None:
        _, (owner, start, stop) = self._texts.popitem(last=False)
        known = self._owners[owner]
        self._charged -= _charge(stop - start)
        known.live -= stop - start
        if not known.live:
            del self._owners[owner]
            return
        known.index.tokens[start:stop] = SEPARATOR
        if known.live < known.index.length // 2:
            self._compact(owner)

    def _compact(self, owner: str) -> None:
        """Make an owner's index anew, without what was removed."""
        old = self._owners[owner]
        new = self._owners[owner] = _Owner(NgramIndex(old.index.length))
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
