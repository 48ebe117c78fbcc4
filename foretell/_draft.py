"""Drafts, and the interface of those who make them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from foretell._errors import ForetellError, InputError, shown
from foretell._model import Output, check_parents, depths, is_chain
from foretell._sampling import DraftSampler, Drawn, is_int

if TYPE_CHECKING:
    from foretell._verify import Accepted


Probabilities = npt.NDArray[np.float64]

Answer = TypeVar("Answer")


class Context(Sequence[int]):
    """A request's tokens as its drafters see them: a view that grows with them, for reading alone.

    Slices are lists of their own.
    """

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    @classmethod
    def of(cls, tokens: Sequence[int]) -> Context:
        """The tokens themselves if they are a Context, else a view of them."""
        if isinstance(tokens, Context):
            return tokens
        return cls(tokens if isinstance(tokens, list) else list(tokens))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._tokens

    def __eq__(self, other: object) -> bool:
        return self._tokens == (list(other) if isinstance(other, Sequence) else other)

    __hash__ = None  # type: ignore[assignment]

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        return np.array(self._tokens, dtype)

    def __repr__(self) -> str:
        return f"Context({self._tokens!r})"


@dataclass(frozen=True)
class Draft:
    """Proposed tokens: a tree, of which a chain is the common case.

    Nodes are numbered as in the verification pass: node 0 is the last emitted token, node i + 1
    is ``tokens[i]``. ``parents`` has one entry for every node, -1 for node 0, and is None for a
    chain. ``probabilities[i]`` is the drafter's estimate that ``tokens[i]`` is right, given that
    the tokens before it on its path are; empty where the drafter has no opinion.

    ``q`` has no default, so that nobody forgets it: the distributions the tokens were drawn
    from, (len, vocab_size of the target), row i being what ``tokens[i]`` was drawn from after
    all processors; or None, which states that nothing was drawn. The exact rules of sampling
    stand on it. Make drafts by ``Draft.one_hot``, ``Draft.sampled``, ``Draft.drawn`` or
    ``Draft.empty``. Equality does not look at it.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    probabilities: tuple[float, ...] = ()
    q: Probabilities | None = field(kw_only=True, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", whole_numbers(self.tokens, "a draft's tokens"))
        if self.parents is not None:
            object.__setattr__(self, "parents", whole_numbers(self.parents, "a draft's parents"))
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
        check_probabilities(self.probabilities)
        if self.q is not None:
            if not isinstance(self.q, np.ndarray):
                raise InputError(f"q is {shown(self.q)}; it must be an array of probabilities")
            if not is_chain(self.parents):
                raise InputError("only a chain can be sampled; a tree has no q")
            if self.q.ndim != 2 or len(self.q) != len(self.tokens):
                raise InputError(
                    f"{len(self.tokens)} drafted tokens need as many rows of q, "
                    f"got shape {self.q.shape}"
                )

    @classmethod
    def empty(cls) -> Draft:
        """No draft: the step is a plain one."""
        return _EMPTY

    @classmethod
    def one_hot(
        cls,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        probabilities: Sequence[float] = (),
    ) -> Draft:
        """Tokens that follow from the context, with no draw: each q is 1 for its token."""
        return cls(
            whole_numbers(tokens, "a draft's tokens"),
            None if parents is None else whole_numbers(parents, "a draft's parents"),
            tuple(probabilities),
            q=None,
        )

    @classmethod
    def trusted(
        cls,
        tokens: tuple[int, ...],
        parents: tuple[int, ...] | None,
        probabilities: tuple[float, ...],
    ) -> Draft:
        """Like ``one_hot``, of what was checked before."""
        made = object.__new__(cls)
        made.__dict__.update(tokens=tokens, parents=parents, probabilities=probabilities, q=None)
        return made

    @classmethod
    def sampled(
        cls, tokens: Sequence[int], q: npt.ArrayLike, probabilities: Sequence[float] = ()
    ) -> Draft:
        """A chain of tokens, each drawn from its row of ``q``."""
        try:
            rows = np.asarray(q, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"q holds no rows of probabilities ({error})") from error
        return cls(whole_numbers(tokens, "a draft's tokens"), None, tuple(probabilities), q=rows)

    @classmethod
    def drawn(cls, drawn: Sequence[Drawn], probabilities: Sequence[float] = ()) -> Draft:
        """A chain of what a DraftSampler drew.

        Its q is left out where the draw follows from the request's own noise (under ``match``).
        """
        tokens = [one.token for one in drawn]
        rows = [one.q for one in drawn if one.q is not None]
        if rows and len(rows) == len(tokens):
            return cls.sampled(tokens, np.stack(rows), probabilities)
        return cls.one_hot(tokens, None, probabilities)

    def q_of(self, index: int, vocab_size: int) -> Probabilities:
        """What ``tokens[index]`` was drawn from, (vocab_size,)."""
        if self.q is not None:
            row: Probabilities = self.q[index]
            return row
        one_hot = np.zeros(vocab_size)
        one_hot[self.tokens[index]] = 1.0
        return one_hot

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
        return Draft.one_hot(
            [self.tokens[i] for i in branch],
            probabilities=[self.probabilities[i] for i in branch if self.probabilities],
        )

    @property
    def depth(self) -> int:
        """Length of the longest path of drafted tokens."""
        if self.parents is None:
            return len(self.tokens)
        return max(depths(self.parents, len(self.tokens) + 1))


class _ClassName:
    def __get__(self, instance: object, owner: type) -> str:
        return owner.__name__


class Drafter(ABC):
    """Proposes what the target will say next.

    A drafter may be wrong as often as it likes: that costs time, never a token. One drafter
    serves one request; ``spawn()`` makes one for the next.
    """

    name: str = cast(str, _ClassName())
    """What it is called in messages and numbers; by default as its class is."""
    trees: bool = False
    """Whether it may propose trees, which ``rejection`` and ``block`` cannot verify."""
    observes_every_pass: bool = True
    """False lets ``observe`` be left out, to save time, after passes it was not asked about."""

    @abstractmethod
    def spawn(self) -> Drafter:
        """A drafter with the same settings and no memory of a request."""

    def sample_with(self, sampler: DraftSampler) -> None:  # noqa: B027 - optional hook
        """How to draw in the request that begins; called before ``start``.

        A drafter that has a distribution draws with ``sampler`` and with nothing else: it applies
        the request's processors and gives back the q that goes into the draft.
        """

    def start(self, prompt: Sequence[int]) -> None:  # noqa: B027 - optional hook
        """A request begins; called before anything is proposed."""

    @abstractmethod
    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """Draft at most ``limit`` tokens (nodes) after ``context``, prompt and output so far.

        An empty draft is a good answer: it makes the step a plain one. More than ``limit`` tokens,
        or ids the target lacks, are an error that ends the request. ``context`` can be read alone
        (its slices are lists of their own) and grows between calls.
        """

    def observe(self, draft: Draft, output: Output, accepted: Accepted) -> None:  # noqa: B027
        """What became of a draft, with the target's logits and hidden states for every node.

        The arrays can be read alone.
        Also called once after prefill, with an empty draft and the logits of the last position.
        """

    def finish(self, context: Sequence[int]) -> None:  # noqa: B027 - optional hook
        """The request is over; ``context`` is prompt and output. Not called after an error."""


def spawned(drafter: Drafter) -> Drafter:
    """A drafter for one request. Raises ForetellError for one that spawns something else."""
    try:
        spawn = drafter.spawn()
    except Exception as error:
        error.add_note(f"in spawn() of the drafter '{drafter.name}'")
        raise
    if not isinstance(spawn, Drafter):
        raise ForetellError(f"drafter '{drafter.name}' spawned {shown(spawn)}, which is no Drafter")
    return spawn


def ask(
    drafter: Drafter,
    propose: Callable[[Sequence[int], int], Answer],
    kind: type[Answer],
    context: Sequence[int],
    limit: int,
) -> Answer:
    """What a method of a drafter proposes, a ``kind``. Errors in it name the drafter."""
    try:
        answer = propose(context, limit)
    except Exception as error:
        if type(error) is InputError:
            message = f"drafter '{drafter.name}' proposed no valid draft: {error}"
            raise ForetellError(message) from error
        error.add_note(f"in the drafter '{drafter.name}'")
        raise
    if not isinstance(answer, kind):
        raise ForetellError(
            f"drafter '{drafter.name}' proposed {shown(answer)}; it must return a {kind.__name__}, "
            "and an empty one where it has no idea"
        )
    return answer


def whole_numbers(values: Iterable[int], what: str) -> tuple[int, ...]:
    """The values as ints of Python. Raises InputError for what is no whole number."""
    try:
        numbers = tuple(values)
    except TypeError:
        raise InputError(f"{what} are {shown(values)}; they must be whole numbers") from None
    if not {*map(type, numbers)} <= {int}:
        for number in numbers:
            if not is_int(number):
                raise InputError(f"{what} hold {shown(number)}, which is no whole number")
        numbers = tuple(map(int, numbers))
    return numbers


def check_probabilities(values: Sequence[float]) -> None:
    """Raise InputError unless all are numbers from 0 to 1."""
    try:
        if all(0.0 <= value <= 1.0 for value in values):
            return
    except TypeError:
        pass
    raise InputError(f"a probability lies outside 0..1, among {shown(values)}")


_EMPTY = Draft((), q=None)
