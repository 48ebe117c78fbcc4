"""Drafters that know what the target will say, for tests on models nobody has a table of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretell._draft import Draft, Drafter


class Replay(Drafter):
    """Drafts a known output, with so many ``mistakes`` (0: perfect, 1: always wrong).

    Mistakes are drawn from the context alone, so the same context gets the same draft. A
    tree offers a wrong token beside each right one, and goes on after both.
    """

    def __init__(
        self, text: Sequence[int], vocab_size: int, mistakes: float, *, trees: bool = False
    ) -> None:
        self._text, self._vocab_size, self._mistakes = tuple(text), vocab_size, mistakes
        self.trees = trees
        kind = {0.0: "perfect", 1.0: "adversarial"}.get(mistakes, "half right")
        self.name = f"{kind} tree" if trees else kind

    def spawn(self) -> Replay:
        return Replay(self._text, self._vocab_size, self._mistakes, trees=self.trees)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        rng = np.random.default_rng(len(context))
        following = self._text[len(context) : len(context) + limit]
        if self.trees:
            return self._tree(following, limit, rng)
        return Draft.one_hot(
            [
                self._wrong(token, rng) if rng.random() < self._mistakes else token
                for token in following
            ]
        )

    def _tree(self, following: Sequence[int], limit: int, rng: np.random.Generator) -> Draft:
        tokens: list[int] = []
        parents = [-1]
        parent = 0
        for token in following:
            wrong = self._wrong(token, rng)
            pair = (wrong, token) if rng.random() < 0.5 else (token, wrong)
            for offered in pair[: limit - len(tokens)]:
                tokens.append(offered)
                parents.append(parent)
            if len(tokens) == limit:
                break
            right = rng.random() >= self._mistakes
            parent = len(tokens) - 1 + pair.index(token if right else wrong)
        return Draft.one_hot(tokens, parents)

    def _wrong(self, token: int, rng: np.random.Generator) -> int:
        return (token + int(rng.integers(1, self._vocab_size))) % self._vocab_size
