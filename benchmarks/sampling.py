"""What sampling costs per token, at the demo model's vocabulary.

    python benchmarks/sampling.py --output sampling.json

Times the target's choice alone on rows of 49152 logits, for each of several settings: with
`--model` on the model's own rows after a text, otherwise on made-up rows whose spread is like
theirs. Settings are measured in turns and the median over the rounds is reported. Times are of the
processor, not of the clock: the work has one thread, and others on the machine do not count (they
still take from the caches). The target is 5% of a step of the `cpu` backend in float32, which
`benchmarks/speed.py` measures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretell import Engine, Rows, SamplingParams, __version__
from foretell._logprobs import token_logprobs
from foretell._sampling import RequestSampler

VOCABULARY = 49_152
TARGET_SHARE = 0.05
TEXT = (
    "The lighthouse stood on a rock half a mile from the shore. Every evening the keeper climbed "
    "its two hundred and twelve steps, trimmed the lamp and wrote the weather into a book."
)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.3": {"temperature": 0.3},
    "temperature 100": {"temperature": 100.0},
    "temperature 1, top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "temperature 0.3, top_p 0.9": {"temperature": 0.3, "top_p": 0.9},
    "temperature 100, top_p 0.9": {"temperature": 100.0, "top_p": 0.9},
    "temperature 1, top_k 50": {"temperature": 1.0, "top_k": 50},
    "temperature 1, min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "temperature 0.7, top_k 40, top_p 0.9, min_p 0.05, all penalties": {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
    },
}


def made_up_rows(count: int) -> NDArray[np.float32]:
    """Normal logits of the spread of a language model's, with a few tokens ahead."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(count, VOCABULARY)) * 2.5
    for row in rows:
        row[rng.integers(0, VOCABULARY, 20)] += rng.uniform(5, 15, 20)
    return rows.astype(np.float32)


def model_rows(engine: Engine) -> tuple[NDArray[np.float32], float]:
    """The model's rows after every token of a text, and the seconds of a plain step."""
    tokens = engine.encode(TEXT)
    session = engine.model.new_session()
    rows = engine.model.forward([Rows(session, tokens)]).logits
    stats = engine.generate(TEXT, max_tokens=48, num_draft_tokens=0, ignore_eos=True).stats
    return np.array(rows), stats.decode_seconds / stats.num_steps


def seconds_per_token(rows: NDArray[np.float32], params: SamplingParams) -> float:
    """Mean over the rows, after a history of 500 tokens that grows by one at each."""
    sampler = RequestSampler(params, seed=1, prompt_length=100)
    history = [i % 997 for i in range(500)]
    sampler.choose(rows[0], history, len(history))
    began = time.thread_time()
    for row in rows:
        history.append(sampler.choose(row, history, len(history)))
    return (time.thread_time() - began) / len(rows)


def logprob_seconds(rows: NDArray[np.float32], count: int) -> float:
    began = time.thread_time()
    for row in rows:
        token_logprobs(row, 7, count)
    return (time.thread_time() - began) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", help="take the rows and the time of a step from this model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--step-seconds", type=float, default=0.020)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    load_before = os.getloadavg()[0]
    if options.model:
        rows, step = model_rows(Engine(options.model, threads=options.threads))
    else:
        rows, step = made_up_rows(32), options.step_seconds
    rounds: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, fields in SETTINGS.items():
            seconds = seconds_per_token(rows, SamplingParams(**fields))
            rounds.setdefault(name, []).append(seconds)
        rounds.setdefault("logprobs 0", []).append(logprob_seconds(rows, 0))
        rounds.setdefault("logprobs 20", []).append(logprob_seconds(rows, 20))
    medians = {name: statistics.median(values) for name, values in rounds.items()}
    record = {
        "foretell": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before_and_after": [load_before, os.getloadavg()[0]],
        "model": options.model,
        "vocab_size": rows.shape[1],
        "num_rows": len(rows),
        "step_seconds": step,
        "target_share": TARGET_SHARE,
        "median_seconds": medians,
        "share_of_step": {name: value / step for name, value in medians.items()},
        "rounds": rounds,
    }
    options.output.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    print(f"one step: {step * 1e3:.1f} ms")
    for name, value in medians.items():
        share = value / step
        verdict = "" if share <= TARGET_SHARE else "  above the target"
        print(f"{name:66} {value * 1e3:6.3f} ms  {share:6.1%}{verdict}")


if __name__ == "__main__":
    main()
