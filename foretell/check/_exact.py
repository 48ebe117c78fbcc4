"""Exact: every course that chance can take, and the joint distribution that comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foretell._noise import Floats
from foretell._verify import Rule
from foretell.check._definition import Tokens, joint
from foretell.check._wiring import RIGHT, Parts, Scenario, decoded
from foretell.check._worlds import WorldNoise, worlds

TOLERANCE = 1e-12
"""On the total variation of a joint distribution; rounding alone stays far below."""


@dataclass(frozen=True)
class Enumeration:
    """What an enumeration found.

    ``different`` counts the worlds in which the outcome (tokens, ending, cache) was not that of
    plain decoding: its total for a rule that promises the same tokens, for any rule at temperature
    0; otherwise those where the cache does not hold the tokens that were emitted.
    """

    total_variation: float
    worlds: int
    different: int
    example: str | None

    @property
    def exact(self) -> bool:
        """Whether the target's distribution, and what else was compared, was met."""
        return self.total_variation < TOLERANCE and not self.different


def enumerated(scenario: Scenario, rule: Rule, parts: Parts = RIGHT) -> Enumeration:
    """The whole decoder, once in every world, against the target's definition."""
    found: dict[Tokens, float] = {}
    memo: dict[bytes, Floats] = {}
    count = different = 0
    example: str | None = None
    for world in worlds():
        noise = WorldNoise(world, shared=parts.shares_noise)
        outcome = decoded(scenario, rule, noise, parts, memo)
        cached = tuple(map(float, (*scenario.prompt, *outcome.tokens[:-1])))
        wrong = outcome.cache != cached
        plain = outcome
        if rule.same_tokens:
            plain = decoded(scenario, None, noise, RIGHT, memo)
            wrong = outcome != plain
        if wrong:
            different += 1
            right = plain.cache if plain != outcome else cached
            example = example or (
                f"{list(outcome.tokens)} with cache {_ids(outcome.cache)} instead of "
                f"{list(plain.tokens)} with cache {_ids(right)}"
            )
        count += 1
        found[outcome.tokens] = found.get(outcome.tokens, 0.0) + world.probability
    wanted = joint(scenario.table, scenario.prompt, scenario.params, scenario.eos_token_ids)
    return Enumeration(total_variation(found, wanted), count, different, example)


def total_variation(first: Mapping[Tokens, float], second: Mapping[Tokens, float]) -> float:
    """Half the sum of all differences."""
    return sum(abs(first.get(o, 0.0) - second.get(o, 0.0)) for o in {*first, *second}) / 2


def _ids(cache: tuple[float, ...]) -> list[int]:
    return [int(token) for token in cache]
