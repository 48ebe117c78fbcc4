"""What to draft next: the interface of those who decide, and the one with a fixed length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from foretell._costs import PassCosts
from foretell._draft import Context, Draft, Drafter, ask, spawned
from foretell._errors import ForetellError, OptionError
from foretell._model import Model, Output, is_chain
from foretell._proposal import EvidenceDrafter
from foretell._sampling import DraftSampler
from foretell._together import Together
from foretell._verify import RULES, Accepted, Rule


class Beside(NamedTuple):
    """The rest of a pass that several requests share.

    Its rows, the tokens to expect of it, how many cached tokens its rows see on average, and the
    requests.
    """

    rows: int = 0
    tokens: float = 0.0
    context: float = 0.0
    requests: int = 0

    def context_with(self, length: int) -> float:
        """The average with one row more, which sees ``length`` tokens."""
        return (self.rows * self.context + length) / (self.rows + 1)


ALONE = Beside()
NOTHING = Draft.empty()


class Policy(ABC):
    """Decides at every step of one request what to draft, if anything."""

    drafters: Sequence[Drafter]
    expected_tokens: float = 1.0
    """Tokens to expect of the step that was proposed last."""
    together: Together | None = None
    """Who decides, in a pass that several requests share, whether this one is asked."""

    @property
    def asking_seconds(self) -> float:
        """What being asked takes, with what has to be done after the pass."""
        return 0.0

    @abstractmethod
    def start(self, prompt: Sequence[int]) -> None:
        """A request begins."""

    @abstractmethod
    def propose(self, context: Sequence[int], limit: int, beside: Beside = ALONE) -> Draft:
        """A draft of at most ``limit`` tokens, for a pass that has ``beside`` in it already."""

    def pass_over(self, context: Sequence[int]) -> None:  # noqa: B027 - optional hook
        """The step is a plain one, and nobody is asked for a draft."""

    def passed(self, rows: int, context: float, seconds: float) -> bool:
        """The pass of ``rows`` rows, those of all requests, took ``seconds``.

        ``context`` is how many cached tokens the rows see on average.
        Returns whether that was taken note of; the requests of a pass are told until one does.
        """
        return False

    @abstractmethod
    def observe(self, draft: Draft, output: Output, accepted: Accepted) -> None:
        """What became of the draft; called after prefill too, with an empty one."""

    def finish(self, context: Sequence[int]) -> None:  # noqa: B027 - optional hook
        """The request is over; ``context`` is prompt and output."""

    def report(self) -> dict[str, Any]:
        """What was decided and why, for Stats."""
        return {}


def propose_together(
    requests: Iterable[tuple[Policy, Sequence[int], int]],
) -> list[Draft | Exception]:
    """One draft for each request of a pass, of (policy, context, limit); one after another.

    Whoever comes first takes the others for plain steps. Where several share the pass, it is
    decided first whether anybody is asked at all. Where a policy fails, what it raised takes the
    place of its draft, so that the others go on.
    """
    asking = list(requests)
    count = rows = len(asking)
    tokens = float(count)
    seen = float(sum(len(context) for _, context, _ in asking))
    groups: dict[Together, list[Policy]] = {}
    if count > 1:
        for policy, _, limit in asking:
            if policy.together is not None and limit > 0:
                groups.setdefault(policy.together, []).append(policy)
    nodes = {one: one.most_nodes(group, count, seen / count) for one, group in groups.items()}
    drafts: list[Draft | Exception] = []
    for policy, context, limit in asking:
        if policy.together in nodes:
            limit = min(limit, nodes[policy.together])
            if limit == 0:
                policy.pass_over(context)
                drafts.append(NOTHING)
                continue
        others = (seen - len(context)) / (rows - 1) if rows > 1 else 0.0
        try:
            draft = policy.propose(
                context, limit, Beside(rows - 1, tokens - 1.0, others, count - 1)
            )
        except Exception as error:
            drafts.append(error)
            continue
        rows += len(draft)
        tokens += policy.expected_tokens - 1.0
        seen += len(draft) * len(context)
        drafts.append(draft)
    return drafts


def check_rule(drafter: Drafter, rule: Rule) -> None:
    """Raise OptionError for a drafter of trees under a rule for chains.

    An EvidenceDrafter draws nothing, and any branch of its tree is a draft that it could have made.
    """
    if drafter.trees and not rule.trees and not isinstance(drafter, EvidenceDrafter):
        raise OptionError(
            f"verification='{rule.name}' is for chains, and the drafter '{drafter.name}' "
            "makes trees; use verification='match', or another drafter"
        )


def check_draft(drafter: Drafter, draft: Draft, limit: int, rule: Rule, vocab_size: int) -> None:
    """Raise ForetellError for a draft that cannot be verified."""
    wrong = None
    if len(draft) > limit:
        wrong = f"{len(draft)} tokens where {limit} were allowed"
    elif min(draft.tokens) < 0 or max(draft.tokens) >= vocab_size:
        wrong = f"a token id outside 0..{vocab_size - 1}"
    elif not rule.trees and not is_chain(draft.parents):
        wrong = f"a tree, which verification='{rule.name}' cannot verify"
    elif draft.q is not None and not _is_distribution(draft, vocab_size):
        wrong = (
            f"a q that is none: it needs a row of {vocab_size} probabilities for each "
            "token, none of them negative, that sum to 1 and allow the token"
        )
    if wrong is not None:
        raise ForetellError(f"drafter '{drafter.name}' proposed {wrong}")


def _is_distribution(draft: Draft, vocab_size: int) -> bool:
    q = draft.q
    assert q is not None
    return (
        q.shape == (len(draft), vocab_size)
        and bool((q >= 0).all())
        and bool((np.abs(q.sum(axis=1) - 1.0) < 1e-4).all())
        and all(q[i, token] > 0 for i, token in enumerate(draft.tokens))
    )


class FixedPolicy(Policy):
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
        costs: PassCosts | None = None,
    ) -> None:
        """``costs`` learn what passes cost, for others; nothing is decided by them here."""
        if (
            isinstance(num_draft_tokens, bool)
            or not isinstance(num_draft_tokens, int)
            or num_draft_tokens < 0
        ):
            raise OptionError(
                f"num_draft_tokens is {num_draft_tokens!r}; use 'auto', or a whole number "
                "from 0 (0 is plain decoding)"
            )
        self.num_draft_tokens = num_draft_tokens
        self.drafters = [spawned(drafter) for drafter in drafters] if num_draft_tokens else []
        self._vocab_size = model.vocab_size
        self._trees = model.capabilities.tree
        self._chains = not rule.trees
        self._rule = rule
        self._costs = costs
        if self.drafters:
            model.capabilities.require("rollback")
        for drafter in self.drafters:
            check_rule(drafter, rule)
            if sampler is not None:
                drafter.sample_with(sampler)

    def start(self, prompt: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.start(Context.of(prompt))

    def propose(self, context: Sequence[int], limit: int, beside: Beside = ALONE) -> Draft:
        limit = min(limit, self.num_draft_tokens)
        if limit > 0:
            for drafter in self.drafters:
                draft = ask(drafter, drafter.propose, Draft, Context.of(context), limit)
                if draft.tokens:
                    if not self._trees or (self._chains and isinstance(drafter, EvidenceDrafter)):
                        draft = draft.first_branch()
                    check_draft(drafter, draft, limit, self._rule, self._vocab_size)
                    return draft
        return Draft.empty()

    def passed(self, rows: int, context: float, seconds: float) -> bool:
        if self._costs is not None:
            self._costs.observe(rows, context, seconds)
        return self._costs is not None

    def observe(self, draft: Draft, output: Output, accepted: Accepted) -> None:
        for drafter in self.drafters:
            drafter.observe(draft, output, accepted)

    def finish(self, context: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.finish(Context.of(context))
