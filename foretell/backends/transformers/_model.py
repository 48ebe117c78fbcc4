"""Runs the causal models of transformers, on what their modules compute and torch runs on."""

from __future__ import annotations

import hashlib
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from foretell._errors import (
    ForetellError,
    InputError,
    OptionError,
    UnsupportedModelError,
)
from foretell._model import (
    Capabilities,
    EarlyExit,
    FloatArray,
    Model,
    Output,
    Rows,
    Session,
    check_rows,
    is_chain,
)
from foretell._tokenizer import Tokenizer
from foretell.backends.transformers import _attention, _operators
from foretell.backends.transformers._cache import (
    LayerCache,
    LayerShape,
    OwnCache,
    PackedCache,
    Pass,
    sees,
)
from foretell.backends.transformers._exact import ExactMode, fuse_norms
from foretell.backends.transformers._self_test import Difference, check_rows_alone, check_trees
from foretell.backends.transformers._session import PlainSession, TransformersSession
from foretell.backends.transformers._shadow import decoder_layers, shadow_of

Route = Literal["packed", "own", "plain"]
Progress = Callable[[str], None]

_NO_LIMIT = 1 << 20  # positions, for models that name none
_CHANGING_ROTARY = ("dynamic", "longrope")
_WORTH_A_NOTE = 300_000_000  # parameters of a model whose self-test takes seconds

_attention.register()


class InexactArithmeticWarning(UserWarning):
    """A model's results depend a little on how many rows share a pass."""


class TransformersModel(Model):
    """A loaded causal model of transformers. Safe to call from several threads: passes take turns.

    ``exact``: compute every row as if it were alone, on the CPU in float32; None where that is so.
    A self-test decides whether it holds: ``exact`` and ``exactness`` say how it ended.
    ``attention`` names an implementation of transformers to use instead of Foretell's own. The
    model given is never changed: what runs is a second tree of modules over its parameters.

    Raises UnsupportedModelError, OptionError, CapabilityError before anything is computed.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer | None = None,
        *,
        exact: bool | None = None,
        attention: str | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
        num_layers: int | None = None,
        self_test: bool = True,
    ) -> None:
        check_model(model)
        self._original: Any = lambda: model
        self._options: dict[str, Any] = {"attention": attention, "threads": threads}
        self.config = model.config.get_text_config(decoder=True)
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids(model.generation_config, self.config)
        self.max_length = max_length(self.config)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.exact = wants_exact(exact, model)
        self.threads = threads
        self.sessions: weakref.WeakSet[TransformersSession] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._operators = _operators.operators(threads, progress) if self.exact else None
        self._captured: dict[int, Tensor] = {}
        self._wanted_layers: frozenset[int] = frozenset()
        self._num_layers = num_layers
        self.shapes: list[LayerShape] = []
        self.windows: list[int | None] = []
        why = self._layers_in_the_way()
        with torch.inference_mode():
            reference = shadow_of(model, attention=attention, num_layers=num_layers)
            self._shadow, self._signature = reference, _parameters(reference)
            routes: list[Route] = ["plain"] if why else ["packed", "own", "plain"]
            if attention is not None or "chunked_attention" in self._layer_types():
                routes = [route for route in routes if route != "packed"]
            self.vocab_size = self._probe(reference)
            tried = self._choose_route(routes, reference)
        self.position_bytes = sum(
            shape.kv_heads * (shape.dim + (shape.value_dim + 7) // 8 * 8) * self.dtype.itemsize
            for shape in self.shapes
        )
        self.identity = self._identity()
        self.capabilities = Capabilities(
            rollback=self.route != "plain",
            tree=self.route != "plain",
            hidden_states=decoder_layers(self._shadow) is not None,
            early_exit=0 if self.route == "plain" else max(0, len(self.windows) - 1),
            why=why or (tried if self.route == "plain" else ""),
        )
        self._watch_layers()
        self.exactness = "plain decoding only" if self.route == "plain" else "not tested"
        self.difference: Difference | None = None
        if self_test and self.route != "plain":
            if progress is not None and model.num_parameters() > _WORTH_A_NOTE:
                progress("comparing passes of 1 to 33 tokens with single steps")
            self._test_itself()

    @property
    def _user_model(self) -> Any:
        found = self._original()
        if found is None:
            raise UnsupportedModelError("the model is gone; keep a reference to it")
        return found

    def forget_original(self) -> None:
        """Hold the given model weakly from now on, for those who keep this one as long as it."""
        self._original = weakref.ref(self._user_model)

    # -- what the model is -------------------------------------------------------------------------

    def _identity(self) -> str:
        """Settings and sizes; what passes cost does not depend on the weights' values."""
        model = self._user_model
        config = hashlib.sha256(model.config.to_json_string().encode()).hexdigest()[:16]
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"transformers {type(model).__name__} {config}, {model.num_parameters()} parameters, "
            f"{kind} on {self.device}, {self.route}, "
            f"{'exact' if self._operators is not None else 'inexact'}, "
            f"attention {self._options['attention']}, {self.threads} threads"
        )

    def _layer_types(self) -> list[str]:
        return list(getattr(self.config, "layer_types", None) or [])

    def _layers_in_the_way(self) -> str:
        """What keeps the cache from being rolled back exactly; empty if nothing does."""
        kind = getattr(self._user_model.generation_config, "cache_implementation", None)
        self._cache_implementation = kind if kind in ("static", "quantized", "offloaded") else None
        layers = DynamicCache(config=self._user_model.config).layers
        for index, layer in enumerate(layers):
            if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
                return f"the cache of layer {index} is a {type(layer).__name__}"
        self.windows = [getattr(layer, "sliding_window", None) for layer in layers]
        if self._num_layers is not None:
            self.windows = self.windows[: self._num_layers]
        if self._cache_implementation is not None:
            return f"its generation config asks for a {self._cache_implementation} cache"
        rotary = getattr(self.config, "rope_parameters", None) or {}
        nested = [value for value in rotary.values() if isinstance(value, dict)]
        for parameters in (rotary, *nested):
            kind = parameters.get("rope_type", "default")
            if kind in _CHANGING_ROTARY:
                return f"its rotary embedding ('{kind}') changes with the length of the text"
        return ""

    def _probe(self, reference: Any) -> int:
        """Run two tokens through the model as it is: shapes of the cache, width of the logits."""
        ids = torch.tensor([[1, 0]], device=self.device)
        cache = DynamicCache(config=reference.config)
        output = reference(**self._cache_argument(cache), input_ids=ids, use_cache=True)
        self.shapes = []
        for layer in cache.layers:
            if getattr(layer, "keys", None) is not None and layer.keys.dim() == 4:
                _, kv_heads, _, dim = layer.keys.shape
                self.shapes.append(LayerShape(kv_heads, dim, layer.values.shape[-1]))
        return int(output.logits.shape[-1])

    def _choose_route(self, routes: Sequence[Route], reference: Any) -> str:
        """The first way of running the model that gives the model's own numbers."""
        crossing = [w + 8 for w in self.windows if w and w <= 128]  # so that a window is left
        wanted = min(self.max_length, max([24, *crossing]))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocab_size, (wanted,), generator=generator).tolist()
        ids = torch.tensor([tokens], device=self.device)
        expected = reference(input_ids=ids, use_cache=False).logits[0].float().cpu()
        tolerance = (1e-3 if self.dtype is torch.float32 else 5e-2) * (1 + expected.abs().max())
        reason = ""
        for route in routes:
            self.route: Route = route
            if route == "packed":
                self._shadow = shadow_of(
                    self._user_model, attention=_attention.NAME, num_layers=self._num_layers
                )
            else:
                self._shadow = shadow_of(
                    self._user_model,
                    attention=self._options["attention"],
                    num_layers=self._num_layers,
                )
            if route != "plain" and len(self.shapes) != len(self.windows):
                reason = reason or "some layers use the keys and values of others"
                continue
            if route == "plain":
                self.exact, self._operators = False, None
            elif self._operators is not None:
                fuse_norms(self._shadow)
            self.capabilities = Capabilities(rollback=route != "plain", tree=False)
            try:
                session, got = self.new_session(), []
                for start in range(0, len(tokens), 7):
                    part = tokens[start : start + 7]
                    got.append(self.forward([Rows(session, part)]).logits)
                    session.keep(range(len(part)))
                difference = (torch.from_numpy(np.concatenate(got)) - expected).abs().max()
            except (ForetellError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                if route == routes[-1]:
                    raise UnsupportedModelError(
                        f"{type(self._user_model).__name__} cannot be run step by step: {error}"
                    ) from error
                reason = f"its attention is not one that is known ({error})"
                continue
            # A quantized cache rounds what it holds, and says other things on purpose.
            rounds = route == "plain" and self._cache_implementation == "quantized"
            if difference <= tolerance or (rounds and bool(difference.isfinite())):
                return reason
            reason = f"its logits depend on more than the cache (by {float(difference):.1e})"
        raise UnsupportedModelError(
            f"{type(self._user_model).__name__} gives other logits step by step than at once "
            f"(by {float(difference):.1e}), so no cache can be trusted"
        )

    def _test_itself(self) -> None:
        """Find out whether rows are invariant and trees equal chains, and what is missing."""
        with self._lock:
            self.difference = check_rows_alone(self, record=self._recording)
            allowed = 0.0 if self.difference.largest == 0 else 10 * self.difference.largest + 1e-5
            trees, chains = (replace(self.capabilities, tree=tree) for tree in (True, False))
            self.capabilities = trees
            try:
                works = check_trees(self, allowed)
            except (ForetellError, TypeError, ValueError, RuntimeError):
                works = False
            self.capabilities = trees if works else chains
        found = self.difference
        if found.largest == 0:
            self.exactness = (
                "rows are invariant: passes of 1 to 33 tokens gave the bits of single steps"
            )
            self.exact = True
            return
        self.exact = False
        where = "" if found.module is None else f", first in {found.module} ({found.by:.1e})"
        self.exactness = (
            f"logits move by up to {found.largest:.1e} with the tokens in a pass{where}"
        )
        self.near_tie_gap = 2 * found.largest
        warnings.warn(
            f"{type(self._user_model).__name__} on {self.device.type} in "
            f"{str(self.dtype).removeprefix('torch.')}: {self.exactness}. Where two tokens are "
            f"closer than {self.near_tie_gap:.1e}, speculation may choose the other one; the "
            "statistics count such positions (num_near_ties)",
            InexactArithmeticWarning,
            stacklevel=4,
        )

    # -- the interface -----------------------------------------------------------------------------

    def new_session(self) -> Session:
        if self.route == "plain":
            return PlainSession(self, self._plain_cache())
        with torch.inference_mode():
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            return TransformersSession(self, [LayerCache(shape, like) for shape in self.shapes])

    def forward(self, rows: Sequence[Rows]) -> Output:
        check_rows(self, rows)
        for part in rows:
            if getattr(part.session, "model", None) is not self:
                raise InputError("the session belongs to another model")
            for layer in part.hidden:
                if not 0 <= layer < len(self.windows):
                    raise InputError(
                        f"there is no layer {layer!r}; the layers are 0..{len(self.windows) - 1}"
                    )
        with self._lock, ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if self._operators is not None:
                stack.enter_context(self._operators.serving())
                stack.enter_context(ExactMode())
            self._wanted_layers = frozenset(layer for part in rows for layer in part.hidden)
            if self.route == "packed":
                logits, hidden = self._run_packed(rows)
            else:
                run = self._run_own if self.route == "own" else self._run_plain
                results = [run(part) for part in rows]
                logits = np.concatenate([result[0] for result in results])
                hidden = {
                    layer: np.concatenate([result[1][layer] for result in results])
                    for layer in self._wanted_layers
                }
        counts = [{"all": len(part.tokens), "last": 1, "none": 0}[part.logits] for part in rows]
        ends = np.cumsum([0, *counts]).tolist()
        starts = np.cumsum([0, *(len(part.tokens) for part in rows)]).tolist()
        return Output(logits, hidden, tuple(pairwise(ends)), tuple(pairwise(starts)))

    def early_exit(self, num_layers: int | None = None) -> EarlyExit:
        if self.route == "plain":
            self.capabilities.require("rollback")
        most = self.capabilities.early_exit
        if num_layers is None:
            num_layers = max(1, (most + 1) // 3)
        if not 1 <= num_layers <= most:
            raise OptionError(
                f"the early exit is after {num_layers} layers; use a number from 1 to {most}"
            )
        return TransformersExit(self, num_layers)

    # -- passes ------------------------------------------------------------------------------------

    def _run_packed(self, rows: Sequence[Rows]) -> tuple[FloatArray, dict[int, FloatArray]]:
        sessions = [_own_session(part.session) for part in rows]
        for part, session in zip(rows, sessions, strict=True):
            session.reserve(len(part.tokens))
        kernels = self._operators is not None
        run = Pass(rows, sessions, self.shapes, self.windows, self.device, kernels)
        ids = np.concatenate([np.asarray(part.tokens, np.int64) for part in rows])
        with _attention.Running(run):
            result = self._call(
                ids, run.device_positions, PackedCache(run), _wanted_rows(rows), None
            )
        for part, session in zip(rows, sessions, strict=True):
            session.add(part.tokens, part.parents)
        return result

    def _run_own(self, part: Rows) -> tuple[FloatArray, dict[int, FloatArray]]:
        session = _own_session(part.session)
        count = len(part.tokens)
        session.reserve(count)
        mask = None
        parents = None if part.parents is None or is_chain(part.parents) else part.parents
        run = Pass([part], [session], self.shapes, self.windows, self.device, exact=False)
        if parents is not None:
            if any(self.windows):
                self.capabilities.require("tree")
            seen = torch.from_numpy(sees(parents, count, session.length, None)).to(self.device)
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
            mask = mask.masked_fill(~seen, torch.finfo(self.dtype).min)[None, None]
        result = self._call(
            np.asarray(part.tokens, np.int64),
            run.device_positions,
            OwnCache(session, self.windows),
            _wanted_rows([part]),
            mask,
        )
        session.add(part.tokens, part.parents)
        return result

    def _run_plain(self, part: Rows) -> tuple[FloatArray, dict[int, FloatArray]]:
        session = part.session
        assert isinstance(session, PlainSession)
        session.check_no_rows_waiting()
        count = len(part.tokens)
        positions = torch.arange(session.length, session.length + count, device=self.device)
        tokens = np.asarray(part.tokens, np.int64)
        wanted = _wanted_rows([part])
        if session.length == 0:
            result = self._call(tokens, positions, session.cache, wanted, None)
        else:  # recurrent layers go on from their state one token at a time, and only so
            steps = [
                self._call(
                    tokens[row : row + 1],
                    positions[row : row + 1],
                    session.cache,
                    [0] if row in wanted else [],
                    None,
                )
                for row in range(count)
            ]
            result = (
                np.concatenate([logits for logits, _ in steps]),
                {
                    layer: np.concatenate([hidden[layer] for _, hidden in steps])
                    for layer in self._wanted_layers
                },
            )
        session.add(count)
        return result

    def _call(
        self,
        tokens: np.ndarray[Any, Any],
        positions: Tensor,
        cache: Any,
        wanted: Sequence[int],
        mask: Tensor | None,
    ) -> tuple[FloatArray, dict[int, FloatArray]]:
        options: dict[str, Any] = {
            "input_ids": torch.from_numpy(tokens)[None].to(self.device, non_blocking=True),
            "use_cache": True,
            **self._cache_argument(cache),
        }
        if "position_ids" in self._signature:
            options["position_ids"] = positions[None]
        if mask is not None:
            options["attention_mask"] = mask
        self._captured = {}
        base = self._shadow.base_model
        if not wanted and base is not self._shadow:
            base(**options)  # no row asks for logits, so the head does not run
            logits = np.empty((0, self.vocab_size), np.float32)
        else:
            index = torch.tensor(list(wanted), dtype=torch.int64)
            index = index.to(self.device, non_blocking=True)
            if "logits_to_keep" in self._signature and len(wanted) < len(tokens) and wanted:
                rows = self._shadow(**options, logits_to_keep=index).logits[0]
            else:
                rows = self._shadow(**options).logits[0]
                rows = rows if len(wanted) == len(tokens) else rows[index]
            logits = rows.float().cpu().contiguous().numpy()
        hidden = {
            layer: self._captured[layer].float().cpu().contiguous().numpy()
            for layer in self._wanted_layers
        }
        return logits, hidden

    def _cache_argument(self, cache: Any) -> dict[str, Any]:
        for name in ("cache", "past_key_values", "cache_params"):
            if name in self._signature:
                return {name: cache}
        raise UnsupportedModelError(
            f"{type(self._user_model).__name__} takes no cache, so it cannot generate step by step"
        )

    def _plain_cache(self) -> Any:
        config = self._shadow.config
        if self._cache_implementation == "static":
            return StaticCache(config=config, max_cache_len=self.max_length)
        if self._cache_implementation == "quantized":
            from transformers import QuantizedCache

            options = getattr(self._user_model.generation_config, "cache_config", None) or {}
            return QuantizedCache(**{"backend": "quanto", "config": config, **options})
        return DynamicCache(config=config)

    # -- looking inside ----------------------------------------------------------------------------

    def _watch_layers(self) -> None:
        """Let the decoder layers leave their output where a pass asks for it."""

        def watch(index: int) -> Callable[..., None]:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                if index in self._wanted_layers:
                    states = output[0] if isinstance(output, tuple) else output
                    self._captured[index] = states[0]

            return hook

        for index, layer in enumerate(decoder_layers(self._shadow) or []):
            layer.register_forward_hook(watch(index))

    @contextmanager
    def _recording(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Every module's output for (1, rows, ...), in the order in which they ran."""
        record: list[tuple[str, Tensor]] = []

        def hook_of(name: str) -> Callable[..., None]:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                value = output[0] if isinstance(output, tuple) and output else output
                if isinstance(value, Tensor) and value.dim() >= 2:
                    record.append((name, value.detach().clone()))

            return hook

        handles = [
            module.register_forward_hook(hook_of(f"{name} ({type(module).__name__})"))
            for name, module in self._shadow.named_modules()
            if name
        ]
        try:
            yield record
        finally:
            for handle in handles:
                handle.remove()


class TransformersExit(EarlyExit):
    """The first layers of a TransformersModel, then its final norm and head."""

    def __init__(self, whole: TransformersModel, num_layers: int) -> None:
        self._whole = whole
        self._model = TransformersModel(
            whole._user_model,
            whole.tokenizer,
            exact=whole._operators is not None,
            num_layers=num_layers,
            self_test=False,
            **whole._options,
        )
        self.num_layers = num_layers
        self.vocab_size, self.max_length = self._model.vocab_size, whole.max_length
        self.capabilities = Capabilities(tree=False)
        self.tokenizer, self.eos_token_ids = whole.tokenizer, whole.eos_token_ids

    def new_session(self) -> Session:
        return self._model.new_session()

    def forward(self, rows: Sequence[Rows]) -> Output:
        return self._model.forward(rows)

    def attach(self, tokens: Sequence[int]) -> Session | None:
        tokens = list(tokens)
        for session in list(self._whole.sessions):
            if session.tokens == tokens:
                shared = TransformersSession(self._model, session.layers[: self.num_layers])
                shared.tokens = tokens
                return shared
        return None


def check_model(model: Any) -> None:
    """Raise UnsupportedModelError, OptionError for what is no causal model in one place."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder model; Foretell continues text with "
            "causal models (AutoModelForCausalLM)"
        )
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head; load it with "
            "AutoModelForCausalLM.from_pretrained(...)"
        )
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) != 1 or devices == ["meta"]:
        raise OptionError(
            f"the model lies on {', '.join(devices)}; load it onto one device (device=..., or "
            "model.to(...), without a device_map)"
        )


def wants_exact(exact: bool | None, model: Any) -> bool:
    """Whether to compute rows alone; raises OptionError where that was asked for and cannot be."""
    tensors = [p for p in model.parameters() if p.is_floating_point()]
    able = all(p.dtype is torch.float32 and p.device.type == "cpu" for p in tensors)
    if exact and not able:
        raise OptionError(
            "exact=True needs float32 weights on the CPU; use dtype='float32', device='cpu', or "
            "exact=False, which counts near-ties instead"
        )
    return able if exact is None else exact


def eos_token_ids(generation: Any, text: Any) -> tuple[int, ...]:
    """Tokens that end an answer, by the generation config, else by that of the decoder."""
    for config in (generation, text):
        value = getattr(config, "eos_token_id", None)
        if value is not None:
            return tuple(value) if isinstance(value, list | tuple) else (int(value),)
    return ()


def max_length(config: Any) -> int:
    """Positions the model was made for."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return _NO_LIMIT


def _own_session(session: Session) -> TransformersSession:
    assert isinstance(session, TransformersSession)
    return session


def _wanted_rows(rows: Sequence[Rows]) -> list[int]:
    wanted: list[int] = []
    start = 0
    for part in rows:
        stop = start + len(part.tokens)
        wanted += range({"all": start, "last": stop - 1, "none": stop}[part.logits], stop)
        start = stop
    return wanted


def _parameters(model: Any) -> frozenset[str]:
    """Names of a forward pass's arguments, through the decorators around it."""
    return frozenset(inspect.signature(type(model).forward).parameters)
