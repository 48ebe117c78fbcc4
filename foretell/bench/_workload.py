"""What the engines are asked: questions of one or more turns, each of a category."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from foretell._errors import EmptyPromptError, InputError, shown

MT_BENCH: Final = frozenset(
    "writing roleplay reasoning math coding extraction stem humanities".split()
)
"""The eight categories of MT-bench, which Spec-Bench reports as one."""
MOST_BYTES: Final = 256 << 20

_NOTICE = (
    "The ferry leaves the harbour at nine in the morning and arive on the island at ten. The last "
    "ferry leaves the island at six in the evening. Tickets is sold on the ferry, and bicycles "
    "travels for free."
)
_REPORT = (
    "The town council met on Tuesday to discuss the old bridge. The engineer reported that two of "
    "its five arches are cracked and that repairs would take eight months. A member asked whether "
    "a ferry could run meanwhile. The mayor answered that a ferry would cost less than a temporary "
    "bridge, and that the school bus could use the northern road. The council voted to close the "
    "bridge in March, to run a ferry, and to ask the county for half of the cost."
)
_CODE = (
    "def average(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n"
)


@dataclass(frozen=True)
class Question:
    """``turns`` are what the user says, one after another; the model answers each."""

    name: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Workload:
    """Questions and where they are from. ``hash`` is of the file they were read from."""

    name: str
    questions: tuple[Question, ...]
    hash: str | None = None

    @property
    def categories(self) -> tuple[str, ...]:
        """Every category, in order of appearance."""
        return tuple(dict.fromkeys(question.category for question in self.questions))

    def sample(self, per_category: int) -> Workload:
        """The same number of questions of each category, spread evenly over those there are.

        Without drawing lots, so that everybody who asks for as many gets the same ones.
        """
        chosen: set[str] = set()
        for category in self.categories:
            inside = [q.name for q in self.questions if q.category == category]
            count = min(per_category, len(inside))
            chosen |= {inside[index * len(inside) // count] for index in range(count)}
        kept = tuple(question for question in self.questions if question.name in chosen)
        return Workload(self.name, kept, self.hash)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: which questions, not what they say."""
        return {
            "name": self.name,
            "hash": self.hash,
            "questions": len(self.questions),
            "categories": {
                category: sum(question.category == category for question in self.questions)
                for category in self.categories
            },
        }


BUILT_IN: Final = Workload(
    "built-in",
    (
        Question("correct", "rewriting", (f"Correct the grammar of this text:\n\n{_NOTICE}",)),
        Question(
            "document", "rewriting", (f"Add a docstring to this Python function:\n\n{_CODE}",)
        ),
        Question("summary", "summarization", (f"Summarize this report:\n\n{_REPORT}",)),
        Question(
            "facts",
            "summarization",
            (
                f"What did the council decide?\n\n{_REPORT}",
                "Say that again as a list, one decision on each line.",
            ),
        ),
        Question("sky", "free questions", ("Why is the sky blue?",)),
        Question("story", "free questions", ("Tell a short story about a lighthouse keeper.",)),
    ),
)
"""A quick look: two questions of each kind, one of them with a second turn."""


def read_workload(path: Path) -> Workload:
    """Spec-Bench's JSONL where the file's name ends so, else a text file with a prompt a line.

    A line of JSONL is ``{"question_id": 81, "category": "writing", "turns": ["...", "..."]}``; the
    categories of MT-bench count as one, "mt_bench". Raises InputError, which names the line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise InputError(f"{path} is larger than {MOST_BYTES >> 20} MB; pass a part of it")
        lines = data.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise InputError(f"{path} is not valid UTF-8; convert it to UTF-8 first") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if path.suffix in (".jsonl", ".json"):
        questions = [_question(path, number, line) for number, line in numbered]
    else:
        questions = [Question(str(number), "prompts", (line.strip(),)) for number, line in numbered]
    if not questions:
        raise EmptyPromptError(f"{path} holds no prompt; put one on each line")
    _refuse_doubles(path, questions)
    return Workload(path.name, tuple(questions), "sha256:" + hashlib.sha256(data).hexdigest())


def _question(path: Path, number: int, line: str) -> Question:
    def wrong(what: str) -> InputError:
        return InputError(
            f'{path}, line {number}: {what}; a line is {{"question_id": 1, "category": "writing", '
            '"turns": ["..."]}'
        )

    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise wrong(f"this is no JSON ({error})") from None
    if not isinstance(entry, dict):
        raise wrong("this is no JSON object")
    name, category, turns = (entry.get(key) for key in ("question_id", "category", "turns"))
    if isinstance(name, bool) or not isinstance(name, int | str):
        raise wrong(f"question_id is {shown(name)}")
    if not isinstance(category, str) or not category:
        raise wrong(f"category is {shown(category)}")
    if not isinstance(turns, list) or not turns:
        raise wrong(f"turns is {shown(turns)}")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise wrong(f"a turn is {shown(turn)}")
        try:
            turn.encode()
        except UnicodeEncodeError:
            raise wrong(f"a turn has half a character: {shown(turn)}") from None
    return Question(str(name), "mt_bench" if category in MT_BENCH else category, tuple(turns))


def _refuse_doubles(path: Path, questions: Sequence[Question]) -> None:
    seen: set[str] = set()
    for question in questions:
        if question.name in seen:
            raise InputError(
                f"{path} has the question_id {question.name} twice; each needs its own"
            )
        seen.add(question.name)


def distinct_ngrams(tokens: Sequence[Any], order: int = 4) -> float:
    """The share of a text's n-grams that are distinct; 1 where it has none."""
    grams = [tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def only(workload: Workload, categories: Iterable[str]) -> Workload:
    """The questions of some categories. Raises InputError for one there is none of."""
    wanted = set(categories)
    missing = wanted - set(workload.categories)
    if missing:
        raise InputError(
            f"{workload.name} has no category {', '.join(sorted(missing))}; it has "
            f"{', '.join(workload.categories)}"
        )
    kept = tuple(question for question in workload.questions if question.category in wanted)
    return Workload(workload.name, kept, workload.hash)
