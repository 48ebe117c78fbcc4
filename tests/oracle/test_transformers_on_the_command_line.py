"""`foretell bench` and `tune` on a model of the transformers backend, early exit included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests")]

pytest.importorskip("torch", reason="needs: pip install torch")
pytest.importorskip("transformers", reason="needs: pip install transformers")

from families import tiny_checkpoint  # noqa: E402

from foretell import Engine  # noqa: E402
from foretell.bench._model_text import ModelText  # noqa: E402

QUICK = ["--max-tokens", "8", "--repetitions", "1", "--backend", "transformers"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "target"
    return str(tiny_checkpoint(folder, "llama", seed=1, tokenizer=True))


def foretell(*words: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "foretell", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "FORETELL_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_what_bench_reads_of_a_model_is_what_its_engine_has(model):
    text = ModelText.of(model, loading={"backend": "transformers"})
    engine = Engine(model, backend="transformers")
    assert text.stop_token_ids == engine.model.eos_token_ids
    assert text.max_length == engine.model.max_length
    assert text.prompt("red green", None) == engine.encode("red green")


def test_bench_measures_early_exit(model, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("red green red green\n")
    words = ["--model", model, "--raw", "--json", "--workload", str(prompts)]
    engines = ["--engine", "foretell:auto,drafters=early_exit", "--engine", "foretell"]
    ran = foretell("bench", *words, *QUICK, *engines, cache=tmp_path)
    assert ran.returncode == 0, ran.stderr
    record = json.loads(ran.stdout)
    assert {engine["mode"] for engine in record["engines"]} == {"plain", "auto"}
    assert len(record["engines"]) == 3
    assert len(record["outputs"]) == 1  # the same tokens


def test_tune_measures_early_exit(model, tmp_path):
    ran = foretell("tune", model, *QUICK, "--json", cache=tmp_path)
    assert ran.returncode == 0, ran.stderr
    tried = {setting["drafter"] for setting in json.loads(ran.stdout)["settings"]}
    assert "early_exit:1" in tried
