"""The report as one page that needs nothing else: tables and plots."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from foretell.bench._markdown import facts, tables, title
from foretell.bench._plots import plots
from foretell.bench._results import Results

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid #ddd; text-align: left;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { width: 100%; height: auto; } code { background: #f3f3f3; padding: 0 0.2em; }
li { overflow-wrap: anywhere; }
"""


def html(results: Sequence[Results]) -> str:
    """One page for all records, a part each. Raises MissingExtraError without matplotlib."""
    body = "".join(_part(one) for one in results)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>foretell bench</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}</body>\n"
        "</html>\n"
    )


def _part(results: Results) -> str:
    items = "".join(f"<li>{_text(fact)}</li>\n" for fact in facts(results))
    parts = [f"<h1>{escape(title(results.record))}</h1>\n<ul>\n{items}</ul>\n"]
    if not results.engines:
        return parts[0] + "<p>Nothing was measured.</p>\n"
    first, *rest = [f"<h2>{escape(name)}</h2>\n{_table(rows)}\n" for name, rows in tables(results)]
    drawn = [f"<h2>{escape(name)}</h2>\n{svg}\n" for name, svg in plots(results)]
    parts += [first, *drawn, *rest]
    return "".join(parts)


def _text(fact: str) -> str:
    """A line of Markdown: code and strong words, nothing else."""
    pieces = escape(fact).split("`")
    marked = "".join(
        f"<code>{piece}</code>" if index % 2 and index < len(pieces) - 1 else piece
        for index, piece in enumerate(pieces)
    )
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = ["<tr>" + "".join(f"<th>{escape(text)}</th>" for text in head) + "</tr>"]
    lines += [
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in body
    ]
    return "<table>\n" + "\n".join(lines) + "\n</table>"
