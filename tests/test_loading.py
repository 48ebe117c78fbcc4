"""What the transformers backend cannot read is refused at once, in one line, without loading it."""

from __future__ import annotations

import sys

import pytest

from foretell import DownloadError, Engine, ModelNotFoundError, OptionError
from foretell import _loading as loading


@pytest.fixture
def asked(monkeypatch):
    """What was looked for on the hub; transformers itself must not be imported."""
    names = []
    monkeypatch.setattr(loading, "require_repository", names.append)
    monkeypatch.setattr(loading, "is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "foretell.backends.transformers", None)
    return names


@pytest.mark.parametrize(
    "options", [{"backend": "transformers"}, {"device": "cuda"}, {"dtype": "float16"}]
)
def test_the_demo_model_is_for_the_cpu_backend(options, asked):
    with pytest.raises(OptionError, match=r"the demo model is a GGUF file, which the cpu") as told:
        Engine("demo", **options)
    assert "organization/name" in str(told.value)
    assert "\n" not in str(told.value)
    assert asked == []


def test_so_is_every_gguf_file_and_a_draft_model(tmp_path, asked):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    for source in (file, str(file)):
        with pytest.raises(OptionError, match=r"m\.gguf is a GGUF file, which the cpu backend"):
            Engine(source, backend="transformers")


def test_folders_and_files_that_are_no_models_are_told(tmp_path, asked, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "weights.bin").touch()
    for source, says in {
        "./nowhere": "there is no folder './nowhere'; give a folder with config.json",
        "nowhere.gguf": "there is no folder 'nowhere.gguf'",
        "a/b/c": "there is no folder 'a/b/c'",
        "two words": "there is no folder 'two words'",
        tmp_path / "gone": "there is no folder",
        "folder": "folder has no config.json; give a folder as Hugging Face publishes it",
        "weights.bin": "weights.bin is a file; give the folder of the model",
        "": "has no config.json",
    }.items():
        with pytest.raises(ModelNotFoundError) as told:
            Engine(source, backend="transformers")
        assert says in str(told.value), source
    assert asked == []


def test_names_on_the_hub_are_looked_for_once(asked, monkeypatch):
    for name in ("gpt2", "organization/name"):
        loading.require_files(name)
    assert asked == ["gpt2", "organization/name"]

    def unreachable(name):
        raise DownloadError("the hub cannot be reached")

    monkeypatch.setattr(loading, "require_repository", unreachable)
    with pytest.raises(DownloadError):
        Engine("organization/name", backend="transformers")


def test_a_folder_with_a_config_goes_to_transformers(tmp_path, asked):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ImportError):  # which the fixture keeps from being imported
        Engine(tmp_path, backend="transformers")


def test_a_gguf_file_of_an_unknown_family_is_not_sent_there(tmp_path, asked, monkeypatch):
    from foretell import UnsupportedModelError
    from foretell.backends import cpu

    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")

    def unknown(*arguments, **options):
        raise UnsupportedModelError("its family is not known")

    monkeypatch.setattr(cpu, "load", unknown)
    with pytest.raises(UnsupportedModelError) as told:
        Engine(file)
    assert str(told.value) == "its family is not known"
