"""Workloads: Spec-Bench's format, text files, and what is wrong with a file."""

from __future__ import annotations

import json

import pytest

from foretell import InputError
from foretell._errors import EmptyPromptError
from foretell.bench._workload import BUILT_IN, distinct_ngrams, only, read_workload


def written(tmp_path, *lines, name="questions.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def line(question=1, category="writing", turns=("Hello",)):
    return json.dumps({"question_id": question, "category": category, "turns": list(turns)})


def test_spec_bench_lines_are_questions_with_their_turns(tmp_path):
    path = written(tmp_path, line(81, "writing", ["One", "Two"]), "", line(5, "qa", ["Who?"]))
    workload = read_workload(path)
    assert [(q.name, q.category, q.turns) for q in workload.questions] == [
        ("81", "mt_bench", ("One", "Two")),
        ("5", "qa", ("Who?",)),
    ]
    assert workload.name == "questions.jsonl"
    assert workload.hash.startswith("sha256:")


def test_what_is_kept_of_a_workload_is_no_text_of_it(tmp_path):
    workload = read_workload(written(tmp_path, line(turns=["a secret"]), line(2, "qa")))
    kept = workload.to_dict()
    assert kept["categories"] == {"mt_bench": 1, "qa": 1}
    assert "secret" not in json.dumps(kept)


def test_a_text_file_has_a_prompt_on_each_line(tmp_path):
    path = written(tmp_path, "\ufefffirst", "  ", "second  ", name="prompts.txt")
    assert [q.turns for q in read_workload(path).questions] == [("first",), ("second",)]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "line 2: this is no JSON"),
        ("[1]", "line 2: this is no JSON object"),
        ("[" * 100_000, "line 2: this is no JSON"),
        (json.dumps({"category": "qa", "turns": ["x"]}), "question_id is None"),
        (line(question=True), "question_id is True"),
        (line(question=1.5), "question_id is 1.5"),
        (line(category=""), "category is ''"),
        (line(turns=[]), "turns is []"),
        (json.dumps({"question_id": 2, "category": "qa", "turns": "x"}), "turns is 'x'"),
        (line(turns=["fine", 3]), "a turn is 3"),
        (line(turns=["  "]), "a turn is '  '"),
        (line(turns=["\ud800"]), "half a character"),
        (line(question="1"), "has the question_id 1 twice"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path, bad, says):
    with pytest.raises(InputError) as error:
        read_workload(written(tmp_path, line(1), bad))
    assert says in str(error.value)


def test_files_that_hold_nothing_or_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(EmptyPromptError, match="holds no prompt"):
        read_workload(written(tmp_path, "", " "))
    with pytest.raises(InputError, match="cannot read"):
        read_workload(tmp_path / "nowhere.txt")
    bad = tmp_path / "latin.txt"
    bad.write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match="not valid UTF-8"):
        read_workload(bad)


def test_a_sample_takes_as_many_of_each_category_and_always_the_same(tmp_path):
    lines = [line(n, "qa" if n < 7 else "math_reasoning") for n in range(1, 10)]
    workload = read_workload(written(tmp_path, *lines))
    sample = workload.sample(3)
    assert [q.name for q in sample.questions] == ["1", "3", "5", "7", "8", "9"]
    assert workload.sample(3) == sample
    assert len(workload.sample(100).questions) == 9


def test_categories_are_chosen_by_name():
    assert only(BUILT_IN, ["rewriting"]).categories == ("rewriting",)
    with pytest.raises(InputError, match="has no category poems; it has rewriting"):
        only(BUILT_IN, ["poems"])


def test_the_built_in_questions_have_a_second_turn_among_them():
    assert {len(question.turns) for question in BUILT_IN.questions} == {1, 2}
    assert len({question.name for question in BUILT_IN.questions}) == len(BUILT_IN.questions)


def test_a_text_that_repeats_itself_has_few_distinct_ngrams():
    assert distinct_ngrams([1, 2, 3, 4, 5, 6]) == 1.0
    assert distinct_ngrams([1, 2] * 20) == pytest.approx(2 / 37)
    assert distinct_ngrams([1, 2, 3]) == 1.0
