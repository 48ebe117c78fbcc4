"""Drafts with the target's own first layers."""

from __future__ import annotations

from collections.abc import Sequence

from foretell._draft import Draft, Drafter
from foretell._model import EarlyExit, Rows
from foretell._sampling import DraftSampler, Drawn, RequestSampler, SamplingParams


class EarlyExitDrafter(Drafter):
    """What the target would say if it ended after some layers (Elhoushi et al. 2024, LayerSkip).

    Weights are the target's, and so is the cache of those layers: there is nothing to prefill and
    nothing to roll back. What is drafted is written behind the target's own positions, and dropped
    by the pass that verifies it. Pays where a model was trained to be left early.
    """

    name = "early_exit"

    def __init__(self, model: EarlyExit) -> None:
        self._model = model
        greedy = RequestSampler(SamplingParams())
        self._sampler = DraftSampler(greedy, model.vocab_size, shares_noise=True)

    def spawn(self) -> EarlyExitDrafter:
        return EarlyExitDrafter(self._model)

    def sample_with(self, sampler: DraftSampler) -> None:
        self._sampler = sampler

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        session = self._model.attach(context[:-1])
        limit = min(limit, self._model.max_length - len(context) + 1)
        drawn: list[Drawn] = []
        feed, seen = [context[-1]], list(context)
        while session is not None and len(drawn) < limit:
            output = self._model.forward([Rows(session, feed, logits="last")])
            session.keep([0])
            token = self._sampler.draw(output.logits[0], seen, len(drawn) + 1)
            if token is None:
                break
            drawn.append(token)
            feed = [token.token]
            seen += feed
        return Draft.drawn(drawn)
