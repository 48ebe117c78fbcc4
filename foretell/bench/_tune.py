"""``foretell tune``: which drafters and lengths pay for this model on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from foretell._engine import DRAFTERS, Engine, NumDraftTokens
from foretell._model import Model, Rows
from foretell._result import FinishReason, Generation, Stats
from foretell.bench._statistics import Estimate, Sample, speedup
from foretell.bench._workload import Question

LENGTHS: Final = (1, 2, 4, 8)
EXITS: Final = (6, 4, 3, 2)
"""A model is left after its layers over these."""
WIDTHS: Final = (1, 2, 3, 4, 5, 7, 9, 12, 17)
CURVE_ROUNDS: Final = 7
CURVE_CONTEXT: Final = 256
WARM_UP_TOKENS: Final = 8
DEFAULT: Final = "default"
ENOUGH_PROMPTS: Final = 20
NEARLY: Final = 1.02
"""Settings that are this much apart are as good as one another."""

Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Setting:
    """A drafter at a fixed length; the default, whose length is decided at every step; or plain."""

    drafter: str | None
    length: NumDraftTokens

    @property
    def name(self) -> str:
        if self.drafter is None:
            return "plain"
        return self.drafter if self.length == "auto" else f"{self.drafter}, {self.length}"


PLAIN: Final = Setting(None, 0)


@dataclass
class Measured:
    """What came of a setting: a list of repetitions for each prompt."""

    setting: Setting
    stats: dict[str, list[Stats]] = field(default_factory=dict)
    differs: bool = False

    def total(self, name: str) -> float:
        return float(sum(getattr(s, name) for runs in self.stats.values() for s in runs))


@dataclass(frozen=True)
class Finding:
    """A setting's numbers; ``expected`` is from acceptance and T(k), ``measured`` from time."""

    setting: Setting
    acceptance_rate: float
    acceptance: tuple[float, ...]
    """Accepted tokens per draft at each position."""
    drafts_per_step: float
    tokens_per_step: float
    expected: float
    measured: Estimate

    @property
    def verdict(self) -> str:
        low, high = self.measured.low, self.measured.high
        if low is None or high is None:
            return "unclear"
        return "pays" if low > 1 else "no" if high < 1 else "unclear"

    def to_dict(self) -> dict[str, Any]:
        return {
            "drafter": self.setting.drafter,
            "num_draft_tokens": self.setting.length,
            "draft_acceptance_rate": self.acceptance_rate,
            "acceptance_per_pos": list(self.acceptance),
            "drafts_per_step": self.drafts_per_step,
            "tokens_per_step": self.tokens_per_step,
            "expected_speedup": self.expected,
            "speedup": self.measured.to_list(),
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Tuning:
    """All findings, the best first; ``curve`` is T(k) in seconds by k.

    ``profile`` is where costs and acceptance were kept for engines to come, None if nowhere.
    """

    curve: dict[int, float]
    plain_tokens_per_second: float
    findings: tuple[Finding, ...]
    equal: bool
    interrupted: bool
    prompts: int
    profile: str | None

    @property
    def default(self) -> Finding | None:
        return next((f for f in self.findings if f.setting.drafter == DEFAULT), None)

    @property
    def best(self) -> Finding | None:
        return self.findings[0] if self.findings else None

    @property
    def advice(self) -> str:
        """What to do about it, in a sentence or two."""
        if self.is_clear:
            return self._advice
        more = (
            f"use --prompts with {ENOUGH_PROMPTS} or more like yours"
            if self.prompts < ENOUGH_PROMPTS
            else "use more prompts, or more --repetitions on a quiet machine"
        )
        return f"{self._advice} The intervals are too wide to tell more: {more}."

    @property
    def is_clear(self) -> bool:
        """Whether intervals tell the default and the best setting from plain decoding, and from
        each other where they are not nearly the same."""
        best, default = self.best, self.default
        if best is None or default is None:
            return True
        if "unclear" in (best.verdict, default.verdict):
            return False
        near = best.measured.value <= NEARLY * default.measured.value
        return near or _clearly(best, default)

    @property
    def _advice(self) -> str:
        best, default = self.best, self.default
        if best is None or default is None:
            return "Too little was measured to say anything."
        if best.measured.value <= 1.0:
            return (
                "Nothing pays here. The default hardly drafts then; plain decoding is "
                "--num-draft-tokens 0."
            )
        gain = f"{default.measured.value:.2f} times plain decoding"
        if best is default:
            return f"The default is best here, with {gain}: nothing to set."
        if not _clearly(best, default):
            return f"No setting is clearly better than the default, with {gain}: nothing to set."
        return (
            f"Best here: --drafter {best.setting.drafter} --num-draft-tokens "
            f"{best.setting.length}, with {best.measured.value:.2f} times plain decoding; the "
            f"default has {gain}."
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, see docs/json.md."""
        return {
            "format": "foretell-tune/1",
            "interrupted": self.interrupted,
            "prompts": self.prompts,
            "pass_seconds": [[width, seconds] for width, seconds in self.curve.items()],
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "settings": [finding.to_dict() for finding in self.findings],
            "equal": self.equal,
            "advice": self.advice,
            "profile": self.profile,
        }


def _clearly(best: Finding, default: Finding) -> bool:
    """Whether one is better than the other for all that is known."""
    return best.measured.low is not None and best.measured.low > default.measured.value


def settings_for(engine: Engine, lengths: Sequence[int] = LENGTHS) -> list[Setting]:
    """Plain, the default, and every drafter that fits, at every length."""
    needs_more = {"early_exit"} | (set() if engine.draft is not None else {"draft_model"})
    names = [name for name in DRAFTERS if name not in needs_more]
    most = engine.model.capabilities.early_exit
    exits = sorted({max(1, (most + 1) // part) for part in EXITS}) if most else []
    names += [f"early_exit:{layers}" for layers in exits]
    fixed = [Setting(name, length) for name in names for length in lengths]
    return [PLAIN, Setting(DEFAULT, "auto"), *fixed]


def tune(
    engine: Engine,
    questions: Sequence[Question],
    *,
    max_tokens: int,
    repetitions: int,
    lengths: Sequence[int] = LENGTHS,
    progress: Progress = lambda what, done: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Tuning:
    """Measure every setting on the first turn of every question, in turn; greedy.

    T(k) and what the default learned go into the engine's profile. After a cancellation there is
    what was complete until then.
    """
    for question in questions:  # one that does not fit is found before any work
        engine.encode(**_prompt(engine, question))
    settings = settings_for(engine, lengths)
    measured = {setting: Measured(setting) for setting in settings}
    engines = {DEFAULT: engine, None: engine} | {
        setting.drafter: _with(engine, setting.drafter)
        for setting in settings
        if setting.drafter not in (DEFAULT, None)
    }
    progress("passes", 0)
    context, times = pass_times(engine.model, is_cancelled)
    for width, taken in times.items():
        for seconds in taken:
            engine._experience.costs.observe(width, context, seconds)
    curve = {width: statistics.median(taken) for width, taken in times.items()}
    done = 0
    progress("warming up", 0)
    _generate(engine, questions[0], PLAIN, WARM_UP_TOKENS, is_cancelled)
    for _ in range(repetitions):
        for number, question in enumerate(questions):
            first: list[int] | None = None
            shift = number % len(settings)
            for setting in [*settings[shift:], *settings[:shift]]:
                progress(f"{setting.name}: {question.name}", done)
                result = _generate(
                    engines[setting.drafter], question, setting, max_tokens, is_cancelled
                )
                if result is None:
                    return _summary(engine, measured, curve, len(questions), interrupted=True)
                done += 1
                first = first or result.token_ids
                measured[setting].differs |= result.token_ids != first
                measured[setting].stats.setdefault(question.name, []).append(result.stats)
    return _summary(engine, measured, curve, len(questions), interrupted=False)


def _with(engine: Engine, drafter: str | None) -> Engine:
    """The same loaded models with one drafter."""
    assert drafter is not None
    draft = engine.draft if drafter == "draft_model" else None
    return Engine(engine.model, draft, [drafter], tokenizer=engine.tokenizer)


def _prompt(engine: Engine, question: Question) -> dict[str, Any]:
    """The first turn as a message, where there is a template for it, or as text."""
    text = question.turns[0]
    if engine.tokenizer is not None and engine.tokenizer.has_chat_template:
        return {"messages": [{"role": "user", "content": text}]}
    return {"prompt": text}


def _generate(
    engine: Engine,
    question: Question,
    setting: Setting,
    max_tokens: int,
    is_cancelled: Callable[[], bool],
) -> Generation | None:
    """The answer to the first turn, or None if it was cancelled."""
    for event in engine.stream(
        **_prompt(engine, question),
        num_draft_tokens=setting.length,
        max_tokens=max_tokens,
        is_cancelled=is_cancelled,
    ):
        if event.result is not None:
            cancelled = event.result.finish_reason is FinishReason.CANCELLED
            return None if cancelled else event.result
    raise AssertionError("a stream ends with its result")


def pass_times(
    model: Model, is_cancelled: Callable[[], bool]
) -> tuple[int, dict[int, list[float]]]:
    """A context, and seconds of passes of several widths after it, each measured several times."""
    room = model.max_length - max(WIDTHS)
    context = min(CURVE_CONTEXT, max(room, 1))
    widths = [width for width in WIDTHS if context + width <= model.max_length]
    session = model.new_session()
    tokens = [token % model.vocab_size for token in range(10, 10 + context + max(widths))]
    model.forward([Rows(session, tokens[:context], logits="none")])
    session.keep(range(context))
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for round_ in range(CURVE_ROUNDS + 1):
        for width in widths:
            if is_cancelled():
                break
            start = time.perf_counter()
            model.forward([Rows(session, tokens[context : context + width], logits="all")])
            taken = time.perf_counter() - start
            session.keep([])
            if round_:  # the first one pays for page faults
                seconds[width].append(taken)
    return context, {width: taken for width, taken in seconds.items() if taken}


def _summary(
    engine: Engine,
    measured: dict[Setting, Measured],
    curve: dict[int, float],
    prompts: int,
    *,
    interrupted: bool,
) -> Tuning:
    plain = measured[PLAIN]
    complete = [
        m for m in measured.values() if m.setting != PLAIN and set(m.stats) & set(plain.stats)
    ]
    findings = [_finding(one, plain, curve) for one in complete] if curve else []
    findings.sort(key=lambda finding: -finding.measured.value)
    seconds = plain.total("decode_seconds")
    profile = engine._profile
    kept = profile is not None and profile.save(engine._experience)
    return Tuning(
        curve=curve,
        plain_tokens_per_second=plain.total("num_decode_tokens") / seconds if seconds else 0.0,
        findings=tuple(findings),
        equal=not any(one.differs for one in measured.values()),
        interrupted=interrupted,
        prompts=prompts,
        profile=str(profile.path) if kept and profile is not None else None,
    )


def _finding(one: Measured, plain: Measured, curve: dict[int, float]) -> Finding:
    steps, drafts = one.total("num_steps"), one.total("num_drafts")
    drafted, tokens = one.total("num_draft_tokens"), one.total("num_decode_tokens")
    positions: list[float] = []
    for runs in one.stats.values():
        for stats in runs:
            for place, count in enumerate(stats.num_accepted_tokens_per_pos):
                positions += [0.0] * (place + 1 - len(positions))
                positions[place] += count
    share = drafts / steps if steps else 0.0
    tokens_per_step = tokens / steps if steps else 0.0
    # What a step takes by T(k), and what it takes outside of passes more than a plain one.
    wide = _at(curve, 1 + drafted / drafts) if drafts else curve[min(curve)]
    drafting = max(_outside(one) - _outside(plain), 0.0)
    first = curve[min(curve)]
    step = share * wide + (1 - share) * first + drafting
    samples = list(_pairs(one, plain))
    return Finding(
        setting=one.setting,
        acceptance_rate=one.total("num_accepted_tokens") / drafted if drafted else 0.0,
        acceptance=tuple(count / drafts for count in positions) if drafts else (),
        drafts_per_step=share,
        tokens_per_step=tokens_per_step,
        expected=tokens_per_step * first / step,
        measured=speedup(*map(list, zip(*samples, strict=True))) if samples else Estimate(1.0),
    )


def _outside(one: Measured) -> float:
    """Seconds of a step outside the model's passes."""
    steps = one.total("num_steps")
    rest = one.total("decode_seconds") - one.total("model_seconds")
    return rest / steps if steps else 0.0


def _pairs(one: Measured, plain: Measured) -> Iterator[tuple[Sample, Sample]]:
    """The same prompts in both, those whose answer has more than the prompt's token."""
    for name in plain.stats:
        if name not in one.stats:
            continue
        ours, theirs = one.stats[name], plain.stats[name]
        if ours[0].num_decode_tokens and theirs[0].num_decode_tokens:
            yield _sample(ours), _sample(theirs)


def _sample(runs: Sequence[Stats]) -> Sample:
    return Sample(runs[0].num_decode_tokens, tuple(stats.decode_seconds for stats in runs))


def _at(curve: dict[int, float], width: float) -> float:
    """T at a width between those that were measured."""
    widths = sorted(curve)
    for below, above in pairwise(widths):
        if below <= width <= above:
            share = (width - below) / (above - below)
            return curve[below] + share * (curve[above] - curve[below])
    return curve[widths[-1]]
