"""Records that are checked, and what is said of them."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest
from fake_bench import foretell_peer, plan, spec

from foretell import InputError
from foretell._extras import install_command
from foretell.bench._html import html
from foretell.bench._markdown import markdown, table, tables
from foretell.bench._record import (
    ENGINE,
    REQUEST,
    TOP,
    check_places,
    load,
    problem_with,
    save,
    write,
)
from foretell.bench._results import results_of
from foretell.bench._run import Run
from foretell.cli._terminal import visible

DOCUMENT = (Path(__file__).resolve().parent.parent / "docs" / "json.md").read_text("utf-8")
PASSES = {
    "dtype": "native",
    "context": 64,
    "bytes_per_second": 1e9,
    "operations_per_second": 1e9,
    "widths": [
        {"width": 1, "seconds": 0.002, "limit_seconds": 0.001},
        {"width": 4, "seconds": 0.003, "limit_seconds": 0.002},
    ],
    "parts": [{"width": 1, "seconds": {"attention": 0.001, "head": 0.001}}],
}


@pytest.fixture(scope="module")
def record():
    engines = [spec("foretell", "plain"), spec("foretell", "3")]
    run = Run(
        plan(*engines, repetitions=2), lambda specs: foretell_peer(), lambda *told: None, bool
    )
    run.record["command"] = "foretell bench | tee"
    run.record["model"] = {"source": "a <table>", "hash": None, "draft": None}
    made = run.run()
    made["passes"] = [PASSES]
    made["skipped"] = [{"name": "openvino native plain", "reason": "pip install openvino-genai"}]
    return made


@pytest.mark.parametrize("name", sorted({*TOP, *ENGINE, *REQUEST}))
def test_every_field_of_a_record_is_documented(name):
    assert re.search(rf"`{name}`", DOCUMENT[DOCUMENT.index("# The record") :]), name


def test_a_record_survives_saving(record, tmp_path):
    path = tmp_path / "bench.json"
    save(record, path)
    assert load(path) == record
    assert [file.name for file in tmp_path.iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r.pop("engines"), "engines is missing"),
        (lambda r: r.update(format="other/2"), "its format is 'other/2'"),
        (lambda r: r["requests"][0].pop("decode_seconds"), "requests[0].decode_seconds is missing"),
        (lambda r: r["requests"][0].update(decode_seconds="1"), "requests[0].decode_seconds is"),
        (lambda r: r["requests"][0].update(decode_seconds=-1), "negative"),
        (lambda r: r["requests"][0].update(turn=True), "requests[0].turn is 'True'"),
        (lambda r: r["requests"][0].update(engine="other"), "not listed"),
        (lambda r: r["requests"][0].update(output=99), "none of the outputs"),
        (lambda r: r["engines"].append(r["engines"][0]), "the same name"),
        (lambda r: r["engines"].append(1), "engines[2] is not an object"),
        (lambda r: r["settings"].pop("threads"), "settings.threads is missing"),
        (lambda r: r["load_average"].clear(), "load_average.before is missing"),
        (lambda r: r["skipped"].append({"name": "x"}), "skipped[1].reason is missing"),
        (lambda r: r["passes"][0].pop("parts"), "passes[0].parts is missing"),
        (lambda r: r["passes"][0]["widths"][1].clear(), "passes[0].widths[1].width is missing"),
        (lambda r: r["passes"][0]["widths"].clear(), "passes[0].widths has no times"),
        (lambda r: r["passes"][0]["widths"][0].update(seconds=0), "passes[0].widths has no times"),
        (lambda r: r["passes"][0]["parts"][0]["seconds"].update(head="x"), "passes[0].parts has"),
        (lambda r: r["outputs"].append(7), "is neither tokens nor a text"),
        (lambda r: r["outputs"].append([1.5]), "is neither tokens nor a text"),
        (lambda r: r["load_average"].update(before=[]), "load_average.before is empty"),
        (lambda r: r["requests"][0].update(decode_seconds=1e-300), "too short for any answer"),
        (lambda r: r["requests"][0].update(decode_tokens=-1), "negative"),
        (lambda r: r["requests"][0].update(num_tokens=10**400), "requests[0].num_tokens is 1"),
        (lambda r: r["requests"][0]["stats"].update(num_steps="x"), "stats.num_steps is 'x'"),
        (
            lambda r: r["requests"][0]["stats"].update(num_accepted_tokens_per_pos=3),
            "num_accepted_tokens_per_pos is no list",
        ),
        (lambda r: r["machine"].update(ram=[{"x": 1e300}]), "machine.ram[0].x is 1e+300"),
    ],
)
def test_what_is_no_record_is_refused_with_the_place(record, tmp_path, change, says):
    damaged = json.loads(json.dumps(record))
    change(damaged)
    assert says in problem_with(damaged)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(damaged), "utf-8")
    with pytest.raises(InputError, match="no record of foretell bench"):
        load(path)


def test_files_that_are_no_json_are_refused(tmp_path):
    path = tmp_path / "bad.json"
    for text in ("", "{", "[" * 100_000, '{"seconds": NaN}', '{"seconds": ' + "9" * 5000 + "}"):
        path.write_text(text, "utf-8")
        with pytest.raises(InputError, match="no JSON"):
            load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="no JSON"):
        load(path)
    with pytest.raises(InputError, match="cannot read"):
        load(tmp_path / "none.json")


def test_the_report_has_every_table(record):
    said = markdown(results_of(record))
    for heading in (
        "Engines",
        "Tokens per second of decoding",
        "Speed of decoding over own plain decoding",
        "Tokens per second with reading the prompt",
        "Acceptance",
        "Where the time of a step goes",
        "Passes against the limit",
    ):
        assert f"## {heading}" in said, heading
    assert "0 of 4" in said
    assert "skipped: openvino native plain: pip install openvino-genai" in said
    assert re.search(r"\| native +\| 4 +\| 3.0 +\| 1.50 +\| 2.0 +\| 1.50", said)


def test_tables_without_rows_are_left_out(record):
    plain = json.loads(json.dumps(record))
    plain["engines"] = plain["engines"][:1]
    plain["requests"] = [r for r in plain["requests"] if r["engine"] == "foretell plain"]
    plain["passes"] = []
    said = markdown(results_of(plain))
    assert "## Engines" in said
    for heading in ("over own plain", "Acceptance", "Passes against"):
        assert heading not in said.replace("over own plain |", ""), heading
    for heading, rows in tables(results_of(plain)):
        assert len(rows) > 1, heading


def test_a_table_that_is_too_wide_is_shown_in_parts(record):
    results = results_of(record)
    whole, narrow = markdown(results), markdown(results, 60)
    lines = [line for line in narrow.splitlines() if line.startswith("|")]
    assert max(map(len, lines)) <= 60
    assert markdown(results, 1000) == whole
    assert _words(whole) == _words(narrow)


def _words(text):
    return set(re.findall(r"[^|\s-][^|]*?(?= *\|)", text))


def test_what_was_disturbed_is_said_only_where_something_was(record):
    quiet = json.loads(json.dumps(record))
    for request in quiet["requests"]:
        request["waiting"] = 0.0
    said = markdown(results_of(quiet))
    assert "others had the machine" not in said
    assert "do not trust" not in said
    assert "3 questions, at most 24 tokens, greedy, 1 thread, 2 repetitions" in said
    for request in quiet["requests"]:
        request["waiting"] = 0.5
    busy = results_of(quiet)
    said = markdown(busy)
    assert "- **machine busy: do not trust these numbers**\n" in said
    assert "up to 100% of an engine's answers" in said
    assert "left out: 0" not in said
    assert "<strong>machine busy: do not trust these numbers</strong>" in html([busy])


def test_the_facts_name_who_began_with_a_saved_profile(record):
    told = json.loads(json.dumps(record))
    assert [engine["profile"] for engine in told["engines"]] == [None, "none"]
    assert "began without a profile: foretell 3" in markdown(results_of(told))
    told["engines"][1]["profile"] = "used"
    assert "began with the profile saved on this machine: foretell 3" in markdown(results_of(told))
    for engine in told["engines"]:  # as in records of earlier versions
        del engine["profile"]
    assert problem_with(told) is None
    assert "profile" not in markdown(results_of(told))


def test_a_table_is_aligned_and_harmless():
    assert table([["a", "b|c"], ["12", "x\ny"]]) == ("| a  | b\\|c |\n|----|------|\n| 12 | x y  |")


def test_the_page_needs_nothing_from_outside_and_has_every_plot(record):
    page = html([results_of(record)])
    assert page.count("<svg") == 6
    for heading in ("Accepted tokens at each position", "T(k)", "Where the time of a pass goes"):
        assert heading in page
    assert "a &lt;table&gt; on made up" in page
    assert "<table> on" not in page
    outside = re.findall(r'(?:src|href)="(?!#)[^"]*"|url\((?!#)[^)]*\)|@import|<script', page)
    assert outside == []


HOSTILE = (
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "]]><metadata>",
    r"$\frac{1}{$ and $",
    "_hidden in legends",
    "half \ud800 a character, \x1b[2J \x00",
    "a `tick` and | and\na line",
    "long " * 200,
    "",
)


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_names_are_text_whatever_is_in_them(record, tmp_path, text):
    """Of models, questions, engines, parts: they come from files that others may have made."""
    made = json.loads(json.dumps(record))
    names = [f"{text} {index}" for index in range(2)]
    for engine, name in zip(made["engines"], names, strict=True):
        for request in made["requests"]:
            if request["engine"] == engine["name"]:
                request["engine"] = name
        engine.update(name=name, plain=names[0])
    for request in made["requests"]:
        request.update(category=text, question=text + request["question"])
    made["model"]["source"] = made["workload"]["name"] = made["command"] = made["started"] = text
    made["machine"]["cpu"] = made["settings"]["sampling"] = made["passes"][0]["dtype"] = text
    made["passes"][0]["parts"][0]["seconds"] = {text: 0.1}
    for name in ("skipped", "left_out", "failures"):
        made[name] = [dict.fromkeys(("name", "reason", "question", "engine", "error"), text)]
    path = tmp_path / "record.json"
    save(made, path)
    results = [results_of(load(path))]
    write(html(results), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.count("<svg") == 6
    assert page.count("<style") == 7
    assert not re.search("<(script|img|svg onload|metadata)", page)
    visible(markdown(results[0])).encode()


def test_results_never_take_the_place_of_something_else(tmp_path):
    record, page = tmp_path / "record.json", tmp_path / "page.html"
    check_places([record, page, None], [None])
    for written, read in (([record, record], []), ([page], [record, page])):
        with pytest.raises(InputError, match="would be overwritten"):
            check_places(written, read)
    os.mkfifo(tmp_path / "pipe")
    check_places([tmp_path / "pipe"] * 2, [])
    reader = threading.Thread(target=lambda: said.append((tmp_path / "pipe").read_text("utf-8")))
    said: list[str] = []
    reader.start()
    write("hello", tmp_path / "pipe")
    reader.join()
    assert said == ["hello"]
    assert (tmp_path / "pipe").is_fifo()


def test_the_page_is_the_same_every_time(record):
    assert html([results_of(record)]) == html([results_of(record)])


def test_without_matplotlib_the_page_names_the_command(record, monkeypatch):
    import sys

    from foretell import MissingExtraError

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("bench"))):
        html([results_of(record)])


def test_an_interrupted_record_reports_what_is_complete(record):
    part = json.loads(json.dumps(record))
    part["interrupted"] = True
    part["requests"] = part["requests"][:3]
    results = results_of(part)
    assert results.questions == 1
    assert "**interrupted**" in markdown(results)
    part["requests"] = []
    assert "Nothing was measured" in markdown(results_of(part))
    assert "Nothing was measured" in html([results_of(part)])


def test_numbers_for_machines_are_those_of_the_tables(record):
    results = results_of(record)
    told = results.to_dict()
    assert told["engines"][1]["decode"]["overall"][0] == results.engines[1].decode["overall"].value
    assert told["engines"][1]["differing"] == 0
