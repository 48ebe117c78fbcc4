"""From what the engine gives to the API's responses and chunks."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from foretell._draft import Draft
from foretell._engine import Engine
from foretell._logprobs import TokenLogprobs
from foretell._request import Emitted
from foretell._result import FinishReason, Generation, Stats
from foretell._verify import Origin
from foretell.server._scheduler import Done, Piece
from foretell.server._translate import Order

LEAST_LOGPROB = -9999.0
"""Stands for the logarithm of 0, which JSON cannot hold; the OpenAI API does the same."""

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
    FinishReason.CANCELLED: "stop",
}


class Format:
    """The common part of both kinds of completions, for one call."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, engine: Engine, order: Order, model_name: str, fingerprint: str) -> None:
        self.engine = engine
        self.order = order
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": fingerprint,
        }
        self._started: set[int] = set()
        self._tokens = engine.require_tokenizer("the OpenAI API")

    # --- Whole responses ------------------------------------------------------------------

    def response(self, done: Sequence[Done]) -> dict[str, Any]:
        """The response to a call whose completions are all there."""
        return {
            **self._head,
            "object": self.kind,
            "choices": [
                {
                    "index": one.index,
                    **self.answer(one),
                    "finish_reason": self.reason(one.result),
                    "foretell": self.about(one),
                }
                for one in done
            ],
            "usage": self.usage(done),
        }

    def answer(self, done: Done) -> dict[str, Any]:
        """Text and log-probabilities of a choice."""
        raise NotImplementedError

    def reason(self, result: Generation) -> str:
        """OpenAI's word for why it ended."""
        return "length" if self.order.only_echo else _REASONS[result.finish_reason]

    def about(self, done: Done) -> dict[str, Any]:
        """Foretell's own object of a finished choice."""
        result = done.result
        return {
            "token_ids": result.token_ids,
            "origins": [str(origin) for origin in result.origins],
            "finish_reason": str(result.finish_reason),
            "seed": result.seed,
            "stats": with_histogram(result.stats.to_dict()),
            "plain_seconds_per_token": self.plain_seconds(done),
        }

    def plain_seconds(self, done: Done) -> float | None:
        """What plain decoding takes here for a token, at the middle of this answer."""
        return self.engine.pass_seconds(
            1, done.result.prompt_tokens + len(done.result.token_ids) // 2
        )

    def usage(self, done: Sequence[Done]) -> dict[str, Any]:
        """Counts of tokens, with Foretell's stats in the details."""
        each = self.order.params.n
        firsts = [one for one in done if one.index % each == 0]  # a prompt counts once
        prompt = sum(one.result.prompt_tokens for one in firsts)
        shown = 0 if self.order.only_echo else sum(len(one.result.token_ids) for one in done)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": shown,
            "total_tokens": prompt + shown,
            "prompt_tokens_details": {
                "cached_tokens": sum(one.cached_tokens for one in firsts),
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "foretell": together([one.result.stats for one in done]),
            },
        }

    # --- Chunks of a stream ------------------------------------------------------------------

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """One chunk; while usage is asked for, all but the last have null there."""
        record = {**self._head, "object": self.chunk_kind, "choices": choices, **more}
        if self.order.include_usage:
            record.setdefault("usage", None)
        return record

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        """What a step emitted, as chunks."""
        raise NotImplementedError

    def done(self, done: Done) -> list[dict[str, Any]]:
        """The end of a choice, as chunks."""
        raise NotImplementedError

    def step(self, piece: Piece) -> dict[str, Any]:
        """Foretell's own object of a chunk: what came from where."""
        emitted = piece.emitted
        record: dict[str, Any] = {
            "step": emitted.step,
            "pieces": [
                {"text": text, "token_id": token, "origin": str(origin)}
                for text, token, origin in zip(
                    emitted.pieces, emitted.tokens, emitted.origins, strict=True
                )
            ],
        }
        if self.order.steps:
            record["draft"] = self.draft(emitted)
            if piece.stats is not None:
                record["stats"] = with_histogram(piece.stats)
        return record

    def draft(self, emitted: Emitted) -> list[dict[str, Any]]:
        """The tree that was verified, a node at a time; -1 is the token that was emitted before."""
        draft = emitted.draft
        kept = kept_nodes(draft, emitted)
        return [
            {
                "token_id": token,
                "text": self._tokens.token_text(token),
                "parent": index - 1 if draft.parents is None else draft.parents[index + 1] - 1,
                "probability": draft.probabilities[index] if draft.probabilities else None,
                "kept": index + 1 in kept,
            }
            for index, token in enumerate(draft.tokens)
        ]


class ChatFormat(Format):
    """Chat completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def answer(self, done: Done) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": done.result.text, "refusal": None},
            "logprobs": self._logprobs(done.result.logprobs),
        }

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        if piece.index not in self._started:
            self._started.add(piece.index)
            delta = {"role": "assistant", "content": "", "refusal": None}
            chunks.append(self.chunk([self._choice(piece.index, delta)]))
        emitted = piece.emitted
        choice = self._choice(
            piece.index,
            {"content": "".join(emitted.pieces)},
            self._logprobs(emitted.logprobs) if emitted.logprobs else None,
        )
        chunks.append(self.chunk([choice], foretell=self.step(piece)))
        return chunks

    def done(self, done: Done) -> list[dict[str, Any]]:
        chunks = []
        if done.rest:
            chunks.append(self.chunk([self._choice(done.index, {"content": done.rest})]))
        choice = self._choice(done.index, {}, None, self.reason(done.result))
        chunks.append(self.chunk([choice], foretell=self.about(done)))
        return chunks

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token, value) for token, value in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokens.token_text(token)
        return {
            "token": text,
            "logprob": finite(logprob),
            "bytes": list(self._tokens.token_bytes(token)),
        }


class CompletionFormat(Format):
    """Text completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lengths: dict[int, int] = {}

    def answer(self, done: Done) -> dict[str, Any]:
        result = done.result
        text = "" if self.order.only_echo else result.text
        pieces = [] if self.order.only_echo else list(result.logprobs or [])
        offset, entries = 0, [(entry, entry.token_id) for entry in pieces]
        records: list[tuple[TokenLogprobs | None, int]] = list(entries)
        if self.order.echo:
            prompt = self._prompt(done.index)
            text = self._echoed(prompt) + text
            records = [*zip(result.prompt_logprobs or [], prompt, strict=False), *entries]
        logprobs = None
        if self.order.params.logprobs is not None:
            logprobs = self._logprobs(records, offset)
        return {"text": text, "logprobs": logprobs}

    def piece(self, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        if piece.index not in self._started:
            self._started.add(piece.index)
            if self.order.echo:
                text = self._echoed(self._prompt(piece.index))
                chunks.append(self.chunk([self._choice(piece.index, text)]))
                self._lengths[piece.index] = len(text)
        if self.order.only_echo:
            return chunks
        emitted = piece.emitted
        logprobs = None
        if emitted.logprobs:
            offset = self._lengths.get(piece.index, 0)
            entries = [(entry, entry.token_id) for entry in emitted.logprobs]
            logprobs = self._logprobs(entries, offset)
        text = "".join(emitted.pieces)
        self._lengths[piece.index] = self._lengths.get(piece.index, 0) + len(text)
        choice = self._choice(piece.index, text, logprobs)
        chunks.append(self.chunk([choice], foretell=self.step(piece)))
        return chunks

    def done(self, done: Done) -> list[dict[str, Any]]:
        rest = "" if self.order.only_echo else done.rest
        choice = self._choice(done.index, rest, None, self.reason(done.result))
        return [self.chunk([choice], foretell=self.about(done))]

    def _prompt(self, index: int) -> Sequence[int]:
        return self.order.prompts[index // self.order.params.n]

    def _echoed(self, prompt: Sequence[int]) -> str:
        return self._tokens.decode(prompt)

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(
        self, entries: Sequence[tuple[TokenLogprobs | None, int]], offset: int
    ) -> dict[str, Any]:
        """In the older API's four parallel lists; before the first token of a prompt is nothing."""
        record: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for entry, token in entries:
            text = self._tokens.token_text(token)
            record["tokens"].append(text)
            record["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            record["top_logprobs"].append(None if entry is None else self._top(entry))
            record["text_offset"].append(offset)
            offset += len(text)
        return record

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """By text, so of several tokens with one text the best; the chosen one is always there."""
        best: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token_id, entry.logprob)):
            best.setdefault(self._tokens.token_text(token), finite(value))
        return best


def kept_nodes(draft: Draft, emitted: Emitted) -> set[int]:
    """The nodes of a draft that were emitted."""
    node: int | None = 0
    kept = set()
    for token, origin in zip(emitted.tokens, emitted.origins, strict=True):
        node = draft.child(node, token) if origin is Origin.DRAFT and node is not None else None
        if node is not None:
            kept.add(node)
    return kept


def with_histogram(stats: dict[str, Any]) -> dict[str, Any]:
    """Stats with how many drafts had 0, 1, 2, ... tokens accepted."""
    reached = [stats["num_drafts"], *stats["num_accepted_tokens_per_pos"], 0]
    histogram = [at - beyond for at, beyond in pairwise(reached)]
    return {**stats, "acceptance_histogram": histogram}


def together(stats: Sequence[Stats]) -> dict[str, Any]:
    """The stats of several completions as if they were one."""
    total = Stats()
    for one in stats:
        total.num_steps += one.num_steps
        total.num_drafts += one.num_drafts
        total.num_draft_tokens += one.num_draft_tokens
        total.num_accepted_tokens += one.num_accepted_tokens
        total.num_decode_tokens += one.num_decode_tokens
        total.prefill_seconds = max(total.prefill_seconds, one.prefill_seconds)
        total.decode_seconds = max(total.decode_seconds, one.decode_seconds)
        total.model_seconds = max(total.model_seconds, one.model_seconds)
        for position, count in enumerate(one.num_accepted_tokens_per_pos):
            if position == len(total.num_accepted_tokens_per_pos):
                total.num_accepted_tokens_per_pos.append(0)
            total.num_accepted_tokens_per_pos[position] += count
    return with_histogram(total.to_dict())


def finite(logprob: float) -> float:
    """A log-probability as JSON can hold it."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
