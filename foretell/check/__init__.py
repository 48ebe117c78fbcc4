"""Proof that speculation changes nothing: ``foretell check`` as a library.

``check(engine)`` gives a Report; ``compare_engines(reference, engine)`` asks other engines from
outside. ``docs/losslessness.md`` explains what is tested and why that proves something.
"""

from foretell.check._kit import check
from foretell.check._openai import Endpoint
from foretell.check._others import Answer, OtherEngine, compare_engines
from foretell.check._report import Case, Planted, Report, Result, Verdict

__all__ = [
    "Answer",
    "Case",
    "Endpoint",
    "OtherEngine",
    "Planted",
    "Report",
    "Result",
    "Verdict",
    "check",
    "compare_engines",
]
