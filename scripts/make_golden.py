"""Compute the logits that `tests/test_golden.py` compares with, using transformers.

    pip install torch transformers
    python scripts/make_golden.py

For each family of `tests/families.py` and each storage type the checkpoint is
written as one file and as shards, in the classic and the modern style of
`config.json`, loaded by transformers and run in float32 over fixed tokens. The
four must agree bit for bit; their logits go to `tests/golden/FAMILY-DTYPE.npz`.

Before anything is stored the script checks that the logits are worth comparing
with: no weight was left out or made up by transformers, every tensor moves the
logits visibly, the logits spread over several units and the gaps between the
first and second choice are no near-ties.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from families import FAMILIES, checkpoint_digest, write_checkpoint  # noqa: E402

SEED = 7
SHARDS = 3
DTYPES = ("float32", "bfloat16")
# Past the original context where the positions are scaled (32 and 64 positions).
LENGTHS = {"llama-linear-rope": 56, "llama-llama3-rope": 96}
STORED_ROWS = 24


def load(folder: Path) -> transformers.PreTrainedModel:
    """The checkpoint in float32, or an error if any weight is not the file's."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {key: value for key, value in info.items() if value}
    # A tied model has no lm_head of its own, and transformers may list it as missing.
    if model.config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight:
        missing = set(problems.get("missing_keys", ())) - {"lm_head.weight"}
        problems["missing_keys"] = missing
    if any(problems.values()):
        raise SystemExit(f"transformers did not take {folder.name} as it is: {problems}")
    return model.eval()


@torch.inference_mode()
def logits_of(model: transformers.PreTrainedModel, tokens: NDArray[np.int64]) -> torch.Tensor:
    return model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].clone()


@torch.inference_mode()
def weakest_tensor(
    model: transformers.PreTrainedModel, tokens: NDArray[np.int64], logits: torch.Tensor
) -> tuple[float, str]:
    """The tensor whose values matter least, and how far its loss moves the logits.

    Reversing a tensor's elements keeps their distribution, so a change of the
    logits means that each value is where it should be.
    """
    changes = []
    for name, parameter in model.named_parameters():
        saved = parameter.clone()
        parameter.copy_(saved.flatten().flip(0).reshape(saved.shape))
        changes.append(((logits_of(model, tokens) - logits).abs().max().item(), name))
        parameter.copy_(saved)
    return min(changes)


def make(family: str, dtype: str, output: Path) -> None:
    config = FAMILIES[family]
    length = LENGTHS.get(family, STORED_ROWS)
    tokens = np.random.PCG64(SEED).random_raw(length) % np.uint64(config["vocab_size"])
    tokens = tokens.astype(np.int64)
    results = []
    for shards in (1, SHARDS):
        for style in ("classic", "modern"):
            with tempfile.TemporaryDirectory() as temporary:
                folder = write_checkpoint(
                    Path(temporary) / family,
                    config,
                    seed=SEED,
                    dtype=dtype,
                    shards=shards,
                    config_style=style,
                )
                model = load(folder)
                results.append(logits_of(model, tokens))
    logits = results[0]
    if not all(torch.equal(logits, other) for other in results):
        raise SystemExit(f"{family}: one file, shards or config styles differ in transformers")

    change, name = weakest_tensor(model, tokens, logits)
    first, second = logits.topk(2).values.T
    gaps = first - second
    spread = logits.std(dim=-1).min().item()
    if change < 0.05 or spread < 1.0 or gaps.median().item() < 0.05:
        raise SystemExit(f"{family}: {name} moves logits by {change}, spread {spread}, gaps {gaps}")

    # The last rows: they lie past the original context where there is one.
    rows = np.arange(length)[-STORED_ROWS:]
    path = output / f"{family}-{dtype}.npz"
    np.savez_compressed(
        path,
        tokens=tokens,
        rows=rows,
        logits=logits.numpy()[rows],
        about=json.dumps(
            {
                "seed": SEED,
                "shards": SHARDS,
                "digest": checkpoint_digest(config, seed=SEED, dtype=dtype),
                "torch": torch.__version__.partition("+")[0],
                "transformers": transformers.__version__,
            }
        ),
    )
    print(
        f"{path.name:32} {path.stat().st_size / 1024:5.0f} KiB  spread {spread:.2f}  "
        f"median gap {gaps.median().item():.2f}  weakest tensor {change:.2f} ({name})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "golden")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    # One thread: more can change the last bits from run to run.
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for family in FAMILIES:
        for dtype in DTYPES:
            make(family, dtype, output)


if __name__ == "__main__":
    main()
