"""What an engine has learned of a model on this machine, kept for the next one."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretell._auto_policy import Experience
from foretell._cache import PARTIAL_PREFIX, cache_directory, publish
from foretell._costs import DrafterCosts, PassCosts
from foretell._model import Model
from foretell._version import __version__

FORMAT = "foretell profile 1"
DAYS = 60
"""An older profile is measured anew: drivers, cooling and neighbours change."""
LARGEST = 1 << 20  # bytes; it takes a few thousand
FIRST, EVERY = 64, 2000
"""Passes after which a profile is written for the first time, and again."""


class Profile:
    """A file in the cache for one combination of model, settings, machine and version.

    A file that is damaged, old or of something else is as good as none: what it would have said
    is measured again while the engine works, and the file replaced. Where the cache cannot be
    written, nothing is kept.
    """

    def __init__(self, identity: str) -> None:
        """``identity`` tells models and settings apart; the machine and version are added."""
        self.identity = " | ".join((identity, _machine(), f"foretell {__version__}"))
        name = hashlib.sha256(self.identity.encode()).hexdigest()[:24]
        self.path = cache_directory() / "profiles" / f"{name}.json"
        self._next = FIRST

    @classmethod
    def of(cls, models: Sequence[Model]) -> Profile | None:
        """A target's, with its draft model's if it has one; None if one does not say who it is."""
        identities = [model.identity for model in models if model.identity is not None]
        return cls(" drafted for by ".join(identities)) if len(identities) == len(models) else None

    def load(self) -> Experience:
        """What the file says, or nothing at all; it goes on to be kept here."""
        experience = Experience(keep=self.save_now_and_then)
        try:
            saved = self._read()
            if not 0 <= time.time() - float(saved["written"]) < DAYS * 86400:
                return experience
            costs = PassCosts.from_dict(saved["passes"])
            drafters = {
                str(name): DrafterCosts.from_dict(entry)
                for name, entry in saved["drafters"].items()
            }
            experience.calibration.restore(saved["calibration"])
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ):
            return experience
        self._next = EVERY if costs.known else FIRST
        experience.costs, experience.drafters = costs, drafters
        return experience

    def _read(self) -> dict[str, Any]:
        if not self.path.is_file():
            raise FileNotFoundError(self.path)
        with self.path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise ValueError(f"{self.path} is too large")
        saved: dict[str, Any] = json.loads(content)
        if saved["format"] != FORMAT or saved["identity"] != self.identity:
            raise ValueError(f"{self.path} is of something else")
        return saved

    def save(self, experience: Experience) -> bool:
        """Write the file, whole or not at all; returns whether that was possible."""
        partial = self.path.with_name(f"{PARTIAL_PREFIX}{self.path.name}-{secrets.token_hex(4)}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_text(json.dumps(self._record(experience), indent=1) + "\n", "utf-8")
                publish(partial, self.path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def save_now_and_then(self, experience: Experience) -> None:
        """Write the file if there is enough that is new."""
        if experience.costs.num_passes >= self._next:
            self._next = experience.costs.num_passes + EVERY
            self.save(experience)

    def _record(self, experience: Experience) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "identity": self.identity,
            "written": time.time(),
            "passes": experience.costs.to_dict(),
            "calibration": experience.calibration.to_dict(),
            "drafters": {
                name: costs.to_dict()
                for name, costs in list(experience.drafters.items())
                if costs.asks
            },
        }


def _machine() -> str:
    """The processor, as far as the system tells."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{platform.system()} {platform.machine()}, {name}, {os.cpu_count()} cores"
