"""Equality and speed of the transformers backend on one GPU, in under five minutes.

    python benchmarks/gpu.py --model FOLDER_OR_NAME --output gpu.json

Needs torch and transformers. For each weight type: how far a pass of 1 to 33 tokens is from single
steps; whether speculation gives the tokens of plain decoding, greedy and sampled, and where it does
not, whether a near-tie was counted before; the ratio of plain and speculative time, in turns; and
how often the host waited for the device in a step (one read of the logits is expected).

`--device cpu --random` runs the same on a tiny random model, to see that the script works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from foretell import Engine, Rows
from foretell.backends.transformers import TransformersModel
from foretell.bench._machine import command_line, machine, versions

BUDGET = 270  # seconds, after which no new part is begun
PROMPTS = (
    "The ferry leaves the harbour at nine. It arrives at ten. The ferry leaves the harbour at",
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n",
    "Once upon a time, in a village by the sea,",
    "1, 1, 2, 3, 5, 8, 13,",
)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 11},
}


def load(options: argparse.Namespace, dtype: torch.dtype) -> tuple[Any, list[list[int]]]:
    """The model on its device, and prompts in its tokens."""
    if options.random:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
            initializer_range=0.2, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        prompts = [[5, 17, 42, 9, 5, 17, 42, 8, 5, 17], [60, 61, 62, 60, 61]]
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    return model.eval().to(options.device), prompts


def waits_per_step(model: TransformersModel, prompt: list[int]) -> float | None:
    """How often the host waits for the device in a step of 4 tokens; None on the CPU."""
    if model.device.type != "cuda":
        return None
    session = model.new_session()
    model.forward([Rows(session, prompt, logits="none")])
    session.keep(range(len(prompt)))
    steps = 8
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(steps):
                model.forward([Rows(session, prompt[:4])])
                session.keep([0, 1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in seen) / steps


def measure(options: argparse.Namespace, dtype: torch.dtype, deadline: float) -> dict[str, Any]:
    """Everything for one weight type."""
    loaded, prompts = load(options, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = Engine(loaded)
    model = engine.model
    assert isinstance(model, TransformersModel)
    found: dict[str, Any] = {
        "exact": model.exact,
        "exactness": model.exactness,
        "near_tie_gap": model.near_tie_gap,
        "trees": model.capabilities.tree,
        "host_waits_per_step": waits_per_step(model, prompts[0]),
        "answers": [],
    }
    ratios: list[float] = []
    for name, setting in SETTINGS.items():
        for prompt in prompts:
            if time.perf_counter() > deadline:
                found["stopped_early"] = True
                break
            fields = {"max_tokens": options.max_tokens, "ignore_eos": True, **setting}
            times: dict[Any, list[float]] = {0: [], "auto": []}
            tokens: dict[Any, list[int]] = {}
            near_ties = 0
            for _ in range(options.rounds + 1):  # the first one warms up
                for length in times:
                    start = time.perf_counter()
                    result = engine.generate(prompt, num_draft_tokens=length, **fields)
                    times[length].append(time.perf_counter() - start)
                    tokens[length] = result.token_ids
                    near_ties = max(near_ties, result.stats.num_near_ties or 0)
            plain, drafted = (statistics.median(times[length][1:]) for length in times)
            ratios.append(plain / drafted)
            same = tokens[0] == tokens["auto"]
            found["answers"].append(
                {
                    "setting": name,
                    "equal": same,
                    "near_ties": near_ties,
                    "as_promised": same or (not model.exact and near_ties > 0),
                    "plain_over_speculative": plain / drafted,
                    "tokens_per_second": options.max_tokens / drafted,
                }
            )
    found["plain_over_speculative"] = statistics.median(ratios) if ratios else None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add_argument("--random", action="store_true", help="a tiny random model instead")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if (options.model is None) != options.random:
        parser.error("give either --model or --random")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device; --device cpu --random tries the script out")
    started = time.perf_counter()
    results = {
        name: measure(options, getattr(torch, name), started + BUDGET)
        for name in options.dtypes.split(",")
    }
    cuda = options.device.startswith("cuda")
    record = {
        "command": command_line("benchmarks/gpu.py", sys.argv[1:], ["--output"]),
        "machine": machine(),
        "device": torch.cuda.get_device_name() if cuda else options.device,
        "versions": {
            **versions(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "seconds": time.perf_counter() - started,
        "results": results,
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    for name, found in results.items():
        print(f"{name}: {found['exactness']}")
        kept = sum(answer["as_promised"] for answer in found["answers"])
        equal = sum(answer["equal"] for answer in found["answers"])
        print(f"  {equal} of {len(found['answers'])} answers equal, {kept} as promised")
        print(f"  plain over speculative time {found['plain_over_speculative']:.2f}")
        print(f"  host waits in a step: {found['host_waits_per_step']}")
    kept = all(a["as_promised"] for found in results.values() for a in found["answers"])
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
