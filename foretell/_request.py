"""One generation in progress, and what a pass makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from foretell._draft import Draft
from foretell._logprobs import TokenLogprobs
from foretell._model import Session
from foretell._policy import Policy
from foretell._result import FinishReason, Generation, Stats
from foretell._sampling import Sampler
from foretell._stop import StopConditions
from foretell._verify import RULES, Origin, Rule


@dataclass(eq=False)
class Request:
    """One generation in progress.

    ``session`` holds every token of ``tokens`` but the last one emitted; before prefill it may
    hold any prefix of the prompt. Whatever ends or breaks the request, it holds a prefix of
    ``tokens``.
    """

    session: Session
    tokens: list[int]
    sampler: Sampler
    policy: Policy
    stops: StopConditions
    is_cancelled: Callable[[], bool] = lambda: False
    rule: Rule = RULES["match"]
    seed: int | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    error: Exception | None = None
    """What broke it; it gets no further passes then."""
    stats: Stats = field(default_factory=Stats)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self.finish is not None or self.error is not None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """An exception in here breaks this request, and none of those that share its pass."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """``error`` broke it, if nothing did before."""
        self.error = self.error or error


@dataclass(frozen=True)
class Emitted:
    """What one pass emitted: tokens, and for each its origin, its text, its log-probability.

    ``step`` is the number of the pass, 0 being the end of the prompt, ``draft`` what was verified.
    """

    tokens: Sequence[int] = ()
    origins: Sequence[Origin] = ()
    pieces: Sequence[str] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    draft: Draft = field(default_factory=Draft.empty)
    step: int = 0


class Answer:
    """All that a request has given so far."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt_tokens = len(request.tokens)
        self.token_ids: list[int] = []
        self.origins: list[Origin] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs] = []

    def add(self, emitted: Emitted) -> None:
        """One more pass."""
        self.token_ids += emitted.tokens
        self.origins += emitted.origins
        self.pieces += emitted.pieces
        self.logprobs += emitted.logprobs

    def finish(self, prompt_logprobs: Sequence[TokenLogprobs] = ()) -> tuple[str, Generation]:
        """The text still held back at the end, and the whole result."""
        request = self.request
        assert request.finish is not None
        request.policy.finish(request.tokens)
        request.stats.policy = request.policy.report()
        rest = request.stops.finish()
        self.pieces.append(rest)
        return rest, Generation(
            "".join(self.pieces),
            self.token_ids,
            request.finish,
            self.prompt_tokens,
            request.stats,
            self.origins,
            request.seed,
            None if request.num_logprobs is None else self.logprobs,
            None if request.num_prompt_logprobs is None else [None, *prompt_logprobs],
        )
