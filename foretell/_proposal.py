"""Proposals: drafted tokens, and on what evidence each of them stands."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from foretell._draft import Draft, Drafter, ask, check_probabilities, whole_numbers
from foretell._errors import InputError, shown
from foretell._model import depths

DEEPEST_KIND = 8


@dataclass(frozen=True)
class Proposal:
    """A tree of tokens, each with an estimated probability and a kind of evidence.

    Nodes are numbered as in a Draft: node 0 is the last emitted token, node i + 1 is
    ``tokens[i]``; ``parents`` has an entry for every node, -1 for node 0, and is None for a
    chain. ``probabilities[i]`` estimates the chance that ``tokens[i]`` is right given that those
    before it on its path are. ``kinds[i]`` names the evidence in a few words ("4 tokens match,
    mostly so"). Tokens of one kind should be right about equally often, because a Calibration
    learns from each what to expect of the next; a few dozen kinds are enough for a drafter.

    Raises InputError for what is no number, lengths that differ, a probability outside 0..1, a
    parent that is not an earlier node, or a token proposed twice after the same one.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    probabilities: tuple[float, ...] = ()
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", whole_numbers(self.tokens, "a proposal's tokens"))
        count = len(self.tokens)
        if not len(self.probabilities) == len(self.kinds) == count:
            raise InputError(
                f"{count} proposed tokens need as many probabilities and kinds of evidence, got "
                f"{len(self.probabilities)} and {len(self.kinds)}"
            )
        check_probabilities(self.probabilities)
        if not {*map(type, self.kinds)} <= {str}:
            raise InputError(f"kinds of evidence are strings, not {shown(self.kinds)}")
        if self.parents is None:
            return
        object.__setattr__(self, "parents", whole_numbers(self.parents, "a proposal's parents"))
        if len(self.parents) != count + 1 or self.parents[0] != -1:
            raise InputError(f"{count} proposed tokens need {count + 1} parents, the first one -1")
        if not all(0 <= parent <= node for node, parent in enumerate(self.parents[1:])):
            raise InputError("a proposed token's parent is not an earlier node")
        if len(set(zip(self.parents[1:], self.tokens, strict=True))) != count:
            raise InputError("a token is proposed twice after the same parent")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, draft: Draft, estimate: float = 0.5) -> Proposal:
        """A draft without evidence: every token's kind is its depth.

        ``estimate`` is the probability to begin with where the draft has none.
        """
        kinds = [f"depth {min(d, DEEPEST_KIND)}" for d in depths(draft.parents, len(draft) + 1)]
        probabilities = draft.probabilities or (estimate,) * len(draft)
        return cls(draft.tokens, draft.parents, probabilities, tuple(kinds[1:]))

    def draft(self) -> Draft:
        """The same tokens as a Draft, without the evidence."""
        return Draft.one_hot(self.tokens, self.parents, self.probabilities)

    @classmethod
    def trusted(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int],
        probabilities: Sequence[float],
        kinds: Sequence[str],
    ) -> Proposal:
        """One whose maker vouches for it: nothing is checked, which saves time at every step."""
        made = object.__new__(cls)
        made.__dict__.update(
            tokens=tuple(tokens),
            parents=tuple(parents),
            probabilities=tuple(probabilities),
            kinds=tuple(kinds),
        )
        return made

    @cached_property
    def children(self) -> list[list[int]]:
        """The nodes that follow each node, as indices into ``tokens``; entry 0 is node 0's."""
        if self.parents is None:
            return [[node] for node in range(len(self.tokens))] + [[]]
        following: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:]):
            following[parent].append(node)
        return following


class EvidenceDrafter(Drafter):
    """A drafter that says how far each of its tokens can be believed, and why; it draws none."""

    trees = True

    @abstractmethod
    def suggest(self, context: Sequence[int], limit: int) -> Proposal:
        """What ``propose`` drafts, with the evidence."""

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        return ask(self, self.suggest, Proposal, context, limit).draft()
