"""Requests that come and go while others run say what they would have said alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
from helpers_core import random_table

from foretell import Draft, Drafter, Engine, SamplingParams
from foretell._batch import Batch
from foretell._request import Answer, Request

CONFIGS = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "seed": 5, "n": 2},
    {"frequency_penalty": 0.7, "logprobs": 2},
    {"prompt_logprobs": 1, "stop_token_ids": [5]},
)


def turn(batch):
    """What happens once in a server's loop."""
    return [*batch.read(), *batch.step()]


def run_alone(engine, prompt, options):
    done = engine.generate(prompt, sampling=SamplingParams(**options), num_draft_tokens=0)
    return [
        (one.token_ids, one.finish_reason, one.logprobs, one.prompt_logprobs)
        for one in done.completions
    ]


def results(requests: list[Request], answers: dict[int, Answer]):
    out = []
    for request in requests:
        answer = answers[id(request)]
        _, result = answer.finish(requests[0].prompt_logprobs)
        out.append(
            (result.token_ids, result.finish_reason, result.logprobs, result.prompt_logprobs)
        )
    return out


@pytest.mark.parametrize("seed", range(12))
def test_whoever_comes_and_goes_the_tokens_are_those_of_a_single_run(seed):
    draw = random.Random(seed)
    model = random_table(8, 2, seed, eos_token_ids=[7])
    engine = Engine(model, drafters=["suffix", "recycling", "ngram"])
    jobs = []
    for index in range(10):
        prompt = [draw.randrange(8) for _ in range(draw.choice((1, 2, 5, 17, 60)))]
        options = {"max_tokens": draw.choice((1, 2, 9, 40)), **CONFIGS[index % len(CONFIGS)]}
        jobs.append((prompt, options, draw.choice(("auto", 0, 1, 5)), draw.randrange(12)))
    batch = Batch(model, prompt_rows=draw.choice((1, 3, 16, 128)))
    joined: dict[int, list[Request]] = {}
    answers: dict[int, Answer] = {}
    for now in range(400):
        for index, (prompt, options, num_draft_tokens, arrival) in enumerate(jobs):
            if arrival == now:
                requests = engine.prepare(
                    prompt, SamplingParams(**options), num_draft_tokens=num_draft_tokens
                )
                joined[index] = requests
                answers.update({id(request): Answer(request) for request in requests})
                batch.join(requests)
        for request, emitted in turn(batch):
            answers[id(request)].add(emitted)
        if len(joined) == len(jobs) and not len(batch):
            break
    assert len(batch) == 0
    for index, (prompt, options, _, _) in enumerate(jobs):
        assert results(joined[index], answers) == run_alone(engine, prompt, options)


def test_requests_share_one_pass_whatever_their_drafts():
    model = random_table(8, 2, 1)
    engine = Engine(model, drafters=["recycling"])
    batch = Batch(model)
    for num_draft_tokens in (0, 1, 3, 6):
        params = SamplingParams(max_tokens=20)
        batch.join(engine.prepare([1, 2, 3], params, num_draft_tokens=num_draft_tokens))
    turn(batch)  # the four prompts in one pass, then a step
    assert model.num_passes == 2
    for _ in range(4):
        before = model.num_passes
        assert len(turn(batch)) == 4
        assert model.num_passes == before + 1


def test_a_long_prompt_is_read_in_pieces_while_others_go_on():
    model = random_table(8, 2, 1)
    engine = Engine(model)
    batch = Batch(model, prompt_rows=10)
    [first] = engine.prepare([1], SamplingParams(max_tokens=100), num_draft_tokens=0)
    batch.join([first])
    turn(batch)
    [second] = engine.prepare([2] * 45, SamplingParams(max_tokens=5), num_draft_tokens=0)
    batch.join([second])
    for read in (10, 20, 30, 40):
        before = len(first.tokens)
        turn(batch)
        assert len(first.tokens) == before + 1
        assert second.session.length == read
        assert len(second.tokens) == 45
    turn(batch)
    assert len(second.tokens) == 47  # its first token, and a step with the other


class Breaks(Drafter):
    """Fails when it is called for the ``at``-th time to do ``what``."""

    name = "breaks"

    def __init__(self, what: str, at: int = 3) -> None:
        self.what, self.at, self.calls = what, at, 0

    def spawn(self) -> Drafter:
        return Breaks(self.what, self.at)

    def _call(self, what: str) -> None:
        if what == self.what:
            self.calls += 1
            if self.calls == self.at:
                raise RuntimeError(f"broken in {what}")

    def start(self, prompt):
        self._call("start")

    def propose(self, context, limit):
        self._call("propose")
        return Draft.one_hot((1,))

    def observe(self, draft, output, accepted):
        self._call("observe")


@pytest.mark.parametrize("what", ["start", "propose", "observe", "forward", "choose"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_breaks_one_request_takes_no_token_from_another(what, place):
    model = random_table(8, 2, 4)
    engine = Engine(model, drafters=[Breaks(what, 1 if what == "start" else 3)])
    sound = Engine(model, drafters=["recycling"])
    batch = Batch(model)
    requests = []
    for index in range(3):
        broken = index == place and what in ("start", "propose", "observe")
        [request] = (engine if broken else sound).prepare(
            [1, 2, index], SamplingParams(max_tokens=20), num_draft_tokens=2
        )
        requests.append(request)
    victim = requests[place]
    if what == "choose":
        choose, calls = victim.sampler.choose, iter(range(100))

        def breaking(*arguments):
            if next(calls) == 4:
                raise RuntimeError("broken in choose")
            return choose(*arguments)

        victim.sampler.choose = breaking
    if what == "forward":
        forward = model.forward

        def failing(rows):
            if any(part.session is victim.session and part.session.length > 6 for part in rows):
                raise MemoryError("broken in forward")
            return forward(rows)

        model.forward = failing
    answers = {id(request): Answer(request) for request in requests}
    for request in requests:
        batch.join([request])
    while len(batch):
        for request, emitted in turn(batch):
            answers[id(request)].add(emitted)
    assert "broken in" in str(victim.error)
    for index, request in enumerate(requests):
        model.forward = type(model).forward.__get__(model)
        plain = sound.generate([1, 2, index], max_tokens=20, num_draft_tokens=0).token_ids
        given = answers[id(request)].token_ids
        assert request.tokens == [1, 2, index, *given]
        assert given == (plain if request is not victim else plain[: len(given)])
        assert len(given) < 20 or request is not victim


def test_a_cancelled_request_leaves_before_the_next_pass():
    model = random_table(8, 2, 1)
    engine = Engine(model)
    batch = Batch(model)
    gone: list[bool] = []
    params = SamplingParams(max_tokens=100)
    batch.join(engine.prepare([1], params, is_cancelled=lambda: bool(gone)))
    turn(batch)
    gone.append(True)
    before = model.num_passes
    [(request, emitted)] = turn(batch)
    assert (request.finish, emitted.tokens, len(batch)) == ("cancelled", (), 0)
    assert model.num_passes == before


def test_one_completion_of_several_can_leave_while_their_prompt_is_read():
    model = random_table(8, 2, 1)
    engine = Engine(model)
    options = {"max_tokens": 9, "temperature": 1.0, "seed": 2, "n": 3}
    batch = Batch(model, prompt_rows=2)
    requests = engine.prepare([1, 2, 3, 4, 5], SamplingParams(**options), num_draft_tokens=0)
    answers = {id(request): Answer(request) for request in requests}
    batch.join(requests)
    turn(batch)
    requests[0].is_cancelled = lambda: True
    while len(batch):
        for request, emitted in turn(batch):
            answers[id(request)].add(emitted)
    alone = run_alone(engine, [1, 2, 3, 4, 5], options)
    assert requests[0].finish == "cancelled"
    assert results(requests, answers)[1:] == alone[1:]


def test_a_prompt_whose_beginning_is_cached_is_read_from_there():
    model = random_table(8, 2, 3)
    engine = Engine(model)
    prompt = [1, 2, 3, 4, 5, 6]
    session = model.new_session()
    from foretell import Rows

    model.forward([Rows(session, prompt[:4], logits="none")])
    session.keep(range(4))
    [request] = engine.prepare(prompt, SamplingParams(max_tokens=9), session=session)
    batch = Batch(model)
    batch.join([request])
    while len(batch):
        turn(batch)
    alone = engine.generate(prompt, max_tokens=9, num_draft_tokens=0)
    assert request.tokens == prompt + alone.token_ids
    plain = [*prompt, *alone.token_ids]
    assert np.array_equal(request.session.tokens, plain[: request.session.length])
