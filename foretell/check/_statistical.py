"""Statistical: sampled blocks, through everything real, against exact probabilities."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from foretell._engine import Engine
from foretell._noise import Floats, key_of
from foretell._verify import Rule
from foretell.backends.table import TableModel
from foretell.check._definition import Tokens, joint
from foretell.check._statistics import Fit, fit
from foretell.check._wiring import Parts, Scenario, decoded
from foretell.check._worlds import KeyedNoise, SharedKeyedNoise

SAMPLES = 1000
FALSE_ALARM = 1e-6
"""For a whole run of the kit, over all its statistical tests."""


def sampled(scenario: Scenario, rule: Rule, *, seed: int, samples: int, false_alarm: float) -> Fit:
    """Outputs of the public engine, one for each of ``samples`` seeds."""
    engine = Engine(
        TableModel(scenario.table, eos_token_ids=scenario.eos_token_ids),
        drafters=[scenario.drafter],
    )
    counts: Counter[Tokens] = Counter()
    for index in range(samples):
        result = engine.generate(
            scenario.prompt,
            sampling=replace(scenario.params, seed=key_of(seed, index)),
            num_draft_tokens=scenario.num_draft_tokens,
            verification=rule.name,
        )
        counts[tuple(result.token_ids)] += 1
    return _fit(scenario, counts, false_alarm)


def sampled_with(
    scenario: Scenario, rule: Rule, parts: Parts, *, seed: int, samples: int, false_alarm: float
) -> Fit:
    """The same of a decoder with other parts."""
    counts: Counter[Tokens] = Counter()
    memo: dict[bytes, Floats] = {}
    for index in range(samples):
        own = key_of(seed, index)
        noise = SharedKeyedNoise(own) if parts.shares_noise else KeyedNoise(own)
        counts[decoded(scenario, rule, noise, parts, memo, seed=own).tokens] += 1
    return _fit(scenario, counts, false_alarm)


def _fit(scenario: Scenario, counts: Counter[Tokens], false_alarm: float) -> Fit:
    expected = joint(scenario.table, scenario.prompt, scenario.params, scenario.eos_token_ids)
    return fit(counts, expected, false_alarm)
