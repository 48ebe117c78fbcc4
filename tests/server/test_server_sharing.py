"""A request's tokens do not depend on what else is running, nor on what was asked before."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import NAME, letters_model
from families import tiny_checkpoint

from foretell import Engine, SamplingParams
from foretell._batch import Batch
from foretell.backends.cpu import load
from foretell.drafters import SuffixMemory
from foretell.server._metrics import Metrics
from foretell.server._prefix_cache import PrefixCache
from foretell.server._scheduler import Scheduler
from foretell.server._settings import Settings


def bodies(count: int, seed: int):
    """Requests of all kinds."""
    draw = random.Random(seed)
    for index in range(count):
        body = {
            "model": "table",
            "prompt": draw.choice(("abc " * draw.randint(1, 60), "hello", "x", "the system says: "))
            + "".join(draw.choices("abcdef ", k=draw.randint(0, 30))),
            "max_tokens": draw.choice((1, 3, 17, 40)),
            "seed": draw.randrange(1000),
            "temperature": draw.choice((0, 0, 1, 0.5)),
            "ignore_eos": draw.random() < 0.5,
            "foretell": {"num_draft_tokens": draw.choice(("auto", "auto", 0, 2, 9))},
        }
        if index % 5 == 0:
            body["n"] = 2
        if index % 7 == 0:
            body["frequency_penalty"] = 0.5
        yield body


def expected(engine: Engine, body) -> list[list[int]]:
    names = ("max_tokens", "seed", "temperature", "ignore_eos", "n", "frequency_penalty")
    sampling = SamplingParams(**{name: body[name] for name in names if name in body})
    done = engine.generate(body["prompt"], sampling=sampling, num_draft_tokens=0)
    return [completion.token_ids for completion in done.completions]


def ask_together(here, requests, workers: int):
    """Everybody's tokens, asked at the same time in several threads."""
    barrier = threading.Barrier(min(workers, len(requests)))

    def ask(numbered):
        index, body = numbered
        if index < barrier.parties:
            barrier.wait()
        response = here.post(body)
        assert response.status_code == 200, response.text
        return [choice["foretell"]["token_ids"] for choice in response.json()["choices"]]

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(ask, enumerate(requests)))


@pytest.mark.parametrize("seed", range(3))
def test_tokens_do_not_depend_on_who_else_is_there(serve, seed):
    model = letters_model(seed, seconds=0.001)
    here = serve(model, max_running=[2, 8, 64][seed])
    requests = list(bodies(60, seed))
    given = ask_together(here, requests, 24)
    assert max(model.passes) > 1, "passes were shared"
    model.seconds = 0.0
    alone = Engine(model)
    assert given == [expected(alone, body) for body in requests]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_of_the_cpu_backend_do_not_either(serve, family, tmp_path):
    model = load(tiny_checkpoint(tmp_path, family, tokenizer=True), threads=2)
    here = serve(model)
    requests = list(bodies(24, 5))
    given = ask_together(here, requests, 12)
    alone = Engine(model)
    assert given == [expected(alone, body) for body in requests]
    again = ask_together(here, requests[:8], 8)  # now with what is in the prefix cache
    assert again == given[:8]


# --- The prefix cache ------------------------------------------------------------------------

SYSTEM = "You are a careful assistant who answers in one word. " * 2


def cached(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_shared_beginning_is_read_once(serve):
    here = serve()
    plain = Engine(here.model)
    first = here.complete(SYSTEM + "one")
    assert cached(first) == 0
    second = here.complete(SYSTEM + "two")
    assert cached(second) == len(SYSTEM)
    for answer, prompt in ((first, SYSTEM + "one"), (second, SYSTEM + "two")):
        alone = plain.generate(prompt, max_tokens=8, num_draft_tokens=0)
        assert answer["choices"][0]["foretell"]["token_ids"] == alone.token_ids


def test_an_earlier_turn_is_not_read_again(serve):
    here = serve()
    answer = here.complete("tell me more", max_tokens=40, ignore_eos=True)
    said = "tell me more" + answer["choices"][0]["text"]
    longer = here.complete(said + " and more")
    assert cached(longer) >= len("tell me more") + 39
    alone = Engine(here.model).generate(said + " and more", max_tokens=8, num_draft_tokens=0)
    assert longer["choices"][0]["foretell"]["token_ids"] == alone.token_ids


def test_nothing_is_shared_between_keys(serve):
    here = serve(api_keys=("alpha", "beta"))

    def ask(key):
        return here.post(
            {"model": "table", "prompt": SYSTEM, "max_tokens": 30, "temperature": 0},
            headers={"Authorization": f"Bearer {key}"},
        ).json()

    assert cached(ask("alpha")) == 0
    assert cached(ask("beta")) == 0
    assert cached(ask("alpha")) == len(SYSTEM) - 1
    here.wait_idle()
    memory = here.engine.suffix_memory
    assert isinstance(memory, SuffixMemory)
    owners = sorted(memory._owners)
    assert len(owners) == 2
    assert "" not in owners
    assert not any("alpha" in owner or "beta" in owner for owner in owners)


def test_log_probabilities_of_a_prompt_are_never_left_out(serve):
    here = serve()
    here.complete(SYSTEM)
    answer = here.complete(SYSTEM, echo=True, logprobs=0)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == len(SYSTEM) + 8
    assert cached(answer) == 0


def _session(model, tokens):
    from foretell import Rows

    session = model.new_session()
    model.forward([Rows(session, tokens, logits="none")])
    session.keep(range(len(tokens)))
    return session


def test_the_cache_gives_the_longest_beginning_of_its_owner():
    model = letters_model()
    model.position_bytes = 1
    cache = PrefixCache(model, 10_000)
    one, two = list(range(20)), [*range(30), 5, 6]
    cache.add("a", one, _session(model, one))
    cache.add("b", two, _session(model, two))
    assert cache.lookup("a", two).length == 20
    assert cache.lookup("b", one).length == 19  # one token is left to run
    assert cache.lookup("c", one) is None
    assert cache.lookup("a", [9, *one]) is None
    assert cache.lookup("a", one[:17]).tokens == one[:16]


def test_what_continues_a_text_takes_its_place():
    model = letters_model()
    model.position_bytes = 1
    cache = PrefixCache(model, 10_000)
    long = list(range(100))
    cache.add("a", long[:40], _session(model, long[:40]))
    cache.add("a", long, _session(model, long))
    assert len(cache) == 1
    cache.add("a", long[:50], _session(model, long[:50]))
    assert (len(cache), cache.num_bytes) == (1, 192)


def test_the_cache_stays_within_its_bytes_and_forgets_the_oldest():
    model = letters_model()
    model.position_bytes = 10
    cache = PrefixCache(model, 3 * 1280)
    texts = [[index, *range(40)] for index in range(5)]
    for text in texts[:3]:
        cache.add("a", text, _session(model, text))
    assert cache.lookup("a", [*texts[0], 1]) is not None  # used: now it is the youngest
    for text in texts[3:]:
        cache.add("a", text, _session(model, text))
        assert cache.num_bytes <= 3 * 1280
    found = [cache.lookup("a", [*text, 1]) is not None for text in texts]
    assert found == [True, False, False, True, True]
    cache.add("a", [*range(250)] * 2, _session(model, [*range(250)] * 2))
    assert cache.num_bytes <= 3 * 1280, "what is larger than all of it is not kept"
    cache.shrink(0)
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_the_cache_counts_at_least_what_is_allocated(tmp_path):
    """Forks share pages, pages are allocated several at a time, and all of that is kept."""
    model = load(tiny_checkpoint(tmp_path, "llama", tokenizer=True), threads=1)
    cache = PrefixCache(model, 1 << 40)
    engine = Engine(model)
    draw = random.Random(0)
    beginning = [draw.randrange(3, 250) for _ in range(100)]
    for turn in range(12):
        prompt = [*beginning[: draw.randrange(20, 100)], turn + 3, *beginning[:30]]
        [request] = engine.prepare(prompt, SamplingParams(max_tokens=20))
        request.session = cache.lookup("a", prompt) or request.session
        batch = Batch(model)
        batch.join([request])
        while len(batch):
            batch.read()
            batch.step()
        held = request.session.length
        cache.add("a", request.tokens[:held], request.session.fork())
        pages = [page for e in cache._entries.values() for page in e.session._pages.arrays]
        allocated = {id(_base(page)): _base(page).nbytes for page in pages}
        assert 0 < sum(allocated.values()) <= cache.num_bytes
    assert len(cache) > 3


@pytest.mark.parametrize("slab", [1, 100_000])
@pytest.mark.parametrize("prompt", [1, 64, 130, 400])
def test_completions_take_at_most_what_is_set_aside(tmp_path, monkeypatch, prompt, slab):
    """They share the prompt's full pages, which count once, however many are allocated at once."""
    monkeypatch.setattr("foretell.backends.cpu._session._SLAB_BYTES", slab)
    model = load(tiny_checkpoint(tmp_path, "llama", tokenizer=True), threads=1)
    engine = Engine(model)
    scheduler = Scheduler(engine, Settings(NAME), Metrics())
    charged = {}
    for n in (1, 6):
        params = SamplingParams(max_tokens=40, n=n, temperature=1, seed=3, ignore_eos=True)
        tokens = [random.Random(i).randrange(3, 250) for i in range(prompt)]
        job = scheduler.job(tokens, params, lambda items: None, num_draft_tokens=4)
        charged[n] = job.num_bytes
        batch = Batch(model)
        batch.join(job.requests)
        while len(batch):
            batch.read()
            batch.step()
        pages = [page for one in job.requests for page in one.session._pages.arrays]
        allocated = {id(_base(page)): _base(page).nbytes for page in pages}
        assert len(allocated) >= n
        assert sum(allocated.values()) <= job.num_bytes
    shared = prompt // model.position_granule * model.position_granule * model.position_bytes
    assert charged[6] == 6 * charged[1] - 5 * shared
    assert shared or prompt < 192


def _base(array):
    while array.base is not None:
        array = array.base
    return array
