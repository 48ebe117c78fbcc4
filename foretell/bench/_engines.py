"""Which engines to compare, and in which configuration: from words of the command line to each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from foretell._engine import DRAFTERS, is_drafter
from foretell._errors import OptionError
from foretell._hub import files_of
from foretell.backends.cpu._model import check_threads
from foretell.backends.cpu._pool import default_threads

PLAIN: Final = "plain"
KINDS: Final = ("foretell", "transformers", "llama.cpp", "openvino", "openai")
DTYPES: Final = ("native", "float32", "bfloat16", "int8")
GGUF_KINDS: Final = {"float32": "F32", "bfloat16": "F16", "int8": "Q8_0"}
"""What a file is converted to for peers that read GGUF, to have as many bits for a weight."""
MODES: Final = {
    "transformers": (PLAIN, "prompt_lookup", "assisted"),
    "openvino": (PLAIN, "prompt_lookup"),
    "openai": (PLAIN, "speculative"),
}
FORM: Final = "KIND[:MODE][,dtype=D][,drafters=A+B][,url=U][,model=M][,name=N]"


@dataclass(frozen=True)
class EngineSpec:
    """One engine in one configuration. ``name`` is what tables call it.

    ``model``: what a peer is given instead of the run's model, or a server's name for its own.
    """

    kind: str
    mode: str
    dtype: str
    name: str
    drafters: tuple[str, ...] = ()
    url: str | None = None
    model: str | None = None

    @property
    def is_plain(self) -> bool:
        return self.mode == PLAIN

    @property
    def process(self) -> tuple[Any, ...]:
        """Specs of equal ``process`` share one: the same weights in another mode."""
        shared = self.kind in ("foretell", "transformers")
        rest = (self.drafters,) if self.kind == "foretell" else (self.url, self.model)
        return (self.kind, self.dtype, None if shared else self.mode, *rest)

    def to_dict(self, plain: str | None) -> dict[str, Any]:
        """The JSON form; ``plain`` names the engine its output is compared with."""
        return {
            "name": self.name,
            "kind": self.kind,
            "mode": self.mode,
            "dtype": self.dtype,
            "drafters": list(self.drafters),
            "plain": plain,
        }


@dataclass(frozen=True)
class Places:
    """Where peers are found on this machine, and what they are given."""

    model: str
    draft: str | None = None
    tokenizer: str | None = None
    threads: int = 1
    pythons: dict[str, str] = field(default_factory=dict)
    """An interpreter for "transformers" or "openvino", where it is another one."""
    llama_server: str | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)
    """How foretell loads the model, beside the above: ``backend`` and that backend's options."""


def places_of(
    model: str,
    draft: str | None,
    tokenizer: Path | None,
    threads: int | None,
    llama_server: str | None,
    pythons: Mapping[str, Path | None],
    loading: Mapping[str, Any],
) -> Places:
    """Where everything is; ``threads`` settled, since peers have to be told."""
    check_threads(threads)
    return Places(
        model,
        draft,
        None if tokenizer is None else str(tokenizer),
        threads or default_threads(),
        {kind: str(python) for kind, python in pythons.items() if python is not None},
        llama_server,
        loading,
    )


SpecTypes = Callable[[], Sequence[str]]


def parse(
    texts: Iterable[str], dtype: str, *, draft: bool, spec_types: SpecTypes
) -> list[EngineSpec]:
    """The engines for ``--engine`` words, each with the plain one it is compared with.

    A kind alone is all its modes: plain and auto for "foretell", every ``--spec-type`` that
    ``spec_types`` finds for "llama.cpp". Raises OptionError for what is none.
    """
    specs: dict[str, EngineSpec] = {}
    for text in texts:
        for spec in expand(text, dtype, draft, spec_types):
            specs.setdefault(spec.name, spec)
    for spec in list(specs.values()):
        if baseline_of(spec, specs.values()) is None and spec.kind != "openai":
            plain = _named(replace(spec, mode=PLAIN, drafters=()))
            specs.setdefault(plain.name, plain)
    # Plain ones first, so that tables begin with what the others are compared with.
    order = list(dict.fromkeys((spec.kind, spec.dtype) for spec in specs.values()))
    return sorted(
        specs.values(), key=lambda spec: (order.index((spec.kind, spec.dtype)), not spec.is_plain)
    )


def baseline_of(spec: EngineSpec, others: Iterable[EngineSpec]) -> EngineSpec | None:
    """The plain engine of the same kind and weights."""
    for other in others:
        if other.is_plain and (other.kind, other.dtype) == (spec.kind, spec.dtype):
            return other
    return None


def expand(text: str, dtype: str, draft: bool, spec_types: SpecTypes) -> list[EngineSpec]:
    """The engines that one word asks for, without the plain one they are compared with."""
    head, *rest = text.split(",")
    kind, _, mode = head.partition(":")
    if kind not in KINDS:
        raise OptionError(f"unknown engine {kind!r}; the engines are {', '.join(KINDS)}: {FORM}")
    options = _options(text, rest)
    dtype = options.pop("dtype", dtype)
    if dtype not in DTYPES:
        raise OptionError(f"{text!r}: dtype is {dtype!r}; use {', '.join(DTYPES)}")
    drafters = tuple(filter(None, options.pop("drafters", "").split("+")))
    for drafter in drafters:
        if not is_drafter(drafter):
            raise OptionError(
                f"{text!r}: unknown drafter {drafter!r}; the drafters are {', '.join(DRAFTERS)}"
            )
    name, url = options.pop("name", None), options.pop("url", None)
    spec = EngineSpec(kind, mode, dtype, name or "", drafters, url, options.pop("model", None))
    _check(text, spec)
    modes = [mode] if mode else _all_modes(spec, draft, spec_types)
    if "assisted" in modes and not draft:
        raise OptionError(f"{text!r}: assisted generation needs a smaller model: --draft MODEL")
    if name and len(modes) > 1:
        raise OptionError(f"{text!r}: one name for {len(modes)} engines; add a mode, KIND:MODE")
    return [_named(replace(spec, mode=one)) for one in modes]


def _options(text: str, parts: Sequence[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in parts:
        key, sign, value = part.partition("=")
        if not sign or not value or key not in ("dtype", "drafters", "url", "model", "name"):
            raise OptionError(f"{text!r}: {part!r} is no option of an engine; use {FORM}")
        if key in options:
            raise OptionError(f"{text!r} has {key} twice")
        options[key] = value
    return options


def _check(text: str, spec: EngineSpec) -> None:
    if (spec.url is None) == (spec.kind == "openai"):
        raise OptionError(
            f"{text!r}: "
            + ("no other engine has a url" if spec.url else "add url=http://HOST:PORT")
        )
    if spec.url is not None and not spec.url.startswith(("http://", "https://")):
        raise OptionError(f"{text!r}: {spec.url!r} is no address; use http://HOST:PORT")
    if spec.drafters and (spec.kind != "foretell" or spec.is_plain):
        raise OptionError(f"{text!r}: drafters are for foretell when it drafts")
    if spec.model and spec.kind == "foretell":
        raise OptionError(f"{text!r}: foretell's model is --model; model= gives a peer another one")
    if not spec.mode:
        return
    if spec.kind == "foretell":
        if spec.mode == "0":
            raise OptionError(f"{text!r}: 0 drafted tokens are foretell:plain")
        if spec.mode not in (PLAIN, "auto") and not spec.mode.isdecimal():
            raise OptionError(f"{text!r}: foretell:plain, foretell:auto or foretell:N")
    elif spec.mode not in MODES.get(spec.kind, (spec.mode,)):
        raise OptionError(f"{text!r}: {spec.kind} has the modes {', '.join(MODES[spec.kind])}")


def _all_modes(spec: EngineSpec, draft: bool, spec_types: SpecTypes) -> list[str]:
    if spec.kind == "foretell":
        return ["auto"] if spec.drafters else [PLAIN, "auto"]
    if spec.kind == "llama.cpp":
        return [PLAIN, *spec_types()]
    if spec.kind == "openai":
        return [PLAIN]
    return [mode for mode in MODES[spec.kind] if draft or mode != "assisted"]


def _named(spec: EngineSpec) -> EngineSpec:
    if spec.name and not (spec.is_plain and spec.kind != "openai"):
        return spec
    if spec.kind == "openai":
        return replace(spec, name=f"openai {spec.url} {spec.mode}")
    drafters = f" {'+'.join(spec.drafters)}" if spec.drafters else ""
    return replace(spec, name=f"{spec.kind} {spec.dtype} {spec.mode}{drafters}")


class Skipped(Exception):
    """An engine that cannot take part; the message says why, and what would change that."""


def settings_of(specs: Sequence[EngineSpec], places: Places, folder: Path) -> dict[str, Any]:
    """What the process of some specs, of equal ``process``, is told. Raises Skipped.

    Peers that read GGUF get the model's file converted to the weight type, kept in ``folder``.
    """
    spec = specs[0]
    settings: dict[str, Any] = {
        "model": places.model,
        "draft": places.draft,
        "tokenizer": places.tokenizer,
        "dtype": spec.dtype,
        "threads": places.threads,
        "modes": [one.mode for one in specs],
    }
    if spec.kind == "foretell":
        drafters = list(spec.drafters)
        # A draft model is for those who name it, or name nothing.
        needs_draft = not drafters or "draft_model" in drafters
        return settings | {
            "drafters": drafters,
            "draft": places.draft if needs_draft else None,
            "loading": dict(places.loading),
        }
    if spec.kind == "openai":
        return settings | {"url": spec.url, "model": spec.model}
    model = _files(spec.model or places.model)
    if spec.kind == "transformers":
        if spec.dtype not in ("float32", "bfloat16"):
            raise Skipped(
                f"transformers computes in float32 or bfloat16, not in {spec.dtype}; name one: "
                "--engine transformers,dtype=float32"
            )
        draft = None if places.draft is None else str(_files(places.draft))
        return settings | {"model": str(model), "draft": draft}
    if spec.model is None and model.suffix != ".gguf":
        raise Skipped(
            f"{spec.kind} does not read {model.name}; give it a file of its own: "
            f"--engine {spec.kind},model=FILE"
        )
    if spec.model is None and spec.dtype in GGUF_KINDS:
        from foretell.bench._convert import converted

        # OpenVINO reads no float32 from GGUF: its worker expands 16-bit weights.
        dtype = "bfloat16" if spec.kind == "openvino" and spec.dtype == "float32" else spec.dtype
        model = converted(model, GGUF_KINDS[dtype], folder)
    draft = None if places.draft is None else str(_files(places.draft))
    return settings | {"model": str(model), "draft": draft, "llama_server": places.llama_server}


def _files(source: str) -> Path:
    """The files of a model, which the peers read themselves."""
    path = files_of(source)
    if path is None:
        raise Skipped(f"there are no files of {source}")
    return path
