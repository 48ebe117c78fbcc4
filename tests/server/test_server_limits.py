"""What is refused, and how; nothing that a client sends is a 500."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import letters_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foretell import Draft, Drafter, Engine, OptionError, SamplingParams
from foretell.server._scheduler import QueueFullError
from foretell.server._settings import Settings

CHAT = {"model": "table", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TEXT = {"model": "table", "prompt": "hi", "max_tokens": 3}
PATHS = {"chat": ("/v1/chat/completions", CHAT), "text": ("/v1/completions", TEXT)}


def check_error(response, status: int, param: str | None = None, word: str = "") -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert word in error["message"]


# --- Fields ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "change", "param"),
    [
        ("chat", {"foo": 1}, "foo"),
        ("text", {"foo": None}, "foo"),
        ("chat", {"tools": []}, "tools"),
        ("text", {"best_of": 2}, "best_of"),
        ("text", {"suffix": "x"}, "suffix"),
        ("text", {"messages": []}, "messages"),
        ("chat", {"prompt": "x"}, "prompt"),
        ("chat", {"max_tokens": "3"}, "max_tokens"),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"max_tokens": 1.5}, "max_tokens"),
        ("chat", {"max_tokens": True}, "max_tokens"),
        ("chat", {"max_completion_tokens": 4}, "max_completion_tokens"),
        ("text", {"max_tokens": 0}, "max_tokens"),
        ("text", {"max_tokens": 10**30}, "max_tokens"),
        ("chat", {"messages": "hi"}, "messages"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [{"role": "user"}]}, "messages.0.content"),
        ("chat", {"messages": [{"role": "god", "content": "x"}]}, "messages.0.role"),
        ("chat", {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "x", "tool_calls": []}]},
            "messages.0.tool_calls",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        ("chat", {"temperature": -1}, "temperature"),
        ("chat", {"temperature": "hot"}, "temperature"),
        ("chat", {"top_p": 2}, "top_p"),
        ("chat", {"n": 0}, "n"),
        ("chat", {"n": 1000}, "n"),
        ("chat", {"stop": ""}, "stop"),
        ("chat", {"stop": ["a"] * 17}, "stop"),
        ("chat", {"frequency_penalty": 3}, "frequency_penalty"),
        ("chat", {"logit_bias": {"a": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {"-1": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {"99999": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {"1": 1000}}, "logit_bias"),
        ("chat", {"logprobs": 3}, "logprobs"),
        ("chat", {"top_logprobs": 3}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("text", {"logprobs": 21}, "logprobs"),
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format.type"),
        ("text", {"prompt": ""}, "prompt"),
        ("text", {"prompt": []}, "prompt"),
        ("text", {"prompt": [[]]}, "prompt"),
        ("text", {"prompt": [99999]}, "prompt"),
        ("text", {"prompt": [-1]}, "prompt"),
        ("text", {"prompt": {"a": 1}}, "prompt"),
        ("text", {"prompt": "x" * 5000}, "prompt"),
        ("chat", {"foretell": 3}, "foretell"),
        ("chat", {"foretell": {"x": 1}}, "foretell.x"),
        ("chat", {"foretell": {"num_draft_tokens": -1}}, "foretell.num_draft_tokens"),
        ("chat", {"foretell": {"num_draft_tokens": 1000}}, "foretell.num_draft_tokens"),
        ("chat", {"foretell": {"num_draft_tokens": "all"}}, "foretell.num_draft_tokens"),
        ("chat", {"foretell": {"drafters": ["x"]}}, "foretell.drafters"),
        ("chat", {"foretell": {"drafters": ["draft_model"]}}, "foretell.drafters"),
        ("chat", {"foretell": {"drafters": ["early_exit"]}}, "foretell.drafters"),
        ("chat", {"foretell": {"drafters": []}}, "foretell.drafters"),
        ("chat", {"foretell": {"verification": "hope"}}, "foretell.verification"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_is_named(shared, kind, change, param):
    path, body = PATHS[kind]
    check_error(shared.post({**body, **change}, path), 400, param)


@pytest.mark.parametrize("number", [33, 10**9, -1, "AUTO", True, 1.5])
def test_a_draft_length_that_cannot_be_says_what_can(shared, number):
    response = shared.post({**TEXT, "foretell": {"num_draft_tokens": number}})
    check_error(response, 400, "foretell.num_draft_tokens", "input should be 'auto'; or: ")


def test_null_is_as_good_as_nothing(shared):
    nothing = dict.fromkeys(
        (
            "n",
            "stop",
            "seed",
            "top_p",
            "logit_bias",
            "stream",
            "stream_options",
            "foretell",
            "user",
        ),
    )
    for path, body in PATHS.values():
        assert shared.post({**body, **nothing}, path).status_code == 200


def test_another_model_is_not_found(shared):
    for name in ("gpt", "../demo", "/etc/passwd", "table\0"):
        check_error(shared.post({**TEXT, "model": name}), 404, "model")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 5000,
        b'{"model": "table", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "table", "prompt": "x", "temperature": NaN}',
        b'{"model": "table", "prompt": "x", "temperature": Infinity}',
        b'{"model": "table", "prompt": "x", "temperature": 1e999}',
        b'{"model": "table", "prompt": "\\ud800"}',
        b'{"model": "\\udfff", "prompt": "x"}',
        b'{"model": "table", "prompt": "x", "stop": "\\ud800"}',
        b'{"model": "table", "prompt": "x", "\\ud800": 1}',
        b'{"model": "table", "prompt": "x", "foretell": {"\\ud800": 1}}',
        b'{"model": "table", "prompt": "x", "user": "\\ud800", "foo": "\\ud800"}',
        b'{"model": "table", "prompt": "x", "logit_bias": {"\\ud800": 1}}',
        b'{"model": "table", "prompt": "x", "logit_bias": {"\xd9\xa3": 1}}',
    ],
    ids=lambda body: repr(body[:60]),
)
def test_a_body_that_is_no_request_is_a_400_or_404(shared, body):
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = shared.http.post(path, content=body, headers=headers)
        assert response.status_code in (400, 404), response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_what_is_not_json_is_refused(shared):
    # Browsers send these to other sites without asking first.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        body = json.dumps(TEXT).encode()
        response = shared.http.post("/v1/completions", content=body, headers={"Content-Type": kind})
        assert response.status_code in (400, 415), kind


def test_unknown_paths_and_methods(shared):
    check_error(shared.http.get("/v1/nothing"), 404)
    check_error(shared.http.get("/v1/completions"), 405)
    for path in ("/static/../_app.py", "/static/%2e%2e/_app.py", "/static//etc/passwd"):
        assert shared.http.get(path).status_code == 404


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(st.characters(codec=None), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(sorted(PATHS)),
    fields=st.lists(
        st.sampled_from(
            "model messages prompt max_tokens n stop temperature top_p seed logprobs top_logprobs "
            "logit_bias stream stream_options echo foretell frequency_penalty presence_penalty "
            "top_k min_p min_tokens stop_token_ids ignore_eos user response_format".split()
        ),
        min_size=1,
        max_size=3,
    ),
    data=st.data(),
)
def test_no_value_of_any_type_is_a_500(shared, kind, fields, data):
    path, body = PATHS[kind]
    body = {**body, **{name: data.draw(values) for name in fields}}
    response = shared.http.post(
        path,
        content=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]


# --- Who may ask -----------------------------------------------------------------------------


def test_keys(serve):
    here = serve(api_keys=("first key", "second"))
    for key in ("first key", "second"):
        headers = {"Authorization": f"Bearer {key}"}
        assert here.post(TEXT, headers=headers).status_code == 200
        assert here.http.get("/metrics", headers=headers).status_code == 200
    wrong = ("", "Bearer", "Bearer secon", "Bearer second2", "Basic second", "second")
    for header in wrong:
        response = here.post(TEXT, headers={"Authorization": header})
        check_error(response, 401)
        assert response.headers["WWW-Authenticate"] == "Bearer"
    check_error(here.http.get("/v1/models"), 401)
    check_error(here.http.get("/metrics"), 401)
    for path in ("/", "/health", "/health/live", "/version", "/static/index.html"):
        assert here.http.get(path).status_code == 200


@pytest.mark.parametrize("key", ["", " ", " a", "a ", "a\nb", "schlüssel", "\udcff"])
def test_keys_and_hosts_that_no_header_can_carry_are_refused(key):
    with pytest.raises(OptionError, match="API key"):
        Settings("x", api_keys=(key,))
    with pytest.raises(OptionError, match="allowed host"):
        Settings("x", allowed_hosts=(key,))


def test_keys_of_odd_characters_are_compared_as_they_are(serve):
    keys = ("a b", "%41", "=&'\"\\<>;,", "Bearer x")
    here = serve(api_keys=keys)
    for key in keys:
        assert here.post(TEXT, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    for key in ("a", "b", "A", "%2541", "x", "Bearer"):
        check_error(here.post(TEXT, headers={"Authorization": f"Bearer {key}"}), 401)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8000", True),
        ("127.0.0.1:1", True),
        ("[::1]:8000", True),
        ("192.168.1.7", True),
        ("mine.example:80", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
    ],
)
def test_hosts(serve, host, allowed):
    here = serve(allowed_hosts=("Mine.example",))
    response = here.http.get("/v1/models", headers={"Host": host})
    assert response.status_code == (200 if allowed else 421), host


def test_pages_of_other_sites_may_not_ask(serve):
    here = serve()
    response = here.post(TEXT, headers={"Origin": "https://evil.example"})
    check_error(response, 403)
    assert "access-control-allow-origin" not in response.headers
    assert here.post(TEXT, headers={"Origin": here.address}).status_code == 200
    check_error(here.post(TEXT, headers={"Origin": "null"}), 403)


def test_pages_of_sites_that_are_named_may(serve):
    here = serve(cors_origins=("https://good.example",))
    asking = {"Origin": "https://good.example", "Access-Control-Request-Method": "POST"}
    response = here.http.options("/v1/completions", headers=asking)
    assert response.headers["access-control-allow-origin"] == "https://good.example"
    response = here.post(TEXT, headers={"Origin": "https://good.example"})
    assert response.headers["access-control-allow-origin"] == "https://good.example"
    check_error(here.post(TEXT, headers={"Origin": "https://evil.example"}), 403)


def test_everybodys_pages_without_a_key_are_refused():
    with pytest.raises(OptionError, match="origin"):
        Settings("x", cors_origins=("*",))
    Settings("x", cors_origins=("*",), api_keys=("k",))


def test_the_page_may_load_nothing_from_elsewhere(shared):
    policy = shared.http.get("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'")
    assert "unsafe" not in policy
    assert shared.http.get("/static/index.html").headers["content-security-policy"] == policy


# --- How much --------------------------------------------------------------------------------


def test_large_bodies_are_refused_whatever_they_say_of_themselves(serve):
    here = serve(max_body_bytes=10_000)
    check_error(here.post({**TEXT, "user": "x" * 20_000}), 413)
    assert here.post({**TEXT, "user": "x" * 5_000}).status_code == 200

    def pieces():
        yield b'{"model": "table", "user": "'
        for _ in range(100):
            yield b"x" * 1000
        yield b'", "prompt": "x"}'

    headers = {"Content-Type": "application/json"}
    try:
        response = here.http.post("/v1/completions", content=pieces(), headers=headers)
    except Exception:  # the connection was closed on the rest of the body
        pass
    else:
        check_error(response, 413)
    assert here.post(TEXT).status_code == 200


def test_a_full_queue_is_a_429_with_a_time_to_come_back(serve):
    here = serve(letters_model(seconds=0.02), max_running=1, max_queue=2)
    long = {**TEXT, "max_tokens": 60, "ignore_eos": True, "foretell": {"num_draft_tokens": 0}}
    with ThreadPoolExecutor(12) as pool:
        responses = list(pool.map(lambda _: here.post(long), range(12)))
    refused = [r for r in responses if r.status_code == 429]
    served = [r for r in responses if r.status_code == 200]
    assert len(refused) + len(served) == 12
    assert 1 <= len(served) <= 5
    for response in refused:
        assert response.json()["error"]["code"] == "queue_full"
        assert 1 <= int(response.headers["Retry-After"]) <= 60


def test_who_can_begin_at_once_does_not_wait_in_the_queue(serve):
    here = serve(letters_model(seconds=0.02), max_running=3, max_queue=1)
    scheduler = here.server.scheduler

    def job():
        return scheduler.job([97], SamplingParams(max_tokens=5, seed=1), lambda items: None)

    with scheduler._changed:  # nothing is let in meanwhile: the lock is one that can be taken again
        for _ in range(4):  # three can begin, and one may wait
            scheduler.submit([job()])
        with pytest.raises(QueueFullError, match="1 requests are waiting"):
            scheduler.submit([job()])
        left = job()
        scheduler.cancel([*scheduler._waiting])
        scheduler.submit([left])  # those who left do not wait either
    here.wait_idle()


def test_several_prompts_are_let_in_together_or_not_at_all(serve):
    here = serve(letters_model(seconds=0.02), max_running=1, max_queue=3)
    with ThreadPoolExecutor(3) as pool:
        waiting = [
            pool.submit(here.post, {**TEXT, "max_tokens": 40, "ignore_eos": True}) for _ in range(2)
        ]
        while here.server.scheduler.num_waiting < 1:
            time.sleep(0.001)
        check_error(here.post({**TEXT, "prompt": ["a", "b", "c"]}), 429)
        assert all(future.result().status_code == 200 for future in waiting)


def test_whoever_does_not_fit_into_memory_waits(serve):
    model = letters_model(seconds=0.005)
    model.position_bytes = 1 << 16  # 4 MiB a page
    here = serve(model, memory_bytes=24 << 20, prefix_cache_bytes=4 << 20)
    scheduler, most, done = here.server.scheduler, [0, 0], threading.Event()

    def watch():
        while not done.is_set():
            most[0] = max(most[0], scheduler.num_running)
            most[1] = max(most[1], scheduler.used_bytes)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    body = {**TEXT, "max_tokens": 30, "ignore_eos": True}
    with ThreadPoolExecutor(10) as pool:
        responses = list(pool.map(lambda _: here.post(body), range(10)))
    done.set()
    watcher.join()
    assert [r.status_code for r in responses] == [200] * 10
    assert most[1] <= 24 << 20
    assert 2 <= most[0] <= 4  # 4 MiB for a page of positions, and 2 more for the rest
    check_error(here.post({**TEXT, "max_tokens": 2000}), 400, "max_tokens", "memory")


def test_limits_of_tokens(serve):
    here = serve(max_request_tokens=50, max_total_tokens=120, default_max_tokens=10)
    check_error(here.post({**TEXT, "max_tokens": 49}), 400, "max_tokens", "at most 48")
    check_error(here.post({**TEXT, "prompt": "x" * 60}), 400, "prompt", "60 tokens")
    check_error(here.post({**TEXT, "max_tokens": 45, "n": 3}), 400, "max_tokens", "120")
    answer = here.complete("hi", max_tokens=48, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 50
    chat = here.post({"model": "table", "messages": CHAT["messages"], "ignore_eos": True},
                     "/v1/chat/completions").json()  # fmt: skip
    assert chat["usage"]["completion_tokens"] == 10


def test_a_request_that_takes_too_long_ends(serve):
    here = serve(letters_model(seconds=0.05), request_timeout=0.3, max_running=1)
    long = {**TEXT, "max_tokens": 1000, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:  # one runs out of time, one in the queue
        responses = list(pool.map(here.post, [long, long]))
    for response in responses:
        check_error(response, 408)
        assert response.headers["x-should-retry"] == "false"
    here.wait_idle()
    lines = here.post({**long, "stream": True}).text.strip().split("\n\n")
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "timeout"
    assert len(lines) > 1


# --- What breaks -----------------------------------------------------------------------------


class Explodes(Drafter):
    """Fails at its third proposal."""

    name = "explodes"

    def __init__(self) -> None:
        self.calls = 0

    def spawn(self) -> Drafter:
        return Explodes()

    def propose(self, context, limit):
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("secret detail")
        return Draft.empty()


def test_a_failure_is_one_requests_own(serve):
    engine = Engine(letters_model(seconds=0.002), drafters=[Explodes(), "recycling"])
    here = serve(engine)
    good = {**TEXT, "max_tokens": 30, "temperature": 0, "foretell": {"drafters": ["recycling"]}}
    bad = {**TEXT, "max_tokens": 30, "ignore_eos": True, "foretell": {"num_draft_tokens": 2}}
    with ThreadPoolExecutor(9) as pool:
        responses = list(pool.map(here.post, [bad if i % 3 == 1 else good for i in range(9)]))
    for index, response in enumerate(responses):
        if index % 3 == 1:
            check_error(response, 500)
            assert "secret" not in response.text
        else:
            assert response.json()["choices"] == responses[0].json()["choices"] or (
                response.json()["choices"][0]["text"] == responses[0].json()["choices"][0]["text"]
            )
    stream = here.post({**bad, "stream": True}).text
    assert '"error"' in stream
    assert "[DONE]" not in stream
    here.wait_idle()
    assert here.server.scheduler.used_bytes == 0


# --- Clients that go away --------------------------------------------------------------------


def leave_early(here, body, *, after: bytes, passes: int = 0) -> None:
    """Ask, wait for ``after`` in the answer and for so many passes, and hang up."""
    data = json.dumps(body).encode()
    host, port = here.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        received = b""
        while after and after not in received:
            received += connection.recv(4096)
        while len(here.model.passes) < passes:
            time.sleep(0.001)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_work_within_a_step(serve, stream):
    model = letters_model(seconds=0.05)
    here = serve(model)
    body = {**TEXT, "max_tokens": 1000, "ignore_eos": True, "stream": stream}
    leave_early(here, body, after=b"data: " if stream else b"", passes=2)
    before = len(model.passes)
    here.wait_idle(5)
    # The pass that was running, and one more while the news travelled.
    assert len(model.passes) <= before + 3
    assert here.server.scheduler.used_bytes == here.server.scheduler._cache.num_bytes


def test_those_who_wait_can_leave_too(serve):
    model = letters_model(seconds=0.02)
    here = serve(model, max_running=1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(here.post, {**TEXT, "max_tokens": 50, "ignore_eos": True})
        while not here.server.scheduler.num_running:
            time.sleep(0.001)
        for _ in range(5):
            leave_early(here, {**TEXT, "max_tokens": 1000, "ignore_eos": True}, after=b"")
        assert running.result().status_code == 200
    here.wait_idle(5)
    assert len(model.passes) < 60


def test_random_departures_leave_nothing_behind(serve):
    model = letters_model(seconds=0.002)
    here = serve(model, max_running=8)
    long = {**TEXT, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 2}
    good = {**TEXT, "max_tokens": 30, "temperature": 0}

    def one(index):
        if index % 3:
            leave_early(here, long, after=b"data: " if index % 2 else b"")
            return None
        return here.post(good).json()["choices"][0]["text"]

    with ThreadPoolExecutor(16) as pool:
        texts = {text for text in pool.map(one, range(60)) if text is not None}
    assert len(texts) == 1
    here.wait_idle(20)
    assert here.server.scheduler.used_bytes == here.server.scheduler._cache.num_bytes
