"""Drafts when that pays, by measured costs and measured acceptance; else it decodes plainly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from foretell._calibration import MOST, Calibration
from foretell._costs import Budget, DrafterCosts, PassCosts
from foretell._draft import Context, Draft, Drafter, ask, spawned
from foretell._model import Model, Output
from foretell._policy import ALONE, Beside, Policy, check_draft, check_rule
from foretell._proposal import DEEPEST_KIND, EvidenceDrafter, Proposal
from foretell._sampling import DraftSampler
from foretell._together import Together, width
from foretell._tree import Node, Source, credit, draft_of, grow, learn
from foretell._verify import RULES, Accepted, Rule

FIRST_NODES, MOST_NODES = 8, 16
"""Nodes to ask for. Most drafts that pay are short; where the longest allowed one was the best,
twice as many are asked for at the next step."""
MARGIN = 0.02
"""How much faster than plain decoding a draft must promise to be. The best of several uncertain
promises is on average too good."""
CHEAP = 0.03
"""A drafter that takes less than this part of a plain pass is asked first and judged afterwards."""
ESTIMATE = 0.6
"""What a token of a drafter without evidence is believed before anything is known."""
MEMORY, LONG_MEMORY = 1 / 32, 1 / 128
"""Weight of the latest ask in what a drafter is worth, to a request and to all of them."""
FIRST_WORTH = 0.05
"""What an ask is taken to save before anything is known, in plain passes."""
SECOND_CHANCE = 1.1
"""A request begins with a drafter that did not pay in earlier ones as if it saved so many times
its cost: the next text may be another one."""
REST = 16
"""A drafter that does not pay is asked at every so manieth step at most; if none does, nothing at
all is decided at the steps between."""
UNPROVEN = 2
"""Nodes of the first drafts; with every one that an engine's targets accepted, one more."""
STALE = 1000
"""Passes after which a row count may be measured anew."""
TRIALS = 3
AUDITION_TOKENS = 4
AUDITION = 0.1
"""What the first trial is taken to cost, in plain passes."""


@dataclass
class Experience:
    """What all requests of an engine learn together."""

    costs: PassCosts = field(default_factory=PassCosts)
    calibration: Calibration = field(default_factory=lambda: Calibration(memory=1000.0))
    drafters: dict[str, DrafterCosts] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    deciding: DrafterCosts = field(default_factory=DrafterCosts)
    """What a step costs beside passes and drafters, where drafters are asked."""
    num_accepted_nodes: int = 0
    keep: Callable[[Experience], object] | None = None
    """What to do with it whenever a request is over; a profile writes it down."""
    together: Together = field(init=False)

    def __post_init__(self) -> None:
        self.together = Together(self)


@dataclass
class _Asked:
    """One drafter in one request."""

    name: str
    drafter: Drafter
    costs: DrafterCosts
    watches: bool
    """Whether it wants to see what became of a draft."""
    worth: float = 0.0
    """Seconds an ask saved of late."""
    stranger: Drafter | None = None
    """Another one like it, to find out what asking costs."""
    last_context: int = 0
    """Length of the context when it was asked last."""
    asked: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0


class AutoPolicy(Policy):
    """Chooses at every step the draft that promises the most tokens per second.

    Of the tree that the drafters' proposals make together, the n best nodes promise 1 + the sum
    of their path probabilities tokens for the T(n + 1) seconds of the pass; n = 0 is plain
    decoding. Where other requests share the pass, their rows and tokens count too, so that what
    decides is the extra cost of this request's draft.

    Drafters that cost next to nothing are asked first; one that saves less than asking costs is
    asked only as the exploration budget allows. Drafters that cost more are asked where their
    acceptance so far says that it pays, for as many tokens as pay most.
    """

    def __init__(
        self,
        model: Model,
        drafters: Sequence[Drafter],
        experience: Experience,
        *,
        rule: Rule = RULES["match"],
        sampler: DraftSampler | None = None,
    ) -> None:
        self._experience = experience
        self.together: Together = experience.together
        self._costs = experience.costs
        self._budget = experience.budget
        self._rule = rule
        self._sampler = sampler
        self._vocab_size = model.vocab_size
        self._chain = not (rule.trees and model.capabilities.tree)
        self._calibration = Calibration(experience.calibration, weight=12.0)
        if drafters:
            model.capabilities.require("rollback")
        self._asked: list[_Asked] = []
        names: Counter[str] = Counter()
        for drafter in map(spawned, drafters):
            check_rule(drafter, rule)
            names[drafter.name] += 1
            count = names[drafter.name]
            name = drafter.name if count == 1 else f"{drafter.name} {count}"
            costs = experience.drafters.setdefault(name, DrafterCosts())
            watches = type(drafter).observe is not Drafter.observe
            self._asked.append(_Asked(name, drafter, costs, watches))
            if sampler is not None:
                drafter.sample_with(sampler)
        self.drafters = [asked.drafter for asked in self._asked]
        self._always_watched = any(
            asked.watches and asked.drafter.observes_every_pass for asked in self._asked
        )
        self._proposals: dict[str, Proposal] = {}
        self._nodes: list[Node] = []
        self._drawn = Draft.empty()
        self._context = 0
        self._room = 0
        self._trust: dict[str, float] = {}
        self._first_worth = 0.0
        self._reach = FIRST_NODES
        self._resting = self._looking = False
        self._width = 1
        self._in_drafters = 0.0
        self._plain_seconds = 0.0
        self._rate = 0.0
        # For the report.
        self._steps = self._tokens = self._drafts = 0
        self._expected = self._deciding = self._exploring = 0.0
        self._reasons: Counter[str] = Counter()

    def start(self, prompt: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.start(Context.of(prompt))

    def propose(self, context: Sequence[int], limit: int, beside: Beside = ALONE) -> Draft:
        began = perf_counter()
        context = Context.of(context)
        self._context, self._room = len(context), limit
        self._proposals, self._nodes, self.expected_tokens = {}, [], 1.0
        self._in_drafters = 0.0
        draft, reason = self._decide(context, min(limit, self._reach), beside)
        self._steps += 1
        self._expected += self.expected_tokens
        if draft.tokens:
            self._drafts += 1
        else:
            self._reasons[reason] += 1
        spent = perf_counter() - began
        self._deciding += spent
        if self._proposals and not self._steps % 4:
            self._experience.deciding.add(max(spent - self._in_drafters, 0.0))
        return draft

    @property
    def asking_seconds(self) -> float:
        if self._resting:
            return 0.0
        return self._experience.deciding.total + sum(
            asked.costs.total for asked in self._asked if self._is_cheap(asked)
        )

    def pass_over(self, context: Sequence[int]) -> None:
        self._context, self.expected_tokens = len(context), 1.0
        if self._proposals or self._nodes:
            self._proposals, self._nodes = {}, []
        self._steps += 1
        self._expected += 1.0
        self._reasons["no draft could pay in this pass"] += 1

    def passed(self, rows: int, context: float, seconds: float) -> bool:
        self._budget.earn(seconds)
        if not self._resting or self._looking or not self._steps % 4:
            self._costs.observe(rows, context, seconds)
        return True

    def observe(self, draft: Draft, output: Output, accepted: Accepted) -> None:
        stepped = self._steps > 0  # else it is the end of prefill
        self._tokens += len(accepted.tokens) if stepped else 0
        if stepped and not self._proposals and not self._always_watched:
            return
        began = perf_counter()
        watched = 0.0
        if self._proposals:
            learn(self._proposals, accepted.tokens, self._calibration)
        kept = accepted.nodes[1:]
        if self._nodes:
            self._experience.num_accepted_nodes += len(kept)
            counts = credit(self._nodes, kept)
            for asked in self._asked:
                drafted, right = counts.get(asked.name, (0, 0))
                asked.drafted += drafted
                asked.accepted += right
            for node, number in zip(self._nodes, range(1, len(draft) + 1), strict=False):
                costs = self._experience.drafters[node.sources[0].drafter]
                costs.chosen(node.path_probability, number in kept)
        for asked in self._asked:
            if asked.watches and (
                asked.drafter.observes_every_pass or not stepped or asked.name in self._proposals
            ):
                watching = perf_counter()
                asked.drafter.observe(draft, output, accepted)
                seconds = perf_counter() - watching
                asked.costs.watch(seconds)
                watched += seconds
        spent = perf_counter() - began
        self._deciding += spent
        if self._proposals and not self._steps % 4:
            self._experience.deciding.watch(max(spent - watched, 0.0))

    def finish(self, context: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.finish(Context.of(context))
        if self._experience.keep is not None:
            self._experience.keep(self._experience)

    # --- Deciding --------------------------------------------------------------------

    def _decide(self, context: Sequence[int], limit: int, beside: Beside) -> tuple[Draft, str]:
        """The draft, or why there is none."""
        if not self._asked:
            return Draft.empty(), "no drafters"
        if limit < 1:
            return Draft.empty(), "no room"
        if not self._costs.known:
            return Draft.empty(), "nothing measured yet"
        self._looking = self._resting and not self._steps % REST and self._may_look()
        if self._resting and not self._looking:
            return Draft.empty(), "no drafter paid of late"
        limit = min(limit, UNPROVEN + self._experience.num_accepted_nodes)
        if beside.rows:
            curve = self.together.curve(
                beside.rows + 1, limit + 1, beside.context_with(len(context))
            )
        else:
            curve = self._costs.curve(1, limit + 1, len(context))
        self._plain_seconds = curve[0]
        self._rate = (beside.tokens + 1.0) / curve[0]
        if beside.rows and not self._could_pay(curve, beside):
            return Draft.empty(), "no draft could pay in this pass"
        if not self._trust or self._width != width(beside.requests + 1):
            self._width = width(beside.requests + 1)
            self._begin()
        self._ask_cheap(context, limit)
        nodes, chosen = self._choose(curve, beside)
        self._update_worth(nodes[:chosen], curve)
        slow = self._ask_slow(context, curve, beside, nodes[:chosen])
        self._resting = slow is None and not chosen and not self._any_pays()
        if slow is not None and not self._rule.same_tokens:
            # Its length was settled before it was drawn, and what is kept must not depend on that.
            self._nodes = self._nodes_of(slow)
            self.expected_tokens = 1.0 + sum(map(self._worth_of, self._nodes))
            return self._drawn, "nothing drawn"
        if slow is not None:
            nodes, chosen = self._choose(curve, beside)
        self._reach = (
            min(2 * self._reach, MOST_NODES)
            if chosen >= limit
            else max(self._reach - 1, 2 * chosen, FIRST_NODES)
        )
        nodes, chosen = self._explore_rows(nodes, chosen, curve, beside)
        if not chosen:
            return Draft.empty(), self._why_not(nodes)
        self._nodes = nodes[:chosen]
        self.expected_tokens = 1.0 + sum(map(self._worth_of, self._nodes))
        return draft_of(self._nodes), ""

    def _begin(self) -> None:
        """Take over what earlier requests learned of the drafters."""
        self._first_worth = FIRST_WORTH * self._plain_seconds
        deciding = self._experience.deciding.total / max(len(self._asked), 1)
        for asked in self._asked:
            self._trust[asked.name] = asked.costs.trust
            worth = self._long_worth(asked)
            if worth is None and self._width == 1:
                asked.worth = self._first_worth
            else:
                chance = SECOND_CHANCE * (asked.costs.total + deciding)
                asked.worth = min(max(worth or 0.0, chance), self._plain_seconds)

    def _could_pay(self, curve: Sequence[float], beside: Beside) -> bool:
        """Whether a chain that is believed as far as anything is would pay: else nobody is asked.

        A pass that many requests share has no free rows, and asking everybody would take time.
        """
        tokens, path = beside.tokens + 1.0, 1.0
        for seconds in curve[1:]:
            path *= MOST
            tokens += path
            if tokens > self._rate * (1.0 + MARGIN) * seconds:
                return True
        return False

    def _why_not(self, nodes: Sequence[Node]) -> str:
        if nodes:
            return "not worth the pass"
        return "nothing proposed" if self._proposals else "no drafter paid of late"

    def _choose(self, curve: Sequence[float], beside: Beside) -> tuple[list[Node], int]:
        """The nodes of the merged tree that were looked at, and how many of them to draft.

        Looks no further than where a node as good as the last one could still pay.
        """
        if not any(proposal.tokens for proposal in self._proposals.values()):
            return [], 0
        limit = len(curve) - 1
        tokens = beside.tokens + 1.0
        best, chosen = self._rate * (1.0 + MARGIN), 0
        trust = max(self._trust[name] for name in self._proposals)
        nodes: list[Node] = []
        for node in grow(self._proposals, self._calibration, limit, chain=self._chain):
            nodes.append(node)
            tokens += self._worth_of(node)
            count = len(nodes)
            rate = tokens / curve[count]
            if rate > best:
                best, chosen = rate, count
            # Were all that follow as good as this one: could they still be worth their time?
            most = node.path_probability * trust
            if all(
                tokens + more * most <= best * curve[count + more]
                for more in range(limit - count, 0, -1)
            ):
                break
        return nodes, chosen

    # --- Drafters that cost next to nothing ------------------------------------------

    def _is_cheap(self, asked: _Asked) -> bool:
        if not self._rule.same_tokens and not isinstance(asked.drafter, EvidenceDrafter):
            return False  # what it draws must be kept or left without a look at it
        if self._is_untried(asked):
            return False
        return asked.costs.each < CHEAP * self._costs.seconds(1, self._context)

    @staticmethod
    def _is_untried(asked: _Asked) -> bool:
        """Whether nobody knows yet what asking it costs; one with evidence is simply asked."""
        return asked.costs.asks < TRIALS and not isinstance(asked.drafter, EvidenceDrafter)

    def _ask_cheap(self, context: Sequence[int], limit: int) -> None:
        for asked in self._asked:
            if not self._is_cheap(asked):
                continue
            cost = asked.costs.total
            if asked.worth < cost and not self._looking:
                if self._steps % REST or not self._budget.allows(cost):
                    continue
                self._spend(cost)
            self._ask(asked, context, limit)

    def _any_pays(self) -> bool:
        """Whether those asked at every step save more than asking them and deciding costs.

        One whose costs are still being found out may.
        """
        saved, cost = 0.0, self._experience.deciding.total
        for asked in self._asked:
            if self._is_untried(asked):
                return True
            if asked.worth >= asked.costs.total and self._is_cheap(asked):
                saved += asked.worth
                cost += asked.costs.total
        return saved > cost

    def _may_look(self) -> bool:
        """Whether the budget has a step for finding out if drafters have begun to pay."""
        cost = self._experience.deciding.total
        cost += sum(asked.costs.total for asked in self._asked if self._is_cheap(asked))
        if self._budget.allows(cost):
            self._spend(cost)
            return True
        return False

    def _spend(self, seconds: float) -> None:
        self._budget.spend(seconds)
        self._exploring += max(seconds, 0.0)

    def _ask(self, asked: _Asked, context: Sequence[int], limit: int) -> None:
        """Take a drafter's proposal, and what it cost."""
        began = perf_counter()
        drafter = asked.drafter
        if isinstance(drafter, EvidenceDrafter):
            proposal = ask(drafter, drafter.suggest, Proposal, context, limit)
            size = 1
            if proposal.tokens:
                self._check(drafter, proposal, limit)
        else:
            draft = ask(drafter, drafter.propose, Draft, context, limit)
            if draft.tokens:
                check_draft(drafter, draft, limit, self._rule, self._vocab_size)
            proposal, size = Proposal.of(draft, ESTIMATE), max(len(draft), 1)
            self._drawn = draft
        self._proposals[asked.name] = proposal
        seconds = perf_counter() - began
        unseen = len(context) - asked.last_context
        asked.last_context = len(context)
        asked.asked += 1
        asked.seconds += seconds
        self._in_drafters += seconds
        if unseen <= MOST_NODES + 1:
            asked.costs.add(seconds / size)
        elif asked.costs.asks:
            asked.costs.catch_up = max(seconds - size * asked.costs.each, 0.0) / unseen

    def _check(self, drafter: Drafter, proposal: Proposal, limit: int) -> None:
        if len(proposal) > limit or not (
            min(proposal.tokens) >= 0 and max(proposal.tokens) < self._vocab_size
        ):
            check_draft(drafter, proposal.draft(), limit, self._rule, self._vocab_size)

    def _update_worth(self, nodes: Sequence[Node], curve: Sequence[float]) -> None:
        """What each drafter that was asked is expected to save in this step, in seconds.

        A node that several propose counts for the first of them alone: the others could be left
        unasked without losing it. Its time is its share of what the draft adds to the pass.
        """
        share = (curve[len(nodes)] - curve[0]) / len(nodes) if nodes else 0.0
        gains = dict.fromkeys(self._proposals, 0.0)
        for node in nodes:
            gains[node.sources[0].drafter] += self._worth_of(node) / self._rate - share
        for asked in self._asked:
            if asked.name in gains:
                gain = gains[asked.name]
                asked.worth += (gain - asked.worth) * MEMORY
                before = self._long_worth(asked)
                first = self._first_worth if self._width == 1 else 0.0
                start = first if before is None else before
                self._remember(asked, start + (gain - start) * LONG_MEMORY)

    def _long_worth(self, asked: _Asked) -> float | None:
        """What its asks saved in all requests, in passes of about as many as now."""
        if self._width == 1:
            return asked.costs.worth
        return self.together.worth.get((asked.name, self._width))

    def _remember(self, asked: _Asked, worth: float) -> None:
        if self._width == 1:
            asked.costs.worth = worth
        else:
            self.together.worth[asked.name, self._width] = worth

    def _worth_of(self, node: Node) -> float:
        """The chance that a node is accepted, given that nodes are chosen for looking likely."""
        return node.path_probability * self._trust[node.sources[0].drafter]

    # --- Drafters that cost something ------------------------------------------------

    def _ask_slow(
        self,
        context: Sequence[int],
        curve: Sequence[float],
        beside: Beside,
        chosen: Sequence[Node],
    ) -> _Asked | None:
        """Ask the drafter that promises most, if it promises more than what is ``chosen``.

        What it costs counts here; once it is spent, the better of what there is then is drafted.
        """
        tokens = beside.tokens + 1.0 + sum(map(self._worth_of, chosen))
        rate = tokens / curve[len(chosen)]
        best, choice = rate * (1.0 + MARGIN), None
        for asked in self._asked:
            if self._is_cheap(asked):
                continue
            if self._is_untried(asked):
                self._audition(asked, context)
                continue
            catch_up = self._catch_up(asked)
            spread = catch_up / min(max(self._room, 1), 32)
            expected, path = beside.tokens + 1.0, 1.0
            for length in range(1, len(curve)):
                kind = f"depth {min(length, DEEPEST_KIND)}"
                path *= self._calibration.probability(asked.name, kind, ESTIMATE)
                expected += path
                drafting = length * asked.costs.each
                promise = expected / (curve[length] + drafting + spread)
                if promise > best:
                    best, choice = promise, (asked, length)
                if length == 1 and choice is None:
                    loss = curve[1] + drafting + catch_up - expected / rate
                    if self._budget.earned and self._budget.allows(loss):
                        self._spend(loss)
                        choice = (asked, 1)
        if choice is None:
            return None
        asked, length = choice
        self._ask(asked, context, length)
        return asked

    def _nodes_of(self, asked: _Asked) -> list[Node]:
        """A chain that is taken as it is, as nodes of a tree."""
        nodes, path = [], 1.0
        proposal = self._proposals[asked.name]
        for index, (token, kind) in enumerate(zip(proposal.tokens, proposal.kinds, strict=True)):
            chance = self._calibration.probability(asked.name, kind, proposal.probabilities[index])
            path *= chance
            nodes.append(Node(token, index, chance, path, (Source(asked.name, index),)))
        return nodes

    def _audition(self, asked: _Asked, context: Sequence[int]) -> None:
        """Find out what a drafter costs, away from the request, on the end of its text.

        So that a model that is slower than the target never reads a whole prompt to show it.
        One token at a time, when the budget has what the last one cost.
        """
        cost = asked.costs.each if asked.costs.asks else AUDITION * self._plain_seconds
        if not self._budget.allows(cost):
            return
        seen = Context(list(context[-AUDITION_TOKENS:]))
        if asked.stranger is None:
            asked.stranger = spawned(asked.drafter)
            if self._sampler is not None:
                asked.stranger.sample_with(self._sampler)
            asked.stranger.start(seen)
        began = perf_counter()
        draft = ask(asked.stranger, asked.stranger.propose, Draft, seen, 1)
        seconds = perf_counter() - began
        asked.costs.add(seconds / max(len(draft), 1))
        self._spend(seconds)
        if asked.costs.asks >= TRIALS:
            asked.stranger = None

    def _catch_up(self, asked: _Asked) -> float:
        """Seconds for a drafter to read what was said since it was asked last."""
        unseen = max(self._context - asked.last_context - MOST_NODES - 1, 0)
        each = asked.costs.each / 8 if asked.costs.catch_up is None else asked.costs.catch_up
        return unseen * each

    # --- Finding out -----------------------------------------------------------------

    def _explore_rows(
        self, nodes: list[Node], chosen: int, curve: Sequence[float], beside: Beside
    ) -> tuple[list[Node], int]:
        """Measure a row count that is not known, or not lately, if the budget allows."""
        if self._budget.spent >= self._budget.earned:
            return nodes, chosen
        tokens = beside.tokens + 1.0
        sums = [tokens]
        for node in nodes:
            sums.append(sums[-1] + self._worth_of(node))
        rate = sums[chosen] / curve[chosen]
        for count in range(len(nodes) + 1):
            if count == chosen or self._costs.age(beside.rows + count + 1) < STALE:
                continue
            loss = curve[count] - sums[count] / rate
            if self._budget.allows(loss):
                self._spend(loss)
                return nodes, count
        return nodes, chosen

    # --- Explaining ------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        return {
            "name": "auto",
            "num_steps": self._steps,
            "num_drafts": self._drafts,
            "plain_steps": [
                {"reason": reason, "num_steps": count}
                for reason, count in self._reasons.most_common()
            ],
            "expected_tokens": self._expected,
            "emitted_tokens": self._tokens,
            "deciding_seconds": self._deciding,
            "exploration_seconds": self._exploring,
            "drafters": [
                {
                    "name": asked.name,
                    "num_asks": asked.asked,
                    "num_draft_tokens": asked.drafted,
                    "num_accepted_tokens": asked.accepted,
                    "seconds": asked.seconds,
                }
                for asked in self._asked
            ],
            "pass_seconds": [self._costs.seconds(rows, self._context) for rows in range(1, 9)]
            if self._costs.known
            else [],
        }
