"""Drafts, and the interface of those who make them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from foretell._errors import InputError
from foretell._model import Output, check_parents, depths

if TYPE_CHECKING:
    from foretell._verify import Accepted


@dataclass(frozen=True)
class Draft:
    """Proposed tokens: a tree, of which a chain is the common case.

    Nodes are numbered as in the verification pass: node 0 is the last emitted token, node i + 1
    is ``tokens[i]``. ``parents`` has one entry for every node, -1 for node 0, and is None for a
    chain. ``probabilities[i]`` is the drafter's estimate that ``tokens[i]`` is right, given that
    the tokens before it on its path are; empty where the drafter has no opinion.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    probabilities: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.parents is not None:
            check_parents(self.parents, len(self.tokens) + 1)
            if -1 in self.parents[1:]:
                raise InputError("every drafted token must follow node 0, directly or not")
            if len(self._children) != len(self.tokens):
                raise InputError("a draft proposes the same token twice after the same parent")
        if self.probabilities and len(self.probabilities) != len(self.tokens):
            raise InputError(
                f"{len(self.tokens)} drafted tokens need as many probabilities, "
                f"got {len(self.probabilities)}"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        parents = self.parents
        return {
            (node if parents is None else parents[node + 1], token): node + 1
            for node, token in enumerate(self.tokens)
        }

    def child(self, node: int, token: int) -> int | None:
        """The node that proposes ``token`` after ``node``, if there is one."""
        return self._children.get((node, token))

    def is_leaf(self, node: int) -> bool:
        """Whether nothing was drafted after ``node``."""
        if self.parents is None:
            return node == len(self.tokens)
        return node not in self.parents[1:]

    def first_branch(self) -> Draft:
        """The chain that takes the first child at every node, for models that verify no trees."""
        if self.parents is None:
            return self
        branch: list[int] = []
        node = 0
        for child, parent in enumerate(self.parents):
            if child and parent == node:
                branch.append(child - 1)
                node = child
        return Draft(
            tuple(self.tokens[i] for i in branch),
            probabilities=tuple(self.probabilities[i] for i in branch if self.probabilities),
        )

    @property
    def depth(self) -> int:
        """Length of the longest path of drafted tokens."""
        return max(depths(self.parents, len(self.tokens) + 1))


class Drafter(ABC):
    """Proposes what the target will say next.

    A drafter may be wrong as often as it likes: that costs time, never a token. One drafter
    serves one request; ``spawn()`` makes one for the next.
    """

    name: str

    @abstractmethod
    def spawn(self) -> Drafter:
        """A drafter with the same settings and no memory of a request."""

    def start(self, prompt: Sequence[int]) -> None:  # noqa: B027 - optional hook
        """A request begins; called before anything is proposed."""

    @abstractmethod
    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """Draft at most ``limit`` tokens (nodes) after ``context``, prompt and output so far.

        An empty draft is a good answer: it makes the step a plain one. More than ``limit`` tokens,
        or ids the target lacks, are an error that ends the request. ``context`` grows between
        calls and must not be changed or kept.
        """

    def observe(self, draft: Draft, output: Output, accepted: Accepted) -> None:  # noqa: B027
        """What became of a draft, with the target's logits and hidden states for every node.

        Also called once after prefill, with an empty draft and the logits of the last position.
        """
