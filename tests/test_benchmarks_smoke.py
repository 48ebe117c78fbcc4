"""The benchmark scripts still run: on a tiny model, for a moment, whatever their numbers say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import foretell
from foretell._model import Rows
from foretell.backends.cpu._model import load
from foretell.bench._convert import converted

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A script as a person would run it."""
    root = Path(foretell.__file__).resolve().parent.parent
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "150"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The random model's script, at a sixteenth of its width and depth."""
    folder = tmp_path_factory.mktemp("random")
    for path in (folder / "tiny", folder / "tiny.gguf"):
        made = run("random_model.py", path, "--shrink", 16)
        assert made.returncode == 0, made.stderr
    return folder


def test_the_random_model_loads_in_both_formats(tiny):
    for path, dtype in ((tiny / "tiny", "bfloat16"), (tiny / "tiny.gguf", "native")):
        model = load(path, dtype=dtype, threads=1)
        assert model.config.num_heads == 32
        assert model.config.tied


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_a_converted_file_is_the_same_model_in_other_weights(tiny, tmp_path, kind):
    path = converted(tiny / "tiny.gguf", kind, tmp_path / "made")
    assert converted(tiny / "tiny.gguf", kind, tmp_path / "made") == path
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    own, other = (load(file, dtype="native", threads=1) for file in (tiny / "tiny.gguf", path))
    logits = [m.forward([Rows(m.new_session(), [1, 2, 3])]).logits for m in (own, other)]
    if kind == "F32":  # what the quantized numbers stand for, to the bit
        assert np.array_equal(*logits)
    else:
        assert np.allclose(*logits, atol=0.05 * float(np.abs(logits[0]).max()))


@pytest.fixture(scope="module")
def record(tiny, tmp_path_factory):
    output = tmp_path_factory.mktemp("record") / "kernels.json"
    arguments = "--threads 2 --rounds 2 --tries 1 --contexts 64 --attention-contexts 16,64".split()
    arguments += "--widths 1,4 --dtypes float32,native --prefill-tokens 130".split()
    arguments += "--buffer-bytes 4194304 --matrix-size 64".split()
    ran = run("kernels.py", "--model", tiny / "tiny.gguf", *arguments, "--output", output)
    assert ran.returncode == 0, ran.stderr
    return output


def test_kernels_measures_every_part(record):
    written = json.loads(record.read_text("utf-8"))
    results = written["results"]
    assert {entry["width"] for entry in results["passes"]} == {1, 4}
    assert {entry["dtype"] for entry in results["passes"]} == {"float32", "native"}
    assert all(entry["over_limit"] > 0 for entry in results["passes"])
    assert all(entry["samples"] == 2 for entry in results["passes"])
    assert results["attention"][0]["to"] == 64
    assert results["prefill"][0]["tokens_per_second"] > 0
    parts = results["profile"][0]["milliseconds"]
    assert parts["attention"] > 0
    assert not any(entry["undisturbed"] for entry in results["passes"])  # too few samples


def test_a_record_names_no_place_on_the_machine(record, tiny):
    text = record.read_text("utf-8")
    assert str(tiny) not in text
    assert str(record.parent) not in text
    assert "python benchmarks/kernels.py" in text


def test_records_are_taken_together(record, tmp_path):
    output = tmp_path / "both.json"
    ran = run("kernels.py", "--merge", record, record, "--output", output)
    assert ran.returncode == 0, ran.stderr
    both = json.loads(output.read_text("utf-8"))
    assert len(both["runs"]) == 2
    assert {entry["samples"] for entry in both["results"]["passes"]} == {4}


def test_an_unknown_part_is_refused():
    ran = run("kernels.py", "--parts", "passes,rest")
    assert ran.returncode == 2
    assert "'rest' is none of passes" in ran.stderr


def test_llama_cpp_is_left_out_with_the_command_that_installs_it(tiny, tmp_path):
    """Whether or not it is there: this Python is told not to find any library."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n', "utf-8")
    python.chmod(0o755)
    arguments = ["--widths", "q4_1", "--llama-cpp-python", python]
    ran = run("llama_cpp.py", "--model", tiny / "tiny.gguf", *arguments)
    assert ran.returncode == 0, ran.stderr
    assert "q4_1 is left out" in ran.stdout
    assert "pip install --no-binary llama-cpp-python" in " ".join(ran.stdout.split())


def test_never_slower_goes_on_where_it_ended(tmp_path):
    questions = tmp_path / "questions.jsonl"
    entry = {"question_id": 1, "category": "qa", "turns": ["who?", "why?"]}
    other = {"question_id": 2, "category": "writing", "turns": ["Say it, say it, say it again."]}
    questions.write_text(json.dumps(entry) + "\n" + json.dumps(other) + "\n", "utf-8")
    output = tmp_path / "record.json"
    arguments = ["--questions", questions, "--output", output, "--dtypes", "native"]
    arguments += "--per-category 1 --hostile-questions 1 --max-tokens 6 --repetitions 2".split()
    first = run("never_slower.py", *arguments, "--minutes", 0)
    assert first.returncode == 0, first.stderr
    assert json.loads(output.read_text("utf-8"))["samples"] == []
    ran = run("never_slower.py", *arguments)
    assert ran.returncode == 0, ran.stderr
    record = json.loads(output.read_text("utf-8"))
    assert len(record["slices"]) == 2
    assert len(record["samples"]) == 2 * 5
    assert all(sample["equal"] for sample in record["samples"])
    workloads = [entry["workload"] for entry in record["results"]]
    assert {"qa", "mt_bench", "random text", "wrong drafter", "slow drafter"} <= {*workloads}
    wrong = [s for s in record["samples"] if s["workload"] == "wrong drafter"]
    assert all(sample["accepted"] == 0 for sample in wrong)
    assert str(tmp_path) not in output.read_text("utf-8")
    again = run("never_slower.py", *arguments[:-1], 3)
    assert again.returncode != 0
    assert "other settings" in again.stderr
