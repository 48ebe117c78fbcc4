"""The run: every engine on every question, in turn, and the record of it."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from foretell._errors import ForetellError
from foretell.bench._engines import EngineSpec, Skipped, baseline_of
from foretell.bench._machine import load_average, machine, seconds_of_others, versions
from foretell.bench._peer import Peer, PeerError, PeerGone
from foretell.bench._protocol import Answer, Missing, Request
from foretell.bench._record import FORMAT
from foretell.bench._workload import Question, Workload

WARM_UP_TOKENS: Final = 16
SECONDS_UNTIL_QUIET: Final = 0.05
"""Threads of the engine before may go on waiting actively for a moment."""
LONGEST_REASON: Final = 400


class Text(Protocol):
    """What a model's tokenizer is needed for."""

    def prompt(self, text: str, messages: Sequence[Mapping[str, str]] | None) -> list[int]:
        """The token ids of a text, or of messages."""

    def decode(self, tokens: Sequence[int]) -> str:
        """What was said, without special tokens."""


@dataclass(frozen=True)
class Plan:
    """What to measure. ``chat``: questions go through the chat template."""

    workload: Workload
    engines: Sequence[EngineSpec]
    text: Text
    stop_token_ids: Sequence[int]
    max_length: int
    max_tokens: int
    threads: int
    repetitions: int = 1
    chat: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)
    passes: Mapping[str, Any] | None = None
    """Settings for measuring T(k) of each of foretell's weight types; None leaves it out."""

    @property
    def num_requests(self) -> int:
        turns = sum(len(question.turns) for question in self.workload.questions)
        return self.repetitions * turns * len(self.engines)


Make = Callable[[Sequence[EngineSpec]], Peer]
"""A peer for specs that share a process; raises Skipped."""
Progress = Callable[[str, int], None]
"""Told what is going on, and of how many requests it was done."""


class Run:
    """One run. ``record`` is complete at any moment, so that an interruption loses nothing."""

    def __init__(
        self, plan: Plan, make: Make, progress: Progress, is_cancelled: Callable[[], bool]
    ) -> None:
        self._plan, self._make = plan, make
        self._progress, self._is_cancelled = progress, is_cancelled
        self._peers: dict[tuple[Any, ...], Peer] = {}
        self._versions: dict[tuple[Any, ...], Mapping[str, str]] = {}
        self._specs: list[EngineSpec] = []
        self._outputs: dict[Any, int] = {}
        self._start = time.perf_counter()
        self._others = seconds_of_others()
        self.record: dict[str, Any] = {
            "format": FORMAT,
            "command": "",
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "interrupted": False,
            "machine": machine(),
            "versions": versions(),
            "load_average": {"before": load_average(), "after": load_average()},
            "cores_used_by_others": 0.0,
            "model": {},
            "workload": plan.workload.to_dict(),
            "settings": {
                "max_tokens": plan.max_tokens,
                "threads": plan.threads,
                "repetitions": plan.repetitions,
                "chat_template": plan.chat,
                "sampling": dict(plan.sampling) or "greedy",
                "warm_up_tokens": WARM_UP_TOKENS,
            },
            "engines": [],
            "skipped": [],
            "left_out": [],
            "failures": [],
            "outputs": [],
            "requests": [],
            "passes": [],
        }

    def run(self) -> dict[str, Any]:
        """Load, warm up, measure. Ends early, with what there is, when cancelled."""
        try:
            self._load()
            self._warm_up()
            self._measure_passes()
            self._measure()
        except KeyboardInterrupt:
            self.record["interrupted"] = True
        finally:
            self._close()
        return self.record

    # --- Before ----------------------------------------------------------------------

    def _load(self) -> None:
        """Start each process; one that does not start takes its engines out of the run."""
        groups: dict[tuple[Any, ...], list[EngineSpec]] = {}
        for spec in self._plan.engines:
            groups.setdefault(spec.process, []).append(spec)
        for process, specs in groups.items():
            if self._cancelled():
                return
            self._progress(f"loading {specs[0].kind}, {specs[0].dtype}", 0)
            peer = None
            try:
                peer = self._make(specs)
                self._versions[process] = peer.start()
            except (Missing, Skipped, ForetellError) as error:
                if peer is not None:
                    peer.close()
                self._skip(specs, error)
            else:
                self._peers[process] = peer
        self._specs = [spec for spec in self._plan.engines if spec.process in self._peers]
        self._list_engines()

    def _list_engines(self) -> None:
        self.record["engines"] = [
            {
                **spec.to_dict(None if plain is None else plain.name),
                "versions": dict(self._versions[spec.process]),
                "profile": None if spec.is_plain else self._peers[spec.process].profile,
            }
            for spec in self._specs
            for plain in [baseline_of(spec, self._specs)]
        ]

    def _skip(self, specs: Sequence[EngineSpec], error: Exception) -> None:
        for spec in specs:
            self.record["skipped"].append({"name": spec.name, "reason": _line(error)})

    def _warm_up(self) -> None:
        first = self._plan.workload.questions[0]
        for spec in self._specs:
            if self._cancelled():
                return
            self._progress(f"warming up {spec.name}", 0)
            try:
                self._ask(spec, [], first.turns[0], 0, WARM_UP_TOKENS)
            except PeerGone as error:
                self._drop(spec, error)
            except ForetellError:
                continue  # the same will be told of the request that counts

    def _measure_passes(self) -> None:
        if self._plan.passes is None:
            return
        measured = set()
        for spec in self._specs:
            if spec.kind != "foretell" or spec.dtype in measured or self._cancelled():
                continue
            measured.add(spec.dtype)
            self._progress(f"passes of {spec.kind}, {spec.dtype}", 0)
            try:
                found = self._peers[spec.process].passes(self._plan.passes)
            except PeerError as error:
                self.record["failures"].append(
                    {"engine": spec.name, "question": None, "error": _line(error)}
                )
                continue
            if found is not None:
                self.record["passes"].append({"dtype": spec.dtype, **found})

    # --- The questions ---------------------------------------------------------------

    def _measure(self) -> None:
        done = 0
        for repetition in range(self._plan.repetitions):
            for number, question in enumerate(self._plan.workload.questions):
                if not self._fits(question, repetition):
                    continue
                # Nobody is always the first, whose turn a machine may favour.
                shift = (number + repetition) % max(len(self._specs), 1)
                for spec in [*self._specs[shift:], *self._specs[:shift]]:
                    if self._cancelled():
                        return
                    if spec not in self._specs:
                        continue  # its process ended meanwhile
                    self._converse(spec, question, repetition, done)
                    done += len(question.turns)
        self._progress("done", done)

    def _fits(self, question: Question, repetition: int) -> bool:
        """Whether the first turn has room for its answer; else it is left out for all engines."""
        messages = [{"role": "user", "content": question.turns[0]}]
        reason = None
        try:
            prompt = self._plan.text.prompt(
                question.turns[0], messages if self._plan.chat else None
            )
        except ForetellError as error:
            reason = _line(error)
        else:
            if len(prompt) + self._plan.max_tokens > self._plan.max_length:
                reason = (
                    f"its prompt of {len(prompt)} tokens leaves no room for "
                    f"{self._plan.max_tokens} in a context of {self._plan.max_length}"
                )
        if reason is not None and repetition == 0:
            self.record["left_out"].append({"question": question.name, "reason": reason})
        return reason is None

    def _converse(self, spec: EngineSpec, question: Question, repetition: int, done: int) -> None:
        """All turns of a question, by one engine."""
        said: list[dict[str, str]] = []
        for turn, text in enumerate(question.turns):
            self._progress(f"{spec.name}: {question.category} {question.name}", done + turn)
            try:
                answer = self._ask(spec, said, text, turn, self._plan.max_tokens)
            except ForetellError as error:  # of the peer, or of the template
                self.record["failures"].append(
                    {"engine": spec.name, "question": question.name, "error": _line(error)}
                )
                if isinstance(error, PeerGone):
                    self._drop(spec, error)
                return
            self.record["requests"].append(
                {
                    "engine": spec.name,
                    "question": question.name,
                    "category": question.category,
                    "turn": turn,
                    "repetition": repetition,
                    "prompt_tokens": answer.prompt_tokens,
                    "num_tokens": answer.num_tokens,
                    "decode_tokens": answer.decode_tokens,
                    "decode_seconds": _short(answer.decode_seconds),
                    "total_seconds": _short(answer.total_seconds),
                    "waiting": answer.waiting,
                    "output": self._output(answer),
                    "stats": {name: _short(value) for name, value in answer.stats.items()},
                }
            )
            heard = answer.text or self._plan.text.decode(answer.tokens)
            said += [{"role": "user", "content": text}, {"role": "assistant", "content": heard}]

    def _ask(
        self, spec: EngineSpec, said: list[dict[str, str]], text: str, turn: int, max_tokens: int
    ) -> Answer:
        plan = self._plan
        messages = [*said, {"role": "user", "content": text}]
        if not plan.chat and said:
            text = "\n".join(message["content"] for message in messages)
        request = Request(
            mode=spec.mode,
            prompt=plan.text.prompt(text, messages if plan.chat else None),
            max_tokens=max_tokens,
            text=None if plan.chat else text,
            messages=messages if plan.chat else None,
            turn=turn,
            sampling=plan.sampling,
            stop_token_ids=list(plan.stop_token_ids),
        )
        time.sleep(SECONDS_UNTIL_QUIET)
        return self._peers[spec.process].ask(request)

    def _output(self, answer: Answer) -> int:
        """The number of an output; equal ones have the same."""
        output = answer.tokens or answer.text
        key = tuple(answer.tokens) or answer.text
        if key not in self._outputs:
            self._outputs[key] = len(self.record["outputs"])
            self.record["outputs"].append(output)
        return self._outputs[key]

    # --- After -----------------------------------------------------------------------

    def _cancelled(self) -> bool:
        if self._is_cancelled():
            self.record["interrupted"] = True
        return bool(self.record["interrupted"])

    def _drop(self, spec: EngineSpec, error: Exception) -> None:
        """A process ended: its engines take no further part, what they measured stays."""
        self._peers[spec.process].close()
        gone = [one for one in self._specs if one.process == spec.process]
        self._skip(gone, error)
        self._specs = [one for one in self._specs if one not in gone]

    def _close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        seconds = time.perf_counter() - self._start
        self.record["seconds"] = round(seconds, 1)
        # Ended processes count among this one's children.
        others = (seconds_of_others() - self._others) / seconds
        self.record["cores_used_by_others"] = round(max(0.0, others), 2)
        self.record["load_average"]["after"] = load_average()


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _line(error: Exception) -> str:
    """What an error says, on one line of bearable length."""
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."
