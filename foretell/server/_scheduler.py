"""Who runs when: a queue, a batch, and the thread that makes its passes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from foretell._auto_policy import MOST_NODES
from foretell._batch import Batch
from foretell._engine import Engine, NumDraftTokens
from foretell._errors import ForetellError
from foretell._request import Answer, Emitted, Request
from foretell._result import FinishReason, Generation
from foretell._sampling import SamplingParams
from foretell.server._metrics import Metrics
from foretell.server._prefix_cache import PrefixCache, positions_for
from foretell.server._settings import Settings

logger = logging.getLogger("foretell.server")

LEAST_KEPT = 64
"""Tokens of a prompt that were not known already, from which on it is kept while it is answered."""
REQUEST_BYTES = 2 << 20
"""What a completion takes besides its cache: drafters' tables, counts of tokens, texts."""


class QueueFullError(ForetellError):
    """More requests wait than may."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(
            f"{waiting} requests are waiting already, and no more may; try again in "
            f"{retry_after} seconds"
        )
        self.retry_after = retry_after


class StoppingError(ForetellError):
    """The server takes no new requests any more."""


class TooLargeError(ForetellError):
    """A request that could never run here, however long it waited."""


class TimedOutError(ForetellError):
    """A request took longer than one may."""


@dataclass(frozen=True)
class Piece:
    """What a pass emitted for one completion; ``stats`` are those so far, where asked for."""

    index: int
    emitted: Emitted
    stats: dict[str, Any] | None = None


@dataclass(frozen=True)
class Done:
    """A completion is finished; ``rest`` is the text that was held back."""

    index: int
    rest: str
    result: Generation
    cached_tokens: int


@dataclass(frozen=True)
class Failed:
    """Nothing more will come of the whole request."""

    error: Exception


Item = Piece | Done | Failed


@dataclass(eq=False)
class Job:
    """One prompt with its completions, from the moment it is asked for to its end.

    Made by ``Scheduler.job``; ``deliver`` is called in the scheduler's thread with what the
    job's completions emitted, and must not wait.
    """

    requests: list[Request]
    owner: str
    num_bytes: int
    num_tokens: int
    deadline: float
    deliver: Callable[[list[Item]], None]
    first_index: int = 0
    with_stats: bool = False
    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    last_token: dict[int, float] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    open: int = 0
    cached_tokens: int = 0
    cancelled: bool = False
    """Set from any thread; see ``Scheduler.cancel``."""

    def __post_init__(self) -> None:
        self.answers = [Answer(request) for request in self.requests]
        self.open = len(self.requests)


class Scheduler:
    """Lets requests into a batch, in the order in which they came, as memory and limits allow.

    One thread makes all passes. A job that does not fit waits, and so do those behind it, so
    nobody starves. Between two passes cancelled and late jobs leave, and what they held is
    free. What a completion can take at most is set aside when it is let in, so that nothing that
    runs is ever short of memory.
    """

    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics) -> None:
        self.engine = engine
        self.settings = settings
        self._metrics = metrics
        self._batch = Batch(engine.model)
        self._cache = PrefixCache(engine.model, settings.prefix_cache_bytes)
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: dict[Request, tuple[Job, int]] = {}
        self._used_bytes = self._used_tokens = 0
        self._stopping = self._ended = False
        self._outbox: dict[int, tuple[Job, list[Item]]] = {}
        self._thread = threading.Thread(target=self._run, name="foretell-scheduler", daemon=True)
        metrics.watch(self)

    # --- From any thread -----------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Jobs that have not begun."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Completions that are being worked on."""
        return len(self._running)

    @property
    def used_bytes(self) -> int:
        """Memory set aside for what runs, and taken by the prefix cache."""
        return self._used_bytes + self._cache.num_bytes

    @property
    def is_alive(self) -> bool:
        """Whether requests can still be worked on."""
        return self._thread.is_alive() and not self._ended

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def job(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        deliver: Callable[[list[Item]], None],
        *,
        drafters: Sequence[str] | None = None,
        num_draft_tokens: NumDraftTokens = "auto",
        verification: str = "match",
        owner: str = "",
        first_index: int = 0,
        with_stats: bool = False,
    ) -> Job:
        """A job to submit. Raises InputError for what the engine cannot do."""
        flag = _Flag()
        requests = self.engine.prepare(
            tokens,
            params,
            num_draft_tokens=num_draft_tokens,
            verification=verification,
            drafters=drafters,
            owner=owner,
            is_cancelled=flag,
        )
        num_tokens, num_bytes = self._cost(len(tokens), params, num_draft_tokens)
        job = Job(
            requests,
            owner,
            num_bytes,
            num_tokens,
            time.monotonic() + self.settings.request_timeout,
            deliver,
            first_index,
            with_stats,
        )
        flag.job = job
        return job

    def submit(self, jobs: Sequence[Job]) -> None:
        """Put the jobs of one call into the queue, all or none.

        Raises QueueFullError, StoppingError, and TooLargeError for what will never fit.
        """
        for job in jobs:
            self._check_size(job)
        with self._changed:
            if self._stopping or self._ended:
                raise StoppingError("the server is shutting down; send the request again later")
            waiting = self._num_left()
            if waiting and waiting + len(jobs) > self.settings.max_queue:
                raise QueueFullError(waiting, self._retry_after())
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Drop these jobs before the next pass; those that are over already stay so."""
        with self._changed:
            for job in jobs:
                job.cancelled = True
            self._changed.notify()

    def refuse_new(self) -> None:
        """From here on nothing new is taken; what waits and runs goes on."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def stop(self) -> None:
        """End the thread; what is not over fails."""
        with self._changed:
            self._stopping = self._ended = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    # --- What a job takes ----------------------------------------------------------------

    def _cost(
        self, prompt: int, params: SamplingParams, num_draft_tokens: NumDraftTokens
    ) -> tuple[int, int]:
        """Tokens and bytes to set aside for all completions of a prompt."""
        model, draft = self.engine.model, self.engine.draft
        room = model.max_length - prompt
        answer = room if params.max_tokens is None else min(params.max_tokens, room)
        nodes = MOST_NODES if num_draft_tokens == "auto" else num_draft_tokens
        each = positions_for(model, prompt + answer + nodes)
        common = prompt // model.position_granule * model.position_granule
        again = each - common if model.forks_share else each
        num_bytes = (each + (params.n - 1) * again) * model.position_bytes
        if draft is not None:
            theirs = positions_for(draft, prompt + answer + nodes)  # nothing of it is shared
            num_bytes += params.n * theirs * draft.position_bytes
        logits = 4 * model.vocab_size * (nodes + 1)
        return prompt + params.n * answer, num_bytes + params.n * (logits + REQUEST_BYTES)

    def _check_size(self, job: Job) -> None:
        limits = self.settings
        if job.num_bytes > limits.memory_bytes:
            raise TooLargeError(
                f"this request may take {job.num_bytes >> 20} MiB of memory, and all requests "
                f"together have {limits.memory_bytes >> 20}; ask for fewer max_tokens or a smaller "
                "n"
            )
        if limits.max_total_tokens is not None and job.num_tokens > limits.max_total_tokens:
            raise TooLargeError(
                f"prompt and answers of this request may have {job.num_tokens} tokens, and all "
                f"requests together {limits.max_total_tokens}; ask for fewer max_tokens or a "
                "smaller n"
            )
        if len(job.requests) > limits.max_running:
            raise TooLargeError(
                f"{len(job.requests)} completions were asked for, and {limits.max_running} can run "
                "at a time; use a smaller n"
            )

    def _fits(self, *jobs: Job) -> bool:
        """Whether there is room for all of these beside what runs."""
        limits = self.settings
        return (
            len(self._running) + sum(len(job.requests) for job in jobs) <= limits.max_running
            and self._used_bytes + sum(job.num_bytes for job in jobs) <= limits.memory_bytes
            and (
                limits.max_total_tokens is None
                or self._used_tokens + sum(job.num_tokens for job in jobs)
                <= limits.max_total_tokens
            )
        )

    def _num_left(self) -> int:
        """Jobs in the queue that the next turn cannot begin; only these do wait."""
        queue = [job for job in self._waiting if not job.cancelled]
        most = min(len(queue), self.settings.max_running)
        begin = next((n for n in range(most) if not self._fits(*queue[: n + 1])), most)
        return len(queue) - begin

    def _retry_after(self) -> int:
        """Seconds after which a place may be free: half of what a request took lately."""
        return max(1, min(60, round(self._metrics.recent_seconds / 2)))

    # --- The thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._running or self._ended):
                    self._changed.wait()
                if self._ended:
                    break
            try:
                self._turn()
            except Exception as error:
                logger.exception("a turn failed")
                self._fail_everybody(error)
            self._send()
        self._fail_everybody(StoppingError("the server is shutting down"))
        self._send()

    def _turn(self) -> None:
        """What happens once in a pass."""
        self._drop_late()
        self._admit()
        if not self._running:
            return
        began = time.monotonic()
        for work in (self._batch.read, self._batch.step):
            for request, emitted in work():
                self._settle(request, emitted)
            self._send()
        self._metrics.step(time.monotonic() - began)

    def _drop_late(self) -> None:
        now = time.monotonic()
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
            for job in waiting:
                if job.cancelled:
                    self._metrics.finished(job, "cancelled")
                elif now > job.deadline:
                    self._expire(job)
                else:
                    self._waiting.append(job)
        for job, _ in list(self._running.values()):
            if now > job.deadline and not job.cancelled:
                self._expire(job)

    def _expire(self, job: Job) -> None:
        job.cancelled = True
        seconds = self.settings.request_timeout
        self._post(job, Failed(TimedOutError(f"the request took longer than {seconds:g} seconds")))
        if job.admitted is None:
            self._metrics.finished(job, "timeout")

    def _admit(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or not self._fits(self._waiting[0]):
                    return
                job = self._waiting.popleft()
                self._used_bytes += job.num_bytes
                self._used_tokens += job.num_tokens
                for index, request in enumerate(job.requests):
                    self._running[request] = (job, index)
            job.admitted = time.monotonic()
            self._cache.shrink(self.settings.memory_bytes - self._used_bytes)
            first = job.requests[0]
            if first.num_prompt_logprobs is None:
                session = self._cache.lookup(job.owner, first.tokens)
                if session is not None:
                    first.session = session
                    job.cached_tokens = session.length
            self._metrics.admitted(job)
            self._batch.join(job.requests)

    def _settle(self, request: Request, emitted: Emitted) -> None:
        """What a request emitted goes to its client; what is over leaves."""
        known = self._running.get(request)
        if known is None:
            return
        job, index = known
        answer = job.answers[index]
        if emitted.tokens:
            answer.add(emitted)
            self._metrics.emitted(job, index, request, emitted)
            if len(answer.token_ids) == len(emitted.tokens) and index == 0:
                self._keep_prompt(job, request)
            stats = request.stats.to_dict() if job.with_stats else None
            self._post(job, Piece(job.first_index + index, emitted, stats))
        if request.is_over:
            self._end(job, index, request)

    def _end(self, job: Job, index: int, request: Request) -> None:
        error = request.error
        if error is None and request.finish is not FinishReason.CANCELLED:
            try:
                rest, result = job.answers[index].finish(job.requests[0].prompt_logprobs)
            except Exception as failure:
                error = failure
            else:
                done = Done(job.first_index + index, rest, result, job.cached_tokens)
                self._post(job, done)
                self._keep(job, request)
        if error is not None:
            logger.error("a request failed", exc_info=error)
            job.cancelled = True  # its other completions have nobody to go to
            self._post(job, Failed(error))
        reason = "error" if error is not None else str(request.finish)
        with self._changed:
            del self._running[request]
            job.open -= 1
            if job.open == 0:
                self._used_bytes -= job.num_bytes
                self._used_tokens -= job.num_tokens
        self._metrics.ended(job, request, reason)
        if job.open == 0:
            self._metrics.finished(job, reason)

    def _keep_prompt(self, job: Job, request: Request) -> None:
        """The prompt was read: others who begin like it need not wait for the answer's end."""
        length = request.session.length
        if length - job.cached_tokens >= LEAST_KEPT and request.num_prompt_logprobs is None:
            self._cache.add(job.owner, request.tokens[:length], request.session.fork())
            self._shrink_cache()

    def _keep(self, job: Job, request: Request) -> None:
        """The next turn of a conversation begins with what was said so far."""
        if request is job.requests[0]:
            length = request.session.length
            # The fork holds no pages beyond them, where drafts were.
            self._cache.add(job.owner, request.tokens[:length], request.session.fork())
            self._shrink_cache()

    def _shrink_cache(self) -> None:
        self._cache.shrink(self.settings.memory_bytes - self._used_bytes)

    def _fail_everybody(self, error: Exception) -> None:
        with self._changed:
            jobs = {
                id(job): job for job in (*self._waiting, *(j for j, _ in self._running.values()))
            }
            self._waiting.clear()
            self._running.clear()
            self._used_bytes = self._used_tokens = 0
        self._batch = Batch(self.engine.model)
        for job in jobs.values():
            if not job.cancelled:
                job.cancelled = True
                self._post(job, Failed(error))
            self._metrics.finished(job, "error")

    def _post(self, job: Job, item: Item) -> None:
        self._outbox.setdefault(id(job), (job, []))[1].append(item)

    def _send(self) -> None:
        outbox, self._outbox = self._outbox, {}
        for job, items in outbox.values():
            job.deliver(items)


class _Flag:
    """Whether a job was cancelled, for requests that are made before it."""

    job: Job | None = None

    def __call__(self) -> bool:
        return self.job is not None and self.job.cancelled
