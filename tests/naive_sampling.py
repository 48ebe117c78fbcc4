"""The distribution and the choice under SamplingParams, written once more: slow and plain."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from foretell import SamplingParams

MASK = (1 << 64) - 1


def processed(
    logits: Sequence[float],
    history: Sequence[int],
    params: SamplingParams,
    prompt_length: int = 0,
    eos: Collection[int] = (),
) -> list[float]:
    """Logits after biases, min_tokens and penalties."""
    row = [float(value) for value in logits]
    for token, bias in dict(params.logit_bias).items():
        row[token] = -math.inf if bias == -math.inf else row[token] + bias
    output = list(history[prompt_length:])
    if len(output) < params.min_tokens:
        for token in {*eos, *params.stop_token_ids}:
            row[token] = -math.inf
    for token in set(history):
        factor = params.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token)
        row[token] -= params.presence_penalty
    return row


def distribution(row: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """The probabilities of the tokens that are left, from processed logits."""
    scores = kept_scores(row, params)
    total = math.fsum(math.exp(score) for score in scores.values())
    return {token: math.exp(score) / total for token, score in scores.items()}


def kept_scores(row: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Log-probabilities, up to a constant, of the tokens that are left."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if params.temperature == 0:
        return {order[0]: 0.0}
    best = row[order[0]]
    if best == math.inf:
        scores = {t: 0.0 for t in order if row[t] == best}
    else:
        scores = {t: (row[t] - best) / params.temperature for t in order if row[t] > -math.inf}
    kept = sorted(scores, key=lambda token: (-scores[token], token))
    if params.min_p > 0:
        kept = [t for t in kept if scores[t] >= math.log(params.min_p)]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        total = math.fsum(math.exp(scores[t]) for t in kept)
        before, nucleus = 0.0, []
        for t in kept:
            if nucleus and before >= params.top_p * total:
                break
            nucleus.append(t)
            before += math.exp(scores[t])
        kept = nucleus
    return {t: scores[t] for t in kept}


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def key_of(*parts: int) -> int:
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (mix(state ^ part) + 0x9E3779B97F4A7C15) & MASK
    return mix(state)


def gumbel(seed: int, position: int, token: int) -> float:
    """The noise of ``match``: the first use is the choice."""
    bits = mix((key_of(1, seed, position) + (token + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11
    return -math.log(-math.log(max(bits, 0.5) * 2.0**-53))


def choose(row: Sequence[float], params: SamplingParams, seed: int, position: int) -> int:
    """argmax of log p + noise."""
    scores = kept_scores(row, params)
    return max(sorted(scores), key=lambda token: scores[token] + gumbel(seed, position, token))
