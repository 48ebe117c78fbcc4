"""`foretell bench` and its report as commands; one run with a real process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from demo import demo_file
from fake_bench import foretell_peer, text
from test_cli_terminal import environment

from foretell.bench._record import load
from foretell.cli import _bench


@pytest.fixture
def bench(run, monkeypatch):
    """The command with engines of this process in the place of others."""

    def bench(*arguments, peer=None, make=None, **settings):
        monkeypatch.setattr(_bench, "text_of", lambda places, progress: text())
        monkeypatch.setattr(_bench, "hash_of", lambda source: "sha256:12")
        monkeypatch.setattr(
            _bench, "make_peer", make or (lambda specs, places: peer or foretell_peer(**settings))
        )
        return run("bench", *arguments)

    return bench


def test_the_quick_look_compares_plain_and_auto(bench):
    ran = bench("--max-tokens", "20", "--repetitions", "2")
    assert ran.code == 0, ran.err
    assert "# demo on built-in" in ran.out
    assert "| foretell native auto " in ran.out
    assert "0 of 7" in ran.out
    assert ran.err == ""


def test_the_record_is_kept_and_reported_again(bench, run, tmp_path):
    path, page = tmp_path / "r.json", tmp_path / "r.html"
    ran = bench("--max-tokens", "20", "--repetitions", "1", "--output", str(path))
    record = load(path)
    assert record["model"] == {"source": "demo", "hash": "sha256:12", "draft": None}
    assert record["command"].startswith("foretell bench --max-tokens 20")
    assert "/" not in record["command"]
    assert record["settings"]["sampling"] == "greedy"
    again = run("bench", "report", str(path), str(path), "--html", str(page))
    assert again.code == 0, again.err
    assert again.out == ran.out + "\n" + ran.out
    assert page.read_text("utf-8").count("<h1>") == 2
    numbers = json.loads(run("bench", "report", "--json", str(path)).out)
    assert numbers[0]["engines"][1]["name"] == "foretell native auto"


def test_json_is_the_record(bench):
    record = json.loads(bench("--max-tokens", "20", "--repetitions", "1", "--json").out)
    assert record["format"] == "foretell-bench/1"
    assert not record["interrupted"]


def test_a_workload_is_read_and_cut(bench, tmp_path):
    path = tmp_path / "questions.jsonl"
    lines = [
        {"question_id": n, "category": "qa" if n % 2 else "rag", "turns": ["fox"]} for n in range(6)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    options = ["--max-tokens", "8", "--repetitions", "1", "--json", "--workload", str(path)]
    assert json.loads(bench(*options).out)["workload"]["questions"] == 6
    cut = json.loads(bench(*options, "--per-category", "2", "--category", "qa").out)
    assert cut["workload"]["categories"] == {"qa": 2}


def test_an_output_that_differs_is_an_exit_code_of_its_own(bench):
    ran = bench("--engine", "foretell:3", "--max-tokens", "20", "--repetitions", "1", faulty=True)
    assert ran.code == 1
    assert "gave other tokens than plain decoding" in ran.err


def test_ctrl_c_keeps_what_was_measured(bench, tmp_path):
    path = tmp_path / "r.json"
    options = ["--engine", "foretell:plain", "--max-tokens", "20", "--repetitions", "50"]
    ran = bench(*options, "--output", str(path), peer=foretell_peer(interrupt_at=100))
    assert ran.code == 130
    assert "**interrupted**" in ran.out
    record = load(path)
    assert record["interrupted"]
    assert 3 <= len(record["requests"]) < 7


def test_a_failure_nobody_thought_of_keeps_what_was_measured(bench, tmp_path):
    peer, path = foretell_peer(), tmp_path / "r.json"
    ask = peer.ask

    def failing(request):
        if len(peer.asked) == 5:
            raise RuntimeError("nobody thought of this")
        return ask(request)

    peer.ask = failing
    ran = bench("--engine", "foretell:plain", "--output", str(path), peer=peer)
    assert ran.code == 2
    assert "nobody thought of this" in ran.err
    record = load(path)
    assert record["interrupted"]
    assert len(record["requests"]) == 4


def test_a_record_that_cannot_be_kept_is_shown_all_the_same(bench, tmp_path, monkeypatch):
    def full(*arguments):
        raise _bench.InputError("cannot write it: no space left on device")

    monkeypatch.setattr(_bench, "save", full)
    ran = bench("--max-tokens", "5", "--output", str(tmp_path / "r.json"))
    assert ran.code == 2
    assert "no space left" in ran.err
    assert "## Engines" in ran.out


def test_nothing_measured_is_an_error_that_says_why(bench):
    peer = foretell_peer()
    peer.start = lambda: (_ for _ in ()).throw(_bench.InputError("no such thing"))
    ran = bench(peer=peer)
    assert ran.code == 2
    assert "nothing was measured (foretell native plain: no such thing" in ran.err


def test_an_engine_that_was_asked_for_and_gave_nothing_is_an_error(bench):
    """Its plain companion, which nobody asked for, is no result of it."""

    def make(specs, places):
        if specs[0].drafters:
            raise _bench.InputError("it has no such layers")
        return foretell_peer()

    options = ["--max-tokens", "8", "--repetitions", "1"]
    word = "foretell:auto,drafters=early_exit"
    ran = bench(*options, "--engine", word, make=make)
    assert ran.code == 2
    assert f"no result of --engine {word} (foretell native auto early_exit: it has no" in ran.err
    assert "| foretell native plain " in ran.out
    ran = bench(*options, "--engine", "foretell", "--engine", word, make=make)
    assert (ran.code, "no result of --engine foretell:auto,drafters" in ran.err) == (2, True)
    assert bench(*options, "--engine", "foretell", make=make).code == 0


def test_the_backend_reaches_foretell(bench):
    seen = []

    def make(specs, places):
        seen.append(places.loading)
        return foretell_peer()

    options = ["--max-tokens", "8", "--repetitions", "1"]
    bench(*options, "--backend", "transformers", "--no-exact", "--device", "cpu", make=make)
    expected = {"backend": "transformers", "device": "cpu", "exact": False}
    assert expected.items() <= seen[0].items()


def test_a_narrow_terminal_gets_narrow_tables(bench, monkeypatch):
    monkeypatch.setattr(_bench, "screen_width", lambda: 80)
    ran = bench("--max-tokens", "20", "--repetitions", "1")
    rows = [line for line in ran.out.splitlines() if line.startswith("|")]
    assert max(map(len, rows)) <= 80
    assert sum(row.startswith("| engine ") for row in rows) > ran.out.count("\n## ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vllm"], "unknown engine 'vllm'"),
        (["--workload", "/nowhere.txt"], "cannot read /nowhere.txt"),
        (["--output", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--html", "/"], "is a folder"),
        (["--category", "poems"], "has no category poems"),
        (["--top-p", "0.5"], "changes nothing at temperature 0"),
        (["--threads", "100000"], "threads is 100000"),
        (["report", "/nowhere.json"], "cannot read /nowhere.json"),
    ],
)
def test_what_cannot_run_says_so_before_any_work(bench, arguments, message):
    ran = bench(*arguments)
    assert ran.code == 2
    assert message in ran.err
    assert ran.out == ""


def test_sampling_is_what_the_options_say(bench):
    told = bench("--temperature", "0.7", "--top-k", "5", "--repetitions", "1", "--json")
    sampling = json.loads(told.out)["settings"]["sampling"]
    assert sampling == {"temperature": 0.7, "top_k": 5, "seed": 0}


def test_places_on_the_machine_stay_out_of_the_record():
    words = ["bench", "--model", "/a/b/m.gguf", "--output=/c/d.json", "--engine", "foretell"]
    expected = "foretell bench --model m.gguf --output=d.json --engine foretell"
    assert _bench.command_line(words) == expected


def test_a_real_process_on_the_demo_model(tmp_path):
    """The whole way once: the command, its own process for the engine, the record."""
    path = tmp_path / "r.json"
    command = [sys.executable, "-m", "foretell", "bench", "--model", str(demo_file())]
    command += ["--category", "rewriting", "--per-category", "1", "--max-tokens", "8"]
    command += ["--repetitions", "1", "--output", str(path), "--engine", "foretell"]
    command += ["--engine", "llama.cpp:plain", "--llama-server", "/nowhere/llama-server"]
    ran = subprocess.run(
        command, capture_output=True, encoding="utf-8", env=environment(), check=False, timeout=300
    )
    assert ran.returncode == 2
    assert (
        "no result of --engine llama.cpp:plain (llama.cpp native plain: there is no" in ran.stderr
    )
    assert "## Engines" in ran.stdout
    record = load(path)
    profiles = [engine["profile"] for engine in record["engines"]]
    assert profiles[0] is None  # plain decoding has no use for one
    began = {"used": "with the profile saved on this machine", "none": "without a profile"}
    assert f"- began {began[profiles[1]]}: foretell native auto\n" in ran.stdout
    assert [r["num_tokens"] for r in record["requests"]] == [8, 8]
    assert record["model"]["hash"].startswith("sha256:")
    assert record["engines"][0]["versions"].keys() == {"foretell"}
    assert "--llama-server FILE" in record["skipped"][0]["reason"]
    assert len(record["outputs"]) == 1
