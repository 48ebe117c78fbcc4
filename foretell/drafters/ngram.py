"""Drafts from a small language model of the request's own text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from foretell._draft import Draft, Drafter
from foretell._errors import OptionError
from foretell._sampling import DraftSampler, Drawn, RequestSampler, SamplingParams


class Ngram(Drafter):
    """A smoothed n-gram model of prompt and output, counted while they grow.

    The chance of a token after its context is (count + ``concentration`` x chance after the
    shorter context) / (occurrences of the context + ``concentration``), down to single tokens
    over a uniform distribution (the hierarchical Dirichlet model of MacKay and Peto 1995). So it
    has a distribution over the whole vocabulary, from which it draws as the request does: the
    drafter to compare accept rules with. Where nothing fits it still drafts.
    """

    name = "ngram"

    def __init__(self, max_ngram: int = 4, concentration: float = 0.5) -> None:
        if max_ngram < 1 or not concentration > 0:
            raise OptionError(
                f"max_ngram is {max_ngram} and concentration {concentration}; use max_ngram from "
                "1 and a concentration above 0"
            )
        self._max_ngram = max_ngram
        self._concentration = concentration
        self._sampler = DraftSampler(RequestSampler(SamplingParams()), 1, shares_noise=True)
        self._tokens = np.zeros(0)
        self._counts: dict[tuple[int, ...], Counter[int]] = {}
        self._counted = 0

    def spawn(self) -> Ngram:
        return Ngram(self._max_ngram, self._concentration)

    def sample_with(self, sampler: DraftSampler) -> None:
        self._sampler = sampler

    def start(self, prompt: Sequence[int]) -> None:
        self._tokens = np.zeros(self._sampler.vocab_size)
        self._counts.clear()
        self._counted = 0

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        self._count(context)
        drawn: list[Drawn] = []
        seen = list(context)
        while len(drawn) < limit:
            logits = np.log(self.distribution(seen)).astype(np.float32)
            token = self._sampler.draw(logits, seen, len(drawn) + 1)
            if token is None:
                break
            drawn.append(token)
            seen.append(token.token)
        return Draft.drawn(drawn)

    def distribution(self, context: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The chance of each token after ``context``, (vocab_size,), from what was counted."""
        weight = self._concentration
        vocab_size = len(self._tokens)
        chances = (self._tokens + weight / vocab_size) / (self._counted + weight)
        for length in range(1, self._max_ngram):
            found = self._counts.get(tuple(context[-length:])) if length <= len(context) else None
            if not found:
                break
            chances *= weight
            chances[list(found)] += np.fromiter(found.values(), np.float64, len(found))
            chances /= found.total() + weight
        return chances

    def _count(self, context: Sequence[int]) -> None:
        for end in range(self._counted, len(context)):
            token = context[end]
            self._tokens[token] += 1
            for length in range(1, min(self._max_ngram - 1, end) + 1):
                follows = self._counts.setdefault(tuple(context[end - length : end]), Counter())
                follows[token] += 1
        self._counted = len(context)
