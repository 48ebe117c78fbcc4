"""``--compare``: the same request with and without speculation, side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from foretell._engine import Engine
from foretell._errors import OptionError
from foretell._result import FinishReason, Generation
from foretell._sampling import seed_for
from foretell.cli._errors import ExitCode
from foretell.cli._generate import Request, finish, print_json, show
from foretell.cli._interrupt import Interrupt
from foretell.cli._summary import speculation
from foretell.cli._terminal import make_printer, progress

ROUNDS = 5
"""If both ways were equally fast, all of 5 rounds would agree once in 16 times."""
WARM_UP_TOKENS = 8
FEW_TOKENS = 16
"""Below that many decoded tokens a ratio is mostly noise."""


@dataclass(frozen=True)
class Comparison:
    """The results of several rounds, plain and speculative in turn."""

    plain: Sequence[Generation]
    speculative: Sequence[Generation]

    @property
    def equal(self) -> bool:
        """Whether every run gave the same tokens, the same text and the same ending."""
        return self.difference is None

    @property
    def difference(self) -> str | None:
        """What differs from the first plain run, or None."""
        first = self.plain[0]
        for kind, runs in (("plain", self.plain[1:]), ("speculative", self.speculative)):
            for run in runs:
                difference = _difference(first, run)
                if difference is not None:
                    return f"a {kind} run {difference}"
        return None

    @property
    def ratios(self) -> list[float]:
        """Each round's speed of decoding, speculative / plain; none after a single token."""
        return _ratios(self.speculative, self.plain, lambda run: run.stats.tokens_per_second)

    @property
    def speedup(self) -> float | None:
        """The median round's ratio of decoding speeds; None where prefill gave the only token."""
        return median(self.ratios) if self.ratios else None

    @property
    def total_speedup(self) -> float | None:
        """The same with the time to read the prompt, which speculation does not change."""
        ratios = _ratios(self.plain, self.speculative, total_seconds)
        return median(ratios) if self.ratios and ratios else None

    @property
    def verdict(self) -> str:
        """Whether speculation paid, in words: only if every round says the same."""
        ratios = self.ratios
        if not ratios:
            return "nothing to compare: the first token was the whole answer"
        ratio = f"{median(ratios):.2f}x"
        tokens = self.plain[0].stats.num_decode_tokens
        if tokens < FEW_TOKENS:
            return f"too short to tell whether speculation pays: {ratio} over {tokens} tokens"
        if not any(run.stats.num_drafts for run in self.speculative):
            return f"nothing was drafted here, so speculation could not pay: {ratio}"
        least, most = f"{min(ratios):.2f}x", f"{max(ratios):.2f}x"
        spread = f"{ratio} in the median round ({least} to {most} in {len(ratios)} rounds)"
        if max(ratios) < 1:
            return f"speculation did not pay here: {spread}"
        if min(ratios) <= 1:
            return f"no clear difference here: {spread}"
        return f"speculation paid here: {spread}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, see docs/json.md: of each kind the run with the median speed."""
        return {
            "plain": _typical(self.plain).to_dict(),
            "speculative": _typical(self.speculative).to_dict(),
            "equal": self.equal,
            "speedup": self.speedup,
            "total_speedup": self.total_speedup,
            "verdict": self.verdict,
            "rounds": {
                "plain": [run.stats.tokens_per_second for run in self.plain],
                "speculative": [run.stats.tokens_per_second for run in self.speculative],
            },
        }

    def report(self) -> str:
        """The lines people read."""
        runs = len(self.plain) + len(self.speculative)
        tokens = len(self.plain[0].token_ids)
        same = f"yes, all {tokens} in {runs} runs" if self.equal else f"NO: {self.difference}"
        if not self.ratios:
            return f"same tokens:  {same}\n{self.verdict}\n"
        return (
            f"plain:        {speed(self.plain):.1f} tokens/s\n"
            f"speculative:  {speed(self.speculative):.1f} tokens/s, "
            f"{speculation(_typical(self.speculative).stats)}\n"
            f"same tokens:  {same}\n"
            f"{self.verdict}\n"
            "(decoding alone, after the first token; "
            f"{self.total_speedup:.2f}x with the time to read the prompt)\n"
        )


def comparable(request: Request) -> Request:
    """The request with its seed settled, so that every run makes the same choices.

    Raises OptionError where there would be nothing to compare.
    """
    if request.num_draft_tokens == 0:
        raise OptionError(
            "--compare with --num-draft-tokens 0 would compare plain decoding with itself; leave "
            "one of them out"
        )
    if request.verification != "match":
        raise OptionError(
            f"--compare checks that the tokens are equal, which --verification "
            f"{request.verification} does not promise; use match"
        )
    return replace(request, sampling=replace(request.sampling, seed=seed_for(request.sampling)))


def compare(engine: Engine, request: Request, *, as_json: bool) -> ExitCode:
    """Show the text once, then measure both ways in turn and say which was faster."""
    with Interrupt() as interrupt:
        first = request.stream(engine, interrupt)
        shown = finish(first) if as_json else show(first, make_printer())
        cancelled = shown.finish_reason is FinishReason.CANCELLED
        comparison = None if cancelled else _measure(engine, request, interrupt)
    if comparison is None:
        if as_json:
            print_json(
                {
                    "plain": None,
                    "speculative": shown.to_dict(),
                    "equal": None,
                    "speedup": None,
                    "total_speedup": None,
                    "verdict": "stopped by Ctrl-C",
                    "rounds": None,
                }
            )
        return ExitCode.INTERRUPTED
    if as_json:
        print_json(comparison.to_dict())
    else:
        sys.stdout.write("\n" + comparison.report())
    return ExitCode.OK if comparison.equal else ExitCode.DIFFERED


def speed(runs: Sequence[Generation]) -> float:
    """Median tokens per second."""
    return median(run.stats.tokens_per_second for run in runs)


def total_seconds(run: Generation) -> float:
    """The time of a whole run: the prompt and the answer."""
    return run.stats.prefill_seconds + run.stats.decode_seconds


def _measure(engine: Engine, request: Request, interrupt: Interrupt) -> Comparison | None:
    """The rounds, after a plain warm-up; None if Ctrl-C ended them."""
    warm_up = replace(
        request.plain(), sampling=replace(request.sampling, max_tokens=WARM_UP_TOKENS)
    )
    finish(warm_up.stream(engine, interrupt))
    plain: list[Generation] = []
    speculative: list[Generation] = []
    for number in range(1, ROUNDS + 1):
        progress(f"measuring, round {number} of {ROUNDS}")
        turns = [(request.plain(), plain), (request, speculative)]
        # Neither way is always the first, whose turn a machine may favour.
        for kind, runs in turns if number % 2 else turns[::-1]:
            run = finish(kind.stream(engine, interrupt))
            if run.finish_reason is FinishReason.CANCELLED:
                return None
            runs.append(run)
    return Comparison(plain, speculative)


def _ratios(
    above: Sequence[Generation], below: Sequence[Generation], of: Callable[[Generation], float]
) -> list[float]:
    pairs = [(of(one), of(other)) for one, other in zip(above, below, strict=True)]
    return [one / other for one, other in pairs] if all(map(all, pairs)) else []


def _typical(runs: Sequence[Generation]) -> Generation:
    ordered = sorted(runs, key=lambda run: run.stats.tokens_per_second)
    return ordered[len(ordered) // 2]


def _difference(first: Generation, other: Generation) -> str | None:
    for index, (ours, theirs) in enumerate(
        zip(first.token_ids, other.token_ids, strict=False), start=1
    ):
        if ours != theirs:
            return f"has {theirs} as token {index}, the first plain run {ours}"
    if len(first.token_ids) != len(other.token_ids):
        return f"has {len(other.token_ids)} tokens, the first plain run {len(first.token_ids)}"
    if first.text != other.text:
        return "has the same tokens but another text"
    if first.finish_reason is not other.finish_reason:
        return f"ended with '{other.finish_reason}', the first plain run '{first.finish_reason}'"
    return None
