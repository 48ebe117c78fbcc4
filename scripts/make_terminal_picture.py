"""Record `docs/terminal.svg`: a real run of the demo model on a pseudo-terminal.

    python scripts/make_terminal_picture.py

The numbers in it are those of the machine it is run on; run it on one that is idle.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "terminal.svg"
COLUMNS = 90
PROMPT = """\
Please correct the grammar mistakes in the following text. Answer with
the whole corrected text.

The ferry leaves the harbour at nine in the morning. It arive on the
island at ten. The last ferry leaves the island at six in the evening.
Tickets costs four pounds for adults and two pounds for childrens. Dogs
travels for free, but they has to stay on deck.
"""
COMMANDS = (
    ["cat", "letter.txt"],
    ["foretell", "generate", "--compare", "--file", "letter.txt"],
)


def on_a_terminal(command: list[str], folder: str) -> str:
    """What a command shows on a terminal, escape codes included."""
    if command[0] == "foretell":
        command = [sys.executable, "-m", *command]
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            data = os.read(master, 4096)
        except OSError:
            break
        if not data:
            break
        shown += data
    os.close(master)
    if process.wait():
        raise SystemExit(shown.decode())
    return shown.decode().replace("\r\n", "\n")


def main() -> None:
    # The first run may pull the model and compile, which is not what the picture is about.
    on_a_terminal(["foretell", "generate", "--max-tokens", "1", "hello"], ".")
    with tempfile.TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere:
        (Path(folder) / "letter.txt").write_text(PROMPT, "utf-8")
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        for command in COMMANDS:
            console.print(Text(f"$ {' '.join(command)}", style="bold"))
            shown = on_a_terminal(command, folder)
            notes = re.compile(r"^(measuring|reading)\b.*\n", re.MULTILINE)
            console.print(Text.from_ansi(notes.sub("", shown)))
    picture = console.export_svg(title="foretell")
    # Without fonts from elsewhere: a picture in a repository should load nothing.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    TARGET.write_text(picture, "utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
