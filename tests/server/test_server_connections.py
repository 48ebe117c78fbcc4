"""Connections that only hold a place: nobody may keep others out by saying nothing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest
from conftest import NAME, Running, letters_model

from foretell.server._protocol import Impatient

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ALIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def here(serve, monkeypatch) -> Iterator[Running]:
    monkeypatch.setattr(Impatient, "arrival", 0.4)
    monkeypatch.setattr(Impatient, "unread", 0.4)
    return serve(letters_model())


def connection(here: Running) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", int(here.address.rpartition(":")[2])))
    made.settimeout(10)
    return made


def read_to_end(sock: socket.socket) -> bytes:
    """What comes until the server closes; an error if it does not."""
    said = b""
    try:
        while data := sock.recv(1 << 16):
            said += data
    except ConnectionResetError:
        pass
    return said


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HTT", HEAD, HEAD + b"Content-Length: 100\r\n\r\n{"]
)
def test_a_request_that_does_not_arrive_is_not_waited_for(here, sent):
    with connection(here) as sock:
        sock.sendall(sent)
        assert read_to_end(sock) == b""


def test_nor_is_the_next_one_of_a_connection_that_was_used(here):
    with connection(here) as sock:
        sock.sendall(ALIVE)
        time.sleep(0.2)
        sock.sendall(b"G")
        assert read_to_end(sock).startswith(b"HTTP/1.1 200")


def test_one_that_arrives_slowly_is_answered(here, monkeypatch):
    monkeypatch.setattr(Impatient, "arrival", 1.2)
    body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 2}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    with connection(here) as sock:
        for _ in range(2):  # the head may take its time, and the body too, and both once more
            for piece in (request[:9], request[9:] + body[:5], body[5:]):
                time.sleep(0.42)
                sock.sendall(piece)
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_an_answer_may_take_longer_than_a_request(serve, monkeypatch):
    monkeypatch.setattr(Impatient, "arrival", 0.3)
    slow = serve(letters_model(seconds=0.1))
    body = {"model": NAME, "prompt": "a", "max_tokens": 8, "ignore_eos": True}
    assert slow.post({**body, "foretell": {"num_draft_tokens": 0}}).status_code == 200


def test_who_does_not_read_is_let_go(here):
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(here.address.rpartition(":")[2])))
        sock.settimeout(10)
        wanted = {"max_tokens": 4000, "ignore_eos": True, "stream": True, "logprobs": 20}
        speculation = {"foretell": {"num_draft_tokens": 0, "steps": True}}
        body = json.dumps({"model": NAME, "prompt": "a", **wanted, **speculation}).encode()
        sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while not here.server.scheduler.num_running:
            time.sleep(0.01)
        here.wait_idle(30)
        time.sleep(0.6)
        assert b"[DONE]" not in read_to_end(sock)


def test_nobody_is_offered_a_web_socket(here):
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    with connection(here) as sock:
        sock.sendall(ALIVE[:-2] + upgrade + b"Sec-WebSocket-Key: abc\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
