"""All that chance can do, one world after another.

A world answers every random decision and knows how probable its answers are. Each uniform
variable is an interval, at first from 0 to 1; a decision cuts the interval at its own boundaries
and goes on in one of the pieces. What is asked of one variable twice is therefore answered
consistently, so noise that is shared where it must not be shows up exactly.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from foretell._noise import Floats, key_of, uniform
from foretell._sampling import KeyedDraws, draw

Variable = Hashable


class StepDraws(Protocol):
    """The random decisions of one step: those of the rule, and those of a drafter."""

    def accept(self, node: int, probability: float) -> bool:
        """As in Draws."""

    def recover(self, node: int, weights: Floats) -> int:
        """As in Draws."""

    def draft(self, node: int, weights: Floats) -> int:
        """A drafted token, to be ``node``."""


class Noise(Protocol):
    """Where a request's randomness comes from."""

    def draws(self, step: int) -> StepDraws:
        """The decisions of the step that begins at the absolute index ``step``."""

    replaces_choice: bool
    """Whether the target's choice is a draw by ``choice``, and not by the request's own noise."""

    def choice(self, position: int, weights: Floats) -> int:
        """The target's choice at ``position``."""


# --- Worlds --------------------------------------------------------------------------


class World:
    """One course of events: the pieces that a script names, in the order of the decisions."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = list(script)
        self.sizes: list[int] = []
        self.probability = 1.0
        self._intervals: dict[Variable, tuple[float, float]] = {}

    def piece(self, variable: Variable, boundaries: Sequence[float]) -> int:
        """In which piece between ascending ``boundaries``, 0 to 1, the variable lies."""
        low, high = self._intervals.get(variable, (0.0, 1.0))
        pieces = [
            (index, max(low, start), min(high, end))
            for index, (start, end) in enumerate(pairwise(boundaries))
            if max(low, start) < min(high, end)
        ]
        if len(self.sizes) == len(self.script):
            self.script.append(0)
        index, start, end = pieces[self.script[len(self.sizes)]]
        self.sizes.append(len(pieces))
        self.probability *= (end - start) / (high - low)
        self._intervals[variable] = (start, end)
        return index

    def token(self, variable: Variable, weights: Floats) -> int:
        """A token drawn by inversion."""
        sums = weights.cumsum()
        return self.piece(variable, [0.0, *(sums[:-1] / sums[-1]).tolist(), 1.0])


def worlds() -> Iterator[World]:
    """Every world, given that the same is asked after the same answers.

    The caller runs each one before it asks for the next.
    """
    script: list[int] = []
    while True:
        world = World(script)
        yield world
        script = world.script[: len(world.sizes)]
        while script and script[-1] == world.sizes[len(script) - 1] - 1:
            script.pop()
        if not script:
            return
        script[-1] += 1


# --- Sources of noise ----------------------------------------------------------------


class WorldNoise:
    """Decisions of a world; with ``shared``, one variable serves all uses of a node."""

    replaces_choice = True

    def __init__(self, world: World, *, shared: bool = False) -> None:
        self._world, self._shared = world, shared

    def draws(self, step: int) -> WorldDraws:
        return WorldDraws(self._world, step, self._shared)

    def choice(self, position: int, weights: Floats) -> int:
        return self._world.token(("choice", position), weights)


class WorldDraws:
    """The decisions of one step."""

    def __init__(self, world: World, step: int, shared: bool) -> None:
        self._world, self._step, self._shared = world, step, shared

    def accept(self, node: int, probability: float) -> bool:
        boundaries = [0.0, min(max(probability, 0.0), 1.0), 1.0]
        return self._world.piece(self._variable("accept", node), boundaries) == 0

    def recover(self, node: int, weights: Floats) -> int:
        place = node + 1 if self._shared else node  # the token after node, as the others say it
        return self._world.token(self._variable("recover", place), weights)

    def draft(self, node: int, weights: Floats) -> int:
        return self._world.token(self._variable("draft", node), weights)

    def _variable(self, use: str, node: int) -> Variable:
        return ("any" if self._shared else use, self._step, node)


class KeyedNoise:
    """The noise of real requests."""

    replaces_choice = False

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def draws(self, step: int) -> KeyedDraws:
        return KeyedDraws(self._seed, step)

    def choice(self, position: int, weights: Floats) -> int:
        raise NotImplementedError


class SharedKeyedNoise:
    """One number for all uses of a node: a planted error."""

    replaces_choice = False

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def draws(self, step: int) -> SharedKeyedDraws:
        return SharedKeyedDraws(self._seed, step)

    def choice(self, position: int, weights: Floats) -> int:
        raise NotImplementedError


class SharedKeyedDraws:
    """The decisions of one step."""

    def __init__(self, seed: int, step: int) -> None:
        self._seed, self._step = seed, step

    def accept(self, node: int, probability: float) -> bool:
        return self._uniform(node) <= probability

    def recover(self, node: int, weights: Floats) -> int:
        return draw(weights, self._uniform(node + 1))

    def draft(self, node: int, weights: Floats) -> int:
        return draw(weights, self._uniform(node))

    def _uniform(self, node: int) -> float:
        return uniform(key_of(self._seed, self._step, node))


def softmax(logits: Floats) -> Floats:
    """Of one row."""
    weights: Floats = np.exp(logits - logits.max())
    weights /= weights.sum()
    return weights
