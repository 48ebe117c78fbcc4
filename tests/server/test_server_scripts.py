"""The soak and the benchmark of the server, for a moment, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from families import tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tiny_checkpoint(tmp_path_factory.mktemp("served"), "llama", tokenizer=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_short_soak_finds_the_same_tokens(model, tmp_path):
    record = tmp_path / "soak.json"
    ran = run(
        "scripts/soak/server_soak.py", "--model", model, "--minutes", 0.05, "--clients", 8,
        "--requests", 6, "--leaving", 0.3, "--output", record,
    )  # fmt: skip
    found = json.loads(record.read_text())
    assert found["complete_answers"] > 8
    assert found["differences"] == []
    # Memory settles in the first seconds, which are all there are here.
    assert ran.returncode == 0 or found["memory_growth_after_warm_up"] > 0, ran.stderr


def test_the_benchmark_compares_tokens_and_speeds(model, tmp_path):
    record = tmp_path / "server.json"
    ran = run(
        "benchmarks/server.py", "--model", model, "--rounds", 2, "--requests", 4, "--clients", 4, 6,
        "--references", 1, "--max-tokens", 6, "--output", record,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(record.read_text())
    assert found["different_answers"] == 0
    assert len(found["runs"]) == 2 * 2 * 2 + 1
    assert [load["clients"] for load in found["loads"]] == [4, 6]
    for load in found["loads"]:
        assert len(load["rates"]) == 3
        assert all(rate > 0 for rate in load["rates"].values())
        assert len(load["ratios"]["batching, speculation / batching"]["rounds"]) == 2
        assert len(load["ratios"]["batching, speculation / one at a time, plain"]["rounds"]) == 1
