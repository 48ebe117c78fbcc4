"""What the target says, from the definitions alone: nothing of the decoder is used here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from foretell._model import FloatArray
from foretell._noise import Floats
from foretell._sampling import SamplingParams
from foretell.check._worlds import softmax

Tokens = tuple[int, ...]


def logits_after(table: FloatArray, history: Sequence[int]) -> Floats:
    """The row of a table after the last tokens of a history; before it counts as token 0."""
    order = table.ndim - 1
    row: Floats = table[tuple([0] * order + list(history))[-order:]].astype(np.float64)
    return row


def next_token(
    table: FloatArray,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Sequence[int] = (),
) -> Floats:
    """The distribution of the next token after all processors, (vocab_size,).

    Written for rows without ties; only the parameters that the exact tests use.
    """
    row = logits_after(table, [*prompt, *output])
    for token, bias in dict(params.logit_bias).items():
        row[token] += bias
    if len(output) < params.min_tokens:
        for token in (*eos_token_ids, *params.stop_token_ids):
            row[token] = -math.inf
    for token in set(prompt) | set(output):
        penalty = params.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in set(output):
        row[token] -= params.presence_penalty
        row[token] -= params.frequency_penalty * list(output).count(token)
    if params.temperature == 0:
        one_hot = np.zeros(len(row))
        one_hot[int(np.argmax(row))] = 1.0
        return one_hot
    p = softmax(row / params.temperature)
    order = np.argsort(-p, kind="stable")
    kept = np.zeros(len(p), np.bool_)
    before = 0.0
    for rank, token in enumerate(order):
        if (params.top_k > 0 and rank >= params.top_k) or before >= params.top_p:
            break
        kept[token] = True
        before += float(p[token])
    p = np.where(kept, p, 0.0)
    result: Floats = p / p.sum()
    return result


def joint(
    table: FloatArray,
    prompt: Sequence[int],
    params: SamplingParams,
    eos_token_ids: Sequence[int] = (),
) -> dict[Tokens, float]:
    """The probability of every output of at most ``max_tokens`` tokens."""
    assert params.max_tokens is not None
    found: dict[Tokens, float] = {}
    open_ones: list[tuple[Tokens, float]] = [((), 1.0)]
    while open_ones:
        output, probability = open_ones.pop()
        p = next_token(table, prompt, output, params, eos_token_ids)
        for token in np.flatnonzero(p):
            whole = (*output, int(token))
            chance = probability * float(p[token])
            if len(whole) == params.max_tokens or token in (*eos_token_ids, *params.stop_token_ids):
                found[whole] = chance
            else:
                open_ones.append((whole, chance))
    return found
