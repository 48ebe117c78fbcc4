"""Peers: processes of their own, what they are told, and how each kind answers."""

from __future__ import annotations

import io
import json
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import local_server
import pytest
from fake_bench import foretell_peer

from foretell.bench import _llama_server_worker as llama
from foretell.bench._openai_worker import OpenAiWorker
from foretell.bench._peer import PeerError, PeerGone, ProcessPeer
from foretell.bench._protocol import Clock, Missing, Request, serve


def settings(**changed):
    return {
        "model": "/nowhere.gguf",
        "draft": None,
        "tokenizer": None,
        "drafters": [],
        "dtype": "float32",
        "threads": 1,
        "modes": ["plain"],
        "llama_server": None,
        **changed,
    }


def bare_python(tmp_path):
    """This Python without any library, as another environment's may be."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n', "utf-8")
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("transformers", "pip install torch transformers"),
        ("openvino", "pip install openvino-genai"),
    ],
)
def test_what_is_not_installed_is_named_with_the_command_that_installs_it(tmp_path, kind, command):
    peer = ProcessPeer(kind, settings(), bare_python(tmp_path))
    with pytest.raises(Missing, match=command):
        peer.start()
    peer.close()


def test_a_python_that_is_not_there_is_missing():
    with pytest.raises(Missing, match="cannot run /nowhere/python"):
        ProcessPeer("openvino", settings(), "/nowhere/python").start()


def test_a_server_that_is_not_there_is_missing():
    peer = ProcessPeer("llama.cpp", settings(llama_server="/nowhere/llama-server"))
    with pytest.raises(Missing, match="--llama-server FILE"):
        peer.start()
    peer.close()


def test_a_process_that_dies_is_gone_and_closing_it_again_does_no_harm(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n", "utf-8")
    python.chmod(0o755)
    peer = ProcessPeer("openvino", settings(), str(python))
    with pytest.raises(PeerGone):
        peer.start()
    peer.close()
    peer.close()


def scripted(tmp_path, *lines, then="exit 0"):
    """An engine that says these lines, whatever it is asked."""
    python = tmp_path / "python"
    said = "".join(f"printf '%b\\n' '{line}'; " for line in lines)
    python.write_text(f"#!/bin/sh\n{said}\n{then}\n", "utf-8")
    python.chmod(0o755)
    return ProcessPeer("openvino", settings(), str(python))


def test_threads_of_an_engine_wait_as_they_would_elsewhere(tmp_path, monkeypatch):
    """Told to sleep at once, OpenMP's would wake late at every loop, and the engine look slow."""
    for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    python = tmp_path / "python"
    hello = """printf '{"versions": {"waiting": "%s"}}\\n' """
    waiting = '"$OMP_WAIT_POLICY$KMP_BLOCKTIME$GOMP_SPINCOUNT"'
    python.write_text(f"#!/bin/sh\nread settings\n{hello}{waiting}\nread more\n", "utf-8")
    python.chmod(0o755)
    peer = ProcessPeer("llama.cpp", settings(), str(python))
    assert peer.start() == {"waiting": ""}
    peer.close()


HELLO = '{"versions": {"x": 1}}'
ANSWER = {
    "tokens": [1],
    "text": "",
    "num_tokens": 1,
    "decode_tokens": 0,
    "decode_seconds": 0.0,
    "total_seconds": 1.0,
    "prompt_tokens": 1,
}


@pytest.mark.parametrize("line", ["", "hello", "[1]", "[" * 50_000, "{}", r"\0377", "null"])
def test_a_process_that_does_not_speak_the_protocol_is_gone(tmp_path, line):
    peer = scripted(tmp_path, line)
    with pytest.raises(PeerGone):
        peer.start()
    peer.close()


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": "abc"},
        {"tokens": [-1]},
        {"text": None},
        {"num_tokens": -1},
        {"num_tokens": 1.5},
        {"decode_seconds": float("nan")},
        {"total_seconds": float("inf")},
        {"prompt_tokens": 10**400},
        {"stats": [1]},
        {"stats": {"num_steps": "x"}},
        {"stats": {"num_accepted_tokens_per_pos": [None]}},
        {"unknown": 1},
    ],
    ids=str,
)
def test_an_answer_that_makes_no_sense_is_a_failed_request(tmp_path, change):
    lines = [json.dumps({**ANSWER, **change}), json.dumps(ANSWER)]
    peer = scripted(tmp_path, HELLO, *lines, then="cat > /dev/null")
    assert peer.start() == {"x": "1"}
    with pytest.raises(PeerError) as failed:
        peer.ask(Request("plain", [1], 3))
    assert not isinstance(failed.value, PeerGone)
    assert peer.ask(Request("plain", [1], 3)).tokens == [1]
    peer.close()


def test_a_process_that_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr("foretell.bench._peer.LONGEST_ANSWER", 0.5)
    peer = scripted(tmp_path, HELLO, then=f"sleep 1000 & echo $! > {tmp_path}/child; wait")
    peer.start()
    with pytest.raises(PeerGone, match=r"said nothing for 0\.5 seconds"):
        peer.ask(Request("plain", [1], 3))
    peer.close()
    child = int((tmp_path / "child").read_text("utf-8"))
    status = Path(f"/proc/{child}/stat")
    until = time.monotonic() + 10
    while status.exists() and status.read_text("utf-8").split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_worker_answers_line_by_line_and_survives_a_failing_request():
    worker = foretell_peer().worker
    asked = [
        {"mode": "plain", "prompt": [5, 6], "max_tokens": 4},
        {"mode": "plain", "prompt": [], "max_tokens": 4},
        {"passes": {}},
        {"mode": "auto", "prompt": [5, 6], "max_tokens": 4},
    ]
    answers = io.StringIO()
    serve(worker, io.StringIO("".join(json.dumps(one) + "\n" for one in asked)), answers)
    first, failed, passes, last = map(json.loads, answers.getvalue().splitlines())
    assert first["tokens"] == last["tokens"]
    assert (first["num_tokens"], first["decode_tokens"]) == (4, 3)
    assert "prompt holds no tokens" in failed["failed"]
    assert passes == {"passes": None}  # a table has no limits to be held against
    assert last["stats"]["num_steps"] <= first["stats"]["num_steps"] == 3


def test_a_clock_counts_what_comes_after_the_first():
    clock = Clock()
    clock.came(2)
    clock.came(3)
    assert clock.decode_tokens == 3
    assert clock.decode_seconds >= 0


# --- Servers ------------------------------------------------------------------------------


class Fake(BaseHTTPRequestHandler):
    """Answers as llama-server and as OpenAI's API do."""

    def log_message(self, *arguments):
        """Quiet."""

    def do_GET(self):
        self.reply({"data": [{"id": "served"}]} if self.path == "/v1/models" else {"status": "ok"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body, self.headers.get("Authorization")))
        if self.server.status != 200:
            self.send_error(self.server.status, "no")
        elif self.path == "/completion":
            self.reply(
                {
                    "content": "abc",
                    "tokens": [1, 2, 3],
                    "timings": {
                        "predicted_n": 3,
                        "predicted_ms": 40.0,
                        "draft_n": 4,
                        "draft_n_accepted": 1,
                    },
                }
            )
        else:
            self.send_response(200)
            self.end_headers()
            for piece in ("He", "llo"):
                chat = {"delta": {"content": piece}} if "chat" in self.path else {"text": piece}
                self.event({"choices": [chat]})
            self.event({"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": 9}})
            self.wfile.write(b"data: [DONE]\n\n")

    def event(self, value):
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def reply(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def serving(status=200):
    return local_server.serving(Fake, asked=[], status=status)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.mark.parametrize("chat", [True, False])
def test_an_endpoint_is_streamed_and_timed(chat, monkeypatch):
    monkeypatch.setenv("FORETELL_API_KEY", "secret")
    messages = [{"role": "user", "content": "Hi"}] if chat else None
    with serving() as (server, url):
        worker = OpenAiWorker({"url": url, "model": None})
        answer = worker.answer(Request("plain", [1], 7, text="Hi", messages=messages))
        [(path, body, key)] = server.asked
    assert path == ("/v1/chat/completions" if chat else "/v1/completions")
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("served", 7, 0)
    assert body["messages" if chat else "prompt"] == (messages or "Hi")
    assert key == "Bearer secret"
    assert (answer.text, answer.num_tokens, answer.decode_tokens) == ("Hello", 5, 4)
    assert 0 <= answer.decode_seconds <= answer.total_seconds


def test_a_server_that_refuses_is_quoted():
    with serving(status=500) as (_, url):
        worker = OpenAiWorker({"url": f"{url}/v1/", "model": "mine"})
        with pytest.raises(OSError, match="answered 500"):
            worker.answer(Request("plain", [1], 7, text="Hi"))


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([b"data: {oops\n\n"], "sent what is no JSON"),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], "sent what is no JSON"),
        ([b"data: [1]\n\n"], "sent"),
        ([b'data: {"error": {"message": "out of luck"}}\n\n'], "out of luck"),
        ([b'data: {"choices": [{"text": "He"}]}\n\n'], "without"),
        ([], "without"),
    ],
)
def test_a_stream_that_is_damaged_is_no_answer(events, says):
    with local_server.serving(Streams, events=events) as (_, url):
        worker = OpenAiWorker({"url": url, "model": "mine"})
        with pytest.raises(OSError, match=says):
            worker.answer(Request("plain", [1], 7, text="Hi"))


def test_a_server_may_leave_out_what_it_does_not_know():
    events = [b": ping\n\n", b'data: {"choices": null, "usage": null}\n\n']
    events += [b'data: {"choices": [{"delta": null, "text": "He"}]}\r\n\r\n', b"data: [DONE]\n\n"]
    with local_server.serving(Streams, events=events) as (_, url):
        answer = OpenAiWorker({"url": url, "model": "m"}).answer(Request("plain", [1, 2], 7, "Hi"))
    assert (answer.text, answer.num_tokens, answer.prompt_tokens) == ("He", 1, 2)


@pytest.mark.parametrize("listed", [b"{}", b'{"data": []}', b"[]", b'{"data": [{"id"'])
def test_a_server_that_lists_no_model_is_told_apart(listed):
    with (
        local_server.serving(Streams, events=[listed]) as (_, url),
        pytest.raises(OSError, match=r"lists no model; name one|is no JSON"),
    ):
        OpenAiWorker({"url": url, "model": None})


class Streams(BaseHTTPRequestHandler):
    """Sends what it is told to."""

    def log_message(self, *arguments):
        """Quiet."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send_response(200)
        self.end_headers()
        for event in self.server.events:
            self.wfile.write(event)

    def do_GET(self):
        self.headers["Content-Length"] = "0"
        self.do_POST()


FAKE_SERVER = """#!{python}
import sys, threading
sys.path.insert(0, {tests!r})
if "--help" in sys.argv:
    print("--spec-type none,draft-simple,draft-mtp,ngram-simple,ngram-mod   types")
elif "--version" in sys.argv:
    print("version: 42 (abc)", file=sys.stderr)
else:
    from http.server import ThreadingHTTPServer
    from test_bench_peers import Fake
    if "--broken" in {flags!r}:
        sys.exit("this model cannot be loaded")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = ThreadingHTTPServer(("127.0.0.1", port), Fake)
    server.asked, server.status = [], 200
    server.serve_forever()
"""


@pytest.fixture
def fake_server(tmp_path, request):
    binary = tmp_path / "llama-server"
    tests = str(request.path.parent)
    flags = getattr(request, "param", "")
    binary.write_text(FAKE_SERVER.format(python=sys.executable, tests=tests, flags=flags), "utf-8")
    binary.chmod(0o755)
    return str(binary)


def test_llama_server_is_started_asked_and_ended(fake_server):
    told = settings(llama_server=fake_server, modes=["ngram-mod"], threads=2)
    worker = llama.LlamaServerWorker(told)
    try:
        assert worker.versions == {"llama.cpp": "42 (abc)"}
        assert worker.process == worker._server.pid
        answer = worker.answer(Request("ngram-mod", [7, 8], 3, turn=1))
    finally:
        worker.close()
    assert worker._server.poll() is not None
    assert (answer.tokens, answer.text, answer.decode_tokens) == ([1, 2, 3], "abc", 2)
    assert answer.decode_seconds == pytest.approx(0.04)
    assert answer.stats == {"num_steps": 1, "num_draft_tokens": 4, "num_accepted_tokens": 1}
    command = worker._server.args
    assert command[command.index("--spec-type") + 1] == "ngram-mod"
    assert command[command.index("--threads") + 1] == "2"


@pytest.mark.parametrize("fake_server", ["--broken"], indirect=True)
def test_a_server_that_ends_at_once_says_why(fake_server):
    with pytest.raises(RuntimeError, match="this model cannot be loaded"):
        llama.LlamaServerWorker(settings(llama_server=fake_server))


def test_spec_types_are_those_the_binary_has(fake_server):
    assert llama.spec_types(fake_server, draft=False) == ["ngram-simple", "ngram-mod"]
    assert llama.spec_types(fake_server, draft=True)[0] == "draft-simple"
    assert llama.spec_types("/nowhere/llama-server", draft=False) == []


def test_llama_server_ends_with_the_driver(fake_server):
    """Through the real pipe: when the driver's end closes, the server is gone."""
    peer = ProcessPeer("llama.cpp", settings(llama_server=fake_server))
    assert peer.start() == {"llama.cpp": "42 (abc)"}
    assert peer.ask(Request("plain", [1], 3)).tokens == [1, 2, 3]
    peer.close()
    assert peer._process.returncode == 0
