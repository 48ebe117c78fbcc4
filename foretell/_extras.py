"""Optional dependencies: the command that installs them, which works wherever Foretell is."""

from __future__ import annotations

import shlex
from importlib.metadata import PackageNotFoundError, requires


def install_command(extra: str) -> str:
    """The pip command that brings what an extra needs.

    It names the packages themselves, as the installed Foretell declares them: the name
    ``foretell[extra]`` would work only where pip can find Foretell, ``.[extra]`` only in the folder
    it was installed from.
    """
    in_folder = f"pip install '.[{extra}]'"
    try:
        declared = requires("foretell") or []
    except PackageNotFoundError:  # run from a checkout without having been installed
        return in_folder
    packages = []
    for line in declared:
        package, _, condition = line.partition(";")
        if condition.replace('"', "'").replace(" ", "") == f"extra=='{extra}'":
            packages.append(package.strip())
    return shlex.join(["pip", "install", *packages]) if packages else in_folder
