"""Log-probabilities of tokens, the target's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foretell._noise import Floats
from foretell._support import leading


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token and of the best alternatives at its position.

    The log-softmax of the target's raw logits, before every processor and at temperature 1, as
    in vLLM by default. ``rank`` is 1 for the most probable token; among equals the lowest id
    comes first. ``top`` holds (token id, log-probability), the best first, as many as were
    asked for; the token itself is among them only if it is one of those.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, in which a probability of 0 has the logarithm None."""
        return {
            "token_id": self.token_id,
            "logprob": _finite(self.logprob),
            "rank": self.rank,
            "top": [{"token_id": token, "logprob": _finite(value)} for token, value in self.top],
        }


def token_logprobs(logits: npt.NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    """Of one row; ``count`` alternatives, -1 for the whole vocabulary.

    A function of the row alone, to the bit: computed in float64 on a copy of its own, so that
    nothing depends on the rows beside it. Where the row has +inf, the tokens that have it share
    the whole probability.
    """
    row = logits.astype(np.float64)
    logprobs = log_softmax(row)
    own = row[token]
    rank = int(np.count_nonzero(row > own) + np.count_nonzero(row[:token] == own)) + 1
    count = len(row) if count < 0 else min(count, len(row))
    top: tuple[tuple[int, float], ...] = ()
    if count:
        best = leading(np.maximum(row, -1e300), count, np.ones(len(row)))
        best = best[np.argsort(-row[best], kind="stable")]
        top = tuple(zip(best.tolist(), logprobs[best].tolist(), strict=True))
    return TokenLogprobs(token, float(logprobs[token]), rank, top)


def log_softmax(row: Floats) -> Floats:
    """Of one row in float64."""
    best = float(row.max())
    if best == math.inf:
        count = np.count_nonzero(row == best)
        return np.where(row == best, -math.log(count), -math.inf)
    shifted = row - best
    result: Floats = shifted - math.log(float(np.exp(shifted).sum()))
    return result


def prompt_logprobs(
    logits: npt.NDArray[np.float32], following: Sequence[int], count: int
) -> list[TokenLogprobs]:
    """Of the tokens that follow the rows of a chunk of the prompt."""
    return [
        token_logprobs(row, token, count) for row, token in zip(logits, following, strict=False)
    ]


def _finite(logprob: float) -> float | None:
    return logprob if math.isfinite(logprob) else None
