"""Rejection and block verification have exactly the target's distribution.

Every random decision of a step is enumerated, every draft with it, and the joint distribution of
the next tokens is compared with the target's. New rules are picked up from RULES.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from helpers_core import Fickle, Scripted, with_costs

from foretell import Draft, Drafter, Engine, ForetellError, InputError, OptionError
from foretell._draft import Draft as DraftClass
from foretell._sampling import DraftSampler, Drawn, RequestSampler, SamplingParams
from foretell._verify import RULES, Accepted
from foretell.backends.table import TableModel
from foretell.drafters import DraftModel, Ngram, Recycling, Suffix

EXACT = [rule for rule in RULES.values() if not rule.same_tokens]
every_exact_rule = pytest.mark.parametrize("rule", EXACT, ids=[rule.name for rule in EXACT])


# --- Enumeration ---------------------------------------------------------------------


class World:
    """Draws that follow a script of outcomes and know how probable it is."""

    def __init__(self, script):
        self.script, self.sizes, self.chance = list(script), [], 1.0

    def _pick(self, chances):
        if len(self.sizes) == len(self.script):
            self.script.append(0)
        outcome = self.script[len(self.sizes)]
        self.sizes.append(len(chances))
        self.chance *= chances[outcome]
        return outcome

    def accept(self, node, probability):
        assert 0 <= probability <= 1
        return bool(self._pick([1 - probability, probability]))

    def recover(self, node, weights):
        assert (weights >= 0).all()
        return self._pick((weights / weights.sum()).tolist())


def worlds():
    """Every World there is, given that a rule asks the same after the same answers."""
    script = []
    while True:
        world = World(script)
        yield world
        script = world.script
        while script and script[-1] == world.sizes[len(script) - 1] - 1:
            script.pop()
        if not script:
            return
        script[-1] += 1


class Known:
    """A target of known distributions; its one random decision maker is a World."""

    def __init__(self, p, world):
        self.p, self.world = p, world

    def distribution(self, logits, history, position):
        assert position == len(history)
        return self.p[tuple(history[1:])]

    def draws(self, step):
        return self.world


def random_distributions(rng, vocab_size, depth, *, zeros):
    found = {}
    for length in range(depth):
        for history in itertools.product(range(vocab_size), repeat=length):
            weights = rng.dirichlet(np.full(vocab_size, 0.7))
            if zeros:
                weights *= rng.random(vocab_size) < 0.7
            found[history] = weights / weights.sum() if weights.sum() else np.eye(vocab_size)[0]
    return found


def joint(p, history):
    return np.prod([p[history[:i]][token] for i, token in enumerate(history)])


def emitted_joint(rule, p, q, vocab_size, length, goes_on=lambda tokens: True):
    """The joint distribution of the next ``length`` + 1 tokens; what a step leaves open is p's.

    The draft ends early where ``goes_on`` says so of the tokens drafted by then.
    """
    drafts = {()}
    for _ in range(length):
        longer = {(*d, t) for d in drafts if goes_on(d) for t in range(vocab_size)}
        drafts = longer | {d for d in drafts if not goes_on(d)}
    logits = np.zeros((length + 1, vocab_size), np.float32)
    result = np.zeros((vocab_size,) * (length + 1))
    for tokens in sorted(drafts):
        drafted = joint(q, tokens)
        if not drafted:
            continue
        draft = Draft.sampled(tokens, [q[tokens[:i]] for i in range(len(tokens))])
        for world in worlds():
            verdict = rule.verify(draft, logits, Known(p, world), [0])
            emitted = tuple(token for token, _ in verdict)
            for rest in itertools.product(range(vocab_size), repeat=length + 1 - len(emitted)):
                whole = emitted + rest
                later = joint(p, whole) / joint(p, emitted) if joint(p, emitted) else 0.0
                result[whole] += drafted * world.chance * later
    return result


@every_exact_rule
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("vocab_size", "length"), [(2, 1), (2, 3), (3, 2), (4, 1)])
def test_the_joint_distribution_is_the_target_s(rule, vocab_size, length, zeros):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        p = random_distributions(rng, vocab_size, length + 1, zeros=zeros)
        q = random_distributions(rng, vocab_size, length, zeros=zeros)
        got = emitted_joint(rule, p, q, vocab_size, length)
        wanted = np.zeros_like(got)
        for whole in itertools.product(range(vocab_size), repeat=length + 1):
            wanted[whole] = joint(p, whole)
        assert np.abs(got - wanted).sum() / 2 < 1e-12


@every_exact_rule
@pytest.mark.parametrize("seed", range(6))
def test_a_draft_may_end_where_its_own_tokens_say(rule, seed):
    rng = np.random.default_rng(seed)
    p = random_distributions(rng, 2, 4, zeros=False)
    q = random_distributions(rng, 2, 3, zeros=False)
    got = emitted_joint(rule, p, q, 2, 3, goes_on=lambda tokens: 1 not in tokens)
    for whole in itertools.product(range(2), repeat=4):
        assert got[whole] == pytest.approx(joint(p, whole), abs=1e-12)


@every_exact_rule
def test_a_perfect_draft_is_always_kept(rule):
    rng = np.random.default_rng(0)
    p = random_distributions(rng, 3, 3, zeros=True)
    draft = Draft.sampled((1, 1), [p[()], p[(1,)]])
    if joint(p, (1, 1)):
        for world in worlds():
            verdict = list(rule.verify(draft, np.zeros((3, 3)), Known(p, world), [0]))
            assert world.chance == 0 or len(verdict) == 3


@every_exact_rule
def test_one_hot_drafts_are_exact_too(rule):
    rng = np.random.default_rng(3)
    p = random_distributions(rng, 3, 3, zeros=False)
    q = {history: np.eye(3)[(sum(history) + 1) % 3] for history in p}
    got = emitted_joint(rule, p, q, 3, 2)
    plain = Draft.one_hot((1, 2))
    for world in worlds():  # None and explicit rows of q are the same thing
        explicit = Draft.sampled((1, 2), [q[()], q[(1,)]])
        ours = list(rule.verify(plain, np.zeros((3, 3)), Known(p, world), [0]))
        twin = World(world.script)
        assert ours == list(rule.verify(explicit, np.zeros((3, 3)), Known(p, twin), [0]))
    for whole in itertools.product(range(3), repeat=3):
        assert got[whole] == pytest.approx(joint(p, whole), abs=1e-12)


def expected_accepted(rule, p, q):
    total = 0.0
    for tokens in itertools.product(range(3), repeat=2):
        draft = Draft.sampled(tokens, [q[()], q[tokens[:1]]])
        for world in worlds():
            verdict = rule.verify(draft, np.zeros((3, 3)), Known(p, world), [0])
            accepted = Accepted.of(draft, verdict).num_accepted
            total += joint(q, tokens) * world.chance * accepted
    return total


def test_block_never_accepts_fewer_than_rejection():
    gains = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        p = random_distributions(rng, 3, 3, zeros=False)
        q = random_distributions(rng, 3, 3, zeros=False)
        gains.append(
            expected_accepted(RULES["block"], p, q) - expected_accepted(RULES["rejection"], p, q)
        )
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


# --- Through the engine --------------------------------------------------------------


@every_exact_rule
@pytest.mark.parametrize("num_draft_tokens", [4, "auto"])
@pytest.mark.parametrize("kind", ["model", "ngram", "lookup", "all"])
def test_sampled_tokens_follow_the_target(rule, kind, num_draft_tokens):
    """Chi-square over the first three tokens of 2500 seeds; passed by chance once in 10^6."""
    model = TableModel.random(3, 2, seed=5)
    lookup = Scripted(lambda context, limit: Draft.one_hot((1, 2, 0)[:limit]))
    drafters = {
        "model": [DraftModel(TableModel.random(3, 1, seed=6))],
        "ngram": [Ngram()],
        "lookup": [lookup],
        "all": [Suffix(), Recycling(k=2), Ngram(), DraftModel(TableModel.random(3, 1, seed=6))],
    }[kind]
    engine = with_costs(Engine(model, drafters=drafters), 1.0, 0.1)
    params = {"temperature": 1.3, "top_p": 0.95, "presence_penalty": 0.3}
    params["num_draft_tokens"] = num_draft_tokens
    counts = Counter(
        tuple(
            engine.generate(
                [1], max_tokens=4, seed=seed, verification=rule.name, **params
            ).token_ids[:3]
        )
        for seed in range(2500)
    )
    del params["num_draft_tokens"]
    sampler = RequestSampler(SamplingParams(**params), prompt_length=1)
    statistic, cells = 0.0, 0
    for whole in itertools.product(range(3), repeat=3):
        chance, history = 1.0, [1]
        for token in whole:
            row = model.table[(0, *history)[-2:]]
            chance *= sampler.distribution(row, history, len(history))[token]
            history.append(token)
        if chance == 0:
            assert counts[whole] == 0
            continue
        statistic += (counts[whole] - 2500 * chance) ** 2 / (2500 * chance)
        cells += 1
    assert cells <= 27
    assert statistic < 80  # 26 degrees of freedom: 1e-6 at 77.6


@every_exact_rule
@pytest.mark.parametrize("seed", range(5))
def test_at_temperature_0_every_rule_is_greedy(rule, seed):
    model = TableModel.random(5, 2, seed=seed)
    for drafter in (
        DraftModel(TableModel.random(5, 1, seed=1)),
        Ngram(),
        Fickle(model, seed, trees=False),
    ):
        engine = Engine(model, drafters=[drafter])
        plain = engine.generate([1, 2], num_draft_tokens=0, max_tokens=40)
        assert engine.generate([1, 2], max_tokens=40).token_ids == plain.token_ids
        for n in (4, "auto"):
            exact = engine.generate(
                [1, 2], max_tokens=40, verification=rule.name, num_draft_tokens=n
            )
            assert exact.token_ids == plain.token_ids


@every_exact_rule
def test_a_seed_reproduces(rule):
    engine = Engine(TableModel.random(5, 2, seed=1), drafters=["ngram"])
    options = {"temperature": 1, "max_tokens": 60, "verification": rule.name}
    first = engine.generate([1, 2], **options)
    again = engine.generate([1, 2], seed=first.seed, **options)
    assert (again.token_ids, again.origins) == (first.token_ids, first.origins)


def test_sharing_noise_makes_a_draft_model_agree_more_often():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(50, 50)) * 2
    model, draft = TableModel(table), TableModel(table + rng.normal(size=(50, 50)) / 2)
    options = {"temperature": 1, "max_tokens": 800, "seed": 1, "num_draft_tokens": 4}
    engine = Engine(model, draft=draft, drafters=["draft_model"])
    shared = engine.generate([1], **options).stats

    class Independent(DraftModel):
        name = "independent"

        def sample_with(self, sampler):
            other = RequestSampler(SamplingParams(temperature=1), seed=99)
            super().sample_with(DraftSampler(other, 50, shares_noise=True))

        def spawn(self):
            return Independent(draft)

    apart = Engine(model, drafters=[Independent(draft)])
    unshared = apart.generate([1], **options).stats
    assert shared.draft_acceptance_rate > 2 * unshared.draft_acceptance_rate


# --- What is refused -----------------------------------------------------------------


def test_an_unknown_rule_is_refused_with_the_known_ones():
    engine = Engine(TableModel.random(5, 2, seed=1))
    for value in ("greedy", None, 3, ["match"]):
        with pytest.raises(OptionError, match=r"verification is .*'match', 'rejection', 'block'"):
            engine.stream([1], verification=value)


class Bushy(Drafter):
    """Proposes a small tree, and may say so."""

    name = "bushy"

    def __init__(self, trees):
        self.trees = trees

    def spawn(self):
        return Bushy(self.trees)

    def propose(self, context, limit):
        return Draft.one_hot((1, 2), (-1, 0, 0)) if limit > 1 else Draft.empty()


@every_exact_rule
def test_drafters_of_trees_are_refused_before_the_first_token(rule):
    model = TableModel.random(5, 2, seed=1)
    engine = Engine(model, drafters=[Bushy(trees=True)])
    with pytest.raises(OptionError, match=f"'{rule.name}' is for chains, .*'bushy' makes trees"):
        engine.stream([1], verification=rule.name)
    assert model.num_passes == 0
    assert len(engine.generate([1], max_tokens=9).token_ids) == 9
    assert (
        len(
            engine.generate([1], max_tokens=9, verification=rule.name, num_draft_tokens=0).token_ids
        )
        == 9
    )


@every_exact_rule
def test_a_tree_nobody_announced_is_an_error(rule):
    engine = Engine(TableModel.random(5, 2, seed=1), drafters=[Bushy(trees=False)])
    with pytest.raises(ForetellError, match="'bushy' proposed a tree"):
        engine.generate([1], num_draft_tokens=4, verification=rule.name)


@pytest.mark.parametrize(
    "q",
    [
        np.full((1, 4), 0.25),
        np.full((1, 5), 0.25),
        np.array([[0.5, 0.0, 0.5, 0.0, 0.0]]),
        np.array([[0.5, 0.7, -0.2, 0.0, 0.0]]),
        np.array([[np.nan, 0.5, 0.5, 0.0, 0.0]]),
    ],
    ids=["too narrow", "sum", "impossible token", "negative", "nan"],
)
def test_a_q_that_is_no_distribution_of_the_token_is_an_error(q):
    drafter = Scripted(lambda context, limit: Draft.sampled((1,), q))
    engine = Engine(TableModel.random(5, 2, seed=1), drafters=[drafter])
    with pytest.raises(ForetellError, match="'scripted' proposed a q that is none"):
        engine.generate([1], num_draft_tokens=4, verification="rejection", temperature=1)


# --- The type ------------------------------------------------------------------------


def test_a_draft_cannot_be_made_without_saying_what_it_was_drawn_from():
    with pytest.raises(TypeError, match="q"):
        DraftClass((1, 2))


def test_the_rows_of_q_are_as_many_as_the_tokens():
    with pytest.raises(InputError, match=r"2 drafted tokens need as many rows of q.*\(1, 3\)"):
        Draft.sampled((1, 2), np.eye(3)[:1])
    with pytest.raises(InputError, match="only a chain"):
        DraftClass((1, 2), (-1, 0, 0), q=np.eye(3)[:2])


def test_what_was_drawn_brings_its_q():
    rows = np.array([[0.25, 0.75], [0.5, 0.5]])
    draft = Draft.drawn([Drawn(1, rows[0]), Drawn(0, rows[1])])
    assert draft.tokens == (1, 0)
    assert np.array_equal(draft.q, rows)
    assert Draft.drawn([Drawn(1, None)]).q is None
    assert Draft.drawn([]) == Draft.empty()
    assert draft.q_of(1, 2).tolist() == [0.5, 0.5]
    assert Draft.one_hot((1,)).q_of(0, 3).tolist() == [0, 1, 0]


def test_a_drafter_draws_from_the_tokens_target_and_draft_share():
    params = SamplingParams(temperature=1.0, logit_bias={0: float("-inf")})
    for shares_noise in (True, False):
        sampler = DraftSampler(RequestSampler(params, seed=1), 3, shares_noise=shares_noise)
        for logits in (np.zeros(2, np.float32), np.array([0, 0, -np.inf, 9, 9], np.float32)):
            drawn = sampler.draw(logits, [0], 1)
            assert drawn.token == 1
            assert (drawn.q is None) == shares_noise
        assert sampler.draw(np.zeros(1, np.float32), [0], 1) is None
        assert sampler.draw(np.full(3, np.nan, np.float32), [0], 1) is None
