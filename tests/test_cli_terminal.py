"""The command line in processes of its own: terminals, colours, Ctrl-C, broken pipes."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

FAKE = Path(__file__).with_name("fake_engine.py")
GREEN, END_OF_STYLE = "\x1b[32m", "\x1b[0m"


def command(*arguments: str, **settings: Any) -> list[str]:
    return [sys.executable, str(FAKE), json.dumps(settings), *arguments]


def environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    path = str(FAKE.parent.parent)
    return {**kept, "PYTHONPATH": path, "TERM": "xterm-256color", "COLUMNS": "80", **changes}


def heed_ctrl_c() -> None:
    """Undo what a shell does to its background jobs, this test run maybe among them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A process on a pseudo-terminal: type into it, read its screen."""

    def __init__(self, arguments: list[str], **changes: str) -> None:
        master, slave = pty.openpty()
        self.process = subprocess.Popen(
            arguments,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(**changes),
            start_new_session=True,
            preexec_fn=self._take_terminal,
        )
        os.close(slave)
        self.master = master
        self.screen = ""

    @staticmethod
    def _take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches the process
        heed_ctrl_c()

    def press_ctrl_c(self) -> None:
        # Python's input() can miss a signal that comes within an instant of showing its prompt.
        time.sleep(0.2)
        self.type("\x03")

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, pattern: str, seconds: float = 20) -> str:
        """Read until `pattern` shows; returns and forgets what came up to it."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.screen)):
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} is not on the screen: {self.screen!r}"
            if not self._read(left):
                raise AssertionError(f"ended without {pattern!r}: {self.screen!r}")
        before, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return before

    def end(self, seconds: float = 20) -> tuple[int, str]:
        """Read to the end; returns the exit code and what was still to come."""
        deadline = time.monotonic() + seconds
        while self._read(max(deadline - time.monotonic(), 0)):
            pass
        code = self.process.wait(timeout=seconds)
        os.close(self.master)
        return code, self.screen.replace("\r\n", "\n")

    def _read(self, seconds: float) -> bool:
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        with suppress(OSError):  # the other end is closed
            data = os.read(self.master, 4096)
            self.screen += data.decode()
            return bool(data)
        return False


def piped(
    *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None, **settings: Any
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(*arguments, **settings),
        input=stdin,
        capture_output=True,
        env=environment(**(env or {})),
        timeout=60,
        check=False,
    )


def background(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        preexec_fn=heed_ctrl_c,
    )


class TestOnATerminal:
    def test_accepted_draft_tokens_are_green_and_a_summary_follows(self):
        arguments = ["generate", "hello", "--max-tokens", "30", "--num-draft-tokens", "4"]
        code, screen = Terminal(command(*arguments)).end()
        text, summary = screen.rsplit("\n", 2)[:2]
        assert code == 0
        assert re.sub(r"\x1b\[\d+m", "", text) == ("fox jumps" * 4)[:30]
        assert text.startswith("fox jumpsf")  # nothing to look up in the first round
        assert f"{GREEN}o{END_OF_STYLE}" in text
        assert re.search(
            r"\[30 tokens, [\d.]+ tokens/s, [\d.]+ tokens per step, \d+% of \d+ drafted tokens "
            r"accepted, green: drafted and accepted, cut at --max-tokens\]",
            summary,
        )

    def test_plain_decoding_has_no_green(self):
        arguments = command("generate", "hello", "--num-draft-tokens", "0", ends=True)
        code, screen = Terminal(arguments).end()
        assert code == 0
        assert GREEN not in screen
        assert "nothing drafted]" in screen

    @pytest.mark.parametrize("changes", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
    def test_no_color_means_no_escape_codes(self, changes):
        code, screen = Terminal(command("generate", "hello", ends=True), **changes).end()
        assert code == 0
        assert "\x1b" not in screen
        assert screen.startswith("fox jumps\n[10 tokens, ")
        assert "green" not in screen

    def test_control_characters_of_the_model_are_shown_not_sent(self):
        says = "a\x1b]0;hi\x07\x9b2J\x7f\r\tb"
        _, screen = Terminal(command("generate", "hello", says=says, ends=True)).end()
        assert screen.startswith("a␛]0;hi␇\ufffd2J␡␍\tb\n")

    def test_markup_of_rich_is_text_like_any_other(self):
        arguments = command("generate", "hello", says="[bold]:x", ends=True)
        assert Terminal(arguments).end()[1].startswith("[bold]:x\n")

    def test_long_lines_are_left_to_the_terminal(self):
        says = "".join(map(chr, range(0x21, 0x7F)))
        arguments = command("generate", "hello", says=says, ends=True)
        assert Terminal(arguments, COLUMNS="20").end()[1].startswith(says + "\n")

    def test_text_is_shown_as_it_comes(self):
        terminal = Terminal(command("generate", "hello", "--max-tokens", "9", seconds=0.2))
        terminal.until("f")
        assert "jumps" not in terminal.screen
        assert terminal.end()[0] == 0

    def test_no_prompt_is_an_error_instead_of_waiting_for_input(self):
        code, screen = Terminal(command("generate")).end()
        assert code == 2
        assert screen.startswith("error: there is no prompt; type it after the command in quotes")

    def test_json_has_no_summary(self):
        _, screen = Terminal(command("generate", "hello", "--json", ends=True)).end()
        assert json.loads(screen)["text"] == "fox jumps"

    def test_compare_shows_both_speeds(self):
        arguments = command("generate", "hello", "--compare", "--max-tokens", "40", seconds=0.001)
        code, screen = Terminal(arguments).end()
        assert code == 0
        assert "measuring, round 5 of 5" in screen
        assert "same tokens:  yes, all 40 in 10 runs\nspeculation " in screen


class TestOnAPipe:
    def test_colour_cannot_be_forced_into_a_pipe(self):
        ran = piped("generate", "hello", "--max-tokens", "30", env={"FORCE_COLOR": "1"})
        assert (ran.stdout, ran.stderr) == (("fox jumps" * 4)[:30].encode() + b"\n", b"")

    def test_text_is_utf8_whatever_the_locale(self):
        changes = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
        ran = piped("generate", "hello", says="é🙂", ends=True, env=changes)
        assert ran.stdout == "é🙂\n".encode()

    def test_an_argument_that_is_not_utf8_is_an_error(self):
        arguments: list[Any] = [*command("generate"), b"a\xff"]
        ran = subprocess.run(arguments, env=environment(), capture_output=True, check=False)
        assert ran.returncode == 2
        assert ran.stderr.startswith(b"error: the prompt is not valid UTF-8")

    def test_a_reader_that_leaves_ends_it_quietly(self):
        arguments = command("generate", "hello", "--max-tokens", "4000", seconds=0.001)
        process = background(arguments)
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3) == b"fox"
        process.stdout.close()
        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == b""

    def test_text_flows_while_it_is_generated(self):
        arguments = command("generate", "hello", "--max-tokens", "200", seconds=0.05)
        process = background(arguments)
        assert process.stdout is not None
        assert process.stdout.read(1) == b"f"
        assert process.poll() is None
        process.kill()
        process.wait()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
class TestOnAFullDisk:
    @pytest.mark.parametrize("unbuffered", ["", "1"])
    @pytest.mark.parametrize(
        "arguments",
        [
            ["--help"],
            ["generate", "--help"],
            ["generate", "hello", "--max-tokens", "9"],
            ["generate", "hello", "--max-tokens", "9", "--json"],
        ],
    )
    def test_it_is_said_in_one_line(self, arguments, unbuffered):
        with Path("/dev/full").open("wb") as full:
            ran = subprocess.run(
                command(*arguments),
                stdout=full,
                stderr=subprocess.PIPE,
                env=environment(PYTHONUNBUFFERED=unbuffered),
                check=False,
            )
        assert ran.returncode == 2
        assert ran.stderr == b"error: cannot write to the output: no space left on device\n"


class TestCtrlC:
    SLOW = {"seconds": 0.05}  # noqa: RUF012

    def test_while_the_program_loads_it_leaves_at_once(self, tmp_path):
        # A library that is slow to import, and is waited for.
        (tmp_path / "tokenizers.py").write_text(
            "print('loading', flush=True)\nimport time\ntime.sleep(20)\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "foretell", "generate", "hello"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{FAKE.parent.parent}"),
            preexec_fn=heed_ctrl_c,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=10) == (b"", b"")
        assert process.returncode == 130

    def test_it_ends_the_text_with_a_summary_and_code_130(self):
        terminal = Terminal(command("generate", "hello", "--max-tokens", "4000", **self.SLOW))
        terminal.until("jumps")
        terminal.press_ctrl_c()
        code, screen = terminal.end()
        assert code == 130
        assert "Traceback" not in screen
        assert screen.rstrip().endswith("stopped by Ctrl-C]" + END_OF_STYLE)

    def test_on_a_pipe_the_text_so_far_stays_and_ends_its_line(self):
        process = background(command("generate", "hello", "--max-tokens", "4000", **self.SLOW))
        assert process.stdout is not None
        first = process.stdout.read(12)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=20)
        assert process.returncode == 130
        assert errors == b""
        assert (first + rest).startswith(b"fox jumpsfox")
        assert (first + rest).endswith(b"\n")

    def test_a_second_one_does_not_wait_for_the_step(self):
        terminal = Terminal(command("generate", "hello", seconds=2))
        terminal.until("f")
        began = time.monotonic()
        terminal.press_ctrl_c()
        terminal.press_ctrl_c()
        code, screen = terminal.end()
        assert code == 130
        assert "Traceback" not in screen
        assert time.monotonic() - began < 1.9


class TestChatOnATerminal:
    def test_turns_are_asked_for_answered_and_summed_up(self):
        terminal = Terminal(command("chat", ends=True))
        terminal.until("> ")
        terminal.type("hello\n")
        assert "fox jumps\r\n" in terminal.until("> ")
        terminal.type("/reset\n")
        assert "a new conversation" in terminal.until("> ")
        terminal.type("\x04")
        assert terminal.end()[0] == 0

    def test_colours_are_explained_once(self):
        terminal = Terminal(command("chat", "--max-tokens", "30", "--num-draft-tokens", "4"))
        terminal.until("> ")
        for legend in (True, False):
            terminal.type("hello\n")
            shown = terminal.until(r"cut at --max-tokens\](.|\s)*> ")
            assert "drafted tokens accepted" in shown
            assert ("green: drafted and accepted" in shown) is legend
        terminal.type("\x04")
        assert terminal.end()[0] == 0

    def test_ctrl_c_stops_the_answer_and_a_second_one_leaves(self):
        terminal = Terminal(command("chat", "--max-tokens", "4000", seconds=0.05))
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("jumps")
        terminal.press_ctrl_c()
        assert "stopped by Ctrl-C" in terminal.until("> ")
        terminal.press_ctrl_c()
        code, screen = terminal.end()
        assert code == 130
        assert "Traceback" not in screen

    def test_ctrl_c_at_the_prompt_asks_for_a_second_one(self):
        terminal = Terminal(command("chat", ends=True))
        terminal.until("> ")
        terminal.press_ctrl_c()
        terminal.until("Ctrl-C again leaves")
        terminal.until("> ")
        terminal.type("hello\n")
        assert "fox jumps" in terminal.until("> ")
        terminal.press_ctrl_c()
        terminal.until("Ctrl-C again leaves")
        terminal.press_ctrl_c()
        assert terminal.end()[0] == 130


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the import log")
def test_version_and_help_load_no_heavy_library():
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "foretell", "generate", "--help"],
        check=True,
        capture_output=True,
        text=True,
        env=environment(),
    )
    loaded = {line.rsplit("|", 1)[-1].strip() for line in ran.stderr.splitlines()}
    assert not loaded & {"numba", "llvmlite", "torch", "transformers", "gguf", "huggingface_hub"}
