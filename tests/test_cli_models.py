"""`foretell models`: what is cached, fetched, and where."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from foretell import DownloadError, _hub
from foretell._hub import CachedModel
from foretell.cli import _terminal


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    models = [
        CachedModel("demo", Path("/cache/demo.gguf"), 98_362_432),
        CachedModel("Qwen/Qwen3-0.6B", Path("/cache/qwen"), 1_200_000_000),
    ]
    monkeypatch.setattr(_hub, "list_cached", lambda: models)
    return models


def test_without_a_command_it_lists_name_size_and_place(run):
    assert run("models").out == (
        "demo                  98 MB  /cache/demo.gguf\nQwen/Qwen3-0.6B    1,200 MB  /cache/qwen\n"
    )


def test_an_empty_cache_is_an_empty_list_and_a_hint(run, cache):
    cache.clear()
    ran = run("models")
    assert (ran.code, ran.out) == (0, "")
    assert ran.err == "no models yet; `foretell models pull demo` fetches the demo model\n"


def test_where_prints_the_path_alone(run):
    assert run("models", "where", "demo").out == "/cache/demo.gguf\n"


def test_where_for_a_model_that_is_not_there_says_how_to_get_it(run):
    ran = run("models", "where", "a/b")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "error: 'a/b' is not in the cache; pull it with `foretell models pull a/b`\n"
    )


def test_pull_prints_where_the_model_is_now(run, monkeypatch):
    monkeypatch.setattr(_hub, "pull", lambda name, progress: Path("/cache") / name)
    assert run("models", "pull", "a/b").out == "/cache/a/b\n"


@pytest.mark.parametrize(("patience", "told"), [(0.01, "pulling a/b\n"), (60, "")])
def test_a_pipe_is_told_of_a_pull_that_takes_long(run, monkeypatch, patience, told):
    def pull(name, progress):
        progress("looking")
        progress(f"pulling {name}")
        time.sleep(0.3)
        return Path("/cache") / name

    monkeypatch.setattr(_terminal, "PATIENCE", patience)
    monkeypatch.setattr(_hub, "pull", pull)
    ran = run("models", "pull", "a/b")
    assert (ran.code, ran.out) == (0, "/cache/a/b\n")
    assert ran.err.replace("looking\n", "") == told


@pytest.mark.parametrize("arguments", [["where", "dmeo"], ["pull", "Demo"]])
def test_a_misspelt_name_is_recognized(run, arguments):
    ran = run("models", *arguments)
    why = {"where": "is not in the cache", "pull": "cannot be pulled"}[arguments[0]]
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"error: {arguments[1]!r} {why}; did you mean 'demo'?\n"


def test_a_failed_pull_is_an_error(run, monkeypatch):
    def pull(name, progress):
        raise DownloadError("the line is down")

    monkeypatch.setattr(_hub, "pull", pull)
    ran = run("models", "pull", "a/b")
    assert (ran.code, ran.out, ran.err) == (2, "", "error: the line is down\n")


@pytest.mark.parametrize("arguments", [["pull"], ["where"], ["nonsense"], ["pull", "a", "b"]])
def test_bad_usage(run, arguments):
    assert run("models", *arguments).code == 2
