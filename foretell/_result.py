"""What a generation gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from foretell._draft import Draft
from foretell._logprobs import TokenLogprobs
from foretell._verify import Accepted, Origin


class FinishReason(StrEnum):
    """Why a generation ended; ``message`` is the sentence for people."""

    message: str

    def __new__(cls, value: str, message: str) -> FinishReason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.message = message
        return member

    STOP = "stop", "The model ended its answer, or a stop string or stop token was reached."
    LENGTH = "length", "max_tokens was reached; raise it for a longer answer."
    CONTEXT = "context", "The model's context is full; shorten the prompt for a longer answer."
    CANCELLED = "cancelled", "The generation was cancelled."


@dataclass
class Stats:
    """Counts and times of one generation, with vLLM's names and definitions.

    A *step* is one target pass after prefill; the first token comes from prefill itself. For
    trees, draft tokens count nodes and a position is a depth. Accepted tokens count after the
    trim, so tokens cut by a stop are not among them.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_decode_tokens: int = 0
    """Tokens emitted after prefill."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    model_seconds: float = 0.0
    """The part of ``decode_seconds`` spent in the target's passes."""
    num_near_ties: int | None = None
    """Positions whose two best logits were closer than a pass of many tokens moves them: there
    the output may differ from plain decoding's. None where a backend is exact."""
    policy: dict[str, Any] = field(default_factory=dict)
    """What the policy decided and why; empty where the draft length was fixed. docs/policy.md
    explains the fields."""

    def record(self, draft: Draft, accepted: Accepted) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_decode_tokens += len(accepted.tokens)
        if not draft.tokens:
            return
        self.num_drafts += 1
        self.num_draft_tokens += len(draft)
        self.num_accepted_tokens += accepted.num_accepted
        while len(self.num_accepted_tokens_per_pos) < draft.depth:
            self.num_accepted_tokens_per_pos.append(0)
        for position in range(accepted.num_accepted):
            self.num_accepted_tokens_per_pos[position] += 1

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens / drafts, so the bonus or correction counts."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per target pass, over drafted and plain steps alike."""
        return self.num_decode_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of decoding, without the one that prefill gives."""
        return self.num_decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "num_steps": self.num_steps,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "tokens_per_step": self.tokens_per_step,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "model_seconds": self.model_seconds,
            "tokens_per_second": self.tokens_per_second,
            **({} if self.num_near_ties is None else {"num_near_ties": self.num_near_ties}),
            **({"policy": self.policy} if self.policy else {}),
        }


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    ``token_ids`` holds every emitted token, an end-of-sequence token or the tokens of a stop
    string included; ``text`` leaves both out (a token of ``stop_token_ids`` stays in, as in
    vLLM, unless the tokenizer calls it special). ``seed`` reproduces it; None where nothing was
    random and none was given. ``logprobs`` and ``prompt_logprobs`` have an entry for each token
    of output and prompt, where they were asked for; nothing comes before the first token of the
    prompt, whose entry is None. ``others`` are the further completions of the same prompt, where
    ``n`` is above 1.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    stats: Stats
    origins: list[Origin] = field(default_factory=list)
    seed: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    others: tuple[Generation, ...] = ()

    @property
    def completions(self) -> tuple[Generation, ...]:
        """All ``n`` completions, this one first."""
        return (self, *self.others)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; log-probabilities and further completions only if there are any."""
        record: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": str(self.finish_reason),
            "prompt_tokens": self.prompt_tokens,
            "seed": self.seed,
            "stats": self.stats.to_dict(),
        }
        if self.logprobs is not None:
            record["logprobs"] = [entry.to_dict() for entry in self.logprobs]
        if self.prompt_logprobs is not None:
            record["prompt_logprobs"] = [
                None if entry is None else entry.to_dict() for entry in self.prompt_logprobs
            ]
        if self.others:
            record["others"] = [other.to_dict() for other in self.others]
        return record


@dataclass(frozen=True)
class Event:
    """One piece of a stream: a token and the text it completed.

    ``text`` may be empty: a character split over several tokens, or what may become a stop
    string, is held back until it is certain. The last event has no token; it carries the text
    still held back and the finished ``result``. With several completions there is such a last
    event for each.
    """

    text: str
    token_id: int | None = None
    origin: Origin | None = None
    step: int = 0
    """The target pass that emitted the token, 0 being prefill."""
    logprobs: TokenLogprobs | None = None
    index: int = 0
    """The completion it belongs to, from 0 to ``n`` - 1."""
    result: Generation | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Set on the last event."""
        return None if self.result is None else self.result.finish_reason
