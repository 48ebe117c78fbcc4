"""What a backend must do: a Model that runs rows, and Sessions that remember them.

The contract is written here once; backends add only what is special about them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from foretell._errors import CapabilityError, ContextLengthError, InputError, shown
from foretell._sampling import is_int

if TYPE_CHECKING:
    from foretell._tokenizer import Tokenizer

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Capabilities:
    """What a model can do; checked by name before the first token, never by ``hasattr``."""

    rollback: bool = True
    """Speculative nodes can be dropped and committed positions rolled back, exactly."""
    tree: bool = True
    """Several branches can be verified in one pass."""
    hidden_states: bool = False
    """``Rows.hidden`` is honoured."""
    early_exit: int = 0
    """Most layers after which the model can be left early; 0: it cannot."""
    why: str = ""
    """What stands in the way of those that are missing, for messages."""

    def require(self, *names: Literal["rollback", "tree", "hidden_states"]) -> None:
        """Raise CapabilityError for the first of ``names`` that is missing."""
        for name in names:
            if not getattr(self, name):
                raise CapabilityError(
                    f"this model cannot do what was asked: it lacks '{name}'"
                    f"{f' ({self.why})' if self.why else ''}. "
                    "Use num_draft_tokens=0 for plain decoding."
                )


class Session(ABC):
    """One sequence's cache: a committed prefix, then the speculative nodes of the last pass.

    Many sessions can share one loaded model. A session must not be used by two threads at once.
    """

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of committed positions."""

    @abstractmethod
    def keep(self, nodes: Sequence[int]) -> None:
        """Commit a path of the last pass's nodes, root first, and drop all the others.

        ``nodes`` are indices into the tokens of the last ``Rows``: each one's parent is the one
        before it, the first one's is -1. An empty path drops everything. Raises InputError for
        anything that is not such a path.
        """

    @abstractmethod
    def rollback(self, n: int) -> None:
        """Forget the last ``n`` committed positions and every speculative node.

        Raises InputError unless 0 <= n <= length.
        """

    @abstractmethod
    def fork(self) -> Session:
        """A second session with the same committed prefix, independent from here on."""

    @abstractmethod
    def keys_values(self) -> tuple[FloatArray, FloatArray]:
        """The committed cache, each (layers, kv_heads, length, head_dim); for tests and proofs."""


@dataclass(frozen=True)
class Rows:
    """One session's share of a pass: tokens appended after its committed prefix.

    ``parents[i]`` is the node that token i follows, -1 for the committed prefix; it must be
    smaller than i. ``None`` is a chain. ``logits`` says which rows' logits to compute, so that an
    8k prompt does not produce 8k rows of them. ``hidden`` names the layers whose output to return.
    """

    session: Session
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    logits: Literal["all", "last", "none"] = "all"
    hidden: tuple[int, ...] = ()


@dataclass(frozen=True)
class Output:
    """What a pass gives back, in the order of its Rows.

    ``logits`` is (rows asked for, vocab_size) float32, C-contiguous, all sessions one after
    another; ``hidden[layer]`` is (rows, hidden_size). ``of(i)`` is the part of the i-th Rows.
    """

    logits: FloatArray
    hidden: Mapping[int, FloatArray] = field(default_factory=dict)
    bounds: tuple[tuple[int, int], ...] = ()
    hidden_bounds: tuple[tuple[int, int], ...] = ()

    def of(self, index: int) -> Output:
        """The output of the ``index``-th Rows of the pass, in arrays that cannot be written to."""
        start, stop = self.bounds[index]
        first, last = self.hidden_bounds[index] if self.hidden_bounds else (0, 0)
        return Output(
            _part(self.logits, start, stop),
            {layer: _part(states, first, last) for layer, states in self.hidden.items()},
            ((0, stop - start),),
            ((0, last - first),),
        )


def _part(rows: FloatArray, start: int, stop: int) -> FloatArray:
    view = rows[start:stop]
    view.setflags(write=False)
    return view


class Model(ABC):
    """A causal language model that runs rows of any number of sessions in one pass.

    Row invariance is part of the contract: a row's logits, and the keys and values it leaves in
    the cache, have the same bits whatever else is in the pass and however the rows before it
    were cut into passes. Everything Foretell promises follows from that.
    """

    vocab_size: int
    """Number of token ids, and the width of a row of logits (an embedding may be padded)."""
    max_length: int
    """Most positions a session can hold."""
    capabilities: Capabilities
    tokenizer: Tokenizer | None = None
    """What turns text to ids and back, where the model came with one."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer."""
    identity: str | None = None
    """Tells apart weights, their format and the settings they run with; what was measured of the
    model is kept under it for the next time, or not at all."""
    position_bytes: int = 0
    """Memory that a session takes for each position, in bytes."""
    position_granule: int = 64
    """Positions that a session takes memory for at once; what is shared by forks is kept whole."""
    forks_share: bool = False
    """Whether a fork takes no memory for the granules of positions that it has in common."""
    near_tie_gap: float = 0.0
    """Logits closer to each other than this may change places with the width of a pass. Above 0
    only where a backend has no row invariance to offer and measured what that amounts to."""

    @abstractmethod
    def new_session(self) -> Session:
        """An empty session."""

    @abstractmethod
    def forward(self, rows: Sequence[Rows]) -> Output:
        """Run all rows in one pass and append each session's as speculative nodes.

        Nodes of an earlier pass that were not kept are dropped first. Nothing changes in any
        session if this raises: InputError for token ids outside the vocabulary, bad parents, a
        session of another model or one named twice; ContextLengthError past ``max_length``.
        """

    def early_exit(self, num_layers: int | None = None) -> EarlyExit:
        """The first ``num_layers`` layers as a model to draft with, by default a third of them.

        Raises CapabilityError, OptionError.
        """
        raise CapabilityError(
            "this model cannot be left early; the transformers backend can (backend='transformers')"
        )


class EarlyExit(Model):
    """The first layers of a model, then its final norm and head: a drafter of no extra weights."""

    @abstractmethod
    def attach(self, tokens: Sequence[int]) -> Session | None:
        """A session over the cache that a session of the whole model has for these tokens.

        What is run in it is written behind the committed positions of the other one, which drops
        it with its next pass. None where no session holds exactly these tokens.
        """


def forward_each(model: Model, rows: Sequence[Rows]) -> list[Output | Exception]:
    """One pass over ``rows``: for each of them its own output.

    If the pass fails, each runs in a pass of its own, so that nobody pays for another's mistake;
    for those that fail again there is the exception.
    """
    try:
        output = model.forward(rows)
    except Exception as error:
        if len(rows) == 1:
            return [error]
        return [one for part in rows for one in forward_each(model, [part])]
    return [output.of(index) for index in range(len(rows))]


def check_rows(model: Model, rows: Sequence[Rows]) -> None:
    """Raise for rows no backend can run; backends call this before they touch a session."""
    seen: set[int] = set()
    for part in rows:
        if id(part.session) in seen:
            raise InputError("a session appears twice in one pass; give each session one Rows")
        seen.add(id(part.session))
        tokens = np.asarray(part.tokens)
        if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
            raise InputError("Rows.tokens must be a non-empty list of integer token ids")
        bad = (tokens < 0) | (tokens >= model.vocab_size)
        if bad.any():
            raise InputError(
                f"token id {int(tokens[bad][0])} is outside the vocabulary "
                f"0..{model.vocab_size - 1}"
            )
        check_parents(part.parents, len(tokens))
        if part.logits not in ("all", "last", "none"):
            raise InputError(f"Rows.logits is {part.logits!r}; use 'all', 'last' or 'none'")
        if part.hidden:
            model.capabilities.require("hidden_states")
        if part.parents is not None and not model.capabilities.tree and not is_chain(part.parents):
            model.capabilities.require("tree")
        depth = max(depths(part.parents, len(tokens)))
        if part.session.length + depth + 1 > model.max_length:
            raise ContextLengthError(
                f"{part.session.length} cached tokens and {depth + 1} new ones exceed the model's "
                f"context of {model.max_length}; shorten the prompt or roll the session back"
            )


def check_parents(parents: Sequence[int] | None, count: int) -> None:
    """Raise InputError unless ``parents`` describes a forest in which parents come first."""
    if parents is None:
        return
    if len(parents) != count:
        raise InputError(f"{count} tokens need {count} parents, got {len(parents)}")
    for node, parent in enumerate(parents):
        if not is_int(parent) or not -1 <= parent < node:
            raise InputError(
                f"node {node} has parent {shown(parent)}; a parent must be an earlier node, "
                "or -1 for the committed prefix"
            )


def is_chain(parents: Sequence[int] | None) -> bool:
    """Whether every node follows the one before it."""
    return parents is None or all(parent == node - 1 for node, parent in enumerate(parents))


def depths(parents: Sequence[int] | None, count: int) -> Sequence[int]:
    """Depth of every node: 0 for those that follow the committed prefix directly."""
    if parents is None:
        return range(count)
    result: list[int] = []
    for parent in parents:
        result.append(0 if parent < 0 else result[parent] + 1)
    return result


def check_path(nodes: Sequence[int], parents: Sequence[int] | None, count: int) -> None:
    """Raise InputError unless ``nodes`` is a path from the root in a pass of ``count`` nodes."""
    previous = -1
    for node in nodes:
        if not 0 <= node < count:
            raise InputError(f"node {node} was not in the last pass, which had {count} nodes")
        parent = node - 1 if parents is None else parents[node]
        if parent != previous:
            raise InputError(
                f"node {node} follows node {parent}, not {previous}: keep() takes one path, "
                "root first"
            )
        previous = node
