"""Write `docs/cli.md` from the command line's own help.

    python scripts/make_cli_docs.py

`tests/test_repository.py` fails where the file and the help have drifted apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "cli.md"
COMMANDS = (
    "",
    "generate",
    "chat",
    "serve",
    "check",
    "bench",
    "bench report",
    "tune",
    "models",
    "models pull",
    "models where",
)
HEADER = """# The command line

Written by `make docs` from the commands' own help; edit the help, not this file.
"""


def help_text(command: str) -> str:
    """What `foretell COMMAND --help` prints, 80 columns wide."""
    ran = subprocess.run(
        [sys.executable, "-m", "foretell", *command.split(), "--help"],
        env={**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return "\n".join(line.rstrip() for line in ran.stdout.strip().splitlines())


def document() -> str:
    """The whole page."""
    parts = [HEADER]
    for command in COMMANDS:
        parts.append(f"## {f'foretell {command}'.strip()}\n\n```\n{help_text(command)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(document(), "utf-8")
    print(f"wrote {TARGET.relative_to(ROOT)}")
