"""What is drafted is what pays, by given costs; a drafter that does not pay is left alone."""

from __future__ import annotations

import pytest
from helpers_core import GivenCosts, Scripted, continuation, next_token, random_table, with_costs

from foretell import Draft, Engine, ForetellError, _auto_policy
from foretell._auto_policy import AutoPolicy, Experience
from foretell._policy import Beside, FixedPolicy, propose_together
from foretell._proposal import EvidenceDrafter, Proposal
from foretell.backends.table import TableModel
from foretell.drafters import DraftModel, Recycling, Suffix

MODEL = random_table(6, 2, seed=1)


class Says(EvidenceDrafter):
    """Proposes a chain of the target's tokens, or of others, at a claimed chance each."""

    name = "says"

    def __init__(self, claim, *, right=True, clock=None, seconds=0.0, asks=None):
        self.claim, self.right, self.clock, self.seconds = claim, right, clock, seconds
        self.asks = [] if asks is None else asks

    def spawn(self):
        return Says(
            self.claim, right=self.right, clock=self.clock, seconds=self.seconds, asks=self.asks
        )

    def suggest(self, context, limit):
        self.asks.append(len(context))
        if self.clock is not None:
            self.clock.now += self.seconds
        tokens = continuation(MODEL, list(context), limit)
        if not self.right:
            tokens = [(token + 1) % 6 for token in tokens]
        return Proposal(tuple(tokens), None, (self.claim,) * limit, ("a kind",) * limit)


class Clock:
    """Time that passes when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_auto_policy, "perf_counter", clock)
    return clock


def stats(drafters, one, more, *, tokens=200, model=MODEL, experience=None, budget=0.0):
    engine = with_costs(Engine(model, drafters=drafters), one, more)
    engine._experience.budget.earn(100.0 * budget)
    if experience is not None:
        engine._experience = experience
    result = engine.generate([1, 2], max_tokens=tokens, ignore_eos=True)
    assert result.token_ids == continuation(model, [1, 2], tokens)
    return result.stats


def policy(drafters, one=1.0, more=0.1, context=(1, 2)):
    """Of an engine that has seen a few things, and may spend a second on finding out more."""
    experience = Experience(costs=GivenCosts(one, more), num_accepted_nodes=100)
    experience.budget.earn(100.0)
    made = AutoPolicy(MODEL, drafters, experience)
    made.start(context)
    return made


def test_long_drafts_where_rows_are_free():
    assert stats([Says(0.9)], 1.0, 0.0).tokens_per_step > 8


def test_plain_steps_where_a_row_costs_as_much_as_a_pass():
    made = stats([Says(0.9)], 1.0, 1.0)
    assert made.num_drafts == 0
    reasons = {entry["reason"] for entry in made.policy["plain_steps"]}
    assert reasons <= {"not worth the pass", "no room", "no drafter paid of late"}


@pytest.mark.parametrize(
    ("claim", "more", "nodes"), [(0.5, 0.4, 1), (0.5, 0.15, 2), (0.5, 0.6, 0), (0.9, 0.4, 4)]
)
def test_the_first_draft_is_the_one_that_promises_most(claim, more, nodes):
    """By hand: the largest of (1 + claim + claim^2 + ...) / (1 + n x more)."""
    sums = [1.0]
    for n in range(1, 9):
        sums.append(sums[-1] + claim**n)
    rates = [total / (1 + n * more) for n, total in enumerate(sums)]
    assert max(range(9), key=rates.__getitem__) == nodes
    assert len(policy([Says(claim)], 1.0, more).propose([1, 2], 8)) == nodes


def test_in_a_shared_pass_the_extra_cost_decides():
    """A row that would double a pass of one adds a quarter to a pass of four."""
    alone = policy([Says(0.6)], 1.0, 0.7)
    assert len(alone.propose([1, 2], 8)) == 0

    class Steps(GivenCosts):
        def seconds(self, rows, context):
            return 1.0 if rows == 1 else 1.7 if rows <= 4 else 1.7 + 0.1 * (rows - 4)

    experience = Experience(costs=Steps())
    made = [AutoPolicy(MODEL, [Says(0.6)], experience) for _ in range(4)]
    drafts = propose_together((one, [1, 2], 8) for one in made)
    assert all(len(draft) > 0 for draft in drafts)
    assert [len(draft) for draft in drafts] == sorted(map(len, drafts), reverse=True)


def test_the_others_of_a_pass_are_plain_until_they_were_asked():
    seen = []

    class Watching(FixedPolicy):
        def propose(self, context, limit, beside=Beside()):  # noqa: B008
            seen.append(beside)
            draft = super().propose(context, limit, beside)
            self.expected_tokens = 1.0 + 0.5 * len(draft)
            return draft

    drafter = Scripted(lambda context, limit: Draft.one_hot((1, 2)))
    propose_together((Watching(MODEL, [drafter], 2), [1], 5) for _ in range(3))
    assert [(one.rows, one.tokens) for one in seen] == [(2, 2.0), (4, 3.0), (6, 4.0)]


def test_a_drafter_that_is_always_wrong_is_found_out():
    made = stats([Says(0.99, right=False)], 1.0, 0.1, tokens=400)
    assert made.num_drafts < 15
    wrong_and_right = stats([Says(0.99, right=False), Suffix()], 1.0, 0.1, tokens=400)
    assert wrong_and_right.tokens_per_step > 2


def test_a_drafter_that_is_right_is_found_out_too():
    assert stats([Says(0.05)], 1.0, 0.2, tokens=400).tokens_per_step > 3


def test_a_drafter_that_costs_more_than_it_brings_is_left_alone(clock):
    """0.02 of a pass each time, for nothing: asked for a while, then at most now and then."""
    useless = Says(0.3, right=False, clock=clock, seconds=0.02)
    made = stats([useless], 1.0, 0.5, tokens=1000)
    [drafter] = made.policy["drafters"]
    assert drafter["num_asks"] == len(useless.asks)
    assert len(useless.asks) < 0.15 * made.num_steps
    late = [at for at in useless.asks if at > 800]
    assert len(late) <= 200 / 16 + 1
    assert {"reason": "no drafter paid of late"}.items() <= made.policy["plain_steps"][0].items()


@pytest.mark.parametrize("evidence", [True, False])
def test_a_drafter_slower_than_the_target_is_hardly_asked(clock, evidence):
    slow = Says(0.99, clock=clock, seconds=2.0)
    if not evidence:
        inner = slow

        def script(context, limit):
            inner.asks.append(len(context))
            clock.now += 2.0 * limit
            return Draft.one_hot(continuation(MODEL, list(context), limit))

        slow = Scripted(script)
        slow.asks = inner.asks
    made = stats([slow], 1.0, 0.1, tokens=1000)
    assert len(slow.asks) < 12
    assert made.policy["exploration_seconds"] <= 0.011 * 1000 + 6


def test_where_all_drafters_are_slower_than_the_target_hardly_anything_is_decided(clock):
    def script(context, limit):
        clock.now += 2.0 * limit
        return Draft.one_hot(continuation(MODEL, list(context), limit))

    made = stats([Scripted(script)], 1.0, 0.1, tokens=1000, budget=0.1)
    resting = {entry["reason"]: entry["num_steps"] for entry in made.policy["plain_steps"]}
    assert resting["no drafter paid of late"] > 900


def test_a_draft_model_that_pays_is_asked_for_as_much_as_pays(clock):
    lengths = []

    def script(context, limit):
        lengths.append(limit)
        clock.now += 0.1 * limit
        return Draft.one_hot(continuation(MODEL, list(context), limit))

    made = stats([Scripted(script)], 1.0, 0.05, tokens=300, budget=1.0)
    assert made.tokens_per_step > 3
    lengths.clear()
    dear = stats([Scripted(script)], 1.0, 0.95, tokens=300, budget=1.0)
    assert dear.num_drafts < 10


def test_a_slow_drafter_does_not_read_the_prompt_to_show_its_speed(clock):
    read = []

    def script(context, limit):
        read.append(len(context))
        clock.now += 5.0
        return Draft.one_hot((0,))

    engine = with_costs(Engine(MODEL, drafters=[Scripted(script)]), 1.0, 0.1)
    engine._experience.budget.earn(100.0)
    engine.generate([1, 2] * 200, max_tokens=20)
    assert read
    assert max(read) < 10


def test_exploring_stays_within_its_budget():
    experience = Experience()
    engine = Engine(random_table(6, 2, seed=4))
    engine._experience = experience
    for seed in range(6):
        engine.generate([1, 2, seed % 6], max_tokens=200)
    assert experience.budget.spent <= 1.05 * experience.budget.earned


def test_a_drafter_is_tried_out_as_the_budget_allows(clock):
    """5 passes for a token: after the first one the budget is overdrawn, and it has to wait."""
    asks = []

    def script(context, limit):
        asks.append(len(context))
        clock.now += 5.0
        return Draft.one_hot((0,))

    experience = Experience(costs=GivenCosts(1.0, 0.1))
    made = AutoPolicy(MODEL, [Scripted(script)], experience)
    made.start([1, 2])
    for passes in range(2000):
        before = len(asks)
        made.propose([1, 2, 3], 8)
        if len(asks) > before:
            assert experience.budget.earned >= (5.0 * before if before else 0.1)
        made.passed(1, 2.0, 1.0)
        experience.costs.num_passes = passes
    assert len(asks) == 4
    assert experience.budget.spent <= experience.budget.earned + 5.0


def test_where_nothing_pays_nothing_is_decided(clock):
    """After a while 15 of 16 steps do not even look, and one that looks sees when it begins to."""

    class Late(Says):
        def suggest(self, context, limit):
            made = super().suggest(context, limit)
            return made if len(context) > 1200 else Proposal()

        def spawn(self):
            return Late(self.claim, clock=self.clock, seconds=self.seconds, asks=self.asks)

    late = Late(0.9, clock=clock, seconds=0.02)
    made = stats([late], 1.0, 0.05, tokens=2000, budget=1000.0)
    quiet = [at for at in late.asks if 500 < at <= 1200]
    assert len(quiet) <= 700 / 16 + 1
    assert made.num_steps < 1200 + 32 + 800 / 5


def test_first_drafts_are_short_whatever_is_claimed():
    experience = Experience(costs=GivenCosts(1.0, 0.0))
    made = AutoPolicy(MODEL, [Says(0.99)], experience)
    made.start([1, 2])
    assert len(made.propose([1, 2], 8)) == 2
    experience.num_accepted_nodes = 4
    assert len(made.propose([1, 2], 8)) == 6


def test_the_report_adds_up():
    made = stats([Suffix(), Recycling(k=2)], 1.0, 0.2, tokens=800)
    report = made.policy
    assert report["name"] == "auto"
    assert report["num_steps"] == made.num_steps
    assert report["num_drafts"] == made.num_drafts
    plain = sum(entry["num_steps"] for entry in report["plain_steps"])
    assert plain + made.num_drafts == made.num_steps
    assert report["emitted_tokens"] == made.num_decode_tokens
    assert report["expected_tokens"] == pytest.approx(made.num_decode_tokens, rel=0.3)
    assert [entry["name"] for entry in report["drafters"]] == ["suffix", "recycling"]
    assert sum(entry["num_draft_tokens"] for entry in report["drafters"]) >= made.num_draft_tokens
    assert len(report["pass_seconds"]) == 8
    assert made.to_dict()["policy"] == report


def test_fixed_lengths_decide_nothing():
    engine = Engine(MODEL)
    for n in (0, 4):
        result = engine.generate([1, 2], max_tokens=50, num_draft_tokens=n)
        assert result.stats.policy == {}
        assert "policy" not in result.stats.to_dict()


def test_two_drafters_of_one_name_are_told_apart():
    drafts = [DraftModel(TableModel(MODEL.table)), DraftModel(TableModel(-MODEL.table))]
    made = stats(drafts, 1.0, 0.05, tokens=300, budget=1.0)
    names = [entry["name"] for entry in made.policy["drafters"]]
    assert names == ["draft_model", "draft_model 2"]
    good, bad = made.policy["drafters"]
    assert good["num_accepted_tokens"] > bad["num_accepted_tokens"]


def test_what_is_learned_serves_the_next_request():
    experience = Experience(costs=GivenCosts(1.0, 0.1))
    wrong = Says(0.99, right=False)
    first = stats([wrong], 1.0, 0.1, tokens=100, experience=experience)
    second = stats([wrong], 1.0, 0.1, tokens=100, experience=experience)
    assert first.num_drafts > 0
    assert second.num_drafts <= 1


def test_outputs_are_remembered_for_their_owner_alone():
    from foretell.drafters import SuffixMemory

    memory = SuffixMemory()
    engine = with_costs(Engine(MODEL, drafters=["suffix"], suffix_memory=memory), 1.0, 0.1)
    options = {"max_tokens": 40}
    first = engine.generate([3, 1], owner="a", **options)
    again = engine.generate([3, 1], owner="a", **options)
    other = engine.generate([3, 1], owner="b", **options)
    assert first.token_ids == again.token_ids == other.token_ids
    assert memory.texts("a") == [first.token_ids] * 2
    assert again.stats.num_steps < first.stats.num_steps
    assert next_token(MODEL, [3, 1]) == first.token_ids[0]
    without = Engine(MODEL, drafters=["suffix"])
    without.generate([3, 1], owner="a", **options)
    assert without.suffix_memory is None


# --- Drafters of others --------------------------------------------------------------


class Odd(EvidenceDrafter):
    """Says whatever it is told to."""

    name = "odd"

    def __init__(self, answer):
        self.answer = answer

    def spawn(self):
        return Odd(self.answer)

    def suggest(self, context, limit):
        return self.answer(context, limit)


def divides_by_zero(context, limit):
    return 1 // 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda context, limit: None, "None"),
        (lambda context, limit: [1, 2], "must return a"),
        (lambda context, limit: Proposal((1,) * 99, None, (0.5,) * 99, ("",) * 99), "99 tokens"),
        (lambda context, limit: Proposal((6,), None, (0.5,), ("",)), "outside 0..5"),
        (lambda context, limit: Proposal((-1,), None, (0.5,), ("",)), "outside 0..5"),
        (lambda context, limit: Proposal((1,), None, (float("nan"),), ("",)), "outside 0..1"),
        (lambda context, limit: Proposal((1, 1), (-1, 0, 0), (0.5,) * 2, ("",) * 2), "twice"),
        (lambda context, limit: Proposal((1, 2), (-1, 2, 0), (0.5,) * 2, ("",) * 2), "parent"),
        (lambda context, limit: Proposal((1.5,), None, (0.5,), ("",)), "no whole number"),
    ],
)
def test_what_is_no_proposal_is_an_error_that_names_the_drafter(answer, message):
    with pytest.raises(ForetellError, match=f"drafter 'odd' proposed.*{message}"):
        policy([Odd(answer)]).propose([1, 2], 8)
    with pytest.raises(ForetellError, match="drafter 'scripted' proposed"):
        policy([Scripted(answer)]).propose([1, 2], 8)


@pytest.mark.parametrize("make", [Odd, Scripted])
def test_an_exception_in_a_drafter_says_in_which(make):
    with pytest.raises(ZeroDivisionError) as raised:
        policy([make(divides_by_zero)]).propose([1, 2], 8)
    assert raised.value.__notes__ == [f"in the drafter '{make(divides_by_zero).name}'"]


class Vandal(Scripted):
    """Tries to change whatever it is shown."""

    def __init__(self, script=lambda context, limit: Draft.one_hot((1,))):
        super().__init__(script)
        self.shown = []

    def spawn(self):
        made = Vandal()
        made.shown = self.shown
        return made

    def change(self, tokens):
        with pytest.raises(TypeError):
            tokens[0] = 5
        with pytest.raises(TypeError):
            del tokens[0]
        with pytest.raises(AttributeError):
            tokens.append(5)
        tokens[:].append(5)
        self.shown.append(list(tokens))

    def start(self, prompt):
        self.change(prompt)

    def propose(self, context, limit):
        self.change(context)
        return super().propose(context, limit)

    def finish(self, context):
        self.change(context)


@pytest.mark.parametrize("n", ["auto", 2])
def test_drafters_cannot_change_a_requests_tokens(n):
    vandal = Vandal()
    engine = with_costs(Engine(MODEL, drafters=[vandal]), 1.0, 0.0)
    result = engine.generate([1, 2], max_tokens=9, num_draft_tokens=n)
    assert result.token_ids == continuation(MODEL, [1, 2], 9)
    assert vandal.shown[-1] == [1, 2, *result.token_ids]
    tokens = [1, 2]
    made = AutoPolicy(MODEL, [vandal], Experience(costs=GivenCosts(1.0, 0.0)))
    for one in (made, FixedPolicy(MODEL, [vandal], 2)):
        one.start(tokens)
        propose_together([(one, tokens, 4)])
        one.finish(tokens)
    assert tokens == [1, 2]


class Counting(EvidenceDrafter):
    """Proposes what is certainly right, and counts how often it is asked."""

    name = "counting"

    def __init__(self) -> None:
        self.asked = 0

    def spawn(self):
        return self

    def suggest(self, context, limit):
        self.asked += 1
        return Proposal((1,) * limit, None, (1.0,) * limit, ("certain",) * limit)


@pytest.mark.parametrize(("rows", "asked"), [(0, 1), (3, 1), (31, 0), (63, 0)])
def test_nobody_is_asked_where_a_shared_pass_has_no_free_rows(rows, asked):
    drafter = Counting()
    # A pass of 4 rows is cheap, and one of 32 costs for each row what it brings at best.
    experience = Experience(costs=GivenCosts(1.0, 0.4))
    one = AutoPolicy(random_table(4, 2, 0), [drafter], experience)
    one.start([1, 2])
    draft = one.propose([1, 2], 20, Beside(rows, float(rows)))
    assert drafter.asked == asked
    assert bool(draft.tokens) == bool(asked)
    if not asked:
        reasons = [entry["reason"] for entry in one.report()["plain_steps"]]
        assert reasons == ["no draft could pay in this pass"]
