"""What to draft next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretell._draft import Draft, Drafter, ask, spawned
from foretell._errors import ForetellError, OptionError
from foretell._model import Model, Output, is_chain
from foretell._sampling import DraftSampler
from foretell._verify import RULES, Accepted, Rule


class FixedPolicy:
    """Drafts up to ``num_draft_tokens`` at every step; the first drafter with an idea wins.

    Where the model verifies no trees, a tree is cut to its first branch. Where the accept rule
    does not, drafters that make trees are refused at once.
    """

    def __init__(
        self,
        model: Model,
        drafters: Sequence[Drafter],
        num_draft_tokens: int,
        *,
        rule: Rule = RULES["match"],
        sampler: DraftSampler | None = None,
    ) -> None:
        if (
            isinstance(num_draft_tokens, bool)
            or not isinstance(num_draft_tokens, int)
            or num_draft_tokens < 0
        ):
            raise OptionError(
                f"num_draft_tokens is {num_draft_tokens!r}; use a whole number from 0 "
                "(0 is plain decoding)"
            )
        self.num_draft_tokens = num_draft_tokens
        self.drafters = [spawned(drafter) for drafter in drafters] if num_draft_tokens else []
        self._vocab_size = model.vocab_size
        self._trees = model.capabilities.tree
        self._rule = rule
        if self.drafters:
            model.capabilities.require("rollback")
        for drafter in self.drafters:
            if drafter.trees and not rule.trees:
                raise OptionError(
                    f"verification='{rule.name}' is for chains, and the drafter '{drafter.name}' "
                    "makes trees; use verification='match', or another drafter"
                )
            if sampler is not None:
                drafter.sample_with(sampler)

    def start(self, prompt: Sequence[int]) -> None:
        """A request begins."""
        for drafter in self.drafters:
            drafter.start(prompt)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """A draft of at most ``limit`` tokens, and never more than was asked for."""
        limit = min(limit, self.num_draft_tokens)
        if limit > 0:
            for drafter in self.drafters:
                draft = ask(drafter, drafter.propose, Draft, context, limit)
                if draft.tokens:
                    self._check(drafter, draft, limit)
                    return draft if self._trees else draft.first_branch()
        return Draft.empty()

    def observe(self, draft: Draft, output: Output, accepted: Accepted) -> None:
        """Tell every drafter what became of the draft."""
        for drafter in self.drafters:
            drafter.observe(draft, output, accepted)

    def _check(self, drafter: Drafter, draft: Draft, limit: int) -> None:
        wrong = None
        if len(draft) > limit:
            wrong = f"{len(draft)} tokens where {limit} were allowed"
        elif min(draft.tokens) < 0 or max(draft.tokens) >= self._vocab_size:
            wrong = f"a token id outside 0..{self._vocab_size - 1}"
        elif not self._rule.trees and not is_chain(draft.parents):
            wrong = f"a tree, which verification='{self._rule.name}' cannot verify"
        elif draft.q is not None and not self._is_distribution(draft):
            wrong = (
                f"a q that is none: it needs a row of {self._vocab_size} probabilities for each "
                "token, none of them negative, that sum to 1 and allow the token"
            )
        if wrong is not None:
            raise ForetellError(f"drafter '{drafter.name}' proposed {wrong}")

    def _is_distribution(self, draft: Draft) -> bool:
        q = draft.q
        assert q is not None
        return (
            q.shape == (len(draft), self._vocab_size)
            and bool((q >= 0).all())
            and bool((np.abs(q.sum(axis=1) - 1.0) < 1e-4).all())
            and all(q[i, token] > 0 for i, token in enumerate(draft.tokens))
        )
