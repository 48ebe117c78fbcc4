"""The benchmark scripts that need torch still run: for a moment, on tiny models, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent)]

pytest.importorskip("torch", reason="needs: pip install torch")
transformers = pytest.importorskip("transformers", reason="needs: pip install transformers")

import foretell  # noqa: E402

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    root = Path(foretell.__file__).resolve().parent.parent
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


def test_the_gpu_script_runs_on_the_cpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    arguments = "--device cpu --random --rounds 1 --max-tokens 12 --output".split()
    ran = run("gpu.py", *arguments, output)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    written = json.loads(output.read_text("utf-8"))
    assert written["results"]["float32"]["exact"]
    assert all(answer["equal"] for answer in written["results"]["float32"]["answers"])
    assert len(written["results"]["bfloat16"]["answers"]) == 4
    assert str(tmp_path) not in output.read_text("utf-8")


def test_the_gpu_script_says_what_is_missing(tmp_path: Path) -> None:
    ran = run("gpu.py", "--output", tmp_path / "gpu.json")
    assert ran.returncode == 2
    assert "--model or --random" in ran.stderr


def test_the_comparison_with_transformers_runs(tmp_path: Path) -> None:
    import tiny_models
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tiny_models.make("llama", vocab_size=300, max_position_embeddings=1024).save_pretrained(
        tmp_path / "model"
    )
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path / "model")
    output = tmp_path / "record.json"
    arguments = "--rounds 1 --prompts 2 --max-tokens 8 --context 20 --draft-layers 1".split()
    ran = run(
        "transformers_backend.py", "--model", tmp_path / "model", *arguments, "--output", output
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    written = json.loads(output.read_text("utf-8"))
    assert written["targets"]["Foretell's tokens are equal"]
    assert written["results"]["pass_ms"]["foretell"]["8"] > 0
    assert str(tmp_path) not in output.read_text("utf-8")
