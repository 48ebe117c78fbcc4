"""What a message says to install works wherever the message is read."""

from __future__ import annotations

import shlex
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from foretell import _extras
from foretell._extras import install_command

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8"))
OPTIONAL = PROJECT["project"]["optional-dependencies"]


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize("extra", ["transformers", "server", "bench", "openvino"])
def test_an_installed_foretell_names_the_packages_themselves(extra, quote, monkeypatch):
    """So that nobody needs an index that has Foretell, or the folder it came from."""
    metadata = ["numpy>=2.1"]
    for name, packages in OPTIONAL.items():
        metadata += [f"{package}; extra == {quote}{name}{quote}" for package in packages]
    monkeypatch.setattr(_extras, "requires", lambda name: metadata)
    assert shlex.split(install_command(extra)) == ["pip", "install", *OPTIONAL[extra]]


def test_a_checkout_that_was_never_installed_names_its_folder(monkeypatch):
    def nothing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(_extras, "requires", nothing)
    assert install_command("server") == "pip install '.[server]'"
    monkeypatch.setattr(_extras, "requires", lambda name: ["numpy>=2.1"])
    assert install_command("server") == "pip install '.[server]'"
