"""Accept rules: how much of a draft is kept.

``match``, the default, keeps a drafted token if it is what the target itself chooses there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from foretell._draft import Draft
from foretell._model import FloatArray
from foretell._sampling import Choose


class Origin(StrEnum):
    """Where an emitted token came from."""

    DRAFT = "draft"
    """Proposed by a drafter and accepted."""
    CORRECTION = "correction"
    """The target's own token at the first disagreement."""
    BONUS = "bonus"
    """The target's own token after a fully accepted draft."""
    PLAIN = "plain"
    """The target's own token in a step without a draft."""


@dataclass(frozen=True)
class Accepted:
    """A path through the draft and the tokens it emits.

    ``nodes`` starts with node 0, the token emitted last, and ``tokens`` is one step ahead of it:
    ``tokens[i]`` is the target's choice after ``nodes[i]``. All tokens but the last were drafted.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    last_origin: Origin

    def cut(self, count: int) -> Accepted:
        """The first ``count`` tokens, with the nodes plain decoding would have cached for them.

        Node 0 stays in any case: it was emitted before.
        """
        if count >= len(self.tokens):
            return self
        return Accepted(self.nodes[: max(count, 1)], self.tokens[:count], Origin.DRAFT)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin of every token."""
        if not self.tokens:
            return ()
        return (Origin.DRAFT,) * (len(self.tokens) - 1) + (self.last_origin,)

    @property
    def num_accepted(self) -> int:
        """How many of the tokens were drafted."""
        return sum(origin is Origin.DRAFT for origin in self.origins)


def match(draft: Draft, logits: FloatArray, choose: Choose, history: Sequence[int]) -> Accepted:
    """Descend the draft for as long as the target's own choice is one of its children.

    ``logits`` is (len(draft) + 1, vocab), row i being what the target says after node i;
    ``history`` is prompt and output so far, whose last token is node 0. The emitted token is the
    target's choice in any case, so the result is what plain decoding would have emitted.
    """
    node, nodes = 0, [0]
    seen = list(history)
    while True:
        token = choose(logits[node], seen, len(seen))
        seen.append(token)
        child = draft.child(node, token)
        if child is None:
            break
        node = child
        nodes.append(node)
    if not draft.tokens:
        origin = Origin.PLAIN
    else:
        origin = Origin.BONUS if draft.is_leaf(node) else Origin.CORRECTION
    return Accepted(tuple(nodes), tuple(seen[len(history) :]), origin)
