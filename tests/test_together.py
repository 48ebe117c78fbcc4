"""Whether anybody in a shared pass is asked for a draft: by given costs, once for all."""

from __future__ import annotations

import random

import pytest
from helpers_core import GivenCosts, random_table, with_costs

from foretell import Engine, SamplingParams
from foretell._auto_policy import AutoPolicy, Experience
from foretell._batch import Batch
from foretell._costs import PassCosts
from foretell._policy import FixedPolicy, propose_together
from foretell._proposal import EvidenceDrafter, Proposal
from foretell._together import EVERY, Together

MODEL = random_table(6, 2, seed=1)


class Counting(EvidenceDrafter):
    """Proposes what is certainly right, and counts who asks it and shows it what became of it."""

    name = "counting"
    observes_every_pass = False

    def __init__(self) -> None:
        self.asked = self.observed = 0

    def spawn(self):
        return self

    def suggest(self, context, limit):
        self.asked += 1
        return Proposal((1,) * limit, None, (1.0,) * limit, ("certain",) * limit)

    def observe(self, draft, output, accepted):
        self.observed += 1


class Steps(GivenCosts):
    """Four rows for the price of one, and the next four for that of another, and so on."""

    def seconds(self, rows, context):
        return float(-(-rows // 4))


def experience(costs, *, asking=0.0, budget=0.0):
    made = Experience(costs=costs, num_accepted_nodes=100)
    made.deciding.add(asking)
    made.budget.earn(100.0 * budget)
    return made


def policies(count, known, drafter):
    made = [AutoPolicy(MODEL, [drafter], known) for _ in range(count)]
    for policy in made:
        policy.start([1, 2])
    return made


def drafted(made):
    return [len(draft) for draft in propose_together((one, [1, 2], 8) for one in made)]


@pytest.mark.parametrize("count", [8, 32, 64])
def test_nobody_is_asked_where_a_row_costs_what_it_brings(count):
    drafter = Counting()
    made = policies(count, experience(GivenCosts(1.0, 1.0), budget=1000.0), drafter)
    for _ in range(3 * EVERY):
        assert drafted(made) == [0] * count
    assert drafter.asked == 0
    report = made[0].report()
    [entry] = report["plain_steps"]
    assert entry == {"reason": "no draft could pay in this pass", "num_steps": 3 * EVERY}
    assert report["exploration_seconds"] == 0.0
    assert report["expected_tokens"] == 3 * EVERY


@pytest.mark.parametrize(("asking", "asked"), [(0.0, 1), (0.01, 1), (0.2, 0)])
def test_what_asking_costs_is_weighed_against_the_most_that_drafts_could_bring(asking, asked):
    """Six rows cost what eight do: two free rows save half a second at most, once in all.

    The first one who is asked takes both, and then there is nothing left to ask the others for.
    """
    drafter = Counting()
    made = policies(6, experience(Steps(), asking=asking), drafter)
    assert sum(drafted(made)) == (2 if asked else 0)
    assert drafter.asked == asked


def test_it_is_decided_once_for_all_and_kept_for_some_passes():
    known = experience(Steps())
    calls = []
    known.together.curve = lambda *given: calls.append(given) or [1.0] * given[1]
    asked = policies(6, known, Counting())
    for _ in range(EVERY):
        assert known.together.most_nodes(asked, 6, 2.0) > 8
    assert len(calls) == 1
    known.together.most_nodes(asked, 6, 2.0)
    assert len(calls) == 2


def test_a_request_alone_is_left_to_its_policy():
    known = experience(GivenCosts(1.0, 0.0))
    known.together.most_nodes = None  # calling it would fail
    assert drafted(policies(1, known, Counting())) == [8]


def test_requests_of_a_fixed_length_draft_whatever_the_others_do():
    known = experience(GivenCosts(1.0, 1.0))
    fixed = FixedPolicy(MODEL, [Counting()], 3)
    assert drafted([fixed, *policies(12, known, Counting())]) == [3, *[0] * 12]


def measured(rows, seconds):
    """Costs of passes that were made, ten of each kind in turns."""
    costs = PassCosts()
    for _ in range(10):
        for k in rows:
            costs.observe(k, 0.0, seconds(k))
    return costs


def test_a_row_count_that_was_never_measured_costs_its_share():
    """Where a guess says that rows are cheap, a wide pass would try them all out in turn."""
    costs = measured([1, 2, 4, 8], lambda k: 0.01 * k)
    optimistic = costs.curve(8, 9, 0.0)
    assert optimistic[8] < 0.155
    assert Together(experience(costs)).curve(8, 9, 0.0)[8] == pytest.approx(0.16, rel=0.01)


def test_a_few_lucky_passes_do_not_make_rows_cheap():
    costs = measured([*range(8, 36), *range(37, 65, 3)], lambda k: 0.002 * k)
    for _ in range(3):
        costs.observe(36, 0.0, 0.05)  # as if twelve of its rows had been free
    assert costs.curve(32, 5, 0.0)[4] <= costs.curve(32, 1, 0.0)[0]
    known = experience(costs, asking=1e-4)
    cautious = known.together.curve(32, 5, 0.0)
    assert cautious[4] > cautious[0] * 1.08
    drafter = Counting()
    assert sum(drafted(policies(32, known, drafter))) == drafter.asked == 0


def test_free_rows_that_were_measured_are_used_in_wide_passes_too():
    """Where the width of a pass costs nothing (another machine), many requests draft."""
    known = experience(measured(range(1, 80), lambda k: 1.0), asking=1e-4)
    assert sum(drafted(policies(32, known, Counting()))) >= 32


@pytest.mark.parametrize(("budget", "tried"), [(0.0, 0), (2.0, 1), (100.0, 2)])
def test_what_was_never_measured_is_tried_within_the_budget(budget, tried):
    """Of more than six rows nothing is known, and a guess says that they might be cheap."""
    costs = measured([1, 6], lambda k: 1.0 + 0.02 * (k - 1))
    known = experience(costs, asking=0.01, budget=budget)
    drafter = Counting()
    made = policies(6, known, drafter)
    tries = []
    for _ in range(2 * EVERY):
        tries.append(drafted(made))
        costs.observe(6 + sum(tries[-1]), 2.0, 1.0 + 0.02 * (5 + sum(tries[-1])))
    assert sum(map(any, tries)) == tried
    assert max(map(max, tries)) == min(tried, 1)
    assert known.budget.spent <= known.budget.earned
    if tried == 2:  # now it is known that they are, and nothing has to be tried any more
        known.budget.spent = known.budget.earned
        for _ in range(EVERY):
            assert sum(drafted(made)) > 0


def test_what_drafts_bring_to_several_is_not_taken_for_what_they_bring_to_one():
    known = experience(Steps())
    drafter = Counting()
    for _ in range(5):
        drafted(policies(3, known, drafter))
    assert drafter.asked
    assert known.drafters["counting"].worth is None
    assert known.together.worth["counting", 2] > 0.0
    drafted(policies(1, known, drafter))
    assert known.drafters["counting"].worth is not None


def batch_of(engine, settings):
    """Runs requests of (prompt, max_tokens, num_draft_tokens) together; their tokens and stats."""
    batch, requests = Batch(engine.model), []
    for prompt, max_tokens, number in settings:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        requests += engine.prepare(prompt, params, num_draft_tokens=number)
        batch.join([requests[-1]])
    passes = []
    while len(batch):
        batch.read()
        running, before = len(batch), [one.stats.num_draft_tokens for one in requests]
        batch.step()
        after = [one.stats.num_draft_tokens for one in requests]
        passes.append((running, sum(after) - sum(before)))
    assert all(one.error is None for one in requests)
    return [one.tokens for one in requests], passes


def test_those_who_are_left_at_the_end_draft_again():
    engine = with_costs(Engine(MODEL, drafters=["suffix"]))
    engine._experience.costs = Steps()
    engine._experience.deciding.add(0.02)
    settings = [([1, 2, index % 6], 40 + 30 * (index > 29), "auto") for index in range(32)]
    _, passes = batch_of(engine, settings)
    wide = [count for running, count in passes if running == 32]
    narrow = [count for running, count in passes if running <= 2]
    assert wide
    assert sum(wide) == 0
    assert sum(narrow) > 10


def test_a_pass_costs_by_what_its_rows_see_on_average():
    engine = with_costs(Engine(MODEL, drafters=["suffix"]), 1.0, 1.0)
    batch = Batch(MODEL)
    for prompt in ([1] * 4, [2] * 10, [3] * 40):
        batch.join(engine.prepare(prompt, SamplingParams(max_tokens=3, ignore_eos=True)))
    batch.read()
    batch.step()
    # Each prompt and the first token after it.
    assert engine._experience.costs.observed == [(3, pytest.approx((5 + 11 + 41) / 3))]


@pytest.mark.parametrize("seed", range(6))
def test_whoever_is_asked_or_not_the_tokens_are_those_of_a_single_run(seed, monkeypatch):
    """Drafters that did not see some of the passes go on from where the text is by then."""
    draw = random.Random(seed)
    monkeypatch.setattr(Together, "most_nodes", lambda *_: draw.choice((0, 0, 1, 8)))
    model = random_table(8, 2, seed)
    engine = with_costs(Engine(model, drafters=["suffix", "recycling", "ngram"]), 1.0, 0.01)
    settings = [
        ([draw.randrange(8) for _ in range(draw.choice((1, 3, 20)))], draw.choice((5, 60)), number)
        for number in ("auto", "auto", "auto", 0, 2, "auto", 5, "auto")
    ]
    tokens, passes = batch_of(engine, settings)
    assert sum(count for _, count in passes) > 0
    for (prompt, max_tokens, _), got in zip(settings, tokens, strict=True):
        alone = engine.generate(
            prompt, max_tokens=max_tokens, ignore_eos=True, num_draft_tokens=0
        ).token_ids
        assert got == prompt + alone
