"""Other engines, asked from outside: a small server on the loopback address stands in for them."""

from __future__ import annotations

import json
import random
import re
from http.server import BaseHTTPRequestHandler

import local_server
import pytest

from foretell import ForetellError, MissingExtraError, OptionError
from foretell._extras import install_command
from foretell.check import Answer, Endpoint, Result, Verdict, compare_engines
from foretell.check._openai import _answer
from foretell.check._transformers import pair


class Fake(BaseHTTPRequestHandler):
    """Says the same tokens after every prompt; ``server.settings`` say what is wrong with it."""

    def do_GET(self):
        self.reply({"data": [{"id": "fake-model"}] if self.server.settings["models"] else []})

    def do_POST(self):
        settings = self.server.settings
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((body, dict(self.headers)))
        if settings["status"] != 200:
            self.send_error(settings["status"], "out of memory")
            return
        if body["temperature"] == 0:
            self.reply({"choices": [self.greedy(body, settings)]})
            return
        rng = random.Random(body["seed"])
        weights = settings["weights"]
        text = "".join(rng.choices("ab", weights)[0] for _ in range(body["max_tokens"]))
        self.reply({"choices": [{"text": text}]})

    def greedy(self, body, settings):
        tokens = ["x", "y", "z", "x", "y"][: body["max_tokens"]]
        place = settings["swaps_at"]
        if place is not None:
            tokens[place] = settings["says"]
        best = [{"x": -1.0, "w": -1.0 - settings["gap"], "v": -9.0} for _ in tokens]
        for token, top in zip(["x", "y", "z", "x", "y"], best, strict=False):
            top[token] = top.pop("x")
        probabilities = [-1.0 - settings["drift"] for _ in tokens]
        choice = {"text": "".join(tokens)}
        if settings["logprobs"] == "completions":
            choice["logprobs"] = {
                "tokens": tokens,
                "token_logprobs": probabilities,
                "top_logprobs": best,
            }
        elif settings["logprobs"] == "chat":
            choice["logprobs"] = {
                "content": [
                    {
                        "token": token,
                        "logprob": p,
                        "top_logprobs": [{"token": t, "logprob": q} for t, q in top.items()],
                    }
                    for token, p, top in zip(tokens, probabilities, best, strict=True)
                ]
            }
        return choice

    def reply(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


def serving(**settings):
    defaults = {
        "models": True,
        "status": 200,
        "logprobs": "completions",
        "gap": 2.0,
        "drift": 0.0,
        "swaps_at": None,
        "says": "w",
        "weights": (1, 2),
    }
    return local_server.serving(Fake, settings=defaults | settings, asked=[])


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def compared(plain=None, speculative=None, **options):
    with serving(**(plain or {})) as (_, left), serving(**(speculative or {})) as (_, right):
        options = {"max_tokens": 5, "samples": 60, "prompts": ["p", "q"]} | options
        return compare_engines(Endpoint(left), Endpoint(right + "/v1/"), **options)


def case(report, name):
    return next(case for case in report.cases if case.name == name)


@pytest.mark.parametrize("shape", ["completions", "chat"])
def test_equal_servers_are_lossless(shape):
    report = compared({"logprobs": shape}, {"logprobs": shape})
    assert report.verdict is Verdict.LOSSLESS
    assert case(report, "greedy text").detail.startswith("2 of 2 answers equal, 10 equal tokens")
    assert case(report, "log-probabilities").detail == "all 10 equal"
    assert case(report, "sampled first tokens").result is Result.PASSED
    assert report.to_dict()["engine"]["model"] == {"source": "fake-model"}


def test_a_near_tie_is_called_one_and_is_no_violation():
    report = compared({"gap": 0.03}, {"swaps_at": 2})
    found = case(report, "greedy text")
    assert found.result is Result.NEAR_TIE
    assert "position 2: 'w' instead of 'z'" in found.detail
    assert "0.03 apart" in found.detail
    assert "a near-tie that rounding can turn round" in found.detail
    assert report.verdict is Verdict.NEAR_TIES
    assert report.verdict.exit_code == 0


def test_a_clear_difference_is_a_violation():
    report = compared({"gap": 1.5}, {"swaps_at": 2})
    assert "1.5 apart" in case(report, "greedy text").detail
    assert "more than rounding explains" in case(report, "greedy text").detail
    assert report.verdict is Verdict.VIOLATION
    difference = case(report, "greedy text").numbers["differences"][0]
    assert (difference["position"], difference["gap"]) == (2, 1.5)


def test_a_token_the_reference_does_not_list_is_no_near_tie():
    report = compared({"gap": 0.03}, {"swaps_at": 1, "says": "k"})
    assert "at least 8 apart" in case(report, "greedy text").detail
    assert report.verdict is Verdict.VIOLATION


def test_without_log_probabilities_a_difference_is_undecided():
    report = compared({"logprobs": None}, {"logprobs": None, "swaps_at": 2})
    assert report.verdict is Verdict.UNDECIDED
    assert report.verdict.exit_code == 2
    assert case(report, "log-probabilities").result is Result.SKIPPED
    assert "nobody can tell" in case(report, "greedy text").detail


def test_log_probabilities_may_differ_by_rounding_and_not_by_more():
    found = case(compared({}, {"drift": 0.01}), "log-probabilities")
    assert found.result is Result.NEAR_TIE
    assert found.detail == "0 of 10 equal, the others within 0.01, which is rounding"
    assert compared({}, {"drift": 1.0}).verdict is Verdict.VIOLATION


def test_another_distribution_of_first_tokens_is_a_violation():
    report = compared({}, {"weights": (9, 1)}, samples=200)
    assert case(report, "sampled first tokens").result is Result.FAILED
    assert report.verdict is Verdict.VIOLATION


def test_too_few_samples_prove_nothing_and_say_so():
    found = case(compared(samples=4), "sampled first tokens")
    assert found.result is Result.SKIPPED
    assert "too few to tell" in found.detail


def test_an_answer_that_ends_early_is_a_difference():
    class Short:
        name, near_tie, about = "short", 0.25, {}

        def __init__(self, text):
            self.text = text

        def greedy(self, prompt, max_tokens):
            return Answer(self.text)

        def sample(self, prompt, max_tokens, seed):
            return "a"

    report = compare_engines(Short("abc"), Short("ab"), ["p"], samples=0)
    assert "position 2: '(end)' instead of 'c'" in report.cases[0].detail


def test_every_request_asks_for_what_it_needs(monkeypatch):
    monkeypatch.setenv("FORETELL_API_KEY", "secret")
    with serving() as (server, url):
        Endpoint(url).greedy("hello", 5)
        body, headers = server.asked[0]
    assert body["model"] == "fake-model"
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ("hello", 5, 0)
    assert body["logprobs"] == 5
    assert headers["Authorization"] == "Bearer secret"


def test_servers_that_cannot_be_asked_are_errors_that_say_why():
    with serving(status=500) as (_, url), pytest.raises(ForetellError, match="answered 500"):
        Endpoint(url).greedy("p", 3)
    with serving(models=False) as (_, url), pytest.raises(ForetellError, match="lists no model"):
        Endpoint(url)
    with pytest.raises(ForetellError, match=r"cannot ask .*is the server running\?"):
        Endpoint(url)
    with pytest.raises(OptionError, match="no address of a server"):
        Endpoint("localhost:8000")


def test_log_probabilities_in_unknown_shapes_are_none():
    assert _answer("ab", None).tokens == ()
    assert _answer("ab", {"tokens": None}).tokens == ()
    assert _answer("ab", {"tokens": ["ab"], "token_logprobs": [-1.0]}).top == ()


def test_a_missing_extra_names_its_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("transformers"))):
        pair("somewhere")
    with pytest.raises(OptionError, match="dtype is 'int8'"):
        pair("somewhere", dtype="int8")
