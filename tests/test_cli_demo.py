"""The command line and the README's example on the real demo model, in processes of their own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from demo import demo_file
from test_cli_terminal import GREEN, Terminal, environment

from foretell import Engine

README = Path(__file__).resolve().parent.parent / "README.md"
LETTER = (
    "Correct the grammar of this text:\n\n"
    "The ferry leaves the harbour at nine in the morning. It arive on the island at ten. The last "
    "ferry leaves the island at six in the evening."
)

STORY = "Write a long story about a lighthouse keeper who learns to play the violin."


@pytest.fixture(scope="module")
def model() -> str:
    return str(demo_file())


def foretell(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "foretell", *arguments],
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        env=environment(),
        timeout=300,
        check=False,
    )


def test_text_and_json_agree_with_and_without_speculation(model):
    common = ["generate", "--model", model, "--max-tokens", "30"]
    text = foretell(*common, LETTER)
    plain = foretell(*common, "--num-draft-tokens", "0", "--json", "-", stdin=LETTER)
    assert (text.returncode, text.stderr, plain.stderr) == (0, "", "")
    result = json.loads(plain.stdout)
    assert text.stdout == result["text"].rstrip("\n") + "\n"
    assert len(result["token_ids"]) > 20
    assert result["stats"]["num_drafts"] == 0


def test_compare_finds_equal_tokens(model):
    options = ["--max-tokens", "24", "--num-draft-tokens", "4", "--compare", "--json"]
    ran = foretell("generate", "--model", model, *options, LETTER)
    result = json.loads(ran.stdout)
    assert (ran.returncode, result["equal"]) == (0, True)
    assert result["speculative"]["stats"]["num_accepted_tokens"] > 0


def test_a_terminal_shows_what_was_drafted(model):
    arguments = ["generate", "--model", model, "--max-tokens", "30", "--num-draft-tokens", "4"]
    terminal = Terminal([sys.executable, "-m", "foretell", *arguments, LETTER])
    code, screen = terminal.end(seconds=120)
    assert code == 0
    assert GREEN in screen
    assert "drafted tokens accepted, green: drafted and accepted" in screen


def test_ctrl_c_stops_it_cleanly(model):
    arguments = ["generate", "--model", model, "--max-tokens", "4000", STORY]
    terminal = Terminal([sys.executable, "-m", "foretell", *arguments])
    terminal.until(r"(\w+\W+){6}", seconds=120)
    terminal.press_ctrl_c()
    code, screen = terminal.end(seconds=60)
    assert code == 130
    assert "Traceback" not in screen
    assert "stopped by Ctrl-C" in screen


def test_a_chat_answers_as_if_it_had_read_the_whole_conversation_at_once(model):
    questions = ["My name is Ada. Say hello.", "What is my name?"]
    ran = foretell("chat", "--model", model, "--max-tokens", "16", stdin="\n".join(questions))
    engine = Engine(model)
    messages: list[dict[str, str]] = []
    expected = ""
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = engine.generate(messages=messages, max_tokens=16, num_draft_tokens=0).text
        messages.append({"role": "assistant", "content": answer})
        expected += answer.rstrip("\n") + "\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, expected, "")


def test_a_model_that_is_not_there_is_one_clear_line():
    ran = foretell("generate", "--model", "no/such/file.gguf", "hello")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("error: ")
    assert ran.stderr.count("\n") == 1


def test_the_example_in_the_readme_runs(model):
    example = re.search(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    assert example is not None
    code = example[1].replace('Engine("demo")', f"Engine({model!r})")
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout) > 100
