"""`foretell chat` from a pipe: every line is a turn. On a terminal: see test_cli_terminal.py."""

from __future__ import annotations

import pytest

from foretell import Chat


def test_every_line_is_a_turn(run):
    ran = run("chat", stdin=b"hello\n\nand now?\n", ends=True)
    assert (ran.code, ran.out, ran.err) == (0, "fox jumps\nfox jumps\n", "")


def test_exit_leaves(run):
    assert run("chat", stdin=b"/exit\nhello\n", ends=True).out == ""


def test_an_unknown_command_is_told_and_not_sent(run):
    ran = run("chat", stdin=b"/quit\n", ends=True)
    assert (ran.code, ran.out) == (0, "")
    assert ran.err == "error: unknown command /quit; the commands are /exit, /reset and /help\n"


def test_text_that_begins_with_a_path_is_a_message(run):
    assert run("chat", stdin=b"/etc/hosts is what?\n", ends=True).out == "fox jumps\n"


def test_turns_share_a_conversation_until_it_is_reset(run, monkeypatch):
    seen = []
    original = Chat.stream

    def stream(self, text, **options):
        seen.append([message["role"] for message in self.messages])
        return original(self, text, **options)

    monkeypatch.setattr(Chat, "stream", stream)
    run("chat", "--system", "be brief", stdin=b"a\nb\n/reset\nc\n", ends=True)
    assert seen == [["system"], ["system", "user", "assistant"], ["system"]]


def test_ctrl_c_stops_the_answer_and_stays(run):
    ran = run("chat", "--num-draft-tokens", "0", stdin=b"a\nb\n", ends=True, interrupt_at=5)
    assert (ran.code, ran.out) == (0, "fox \nfox jumps\n")


def test_a_conversation_that_outgrows_the_context_says_so_and_goes_on(run):
    lines = b"x" * 50 + b"\nhi\n"
    ran = run("chat", stdin=lines, ends=True, max_length=40)
    assert (ran.code, ran.out) == (0, "fox jumps\n")
    assert "context is 40" in ran.err
    assert "/reset starts over" in ran.err


def test_a_model_without_chat_template_is_refused(run):
    ran = run("chat", stdin=b"hello\n", chat=False)
    assert (ran.code, ran.out) == (2, "")
    assert "error: this model has no chat template" in ran.err


def test_a_model_without_tokenizer_is_refused_for_that(run):
    ran = run("chat", stdin=b"hello\n", tokenizer=False)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "error: a conversation needs a tokenizer, and this model came without one; pass its "
        "tokenizer.json (Engine(tokenizer=...), --tokenizer FILE)\n"
    )


@pytest.mark.parametrize("data", [b"\xff\n", b"hello\n\xff\n"])
def test_input_that_is_not_utf8_is_an_error(run, data):
    ran = run("chat", stdin=data, ends=True)
    assert ran.code == 2
    assert "stdin is not valid UTF-8" in ran.err
