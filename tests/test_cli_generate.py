"""`foretell generate` on pipes: exact output, errors and exit codes.

The engine is a table model that says "fox jumps" ("fox jumpsfox jumps...") whatever it is asked.
"""

from __future__ import annotations

import json
import signal

import pytest


def test_a_pipe_gets_the_text_and_one_line_end(run):
    ran = run("generate", "hello", "--max-tokens", "12")
    assert (ran.code, ran.out, ran.err) == (0, "fox jumpsfox\n", "")


def test_line_ends_at_the_end_of_the_text_become_one(run):
    ran = run("generate", "hello", says="a\nbc\r\t", max_length=40, ends=True)
    assert ran.out == "a\nbc\r\t\n"
    assert run("generate", "hello", says="ab\n", ends=True).out == "ab\n"


def test_line_ends_inside_the_text_are_kept(run):
    ran = run("generate", "hello", "--max-tokens", "6", says="ab\n")
    assert ran.out == "ab\nab\n"


def test_the_text_ends_where_the_model_ends_it(run):
    assert run("generate", "hello", ends=True).out == "fox jumps\n"


def test_characters_of_several_bytes_arrive_whole(run):
    assert run("generate", "hello", says="é🙂д", ends=True).out == "é🙂д\n"


def test_control_characters_reach_a_pipe_unchanged(run):
    assert run("generate", "hello", says="a\x1b[2J", ends=True).out == "a\x1b[2J\n"


@pytest.mark.parametrize("options", [["--num-draft-tokens", "0"], [], ["--num-draft-tokens", "9"]])
def test_speculation_changes_nothing(run, options):
    ran = run("generate", "x fox", "--raw", "--max-tokens", "40", *options)
    assert ran.out == (" jumpsfox" * 5)[:40] + "\n"


def test_stop_strings_end_the_text_and_are_left_out(run):
    ran = run("generate", "hello", "--stop", "zzz", "--stop", "mps")
    assert ran.out == "fox ju\n"


def test_without_a_chat_template_the_prompt_is_continued(run):
    plain = json.loads(run("generate", "x fox", "--json", "--max-tokens", "3", chat=False).out)
    assert (plain["prompt_tokens"], plain["text"]) == (5, " ju")


def test_raw_leaves_the_chat_template_out(run):
    raw = json.loads(run("generate", "x fox", "--json", "--raw", "--max-tokens", "3").out)
    assert (raw["prompt_tokens"], raw["text"]) == (5, " ju")


def test_the_chat_template_holds_system_and_prompt(run):
    ran = json.loads(run("generate", "hi", "--system", "be", "--json", "--max-tokens", "1").out)
    assert ran["prompt_tokens"] == len("system: be") + 1 + len("user: hi") + 1


def test_json_is_one_object_and_nothing_else(run):
    ran = run("generate", "hello", "--json", "--max-tokens", "20", "--num-draft-tokens", "4")
    result = json.loads(ran.out)
    assert (ran.code, ran.out.count("\n"), ran.err) == (0, 1, "")
    assert set(result) == {
        "text",
        "token_ids",
        "finish_reason",
        "prompt_tokens",
        "seed",
        "stats",
    }
    assert (result["text"], result["finish_reason"]) == ("fox jumpsfox jumpsfo", "length")
    assert result["stats"]["num_accepted_tokens"] > 0


def test_several_drafters_are_accepted(run):
    ran = run("generate", "hello", "--drafter", "prompt_lookup", "--drafter", "prompt_lookup")
    assert ran.code == 0


class TestWhereThePromptComesFrom:
    def length(self, run, *arguments, **settings):
        ran = run("generate", "--raw", "--json", "--max-tokens", "1", *arguments, **settings)
        assert ran.code == 0, ran.err
        return json.loads(ran.out)["prompt_tokens"]

    def test_a_dash_reads_stdin(self, run):
        assert self.length(run, "-", stdin=b"abc") == 3

    def test_no_prompt_reads_stdin_where_it_is_a_pipe(self, run):
        assert self.length(run, stdin=b"abc") == 3

    def test_a_file(self, run, tmp_path):
        (tmp_path / "prompt.txt").write_bytes("aé".encode())
        assert self.length(run, "--file", str(tmp_path / "prompt.txt")) == 3

    @pytest.mark.parametrize("data", [b"abc\n", b"abc\r\n", b"\xef\xbb\xbfabc", b"abc\r"])
    def test_the_last_line_end_and_a_byte_order_mark_are_left_out(self, run, data):
        assert self.length(run, stdin=data) == 3 + (data == b"abc\r")

    def test_one_line_end_of_several(self, run):
        assert self.length(run, stdin=b"abc\n\n") == 4

    def test_a_prompt_that_looks_like_an_option_follows_two_dashes(self, run):
        assert self.length(run, "--", "--raw") == 5


class TestErrors:
    """One message on stderr, nothing on stdout, exit code 2, no traceback."""

    @pytest.mark.parametrize(
        ("arguments", "stdin", "message"),
        [
            (["x", "--file", "y"], b"", "got a PROMPT and a --file; pass one of them"),
            (["-", "--file", "y"], b"", "got a PROMPT and a --file; pass one of them"),
            ([""], b"", "the prompt is empty; pass some text"),
            (["-"], b"", "the prompt is empty; pass some text"),
            (
                ["hi", "there", "friend"],
                b"",
                "got 3 prompts; if they are one, put it in quotes: 'hi there friend'",
            ),
            ([], b"\n", "the prompt is empty; pass some text"),
            (
                ["-"],
                b"ab\xff",
                "stdin is not valid UTF-8 (byte 2 is 0xff); convert it to UTF-8 first",
            ),
            (["a\udcff"], b"", "the prompt is not valid UTF-8; convert it to UTF-8 first"),
            (
                ["x", "--system", "a\udcff"],
                b"",
                "--system is not valid UTF-8; convert it to UTF-8 first",
            ),
            (
                ["x", "--stop", "a\udcff"],
                b"",
                "--stop is not valid UTF-8; convert it to UTF-8 first",
            ),
            (
                ["x", "--num-draft-tokens", "0", "--drafter", "ngram"],
                b"",
                "--drafter ngram cannot be used with --num-draft-tokens 0, which drafts nothing; "
                "leave one of them out",
            ),
            (
                ["x", "--num-draft-tokens", "0", "--draft", "demo"],
                b"",
                "--draft demo cannot be used with --num-draft-tokens 0, which drafts nothing; "
                "leave one of them out",
            ),
            (
                ["x", "--drafter", "draft_model"],
                b"",
                "the drafter 'draft_model' needs a draft model: pass one (draft=..., --draft "
                "MODEL)",
            ),
            (
                ["x", "--system", "y", "--raw"],
                b"",
                "--system needs a chat template, and --raw leaves it out; put the text into the "
                "prompt instead",
            ),
            (
                ["x", "--compare", "--num-draft-tokens", "0"],
                b"",
                "--compare with --num-draft-tokens 0 would compare plain decoding with itself; "
                "leave one of them out",
            ),
            (
                ["x", "--drafter", "nobody"],
                b"",
                "unknown drafter 'nobody'; the drafters are suffix, recycling, "
                "prompt_lookup, draft_model, ngram, early_exit",
            ),
            (
                ["x", "--stop", ""],
                b"",
                "stop holds an empty string, which would end every text at once",
            ),
        ],
    )
    def test_a_request_that_cannot_be_carried_out(self, run, arguments, stdin, message):
        ran = run("generate", *arguments, stdin=stdin)
        assert (ran.code, ran.out, ran.err) == (2, "", f"error: {message}\n")

    def test_a_missing_file(self, run, tmp_path):
        ran = run("generate", "--file", str(tmp_path / "none"))
        assert (ran.code, ran.out) == (2, "")
        assert ran.err == f"error: cannot read --file {tmp_path}/none: No such file or directory\n"

    def test_a_prompt_longer_than_the_context(self, run):
        ran = run("generate", "x" * 50, max_length=40)
        assert ran.code == 2
        assert "error: the prompt has 57 tokens, but the model's context is 40" in ran.err

    def test_a_model_without_tokenizer(self, run):
        ran = run("generate", "x", "--raw", tokenizer=False)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err == (
            "error: a text prompt needs a tokenizer, and this model came without one; pass its "
            "tokenizer.json (Engine(tokenizer=...), --tokenizer FILE); in Python, token ids do as "
            "well\n"
        )

    def test_a_system_message_for_a_model_without_template(self, run):
        ran = run("generate", "x", "--system", "y", chat=False)
        assert "--system needs a chat template, and this model has none" in ran.err

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--temperature", "-1"],
            ["--nonsense"],
            ["--max-tokens", "0"],
            ["--max-tokens", "many"],
            ["--num-draft-tokens", "-1"],
            ["--threads", "0"],
            ["--dtype", "float64"],
        ],
    )
    def test_bad_usage(self, run, arguments):
        ran = run("generate", "x", *arguments)
        assert (ran.code, ran.out) == (2, "")
        assert "Error: " in ran.err
        assert "Traceback" not in ran.err

    def test_control_characters_in_a_message_are_shown(self, run):
        ran = run("generate", "x", "--drafter", "\x1b[2J")
        assert "\x1b" not in ran.err

    def test_an_unexpected_error_is_one_line_with_a_hint(self, run):
        ran = run("generate", "x", nonsense=True)
        assert ran.code == 2
        assert ran.err.startswith("error: unexpected TypeError: ")
        assert ran.err.endswith("; run it again with --debug to see where it happened\n")
        assert ran.err.count("\n") == 1

    def test_debug_shows_where(self, run):
        ran = run("generate", "x", "--debug", nonsense=True)
        assert ran.code == 2
        assert "Traceback" in ran.err
        assert "--debug" not in ran.err.splitlines()[-1]


class TestCtrlC:
    """In the middle of an answer; on a terminal: see test_cli_terminal.py."""

    def test_the_text_so_far_stays_and_ends_its_line(self, run):
        ran = run("generate", "hello", "--num-draft-tokens", "0", interrupt_at=5)
        assert (ran.code, ran.out, ran.err) == (130, "fox \n", "")

    def test_json_is_still_one_object(self, run):
        ran = run("generate", "hello", "--json", interrupt_at=5)
        assert (ran.code, ran.err) == (130, "")
        assert json.loads(ran.out)["finish_reason"] == "cancelled"

    def test_before_the_first_token_there_is_an_empty_line(self, run):
        ran = run("generate", "hello", interrupt_at=1)
        assert (ran.code, ran.out, ran.err) == (130, "\n", "")

    def test_its_handler_is_gone_afterwards(self, run):
        before = signal.getsignal(signal.SIGINT)
        run("generate", "hello", interrupt_at=5)
        assert signal.getsignal(signal.SIGINT) is before

    def test_it_stays_ignored_where_it_was(self, run, monkeypatch):
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            ran = run("generate", "hello", ends=True, interrupt_at=5)
        finally:
            signal.signal(signal.SIGINT, before)
        assert (ran.code, ran.out) == (0, "fox jumps\n")


def test_version(run):
    from foretell import __version__

    assert run("--version").out == f"foretell {__version__}\n"


@pytest.mark.parametrize(
    ("command", "codes"),
    [
        (
            [],
            "0 fine; 1 something differed that must not (only where outputs are compared); 2 could",
        ),
        (["generate"], "0 fine; 1 --compare found a difference; 2 could not run"),
        (["chat"], "0 fine; 2 could not run"),
        (["models"], "0 fine; 2 could not run"),
        (["models", "pull"], "0 fine; 2 could not run"),
    ],
)
def test_help_documents_the_exit_codes(run, command, codes):
    ran = run(*command, "--help")
    assert ran.code == 0
    assert f"Exit codes: {codes}" in " ".join(ran.out.split())
