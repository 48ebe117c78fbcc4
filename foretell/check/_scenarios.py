"""Small worlds to test in: targets of known distributions, drafters from perfect to adversarial."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from foretell._draft import Draft, Drafter
from foretell._model import FloatArray
from foretell._sampling import SamplingParams
from foretell.backends.table import TableModel
from foretell.check._wiring import Scenario
from foretell.drafters import DraftModel, Ngram

KINDS = ("sampling", "processors", "greedy", "end")
"""Kinds of request that exact enumeration covers."""


class Fixed(Drafter):
    """The same tokens whatever the context: a deterministic drafter that knows nothing."""

    name = "fixed"

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)

    def spawn(self) -> Fixed:
        return Fixed(self._tokens)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        return Draft.one_hot(self._tokens[:limit])


class Bush(Drafter):
    """A tree: the two best tokens of a table after the context, then the best after each."""

    name = "bush"
    trees = True

    def __init__(self, table: FloatArray) -> None:
        self._table = table

    def spawn(self) -> Bush:
        return Bush(self._table)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        best = np.argsort(-self._table[context[-1]], kind="stable")[:2].tolist()
        tokens, parents = list(best), [-1, 0, 0]
        for node, token in enumerate(best, 1):
            tokens.append(int(self._table[token].argmax()))
            parents.append(node)
        return Draft.one_hot(tokens[:limit], parents[: limit + 1])


def scenario(
    kind: str, drafter: str = "random", *, seed: int = 0, vocab_size: int = 2, max_tokens: int = 4
) -> Scenario:
    """A scenario of a kind with a drafter of a kind, its tables drawn by ``seed``."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    table = _table(rng, (vocab_size,) * 3)
    first = _table(rng, (vocab_size,) * 2)
    near: FloatArray = table[0] + rng.normal(size=first.shape).astype(np.float32) / 2
    makers: dict[str, Callable[[], Drafter]] = {
        "perfect": lambda: DraftModel(TableModel(table)),
        "near": lambda: DraftModel(TableModel(near)),
        "random": lambda: DraftModel(TableModel(first)),
        "adversarial": lambda: DraftModel(TableModel(-3 * table)),
        "fixed": lambda: Fixed(rng.integers(vocab_size, size=8).tolist()),
        "ngram": Ngram,
        "bush": lambda: Bush(first),
    }
    params = {
        "sampling": SamplingParams(temperature=1.0, max_tokens=max_tokens),
        "processors": SamplingParams(
            temperature=0.6,
            max_tokens=max_tokens,
            presence_penalty=1.5,
            frequency_penalty=0.5,
            repetition_penalty=1.3,
            logit_bias={0: 0.5},
            top_k=vocab_size - 1 if vocab_size > 2 else 0,
        ),
        "greedy": SamplingParams(max_tokens=max_tokens),
        "end": SamplingParams(temperature=1.0, max_tokens=max_tokens, min_tokens=1),
    }[kind]
    return Scenario(
        f"{kind}, {drafter} drafter",
        table,
        makers[drafter](),
        params,
        eos_token_ids=(vocab_size - 1,) if kind == "end" else (),
        num_draft_tokens=4 if drafter == "bush" else 2,
    )


DRAFTERS = ("perfect", "near", "random", "adversarial", "fixed", "ngram")
"""Drafters of chains, from perfect to adversarial; "bush" makes trees."""


def _table(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """Logits whose every row is far from flat: differences of 1 to 2.5 between neighbours."""
    gaps = rng.uniform(1.0, 2.5, size=shape)
    rows = gaps.cumsum(axis=-1)
    result: FloatArray = rng.permuted(rows, axis=-1).astype(np.float32)
    return result
