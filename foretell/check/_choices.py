"""Every table of choices: rules that promise the same tokens, without any chance or number.

A target that chooses is a table: what it says after each history. All tables that a draft can
tell apart are gone through, for every chain and every tree of a size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from foretell._draft import Draft
from foretell._model import FloatArray
from foretell._noise import Floats
from foretell._sampling import Draws
from foretell._verify import Accepted, Rule
from foretell.check._worlds import World, worlds

PROMPT = (0,)
Path = tuple[int, ...]


@dataclass(frozen=True)
class Choices:
    """How many drafts were verified under how many tables, and the first that came out wrong."""

    drafts: int
    tables: int
    different: int
    example: str | None


class _Table:
    """The choices of one world, asked for by rows that say which node they belong to. A Sampler."""

    def __init__(self, world: World, vocab_size: int, paths: Sequence[Path]) -> None:
        self._world, self._paths = world, paths
        self._boundaries = [i / vocab_size for i in range(vocab_size + 1)]

    def choose(self, logits: FloatArray, history: Sequence[int], position: int) -> int:
        asked = tuple(history[len(PROMPT) :])
        of_row = self._paths[int(logits[0])]
        # Another node's row, or another history, is another entry of the table.
        consistent = asked == of_row and position == len(history)
        return self.after(asked) if consistent else self._entry((asked, of_row, position))

    def after(self, path: Path) -> int:
        return self._entry(path)

    def _entry(self, key: object) -> int:
        return self._world.piece(repr(key), self._boundaries)

    def distribution(self, logits: FloatArray, history: Sequence[int], position: int) -> Floats:
        raise NotImplementedError

    def draws(self, step: int) -> Draws:
        raise NotImplementedError


def every_table(rule: Rule, vocab_size: int, depth: int, *, trees: bool) -> Choices:
    """``rule`` against a walk through the table, for every draft of at most ``depth`` tokens."""
    drafts = tables = different = 0
    example: str | None = None
    for draft, paths in _trees(vocab_size, depth) if trees else _chains(vocab_size, depth):
        drafts += 1
        rows = np.arange(len(paths), dtype=np.float32)[:, None]
        for world in worlds():
            tables += 1
            table = _Table(world, vocab_size, paths)
            verdict = list(rule.verify(draft, rows, table, PROMPT))
            nodes, tokens = _walk(draft, table)
            accepted = Accepted.of(draft, verdict)
            if (accepted.nodes, accepted.tokens) != (nodes, tokens):
                different += 1
                example = example or (
                    f"draft {list(draft.tokens)} with parents {draft.parents}: "
                    f"{list(accepted.tokens)} instead of {list(tokens)}"
                )
    return Choices(drafts, tables, different, example)


def _walk(draft: Draft, table: _Table) -> tuple[Path, Path]:
    """Plain decoding up to the first token that was not drafted."""
    nodes, tokens = [0], list[int]()
    parents = range(-1, len(draft)) if draft.parents is None else draft.parents
    while True:
        token = table.after(tuple(tokens))
        tokens.append(token)
        following = [
            node
            for node, drafted in enumerate(draft.tokens, 1)
            if parents[node] == nodes[-1] and drafted == token
        ]
        if not following:
            return tuple(nodes), tuple(tokens)
        nodes.append(following[0])


def _chains(vocab_size: int, depth: int) -> Iterator[tuple[Draft, list[Path]]]:
    for length in range(depth + 1):
        for tokens in product(range(vocab_size), repeat=length):
            yield Draft.one_hot(tokens), [tokens[:i] for i in range(length + 1)]


def _trees(vocab_size: int, depth: int) -> Iterator[tuple[Draft, list[Path]]]:
    """Each tree twice: its nodes by depth, and branch by branch from the last one on."""
    for inner in _sets(vocab_size, depth):
        by_depth = sorted(inner, key=len)
        by_branch = sorted(inner, key=lambda path: [-token for token in path])
        for order in (by_depth, by_branch):
            paths = [(), *order]
            parents = [-1, *(paths.index(path[:-1]) for path in order)]
            yield Draft.one_hot([path[-1] for path in order], parents), paths


def _sets(vocab_size: int, depth: int) -> list[list[Path]]:
    """All sets of paths that hold every path's beginnings."""
    if depth == 0:
        return [[]]
    below = _sets(vocab_size, depth - 1)
    found: list[list[Path]] = []
    for chosen in product([None, *below], repeat=vocab_size):
        paths: list[Path] = []
        for token, rest in enumerate(chosen):
            if rest is not None:
                paths += [(token,), *((token, *path) for path in rest)]
        found.append(paths)
    return found
