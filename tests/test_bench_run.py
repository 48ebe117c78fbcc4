"""The run: who is asked what, in which order, and what is kept of it."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_bench import WORKLOAD, Scripted, WorkerPeer, foretell_peer, plan, spec
from fake_engine import byte_tokenizer

from foretell import InputError
from foretell.bench._engines import Skipped
from foretell.bench._markdown import markdown
from foretell.bench._protocol import Missing
from foretell.bench._record import problem_with
from foretell.bench._results import results_of
from foretell.bench._run import Run
from foretell.bench._workload import Question, Workload

PLAIN, AUTO = spec("foretell", "plain"), spec("foretell", "auto")


def measured(a_plan, make, is_cancelled=lambda: False):
    told = []
    run = Run(a_plan, make, lambda what, done: told.append((what, done)), is_cancelled)
    return run.run(), told


def test_every_engine_answers_every_turn_in_every_repetition():
    peer = foretell_peer()
    record, told = measured(plan(PLAIN, AUTO, repetitions=2), lambda specs: peer)
    assert problem_with(record) is None
    asked = Counter(
        (r["engine"], r["question"], r["turn"], r["repetition"]) for r in record["requests"]
    )
    assert set(asked.values()) == {1}
    assert len(asked) == 2 * 4 * 2
    assert told[-1] == ("done", 16)
    assert peer.closed


def test_engines_take_turns_prompt_by_prompt_and_none_is_always_first():
    record, _ = measured(plan(PLAIN, AUTO), lambda specs: foretell_peer())
    firsts = [r["engine"] for r in record["requests"] if r["turn"] == 0][::2]
    assert firsts == ["foretell plain", "foretell auto", "foretell plain"]


def test_speculation_gives_the_tokens_of_plain_decoding():
    record, _ = measured(plan(PLAIN, AUTO), lambda specs: foretell_peer())
    results = results_of(record)
    assert [engine.differing for engine in results.engines] == [None, 0]
    assert results.engines[1].turns == 4


def test_an_output_that_differs_is_counted():
    faulty = foretell_peer(faulty=True)
    record, _ = measured(plan(PLAIN, spec("foretell", "3")), lambda specs: faulty)
    assert results_of(record).engines[1].differing > 0


def test_the_second_turn_has_the_first_answer_in_it_and_keeps_the_session():
    peer = foretell_peer()
    measured(plan(PLAIN), lambda specs: peer)
    first, second = (r for r in peer.asked[1:] if r.messages[0]["content"] == "fox jumps")
    assert (first.turn, second.turn) == (0, 1)
    assert [message["role"] for message in second.messages] == ["user", "assistant", "user"]
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(second.prompt).startswith(tokenizer.decode(first.prompt))


def test_a_second_turn_reads_only_what_is_new():
    peer = foretell_peer()
    model, rows = peer.worker.engine.model, []
    forward = model.forward

    def counted(parts):
        rows.append(sum(len(part.tokens) for part in parts))
        return forward(parts)

    model.forward = counted
    measured(plan(PLAIN), lambda specs: peer)
    prefills = [count for count in rows if count > 1]
    warm_up, first, second, *_ = peer.asked
    assert prefills[:2] == [len(warm_up.prompt), len(first.prompt)]
    assert prefills[2] == len(second.prompt) - len(first.prompt)


def test_without_template_prompts_are_continued_as_they_are():
    peer = foretell_peer(chat=False)
    measured(plan(PLAIN, chat=False), lambda specs: peer)
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(peer.asked[0].prompt) == "fox jumps"
    assert peer.asked[0].messages is None


def test_equal_outputs_are_kept_once():
    record, _ = measured(plan(PLAIN, AUTO, repetitions=3), lambda specs: foretell_peer())
    assert len(record["outputs"]) <= 4


def test_what_cannot_start_is_skipped_and_the_others_go_on():
    def make(specs):
        if specs[0].kind == "openvino":
            raise Skipped("no file for it")
        if specs[0].kind == "transformers":
            peer = foretell_peer()
            peer.start = lambda: (_ for _ in ()).throw(Missing("not there; pip install torch"))
            return peer
        return foretell_peer()

    absent = [spec("transformers", "plain"), spec("openvino", "plain")]
    record, _ = measured(plan(PLAIN, *absent), make)
    assert record["skipped"] == [
        {"name": "transformers plain", "reason": "not there; pip install torch"},
        {"name": "openvino plain", "reason": "no file for it"},
    ]
    assert {r["engine"] for r in record["requests"]} == {"foretell plain"}


def test_a_failed_request_costs_its_question_and_nothing_else():
    peer = foretell_peer()
    peer.fails_at = 2  # the first after the warm-up
    record, _ = measured(plan(PLAIN), lambda specs: peer)
    assert record["failures"] == [
        {"engine": "foretell plain", "question": "1", "error": "it did not want to"}
    ]
    assert {r["question"] for r in record["requests"]} == {"2", "3"}


def test_a_process_that_dies_takes_its_engines_out_and_what_it_measured_stays():
    peers = {"foretell": foretell_peer(), "openvino": foretell_peer()}
    peers["openvino"].dies_at = 4
    other = spec("openvino", "plain")
    record, _ = measured(plan(PLAIN, other), lambda specs: peers[specs[0].kind])
    assert "ended without a word" in record["skipped"][0]["reason"]
    assert peers["openvino"].closed
    assert Counter(r["engine"] for r in record["requests"])["openvino plain"] == 2
    results = results_of(record)
    assert results.questions == 1  # what both have


def test_a_prompt_too_long_for_the_context_is_left_out_for_all():
    long = Workload("long", (Question("big", "jumps", ("x" * 100,)), *WORKLOAD.questions))
    a_plan = plan(PLAIN, AUTO, workload=long, max_length=90)
    record, _ = measured(a_plan, lambda specs: foretell_peer())
    [left] = record["left_out"]
    assert left["question"] == "big"
    assert "leaves no room for 24 in a context of 90" in left["reason"]
    assert "big" not in {r["question"] for r in record["requests"]}


def test_a_question_the_template_refuses_is_left_out_for_all():
    a_plan = plan(PLAIN, AUTO)
    prompt = a_plan.text.prompt

    def fussy(text, messages):
        if text == "jumps fox":
            raise InputError("the chat template refuses this")
        return prompt(text, messages)

    a_plan.text.prompt = fussy
    record, _ = measured(a_plan, lambda specs: foretell_peer())
    assert record["left_out"] == [{"question": "2", "reason": "the chat template refuses this"}]
    assert {r["question"] for r in record["requests"]} == {"1", "3"}


def test_cancelling_keeps_what_was_measured():
    calls = iter(range(1000))
    record, _ = measured(plan(PLAIN, AUTO), lambda specs: foretell_peer(), lambda: next(calls) > 6)
    assert record["interrupted"]
    assert record["requests"]
    assert problem_with(record) is None


def test_a_second_ctrl_c_ends_the_run_at_once_and_keeps_it_too():
    peer = foretell_peer()
    answer = peer.worker.answer

    def impatient(request):
        if len(peer.asked) == 4:
            raise KeyboardInterrupt
        return answer(request)

    peer.worker.answer = impatient
    record, _ = measured(plan(PLAIN), lambda specs: peer)
    assert record["interrupted"]
    assert len(record["requests"]) == 2
    assert peer.closed


def test_sampling_reaches_the_engine_and_the_record():
    peer = foretell_peer()
    sampling = {"temperature": 0.8, "seed": 5}
    record, _ = measured(plan(PLAIN, AUTO, sampling=sampling), lambda specs: peer)
    assert peer.asked[-1].sampling == sampling
    assert record["settings"]["sampling"] == sampling
    assert results_of(record).engines[1].differing == 0


@pytest.mark.parametrize("what", ["decode", "total"])
def test_speeds_and_speedups_are_what_the_times_say(what):
    tokens = list(range(21))
    worker = Scripted({"plain": (tokens, 0.1), "auto": (tokens, 0.05)})
    record, _ = measured(plan(PLAIN, AUTO, repetitions=2), lambda specs: WorkerPeer(worker))
    _, auto = results_of(record).engines
    rates = getattr(auto, what)
    expected = {"decode": 20.0, "total": 21 / 2}[what]
    assert rates["overall"].value == pytest.approx(expected)
    assert set(rates) == {"overall", "jumps", "runs"}
    ratio = {"decode": 2.0, "total": 3 / 2}[what]
    assert getattr(auto, f"{what}_speedup")["overall"].value == pytest.approx(ratio)


def test_peers_are_held_against_foretell_in_the_same_weights():
    tokens = list(range(11))
    fast = Scripted({"plain": (tokens, 0.1), "auto": (tokens, 0.05)})
    peers = {"foretell": fast, "llama.cpp": Scripted({"plain": (tokens, 0.2)})}
    engines = [PLAIN, AUTO, spec("llama.cpp", "plain"), spec("openvino", "plain", "int8")]
    peers["openvino"] = peers["llama.cpp"]
    record, _ = measured(plan(*engines), lambda specs: WorkerPeer(peers[specs[0].kind]))
    found = {engine.name: engine.times_others for engine in results_of(record).engines}
    assert found["llama.cpp plain"]["foretell auto"].value == pytest.approx(4.0)
    assert found["openvino plain"] == {}
    assert found["foretell plain"] == {}


def test_questions_whose_plain_output_loops_can_be_left_out():
    loop, fresh = [1, 2] * 10, list(range(20))

    class Moody(Scripted):
        def answer(self, request):
            self.script = {
                mode: (loop if len(request.prompt) < 15 else fresh, 0.1)
                for mode in ("plain", "auto")
            }
            return super().answer(request)

    record, _ = measured(plan(PLAIN, AUTO), lambda specs: WorkerPeer(Moody({})))
    results = results_of(record)
    assert results.looping == ("3",)
    assert {"jumps", "overall"} == set(results.without_loops[0].decode)
    assert "## Without questions whose plain output loops: 1 left out" in markdown(results)


def test_answers_that_others_disturbed_do_not_count_where_there_are_others():
    tokens = list(range(11))
    worker = Scripted({"plain": (tokens, 0.1), "auto": (tokens, 0.05)})
    made = plan(PLAIN, AUTO, repetitions=2)
    record, _ = measured(made, lambda specs: WorkerPeer(worker))
    for request in record["requests"]:
        request["waiting"] = 0.01
        if request["engine"] == "foretell auto" and request["repetition"] == 1:
            request |= {"waiting": 0.8, "decode_seconds": 50.0}
    results = results_of(record)
    assert results.left_out == 0
    assert results.engines[1].decode["overall"].value == pytest.approx(20.0)
    assert results.engines[1].disturbed == 0.5
    for request in record["requests"]:
        if request["question"] == "3":
            request["waiting"] = 0.8
    results = results_of(record)
    assert (results.left_out, results.questions) == (1, 2)
    for request in record["requests"]:
        request["waiting"] = 0.8
    assert results_of(record).left_out == 0
