"""What is said about a generation, in one line."""

from __future__ import annotations

from foretell._result import FinishReason, Generation, Stats


def summary(result: Generation, colour: bool = False) -> str:
    """Length, speed and how speculation did; with a legend where drafted tokens are coloured."""
    stats = result.stats
    parts = [
        _count(len(result.token_ids), "token"),
        f"{stats.tokens_per_second:.1f} tokens/s",
        speculation(stats),
    ]
    if result.seed is not None:
        parts.append(f"seed {result.seed}")
    if colour and stats.num_accepted_tokens:
        parts.append("green: drafted and accepted")
    if result.finish_reason is FinishReason.CANCELLED:
        parts.append("stopped by Ctrl-C")
    elif result.finish_reason is FinishReason.LENGTH:
        parts.append("cut at --max-tokens")
    elif result.finish_reason is FinishReason.CONTEXT:
        parts.append("the model's context is full")
    return "[" + ", ".join(parts) + "]"


def speculation(stats: Stats) -> str:
    """How speculation did."""
    if not stats.num_drafts:
        return "nothing drafted"
    return (
        f"{stats.tokens_per_step:.2f} tokens per step, {stats.draft_acceptance_rate:.0%} of "
        f"{_count(stats.num_draft_tokens, 'drafted token')} accepted"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
