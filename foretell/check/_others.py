"""Other engines: the same questions with speculation and without, asked from outside.

Nothing is known of such an engine but what it answers. Many compute in 16 bits, where a pass of
several tokens rounds otherwise than a pass of one; two tokens that are nearly as good as each
other then change places without any error in the algorithm. So a difference is held against the
reference's own log-probabilities, and called a near-tie where it is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from foretell.check._about import versions
from foretell.check._report import Case, Report, Result
from foretell.check._statistical import FALSE_ALARM
from foretell.check._statistics import fit_two

NEAR_TIE = 0.25
"""Log-probabilities no further apart than that count as a near-tie in 16-bit arithmetic: two steps
of bfloat16 at logits from 16 to 32."""
NEAR_TIE_FLOAT32 = 1e-3
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "Red, green, blue, red, green, blue, red, green, blue,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
)
TOP = 5


@dataclass(frozen=True)
class Answer:
    """A greedy continuation.

    ``tokens`` are its pieces of text, ``logprobs`` theirs, and ``top`` the best alternatives at
    each place, by piece; empty where the engine does not tell.
    """

    text: str
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[Mapping[str, float], ...] = ()


class OtherEngine(Protocol):
    """An engine with or without speculation."""

    name: str
    near_tie: float
    about: Mapping[str, Any]

    def greedy(self, prompt: str, max_tokens: int) -> Answer:
        """The continuation at temperature 0."""

    def sample(self, prompt: str, max_tokens: int, seed: int) -> str:
        """A continuation at temperature 1, all processors off."""


@dataclass(frozen=True)
class Parting:
    """Where two greedy answers part; positions count tokens, or characters without tokens.

    ``gap`` is how much less probable the reference finds the other's token than its own best, as
    a difference of logits; ``gap_of_two_best`` that between its own two best.
    """

    prompt: int
    position: int
    expected: str
    got: str
    gap: float | None
    gap_of_two_best: float | None
    at_least: bool = False

    def result(self, near_tie: float) -> Result:
        """What it means."""
        if self.gap is None:
            return Result.UNDECIDED
        return Result.NEAR_TIE if self.gap <= near_tie and not self.at_least else Result.FAILED

    def described(self, near_tie: float) -> str:
        """One sentence."""
        place = f"prompt {self.prompt}, position {self.position}: {self.got!r} instead of "
        place += repr(self.expected)
        if self.gap is None:
            return f"{place}; without log-probabilities nobody can tell whether it is a near-tie"
        known = "at least " if self.at_least else ""
        place += f"; the reference has them {known}{self.gap:.4g} apart"
        if self.gap_of_two_best is not None:
            place += f" (its two best {self.gap_of_two_best:.4g})"
        if self.result(near_tie) is Result.NEAR_TIE:
            return f"{place}, a near-tie that rounding can turn round (up to {near_tie:g})"
        return f"{place}, more than rounding explains ({near_tie:g})"


@dataclass
class _Pairs:
    """Greedy answers of both engines."""

    partings: list[Parting] = field(default_factory=list)
    equal: int = 0
    tokens: int = 0
    compared: int = 0
    equal_logprobs: int = 0
    largest: float = 0.0


def compare_engines(
    reference: OtherEngine,
    engine: OtherEngine,
    prompts: Sequence[str] = PROMPTS,
    *,
    max_tokens: int = 48,
    samples: int = 200,
    seed: int = 0,
    progress: Callable[[float, str], None] | None = None,
) -> Report:
    """``engine``, with speculation, against ``reference``, the same without.

    Greedy text and log-probabilities for every prompt, then first tokens sampled after the first
    prompt, ``samples`` from each. Raises ForetellError where an engine cannot be asked.
    """
    began = perf_counter()
    tell = progress or (lambda share, name: None)
    pairs = _Pairs()
    for index, prompt in enumerate(prompts):
        tell(0.5 * index / len(prompts), "greedy text")
        _compare(
            pairs, index, reference.greedy(prompt, max_tokens), engine.greedy(prompt, max_tokens)
        )
    near_tie = max(reference.near_tie, engine.near_tie)
    cases = [_greedy(pairs, len(prompts), near_tie), _logprobs(pairs, near_tie)]
    drawn: list[Counter[str]] = []
    for offset, one in enumerate((reference, engine)):
        counts: Counter[str] = Counter()
        for index in range(samples):
            tell(0.5 + (offset + index / samples) / 4, "sampled first tokens")
            counts[one.sample(prompts[0], 3, seed * 2 * samples + offset * samples + index)] += 1
        drawn.append(counts)
    if samples:
        cases.append(_sampled(drawn[0], drawn[1]))
    tell(1.0, "done")
    about = {
        "engine": {"name": engine.name, **engine.about},
        "reference": {"name": reference.name, **reference.about},
        "versions": versions(),
        "model": engine.about.get("model"),
        "seeds": {"samples": seed},
    }
    return Report(about, tuple(cases), (), perf_counter() - began)


def _compare(pairs: _Pairs, index: int, left: Answer, right: Answer) -> None:
    by_token = bool(left.tokens) and bool(right.tokens)
    ours: Sequence[str] = left.tokens if by_token else left.text
    theirs: Sequence[str] = right.tokens if by_token else right.text
    shared = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    for a, b in zip(left.logprobs[:shared], right.logprobs[:shared], strict=False):
        pairs.compared += 1
        pairs.equal_logprobs += a == b
        pairs.largest = max(pairs.largest, abs(a - b))
    pairs.tokens += shared
    if shared == len(ours) == len(theirs):
        pairs.equal += 1
        return
    expected = ours[shared] if shared < len(ours) else "(end)"
    got = theirs[shared] if shared < len(theirs) else "(end)"
    gap = best_gap = None
    at_least = False
    if by_token and shared < len(left.top) and len(left.top[shared]) > 1:
        known = left.top[shared]
        best, second = sorted(known.values(), reverse=True)[:2]
        best_gap = best - second
        at_least = got not in known
        gap = best - min(known.values()) if at_least else best - known[got]
    pairs.partings.append(Parting(index, shared, expected, got, gap, best_gap, at_least))


def _greedy(pairs: _Pairs, prompts: int, near_tie: float) -> Case:
    found = [parting.result(near_tie) for parting in pairs.partings]
    result = next(
        (r for r in (Result.FAILED, Result.UNDECIDED, Result.NEAR_TIE) if r in found), Result.PASSED
    )
    detail = f"{pairs.equal} of {prompts} answers equal, {pairs.tokens} equal tokens in all"
    for parting in sorted(pairs.partings, key=lambda one: found.index(one.result(near_tie))):
        detail += f"; {parting.described(near_tie)}"
    return Case(
        "other engine",
        "greedy text",
        None,
        result,
        detail,
        {
            "prompts": prompts,
            "equal": pairs.equal,
            "near_tie": near_tie,
            "differences": [
                {
                    "prompt": one.prompt,
                    "position": one.position,
                    "expected": one.expected,
                    "got": one.got,
                    "gap": one.gap,
                    "gap_is_at_least": one.at_least,
                    "gap_of_two_best": one.gap_of_two_best,
                    "result": str(one.result(near_tie)),
                }
                for one in pairs.partings
            ],
        },
    )


def _logprobs(pairs: _Pairs, near_tie: float) -> Case:
    name = "log-probabilities"
    if not pairs.compared:
        return Case("other engine", name, None, Result.SKIPPED, "the engines do not tell them")
    rest = pairs.compared - pairs.equal_logprobs
    result, detail = Result.PASSED, f"all {pairs.compared} equal"
    if rest:
        detail = f"{pairs.equal_logprobs} of {pairs.compared} equal, the others within "
        detail += f"{pairs.largest:.3g}"
        result = Result.NEAR_TIE
        if pairs.largest > near_tie:
            result = Result.FAILED
            detail += f", more than rounding explains ({near_tie:g})"
        else:
            detail += ", which is rounding"
    numbers = {
        "compared": pairs.compared,
        "equal": pairs.equal_logprobs,
        "largest_difference": pairs.largest,
    }
    return Case("other engine", name, None, result, detail, numbers)


def _sampled(first: Counter[str], second: Counter[str]) -> Case:
    found = fit_two(first, second, FALSE_ALARM)
    outcomes = len({*first, *second})
    result = Result.PASSED if found.fits else Result.FAILED
    if found.fits and found.degrees == 0 and outcomes > 1:
        return Case(
            "other engine",
            "sampled first tokens",
            None,
            Result.SKIPPED,
            f"{found.samples} samples with {outcomes} outcomes are too few to tell",
        )
    return Case(
        "other engine",
        "sampled first tokens",
        None,
        result,
        f"{found.samples} samples of 3 tokens, {outcomes} outcomes: chi-square "
        f"{found.chi_square:.1f} with {found.degrees} degrees of freedom, p {found.p_value:.2g}; "
        f"total variation {found.total_variation:.3f} (chance alone about {found.noise_floor:.3f})",
        {
            "samples": found.samples,
            "chi_square": found.chi_square,
            "degrees_of_freedom": found.degrees,
            "p_value": found.p_value,
            "total_variation": found.total_variation,
            "noise_floor": found.noise_floor,
            "false_alarm": found.false_alarm,
        },
    )
