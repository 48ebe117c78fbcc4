"""Every Python block of docs/how-it-works.md runs and prints what the page shows.

The convention of the page: ```python blocks run in order and share one namespace; a block
that prints is followed by a ```text block with its output, and there are no other ```text
blocks.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "how-it-works.md"
FENCED_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read_page() -> str:
    return PAGE.read_text(encoding="utf-8")


def examples(page: str) -> list[tuple[int, str, str]]:
    """Return (line number, code, shown output) of every Python block, in order."""
    found: list[tuple[int, str, str]] = []
    previous = ""
    for block in FENCED_BLOCK.finditer(page):
        language, content = block.groups()
        if language == "python":
            found.append((page[: block.start(2)].count("\n") + 1, content, ""))
        elif language == "text":
            assert previous == "python", f"output without code: {content!r}"
            line, code, _ = found.pop()
            found.append((line, code, content))
        else:
            pytest.fail(f"a block of language {language!r} is neither code nor output")
        previous = language
    return found


def run(code: str, line: int, namespace: dict[str, object]) -> str:
    """Execute one block, with line numbers of the page in tracebacks, and return its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile("\n" * (line - 1) + code, str(PAGE), "exec"), namespace)
    return output.getvalue()


def test_the_code_of_the_page_prints_what_the_page_shows():
    namespace: dict[str, object] = {"__name__": "how_it_works"}
    for line, code, shown in examples(read_page()):
        assert run(code, line, namespace) == shown, f"{PAGE.name}, code at line {line}"


def test_the_page_has_code_and_every_fence_is_read():
    page = read_page()
    blocks = FENCED_BLOCK.findall(page)
    assert len(re.findall(r"^```", page, re.MULTILINE)) == 2 * len(blocks)
    assert len(examples(page)) >= 10


def test_a_wrong_output_would_be_noticed():
    (line, code, shown), *_ = examples("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    assert (run(code, line, {}), shown) == ("2\n", "3\n")


def test_the_table_of_contents_names_every_section():
    page = read_page()
    sections = re.findall(r"^## (.+)$", page, re.MULTILINE)
    contents = re.findall(r"^- \[(.+)\]\(#(.+)\)$", page, re.MULTILINE)
    assert [title for title, _ in contents] == sections
    for title, anchor in contents:
        assert anchor == re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
