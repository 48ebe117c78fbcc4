"""Drafts with a smaller model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from foretell._draft import Draft, Drafter
from foretell._model import Model, Rows, Session
from foretell._sampling import DraftSampler, Drawn, RequestSampler, SamplingParams


class DraftModel(Drafter):
    """The draft model's own continuation (Leviathan et al. 2023, Chen et al. 2023).

    It is chosen as the request chooses: the best token, or one drawn after the same processors.
    It never proposes an id the target lacks (its embedding may be padded larger), and stops
    drafting where its own context ends or where the text holds an id it does not know. Its cache
    follows the context: what was accepted stays, what was not is rolled back.
    """

    name = "draft_model"

    def __init__(self, model: Model, vocab_size: int | None = None) -> None:
        model.capabilities.require("rollback")
        self._model = model
        self._vocab_size = min(model.vocab_size, vocab_size or model.vocab_size)
        self._session: Session | None = None
        self._cached: list[int] = []
        self._agreed = 0
        greedy = RequestSampler(SamplingParams())
        self._sampler = DraftSampler(greedy, self._vocab_size, shares_noise=True)

    def spawn(self) -> DraftModel:
        return DraftModel(self._model, self._vocab_size)

    def sample_with(self, sampler: DraftSampler) -> None:
        self._sampler = sampler

    def start(self, prompt: Sequence[int]) -> None:
        self._agreed = 0

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        limit = min(limit, self._model.max_length - len(context) + 1)
        if limit < 1:
            return Draft.empty()
        if self._session is None:
            self._session = self._model.new_session()
        session = self._session
        common = self._common(context)
        session.rollback(session.length - common)
        del self._cached[common:]
        drawn: list[Drawn] = []
        feed, seen = list(context[common:]), list(context)
        while True:
            if max(feed) >= self._model.vocab_size:
                return Draft.empty()
            output = self._model.forward([Rows(session, feed, logits="last")])
            session.keep(range(len(feed)))
            self._cached.extend(feed)
            logits = output.logits[0, : self._vocab_size]
            token = self._sampler.draw(logits, seen, len(drawn) + 1)
            if token is None:
                return Draft.drawn(drawn)
            drawn.append(token)
            if len(drawn) == limit:
                return Draft.drawn(drawn)
            feed = [token.token]
            seen += feed

    def _common(self, context: Sequence[int]) -> int:
        """Length of the prefix that cache and context share, leaving a token to run."""
        longest = min(len(self._cached), len(context) - 1)
        common = min(self._agreed, longest)  # below that, the cache came from the context
        while common < longest and self._cached[common] == context[common]:
            common += 1
        self._agreed = len(context)
        return common
