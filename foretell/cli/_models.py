"""Models on this machine."""

from __future__ import annotations

import sys

from foretell import _hub
from foretell.cli._terminal import announced, note, visible


def show_cached() -> None:
    """One line for each cached model: name, size, path."""
    models = _hub.list_cached()
    if not models:
        note("no models yet; `foretell models pull demo` fetches the demo model")
    width = max((len(model.name) for model in models), default=0)
    for model in models:
        size = f"{model.size / 1e6:,.0f} MB"
        sys.stdout.write(visible(f"{model.name:<{width}}  {size:>10}  {model.path}") + "\n")


def pull(name: str) -> None:
    """Fetch a model and print where it is."""
    with announced() as progress:
        path = _hub.pull(name, progress=progress)
    sys.stdout.write(f"{path}\n")


def where(name: str) -> None:
    """Print the path of a cached model."""
    sys.stdout.write(f"{_hub.where(name)}\n")
