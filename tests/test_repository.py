"""The repository itself: documents that are true, links that lead somewhere, nothing private."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import foretell
from foretell._engine import DRAFTERS

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from make_cli_docs import COMMANDS, document, help_text  # noqa: E402

DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

documents = pytest.mark.parametrize(
    "document_", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS]
)


def tracked_files() -> list[Path]:
    try:
        ran = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in ran.stdout.decode().split("\0") if name]


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, made as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@documents
def test_links_between_documents_lead_somewhere(document_):
    text = document_.read_text("utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document_.parent / name) if name else document_
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text("utf-8")), link


def command_lines(text: str) -> list[list[str]]:
    """The words of every `foretell ...` in code, prompts and comments left out."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    code = "\n".join(blocks).replace("\\\n", " ").splitlines() + re.findall(r"`([^`\n]+)`", text)
    found = []
    for line in code:
        for part in re.split(r"[|;]|&&", line):
            start = re.match(r"\s*(?:\$ )?(?:python -m )?foretell (?=[\w-])(.*)", part)
            if start:
                found.append(shlex.split(start[1], comments=True))
    return found


def command_of(words: list[str]) -> str:
    two = " ".join(words[:2])
    return two if two in COMMANDS else words[0] if words[0] in COMMANDS else ""


@documents
def test_commands_and_options_in_documents_exist(document_):
    text = document_.read_text("utf-8")
    if document_.name == "cli.md":
        return  # the help itself, see below
    for words in command_lines(text):
        command = command_of(words)
        assert command or words[0].startswith("-"), f"no command: {words}"
        known = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", help_text(command)))
        for word in words:
            if re.match(r"--?[a-z]", word):
                assert word.partition("=")[0] in known, f"foretell {command} has no {word}"


@documents
def test_make_targets_in_documents_exist(document_):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    code = re.findall(r"`+[^`]+`+", document_.read_text("utf-8"))
    for name in re.findall(r"(?:^|[`\n$] ?)make ([a-z]+)", "\n".join(code)):
        assert name in targets, f"make {name}"


def test_the_reference_of_commands_is_what_help_says():
    written = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert written == document(), "run `make docs`"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_whole_at_80_columns_and_tells_its_own_exit_codes(command):
    said = help_text(command)
    assert max(map(len, said.splitlines())) <= 80
    usage = said.splitlines()[0]
    assert "{" not in usage
    assert "}" not in usage
    _, _, commands = said.partition("\nCommands:\n")
    listed = re.findall(r"^  \S+ .*$", commands.partition("\n\n")[0], re.M)
    assert bool(listed) == (command in ("", "bench", "models"))
    assert not [line for line in listed if line.endswith("...")]
    codes = " ".join(said[said.index("Exit codes:") :].split())
    assert ("--compare" in codes) == (command == "generate")
    differs = command in ("", "generate", "check", "bench", "tune")
    assert ("; 1 " in codes) == differs, codes


def test_the_architecture_page_names_every_part():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    for path in (ROOT / "foretell").iterdir():
        if path.suffix == ".py" or (path.is_dir() and (path / "__init__.py").exists()):
            assert path.name in page, path.name


def test_the_readme_says_what_each_drafter_is_for():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", readme, re.M)) == set(DRAFTERS)


def test_the_changelog_tells_of_this_version():
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    version = re.escape(foretell.__version__)
    assert re.search(rf"^## \[{version}\] - (\d{{4}}-\d\d-\d\d|unreleased)$", changes, re.M)


def test_dependencies_are_those_that_are_imported():
    imported = set()
    for file in (ROOT / "foretell").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    # Numba brings llvmlite and openvino-genai openvino, each in the one version that fits it.
    brought = {"foretell", "llvmlite", "openvino"}
    outside = {name.replace("_", "-") for name in imported - set(sys.stdlib_module_names) - brought}
    optional = PROJECT["optional-dependencies"]
    extras = [
        name
        for extra in ("transformers", "server", "openvino", "bench")
        for name in optional[extra]
    ]
    declared = {re.split(r"[<>=]", name)[0].lower() for name in PROJECT["dependencies"] + extras}
    assert outside == {name.replace("_", "-") for name in declared}


def test_the_supported_pythons_are_the_same_everywhere():
    low, high = map(int, re.findall(r"3\.(\d+)", PROJECT["requires-python"]))
    script = (ROOT / "scripts" / "python").read_text("utf-8")
    assert f"(3, {low}) <= sys.version_info[:2] < (3, {high})" in script
    assert f"CPython 3.{low} to 3.{high - 1}" in script
    for minor in range(low, high):
        assert f"python3.{minor}" in script


def test_nothing_in_the_repository_belongs_to_one_machine():
    machine = re.compile(r"(?<![\w.:/-])/(work|root|home/\w+)/|file:///|/simple/")
    hosts = re.compile("pythonhosted|" + re.escape("pypi" + ".org"))
    for file in tracked_files():
        if not file.is_file() or file == Path(__file__):
            continue
        try:
            text = file.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        for pattern in (machine, hosts):
            found = pattern.search(text)
            assert found is None, f"{file.relative_to(ROOT)}: {found}"


def test_scripts_can_be_run():
    for file in (ROOT / "scripts").iterdir():
        if file.is_file() and file.read_bytes().startswith(b"#!"):
            assert file.stat().st_mode & 0o111, file.name
