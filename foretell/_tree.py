"""One draft tree out of many proposals, best nodes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from foretell._calibration import Calibration
from foretell._draft import Draft
from foretell._proposal import Proposal

Proposals = Mapping[str, Proposal]
"""What each drafter proposed, by its name."""


class Source(NamedTuple):
    """Where a node of the tree was proposed: ``tokens[position]`` of ``drafter``'s proposal."""

    drafter: str
    position: int


class Node(NamedTuple):
    """A token of the merged tree; numbered as in a Draft, from 1 in the order of arrival."""

    token: int
    parent: int
    """The node it follows; 0 is the token emitted last."""
    probability: float
    """Calibrated chance that it is right if its parent is."""
    path_probability: float
    """Calibrated chance that the target gets this far: the product along its path."""
    sources: tuple[Source, ...]
    """Everyone who proposed it."""


def grow(
    proposals: Proposals, calibration: Calibration, limit: int, *, chain: bool = False
) -> Iterator[Node]:
    """Yield at most ``limit`` nodes of the merged tree, the most probable path first.

    Parents come before their children and path probabilities never increase, so every prefix is
    a draft, and of all drafts of its size the one with the largest sum of path probabilities,
    which is the number of tokens to expect of it. Whoever iterates decides where to cut.

    The same token after the same parent is one node, with the largest of its calibrated
    probabilities. Not more than that, as if the drafters were independent witnesses (1 minus the
    product of doubts): they read the same text, and mostly agree because of that. What is added
    by agreement is small (in simulations no difference to speak of), while overconfidence costs
    verification time. Siblings whose probabilities add up to more than 1 are scaled to 1.

    With ``chain``, for models that verify no trees, every node follows the one before it.
    """
    children = {drafter: proposal.children for drafter, proposal in proposals.items()}
    heap: list[tuple[float, int, int, int, float, list[Source]]] = []
    arrivals = 0
    number, path = 0, 1.0
    reached = [Source(drafter, -1) for drafter in proposals]
    while True:
        if chain:
            heap.clear()
        merged: dict[int, list[Source]] = {}
        chances: dict[int, float] = {}
        for drafter, parent in reached:
            proposal = proposals[drafter]
            for index in children[drafter][parent + 1]:
                token = proposal.tokens[index]
                chance = calibration.probability(
                    drafter, proposal.kinds[index], proposal.probabilities[index]
                )
                merged.setdefault(token, []).append(Source(drafter, index))
                chances[token] = max(chance, chances.get(token, 0.0))
        excess = max(1.0, sum(chances.values()))
        for token, sources in merged.items():
            chance = chances[token] / excess
            arrivals += 1  # settles ties: first come, first served
            heappush(heap, (-path * chance, arrivals, number, token, chance, sources))
        if number >= limit or not heap:
            return
        path, _, parent, token, chance, reached = heappop(heap)
        path = -path
        number += 1
        yield Node(token, parent, chance, path, tuple(reached))


def draft_of(nodes: Sequence[Node]) -> Draft:
    """The draft of the nodes that were chosen, a prefix of what ``grow`` yielded."""
    parents = (-1, *(node.parent for node in nodes))
    return Draft.trusted(
        tuple(node.token for node in nodes),
        None if parents == tuple(range(-1, len(nodes))) else parents,
        tuple(node.probability for node in nodes),
    )


def learn(proposals: Proposals, tokens: Sequence[int], calibration: Calibration) -> None:
    """Compare every proposal with the ``tokens`` that were emitted instead of it.

    A proposed token says something about its drafter where everything before it was right: then
    the target was asked, and the token was right or wrong. That holds whether it was drafted or
    not, after plain steps too: a drafter that is not believed can win trust back for nothing.
    """
    for drafter, proposal in proposals.items():
        children = proposal.children
        parent = -1
        for token in tokens:
            following = children[parent + 1]
            parent = -1
            for index in following:
                right = proposal.tokens[index] == token
                calibration.observe(
                    drafter, proposal.kinds[index], proposal.probabilities[index], right
                )
                if right:
                    parent = index
            if parent < 0:
                break


def credit(nodes: Sequence[Node], accepted: Sequence[int]) -> dict[str, tuple[int, int]]:
    """How many of the draft's nodes each drafter had proposed, and how many were accepted.

    ``accepted`` are the numbers of the accepted nodes. A node that several proposed counts for
    each of them.
    """
    counts: dict[str, tuple[int, int]] = {}
    kept = set(accepted)
    for number, node in enumerate(nodes, start=1):
        for drafter in {source.drafter for source in node.sources}:
            drafted, right = counts.get(drafter, (0, 0))
            counts[drafter] = (drafted + 1, right + (number in kept))
    return counts
