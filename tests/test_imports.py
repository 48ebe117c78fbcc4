"""Which part may import which: the architecture, read from the source.

`docs/architecture.md` explains the directions. A new module fails here until it has a place.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "foretell"

# What each part may import of the package, imports for type checkers included. A part is a
# module, or a folder with all that is in it.
MAY_IMPORT = {
    # Words and rules, from the bottom up.
    "_errors": "",
    "_version": "",
    "_fork": "",
    "_memory": "",
    "_noise": "",
    "_support": "_noise",
    "_logprobs": "_noise _support",
    "_sampling": "_errors _noise _support",
    "_model": "_errors _sampling _tokenizer",
    "_draft": "_errors _sampling _model _verify",
    "_verify": "_errors _sampling _model _draft",
    "_proposal": "_errors _model _draft",
    "_calibration": "",
    "_tree": "_draft _proposal _calibration",
    "_result": "_errors _logprobs _sampling _model _draft _verify",
    "_stop": "_errors _result",
    "_costs": "_fork",
    "_together": "_calibration _costs",
    "_policy": "_errors _costs _sampling _model _draft _verify _proposal _together",
    "_auto_policy": (
        "_errors _sampling _model _draft _verify _proposal _calibration _tree _costs _policy "
        "_together"
    ),
    "_profile": "_cache _model _costs _auto_policy _version",
    "_request": "_logprobs _sampling _model _draft _verify _result _stop _policy",
    "_prefill": "_logprobs _model _draft _request",
    "_decode": "_logprobs _model _draft _verify _result _policy _request _prefill",
    "_batch": "_decode _model _prefill _request _result",
    # Text.
    "_stream_decoder": "_errors _tokenizer",
    "_template_sandbox": "",
    "_chat_template": "_errors _template_sandbox",
    "_tokenizer": "_errors _fork _chat_template _stream_decoder",
    # Files.
    "_cache": "_errors _version",
    "_kernel_cache": "_errors _cache _fork",
    "_largest": "_model _kernel_cache",
    "_occurrences": "_kernel_cache _fork",
    "_extras": "",
    "_pip": "_errors",
    "_demo": "_errors _cache _pip",
    "_hub": "_errors _cache _demo",
    # Implementations: interfaces only; never the loop, the engine or one another.
    "drafters": (
        "_errors _fork _sampling _model _draft _verify _proposal _tokenizer _largest _occurrences"
    ),
    "backends/table": "_errors _model",
    "backends/cpu": "_errors _memory _model _tokenizer _cache _hub _kernel_cache",
    # The cpu backend's kernels, as operators of torch: written once.
    "backends/transformers": "_errors _model _tokenizer backends/cpu",
    "_loading": "_errors _extras _hub _model backends/cpu backends/transformers",
    "_near_ties": "_noise _result _sampling",
    # The one place where it all meets, and what stands on it.
    "_engine": (
        "_errors _logprobs _sampling _model _draft _verify _result _stop _policy "
        "_auto_policy _profile _request _decode _tokenizer _stream_decoder drafters _loading "
        "_near_ties"
    ),
    "_drop_in": (
        "_errors _extras _noise _support _sampling _stop _result _request _batch _loading _engine"
    ),
    "check": (
        "_errors _extras _version _noise _logprobs _sampling _model _draft _verify _policy _result "
        "_stop _request _decode _loading _engine _hub drafters backends/table"
    ),
    "server": (
        "_errors _version _sampling _model _draft _verify _result _logprobs _request _batch "
        "_auto_policy _engine"
    ),
    "bench": (
        "_errors _extras _version _cache _hub _model _tokenizer _result _loading _engine "
        "backends/cpu backends/transformers"
    ),
    "cli": (
        "_errors _extras _version _memory _sampling _verify _result _engine _hub drafters check "
        "server bench"
    ),
    "__main__": "cli",
    "__init__": (
        "_version _errors _logprobs _sampling _model _draft _verify _result _tokenizer _engine "
        "_drop_in"
    ),
    # For reading: the method in NumPy, independent of all of the above.
    "reference": "",
}
FOLDERS = ("drafters", "backends/cpu", "backends/transformers", "cli", "server", "bench", "check")
EMPTY = ("backends",)  # a namespace, nothing more

# Libraries outside the standard one, and the only parts that may import them.
LIBRARIES = {
    "numpy": (
        "_noise _support _logprobs _sampling _model _draft _verify _policy _near_ties _drop_in "
        "_largest _occurrences drafters backends/table backends/cpu backends/transformers check "
        "bench reference"
    ),
    "numba": "backends/cpu bench _kernel_cache _largest _occurrences",
    "llvmlite": "backends/cpu _kernel_cache",
    "psutil": "_memory bench",
    "safetensors": "backends/cpu backends/transformers",
    "gguf": "backends/cpu bench",
    "tokenizers": "_tokenizer _stream_decoder backends/cpu backends/transformers",
    "jinja2": "_template_sandbox",
    "huggingface_hub": "_hub",
    "filelock": "_demo",
    "platformdirs": "_cache",
    "rich": "cli _demo",
    "typer": "cli",
    "fastapi": "server",
    "starlette": "server",
    "uvicorn": "server",
    "h11": "server",
    "pydantic": "server",
    "prometheus_client": "server",
    # Extras; the engine only names their types.
    "torch": "check bench backends/transformers _drop_in",
    "transformers": "check bench backends/transformers _drop_in _loading _engine",
    "accelerate": "bench",
    "openvino": "bench",
    "openvino_genai": "bench",
    "matplotlib": "bench",
}


def part_of(module: str) -> str:
    """`foretell.backends.cpu._pass` belongs to the part `backends/cpu`."""
    path = "/".join(module.split(".")[1:]) or "__init__"
    for folder in FOLDERS:
        if path == folder or path.startswith(folder + "/"):
            return folder
    return path


def modules() -> dict[str, ast.Module]:
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(file.read_text("utf-8"))
    return found


MODULES = modules()


def imports(tree: ast.AST, *, running: bool = False) -> Iterator[str]:
    """Every module that is imported; with `running`, only when the importing one is loaded."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module
        elif running and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            continue
        else:
            yield from imports(node, running=running)


def test_every_module_has_a_place():
    parts = {part_of(module) for module in MODULES}
    assert parts - {*MAY_IMPORT, *EMPTY} == set()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_part_may(module):
    part = part_of(module)
    allowed = {part, *MAY_IMPORT.get(part, "").split()}
    used = {part_of(name) for name in imports(MODULES[module]) if name.split(".")[0] == "foretell"}
    assert used - allowed == set(), f"{part} must not import these"


@pytest.mark.parametrize("module", MODULES)
def test_a_library_is_imported_only_where_it_is_needed(module):
    part = part_of(module)
    outside = {name.split(".")[0] for name in imports(MODULES[module])}
    for library in outside - set(sys.stdlib_module_names) - {"foretell", "__future__"}:
        assert part in LIBRARIES.get(library, "").split(), f"{part} must not import {library}"


EXTRAS = {"torch", "transformers", "accelerate", "openvino", "openvino_genai", "matplotlib"}


def test_an_extra_is_imported_only_when_it_is_used():
    for module, tree in MODULES.items():
        if part_of(module) == "backends/transformers":
            continue  # which is imported itself when it is used, see below
        loaded = set(imports(tree, running=True))
        assert not {name.split(".")[0] for name in loaded} & EXTRAS, module
        parts = {part_of(name) for name in loaded if name.startswith("foretell")}
        assert "backends/transformers" not in parts, module


@pytest.mark.parametrize("worker", ["transformers", "openvino", "llama_server", "openai"])
def test_what_runs_in_another_environment_needs_only_the_standard_library(worker):
    seen, waiting = set(), [f"foretell.bench._{worker}_worker"]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        names = list(imports(MODULES[module], running=True))
        outside = {name.split(".")[0] for name in names} - {"foretell", "__future__"}
        assert outside <= set(sys.stdlib_module_names), module
        waiting += [name for name in names if name.startswith("foretell")]
    assert "foretell.bench._protocol" in seen


def test_drafters_do_not_import_one_another():
    for module, tree in MODULES.items():
        if module.startswith("foretell.drafters."):
            others = [name for name in imports(tree) if name.startswith("foretell.drafters")]
            assert others == [], module


def test_no_module_imports_itself_through_others():
    graph = {
        module: {name for name in imports(tree, running=True) if name in MODULES}
        for module, tree in MODULES.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_capabilities_are_asked_for_by_name():
    for module, tree in MODULES.items():
        calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        guesses = [call for call in calls if call.startswith("hasattr(")]
        # What the operating system can do has no other name.
        assert [call for call in guesses if not call.startswith("hasattr(os, ")] == [], module


def test_the_decode_loop_is_a_page_long():
    assert len((PACKAGE / "_decode.py").read_text("utf-8").splitlines()) <= 150
