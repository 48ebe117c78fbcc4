"""How often the kit finds what is there, and what is not: a short run, a long one's record."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from foretell._verify import RULES
from foretell.check._planted import PLANTED

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts" / "soak"))

import check_power  # noqa: E402

RECORD = json.loads((ROOT / "scripts" / "soak" / "check_power.json").read_text("utf-8"))


@pytest.mark.parametrize("seed", range(100, 103))
def test_clean_runs_raise_no_alarm(seed):
    found = check_power.false_alarms([check_power.clean_run(seed)])
    assert found["alarms"] == []
    assert found["worst_exact_total_variation"] < 1e-12


def test_the_record_has_every_planted_error_and_found_them():
    pairs = {
        (error.name, rule.name)
        for error in PLANTED
        for rule in RULES.values()
        if error.applies_to(rule)
    }
    assert {(row["error"], row["rule"]) for row in RECORD["enumeration"]} == pairs
    for row in RECORD["enumeration"]:
        assert row["of"] >= 100
        assert row["found"] == row["of"] * row["is_error"], row


def test_the_document_says_what_the_record_says():
    page = (ROOT / "docs" / "losslessness.md").read_text("utf-8")
    assert check_power.table(RECORD) in page
