"""What to draft next."""

from __future__ import annotations

from collections.abc import Sequence

from foretell._draft import Draft, Drafter
from foretell._errors import ForetellError, OptionError
from foretell._model import Model, Output
from foretell._verify import Accepted


class FixedPolicy:
    """Drafts up to ``num_draft_tokens`` at every step; the first drafter with an idea wins.

    Where the model verifies no trees, a tree is cut to its first branch.
    """

    def __init__(self, model: Model, drafters: Sequence[Drafter], num_draft_tokens: int) -> None:
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
        self.drafters = [drafter.spawn() for drafter in drafters] if num_draft_tokens else []
        self._vocab_size = model.vocab_size
        self._trees = model.capabilities.tree
        if self.drafters:
            model.capabilities.require("rollback")

    def start(self, prompt: Sequence[int]) -> None:
        """A request begins."""
        for drafter in self.drafters:
            drafter.start(prompt)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """A draft of at most ``limit`` tokens, and never more than was asked for."""
        limit = min(limit, self.num_draft_tokens)
        if limit > 0:
            for drafter in self.drafters:
                draft = drafter.propose(context, limit)
                if draft.tokens:
                    self._check(drafter, draft, limit)
                    return draft if self._trees else draft.first_branch()
        return Draft()

    def observe(self, draft: Draft, output: Output, accepted: Accepted) -> None:
        """Tell every drafter what became of the draft."""
        for drafter in self.drafters:
            drafter.observe(draft, output, accepted)

    def _check(self, drafter: Drafter, draft: Draft, limit: int) -> None:
        if len(draft) > limit:
            raise ForetellError(
                f"drafter '{drafter.name}' proposed {len(draft)} tokens where {limit} were allowed"
            )
        if min(draft.tokens) < 0 or max(draft.tokens) >= self._vocab_size:
            raise ForetellError(
                f"drafter '{drafter.name}' proposed a token id outside 0..{self._vocab_size - 1}"
            )
