"""`foretell serve` as a process: starting, stopping, logs, metrics, and what the documents show."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from foretell import ForetellError
from foretell._extras import install_command
from foretell.server._run import listen

ROOT = Path(__file__).resolve().parent.parent.parent
FAKE = str(ROOT / "tests" / "fake_engine.py")
LONG = {"model": "demo", "prompt": "fox", "max_tokens": 60, "temperature": 0}


class Process:
    """A server in a process of its own."""

    def __init__(self, *options: str, env: dict[str, str] | None = None, **engine: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, FAKE, json.dumps(engine), "serve", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        found = re.search(r"http://\S+?:\d+", first)
        assert found, first + self.process.stderr.read()
        self.address = found[0]
        self.http = httpx2.Client(base_url=self.address, timeout=60)

    def post(self, body: Any, **options: Any) -> httpx2.Response:
        return self.http.post("/v1/completions", json=body, **options)

    def running(self) -> float:
        """How many completions are worked on."""
        return metrics(self.http.get("/metrics").text)["foretell_num_requests_running"]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self, seconds: float = 30) -> tuple[int, list[dict[str, Any]]]:
        """The exit code and the log, once it has ended."""
        _, log = self.process.communicate(timeout=seconds)
        return self.process.returncode, [json.loads(line) for line in log.splitlines()]


def metrics(text: str) -> dict[str, float]:
    """Every sample by its name, with its labels if it has any."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = "".join(f"[{value}]" for value in sample.labels.values())
            found[sample.name + labels] = sample.value
    return found


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(*options: str, **engine: Any) -> Process:
        processes.append(Process(*options, **engine))
        return processes[-1]

    yield start
    for one in processes:
        one.http.close()
        if one.process.poll() is None:
            one.process.kill()
            one.process.communicate()


def in_background(function: Callable[[], Any]) -> Any:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_those_who_run_finish(start, number):
    server = start(says="fox jumps", seconds=0.01)
    streams = {**LONG, "stream": True}
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(server.post, streams if i % 2 else LONG) for i in range(8)]
        while server.running() < 8:
            time.sleep(0.01)
        server.signal(number)
        responses = [future.result() for future in futures]
    code, log = server.ended()
    assert code == 0
    assert [response.status_code for response in responses] == [200] * 8
    for response in responses[::2]:
        assert response.json()["choices"][0]["text"] == (" jumpsfox" * 7)[:60]
    for response in responses[1::2]:
        assert response.text.rstrip().endswith("data: [DONE]")
    events = [entry["event"] for entry in log]
    assert events.count("request") == 8
    assert events[-1] == "stopped"


def test_while_it_stops_nothing_new_is_taken(start):
    server = start(says="fox jumps", seconds=0.02)
    with httpx2.Client(base_url=server.address) as kept:  # a connection that is there already
        assert kept.get("/health/ready").status_code == 200
        running = in_background(lambda: server.post({**LONG, "max_tokens": 100}))
        while server.running() < 1:
            time.sleep(0.01)
        server.signal(signal.SIGTERM)
        time.sleep(0.2)
        try:
            response = kept.post("/v1/completions", json=LONG)
        except httpx2.TransportError:
            pass  # the connection was closed, as it was idle
        else:
            assert response.status_code == 503
            assert response.headers["Retry-After"]
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{server.address}/health", timeout=2)
        assert running.result().status_code == 200
    assert server.ended()[0] == 0


def test_who_is_not_done_after_the_grace_is_cut_off(start):
    server = start("--grace", "1", says="fox jumps", seconds=0.05)
    body = {**LONG, "max_tokens": 2000, "stream": True}
    cut = in_background(lambda: server.post(body))
    while server.running() < 1:
        time.sleep(0.01)
    began = time.monotonic()
    server.signal(signal.SIGTERM)
    code, _ = server.ended()
    assert code == 0
    assert time.monotonic() - began < 8
    assert cut.exception() is not None or "[DONE]" not in cut.result().text


def test_a_second_signal_does_not_wait(start):
    server = start(says="fox jumps", seconds=0.05)
    body = {**LONG, "max_tokens": 2000, "stream": True}
    cut = in_background(lambda: server.post(body))
    while server.running() < 1:
        time.sleep(0.01)
    server.signal(signal.SIGINT)
    time.sleep(0.3)
    began = time.monotonic()
    server.signal(signal.SIGINT)
    code, _ = server.ended()
    assert code == 130
    assert time.monotonic() - began < 5
    cut.exception()


def test_the_log_has_a_line_for_each_request_and_no_text(start):
    server = start(says="fox jumps")
    secret = {"model": "demo", "prompt": "SECRETPROMPT fox", "max_tokens": 5, "temperature": 0}
    assert server.post(secret, headers={"X-Request-Id": "mine"}).headers["X-Request-Id"] == "mine"
    server.post({**secret, "stream": True})
    server.post({**secret, "temperature": -1})
    server.post({**secret, "foo": "SECRETFIELD"})
    server.signal(signal.SIGTERM)
    _, log = server.ended()
    lines = [entry for entry in log if entry["event"] == "request"]
    assert [line["status"] for line in lines] == [200, 200, 400]
    assert lines[0]["id"] == "mine"
    for line in lines[:2]:
        assert line["prompt_tokens"] == 16
        assert line["completion_tokens"] == 5
        assert line["finish_reasons"] == ["length"]
        assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]
    assert "SECRET" not in json.dumps(log)
    assert "jumps" not in json.dumps(log)


def test_the_log_has_the_text_where_that_was_asked_for(start):
    server = start("--log-prompts", says="fox jumps")
    server.post({"model": "demo", "prompt": "a fox", "max_tokens": 6, "temperature": 0})
    server.signal(signal.SIGTERM)
    [line] = [entry for entry in server.ended()[1] if entry["event"] == "request"]
    assert (line["prompt"], line["completions"]) == ("a fox", [" jumps"])


def test_keys_can_come_from_the_environment(start):
    server = start(says="fox", env={"FORETELL_API_KEYS": "one two"})
    assert server.post(LONG).status_code == 401
    for key in ("one", "two"):
        assert server.post(LONG, headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_metrics_have_the_definitions_of_the_stats(start):
    server = start(says="fox jumps")
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    prompt = "fox jumps" * 3
    for number in (0, 3, 5):
        body = {**LONG, "prompt": prompt, "foretell": {"num_draft_tokens": number}}
        answer = server.post(body).json()
        stats = answer["usage"]["completion_tokens_details"]["foretell"]
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            totals[name] = totals.get(name, 0) + stats[name]
        for position, count in enumerate(stats["num_accepted_tokens_per_pos"]):
            positions[position] = positions.get(position, 0) + count
    found = metrics(server.http.get("/metrics").text)
    for name, count in totals.items():
        assert found[f"foretell_spec_decode_{name}_total"] == count
    assert totals["num_accepted_tokens"] > 0
    for position, count in positions.items():
        name = f"foretell_spec_decode_num_accepted_tokens_per_pos_total[{position}]"
        assert found.get(name, 0) == count
    assert found["foretell_generation_tokens_total"] == 180
    assert found["foretell_prompt_tokens_total"] == 3 * len(prompt)
    assert found["foretell_prefix_cache_hits_total"] == 2 * (len(prompt) - 1)
    assert found["foretell_request_success_total[length]"] == 3
    assert found["foretell_time_to_first_token_seconds_count"] == 3
    assert found["foretell_e2e_request_latency_seconds_count"] == 3
    assert found["foretell_request_queue_time_seconds_count"] == 3
    assert found["foretell_inter_token_latency_seconds_count"] > 60
    assert found["foretell_tokens_per_second"] > 0
    assert found["foretell_num_requests_waiting"] == found["foretell_num_requests_running"] == 0
    assert 0 <= found["foretell_kv_cache_usage_perc"] <= 1
    assert not [name for name in found if name.endswith("_created")]


def test_health_and_version(start):
    from foretell import __version__

    server = start(says="fox")
    assert server.http.get("/health/live").json() == {"status": "live"}
    assert server.http.get("/health/ready").json() == {"status": "ready"}
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/version").json() == {"version": __version__}


def refused(*options: str) -> str:
    ran = subprocess.run(
        [sys.executable, FAKE, "{}", "serve", *options], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 2, ran.stderr
    assert ran.stdout == ""
    return ran.stderr


def test_what_cannot_be_served_is_an_error_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in refused("--port", port)
    for host in ("no.such.host.invalid", "a b", "::zz", "x" * 300, "192.0.2.1"):
        assert "use an address and a port of this machine" in refused("--host", host)
    assert "the host is empty" in refused("--host", "")
    assert "API key is empty" in refused("--api-key", "")
    assert "name the origins" in refused("--cors-origin", "*")
    assert "--max-running" in refused("--max-running", "0")


def test_nobody_else_gets_the_port_while_a_model_is_loaded():
    with listen("127.0.0.1", 0) as first, pytest.raises(ForetellError, match="another server"):
        listen("127.0.0.1", first.getsockname()[1])


def test_without_the_extra_the_message_says_what_to_install(tmp_path):
    (tmp_path / "fastapi.py").write_text("raise ImportError('none', name='fastapi')")
    ran = subprocess.run(
        [sys.executable, FAKE, "{}", "serve"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH')}"},
    )
    assert ran.returncode == 2
    assert f"which is not installed: {install_command('server')}" in ran.stderr


# --- Documents -------------------------------------------------------------------------------

EXAMPLES = re.findall(
    r"^```(sh|python)\n(.*?)^```", (ROOT / "docs" / "server.md").read_text("utf-8"), re.M | re.S
)


@pytest.fixture(scope="module")
def documented() -> Iterator[Process]:
    server = Process(says="fox jumps")
    yield server
    server.http.close()
    server.process.kill()
    server.process.communicate()


def test_there_are_examples_of_both_kinds():
    assert {kind for kind, _ in EXAMPLES} == {"sh", "python"}


@pytest.mark.parametrize(("kind", "code"), EXAMPLES, ids=lambda text: text[:20].split("\n")[0])
def test_the_documents_examples_run(documented, kind, code):
    assert "http://127.0.0.1:8000" in code
    code = code.replace("http://127.0.0.1:8000", documented.address)
    program = ["sh", "-euc", code.replace("curl ", "curl --fail-with-body -sS ")]
    if kind == "python":
        program = [sys.executable, "-c", code]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout) > 2


def test_the_documents_json_is_json():
    text = (ROOT / "docs" / "server.md").read_text("utf-8")
    blocks = re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)
    assert [set(json.loads(block)) for block in blocks] == [{"step", "pieces", "draft", "stats"}]


def test_threads_end_with_the_tests():
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("foretell-scheduler") == 0
