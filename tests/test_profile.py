"""What was learned on this machine is there the next time; what is damaged or old is not used."""

from __future__ import annotations

import errno
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretell import Engine, _profile
from foretell._auto_policy import Experience
from foretell._calibration import Calibration
from foretell._costs import DrafterCosts, PassCosts
from foretell._profile import Profile
from foretell.backends.table import TableModel


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(_profile, "cache_directory", lambda: tmp_path)
    return tmp_path


def experience() -> Experience:
    costs = PassCosts.from_dict({"rows": {"1": 0.01, "4": 0.02}, "slope": 1e-7})
    drafter = DrafterCosts(worth=0.004)
    drafter.add(1e-4)
    calibration = Calibration(memory=1000.0)
    for right in (True, True, False):
        calibration.observe("suffix", "2 tokens match", 0.3, right)
    return Experience(costs=costs, drafters={"suffix": drafter}, calibration=calibration)


def test_a_profile_is_what_was_saved():
    assert Profile("a model").save(experience())
    loaded = Profile("a model").load()
    assert loaded.costs.to_dict() == experience().costs.to_dict()
    assert loaded.drafters["suffix"].worth == 0.004
    assert loaded.calibration.to_dict() == experience().calibration.to_dict()
    assert loaded.calibration.probability("suffix", "2 tokens match", 0.3) > 0.3
    assert not Profile("another model").load().costs.known


def damage(path, what):
    if what == "cut":
        path.write_bytes(path.read_bytes()[:40])
    elif what == "bytes":
        path.write_bytes(b"\xff\x00")
    elif what == "deep":
        path.write_bytes(b"[" * 200_000)
    elif what == "large":
        path.write_bytes(path.read_bytes() + b" " * (1 << 20))
    elif what == "list":
        path.write_bytes(b"[]")
    elif what == "folder":
        path.unlink()
        path.mkdir()
    else:
        record = json.loads(path.read_text("utf-8"))
        record.update(what)
        path.write_text(json.dumps(record), "utf-8")


@pytest.mark.parametrize(
    "what",
    [
        "cut",
        "bytes",
        "deep",
        "large",
        "list",
        {"format": "another"},
        {"identity": "another"},
        {"written": 0},
        {"written": time.time() + 1e6},
        {"written": None},
        {"written": float("nan")},
        {"written": 10**400},
        {"calibration": {"kinds": [["x", 0, 10**400, 0, 0, 0]], "drafters": []}},
        {"passes": {"rows": {"1": "fast"}, "slope": 0}},
        {"passes": {"rows": {"9" * 400: 0.1}, "slope": 0}},
        {"passes": {"rows": {"1": float("inf")}, "slope": 0}},
        {"passes": {"rows": {"1": 0.1}, "slope": float("nan")}},
        {"passes": [1]},
        {"drafters": {"suffix": {}}},
        {"drafters": {"suffix": {"each": {}, "watching": 0, "trust": 1}}},
        {"drafters": [1]},
        {"calibration": {}},
        {"calibration": {"drafters": [["suffix", 1, 1, 1, float("nan")]], "kinds": []}},
        {"calibration": {"drafters": [["suffix", 1, 1, 1, 1, 1]], "kinds": []}},
        {"calibration": {"drafters": [["suffix", -1, 1, 1, 1]], "kinds": []}},
        {"calibration": {"drafters": [], "kinds": [[1]]}},
        {"calibration": {"drafters": 1, "kinds": 1}},
    ],
)
def test_what_is_damaged_old_or_of_something_else_is_not_used(what):
    profile = Profile("a model")
    profile.save(experience())
    damage(profile.path, what)
    loaded = Profile("a model").load()
    assert not loaded.costs.known
    assert loaded.drafters == {}
    assert profile.save(experience())
    assert Profile("a model").load().costs.known


def test_a_folder_in_its_place_is_no_error():
    profile = Profile("a model")
    profile.save(experience())
    damage(profile.path, "folder")
    assert not Profile("a model").load().costs.known
    assert not profile.save(experience())


def test_a_full_disk_leaves_what_was_there(cache, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    profile = Profile("a model")
    assert profile.save(experience())
    before = profile.path.read_bytes()
    changed = experience()
    changed.costs.observe(8, 0, 0.03)
    for place, name in ((_profile, "publish"), (Path, "write_text"), (Path, "mkdir")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, full)
            assert not profile.save(changed)
        assert [file.read_bytes() for file in (cache / "profiles").iterdir()] == [before]


def test_many_writers_at_once_leave_a_whole_file(cache):
    """Engines of one model in several threads; processes differ in nothing but their ids."""
    profile = Profile("a model")
    made = []
    for number in range(1, 9):
        one = experience()
        one.drafters |= {f"drafter {n}": one.drafters["suffix"] for n in range(200 * number)}
        made.append(one)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            assert all(pool.map(lambda one: Profile("a model").save(one), made))
            sizes = {len(one.drafters) for one in made}
            assert len(Profile("a model").load().drafters) in sizes
    assert [*(cache / "profiles").iterdir()] == [profile.path]


def test_a_profile_of_wrong_numbers_is_corrected_by_a_few_passes():
    """As if the machine had been a thousand times as fast, or as slow."""
    for factor in (1e-3, 1e3):
        saved = experience()
        saved.costs = PassCosts.from_dict(
            {"rows": {"1": 0.01 * factor, "4": 0.01 * factor}, "slope": 0}
        )
        Profile("a model").save(saved)
        costs = Profile("a model").load().costs
        for _ in range(8):
            costs.observe(1, 0, 0.01)
            costs.observe(4, 0, 0.02)
        assert costs.seconds(1, 0) == pytest.approx(0.01, rel=0.4)
        assert costs.seconds(4, 0) / costs.seconds(1, 0) == pytest.approx(2.0, rel=0.1)


def test_a_cache_that_cannot_be_written_is_no_error(cache, monkeypatch):
    (cache / "file").write_text("")
    monkeypatch.setattr(_profile, "cache_directory", lambda: cache / "file")
    assert not Profile("a model").save(experience())


def test_an_engine_keeps_what_it_learned_and_begins_with_it(cache):
    class Named(TableModel):
        identity = "a table"

    def engine():
        return Engine(Named.random(4, 2, seed=3))

    engine().generate([1, 2], max_tokens=20)
    assert not (cache / "profiles").exists()
    first = engine()
    first.generate([1, 2], max_tokens=300)
    [file] = (cache / "profiles").iterdir()
    saved = json.loads(file.read_text("utf-8"))
    assert saved["identity"].startswith("a table | ")
    assert "suffix" in saved["drafters"]
    assert engine()._experience.costs.known
    Engine(TableModel.random(4, 2, seed=3)).generate([1, 2], max_tokens=300)
    assert len(list((cache / "profiles").iterdir())) == 1
