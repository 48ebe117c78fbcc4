"""``foretell.generate(model, ...)``: what ``model.generate(...)`` does, with speculation."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from foretell._batch import Batch
from foretell._engine import Engine
from foretell._errors import (
    ContextLengthError,
    EmptyPromptError,
    InputError,
    MissingExtraError,
    OptionError,
    shown,
)
from foretell._extras import install_command
from foretell._noise import Floats, key_of
from foretell._request import Request
from foretell._result import FinishReason
from foretell._sampling import Draws, KeyedDraws, Logits, SamplingParams, completion_seed, is_int
from foretell._stop import StopConditions
from foretell._support import Support

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_CHOICE = 1  # the use of random numbers that the engine's own sampler has for it, see _sampling

# Settings of a GenerationConfig that would need another way of decoding, and when they are off.
_OFF: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "force_words_ids": (None,),
    "constraints": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    "token_healing": (None, False),
    "cache_implementation": (None, "dynamic"),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "use_cache": (None, True),
    "low_memory": (None, False),
    "compile_config": (None,),
}


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    prefix_allowed_tokens_fn: Any = None,
    draft: Any = None,
    drafters: Sequence[Any] | None = None,
    num_draft_tokens: Any = "auto",
    exact: bool | None = None,
    seed: int | None = None,
    **kwargs: Any,
) -> Any:
    """Like ``model.generate`` of transformers, for the cases that are listed here.

    ``inputs`` or ``input_ids`` are (batch, length) token ids, ``attention_mask`` says what of them
    is padding, which has to be on the left. ``generation_config`` and settings of it as keywords
    mean what they mean there: lengths, do_sample with temperature, top_k, top_p, min_p and all
    that ends up in transformers' own logits processors, eos_token_id, stop_strings (with
    ``tokenizer``), max_time, num_return_sequences, return_dict_in_generate with output_scores and
    output_logits. ``logits_processor``, ``stopping_criteria``, ``prefix_allowed_tokens_fn`` and a
    ``streamer`` (for one sequence) are transformers' own too.

    Each sequence advances by what its own draft is worth, and each has the tokens that it has
    alone: processors and criteria see it without padding. Greedy output is that of
    ``model.generate`` up to near-ties. Sampled output follows ``seed``, by default drawn from
    torch's generator: the distribution is the same, the random numbers are Foretell's. Where
    sequences end at different steps, the scores behind an end are 0.

    ``draft``, ``drafters``, ``num_draft_tokens`` and ``exact`` are Engine's. The model is checked
    when it is first seen, which takes a few seconds, and kept for as long as it lives.

    Returns what ``model.generate`` returns. Raises OptionError for every other argument, by name.
    """
    torch, transformers = _libraries()
    if not isinstance(model, transformers.PreTrainedModel):
        raise OptionError(
            f"the model is {shown(model)}; pass a PreTrainedModel (foretell.Engine runs others)"
        )
    ids, mask = _checked_inputs(inputs, input_ids, attention_mask)
    config = _config(model, generation_config, kwargs, ids)
    if streamer is not None and len(ids) * config.num_return_sequences > 1:
        raise OptionError("streamer is for one sequence; leave it out, or pass one prompt")
    engine = _engine(model, draft, drafters, exact)
    prompts = [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    for prompt in prompts:
        if not prompt:
            raise EmptyPromptError("a row of input_ids is all padding; leave it out")
    room = engine.model.max_length
    if config.max_length > room:
        raise ContextLengthError(
            f"max_length is {config.max_length} with the prompt of {ids.shape[1]} tokens, but the "
            f"model's context is {room}; use a smaller max_new_tokens, or a shorter prompt"
        )
    if config.do_sample and seed is None:
        seed = int(torch.randint(0, 2**62, (1,)).item())
    elif seed is not None and (not is_int(seed) or seed < 0):
        raise OptionError(f"seed is {shown(seed)}; use a whole number from 0")
    if streamer is not None:
        streamer.put(ids.cpu())
    rows: list[_Row] = []
    batch = Batch(engine.model)
    for prompt in prompts:
        own = _config_of_row(config, ids.shape[1] - len(prompt))
        group = []
        for _ in range(config.num_return_sequences):
            row = _Row(
                model, own, prompt, logits_processor, stopping_criteria, prefix_allowed_tokens_fn,
                tokenizer, completion_seed(seed or 0, len(rows)), streamer,
            )  # fmt: skip
            rows.append(row)
            group.append(row.request(engine, num_draft_tokens))
        batch.join(group)
    while len(batch):
        batch.read()
        batch.step()
    for row in rows:
        if row.error is not None:
            raise row.error
    if streamer is not None:
        streamer.end()
    return _output(torch, transformers, config, ids, rows)


class _Row:
    """One sequence: its processors, its criteria, and what came out of it."""

    def __init__(
        self,
        model: Any,
        config: Any,
        prompt: list[int],
        processors: Any,
        criteria: Any,
        allowed: Any,
        tokenizer: Any,
        seed: int,
        streamer: Any,
    ) -> None:
        import torch
        from transformers import LogitsProcessorList, StoppingCriteriaList

        self._torch = torch
        self._config, self._prompt, self._seed, self._streamer = config, prompt, seed, streamer
        with _their_refusals():
            self._processors = model._get_logits_processor(
                generation_config=config,
                input_ids_seq_length=len(prompt),
                encoder_input_ids=torch.tensor([prompt]),
                prefix_allowed_tokens_fn=allowed,
                logits_processor=processors if processors is not None else LogitsProcessorList(),
                device="cpu",
                model_kwargs={},
            )
            self._criteria = model._get_stopping_criteria(
                generation_config=config,
                stopping_criteria=criteria if criteria is not None else StoppingCriteriaList(),
                tokenizer=tokenizer,
            )
        self.tokens: list[int] = []
        self.scores: dict[int, Logits] = {}
        self.logits: dict[int, Logits] = {}
        self._request: Request | None = None

    def request(self, engine: Engine, num_draft_tokens: Any) -> Request:
        """What the loop runs: the engine's request, with this row's choice and end."""
        config = self._config
        sampled = (
            {"temperature": float(config.temperature or 1.0), "seed": self._seed}
            if config.do_sample
            else {}
        )
        params = SamplingParams(max_tokens=None, ignore_eos=True, **sampled)  # type: ignore[arg-type]
        [request] = engine.prepare(self._prompt, params, num_draft_tokens=num_draft_tokens)
        request.sampler = self
        request.stops = cast(StopConditions, self)
        self._request = request
        return request

    @property
    def error(self) -> Exception | None:
        """What broke it."""
        return None if self._request is None else self._request.error

    # -- a Sampler ---------------------------------------------------------------------------------

    def choose(self, logits: Logits, history: Sequence[int], position: int) -> int:
        row = self._processed(logits, history)
        if self._config.output_scores:
            self.scores[position] = row
        if self._config.output_logits:
            self.logits[position] = logits.copy()
        if not self._config.do_sample:
            return int(row.argmax())
        return Support.of(row, 1.0).choose(key_of(_CHOICE, self._seed, position))

    def distribution(self, logits: Logits, history: Sequence[int], position: int) -> Floats:
        return Support.of(self._processed(logits, history), 1.0).probabilities()

    def draws(self, step: int) -> Draws:
        return KeyedDraws(self._seed, step)

    def _processed(self, logits: Logits, history: Sequence[int]) -> Logits:
        torch = self._torch
        if not self._processors:
            return logits
        with torch.inference_mode():
            ids = torch.tensor([list(history)])
            scores = self._processors(ids, torch.from_numpy(np.array(logits))[None])
        return np.ascontiguousarray(scores[0].float().numpy())

    # -- StopConditions ----------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many more tokens can be emitted at most."""
        return int(self._config.max_length) - len(self._prompt) - len(self.tokens)

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        """One more token; whether a criterion ends the sequence with it."""
        torch = self._torch
        self.tokens.append(token)
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        ids = torch.tensor([[*self._prompt, *self.tokens]])
        ended = self._criteria(ids, self._scores_so_far())
        if bool(torch.as_tensor(ended).any()):
            return "", FinishReason.LENGTH if self.room <= 0 else FinishReason.STOP
        return "", None

    def finish(self) -> str:
        """No text is held back here."""
        return ""

    def _scores_so_far(self) -> Any:
        if not self._config.output_scores:
            return None
        start = len(self._prompt)
        found = (self.scores.get(start + index) for index in range(len(self.tokens)))
        return tuple(self._torch.from_numpy(row)[None] for row in found if row is not None)


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtraError(
            f"generate needs torch and transformers: {install_command('transformers')}"
        ) from error
    return torch, transformers


def _checked_inputs(inputs: Any, input_ids: Any, attention_mask: Any) -> tuple[Any, Any]:
    """Token ids, and which of them are not padding, both (batch, length)."""
    import torch

    def _are_ids(kind: Any) -> bool:
        return kind in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

    if (inputs is None) == (input_ids is None):
        raise InputError("pass the prompt's token ids once, as inputs or as input_ids")
    ids = input_ids if inputs is None else inputs
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not _are_ids(ids.dtype):
        raise InputError("input_ids must be a tensor of token ids, (batch, length)")
    if ids.numel() == 0:
        raise EmptyPromptError("input_ids is empty; pass at least one token")
    if attention_mask is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != ids.shape:
        raise InputError(f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}")
    mask = attention_mask.to(ids.device) != 0
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise InputError(
            "attention_mask has padding behind or between tokens; pad on the left "
            "(tokenizer.padding_side = 'left')"
        )
    return ids, mask


def _config(model: Any, given: Any, kwargs: dict[str, Any], ids: Any) -> Any:
    """The generation config as transformers would have it; OptionError for what is not covered."""
    has_default = {
        name: kwargs.get(name) is None
        and getattr(given, name, None) is None
        and getattr(model.generation_config, name, None) is None
        for name in ("max_length", "min_length")
    }
    with _their_refusals():
        config, rest = model._prepare_generation_config(given, **kwargs)
        rest = {name: value for name, value in rest.items() if value is not None}
        for name, off in _OFF.items():
            value = getattr(config, name, None)
            if not any(value is one or value == one for one in off):
                raise OptionError(
                    f"{name}={shown(value)} is not covered by foretell.generate; use "
                    "model.generate for it, or leave it out"
                )
        if rest:
            name, value = next(iter(rest.items()))
            known = any(
                name in inspect.signature(function).parameters
                for function in (type(model).forward, type(model).generate)
            )
            raise OptionError(
                f"{name}={shown(value)} is not covered by foretell.generate"
                + ("; use model.generate for it, or leave it out" if known else "")
            )
        config.validate()
        model._prepare_special_tokens(config, True, device="cpu")
        config = model._prepare_generated_length(
            generation_config=config,
            has_default_max_length=has_default["max_length"],
            has_default_min_length=has_default["min_length"],
            model_input_name="input_ids",
            input_ids_length=ids.shape[1],
            inputs_tensor=ids,
        )
        if not is_int(config.num_return_sequences) or config.num_return_sequences < 1:
            raise OptionError(
                f"num_return_sequences={shown(config.num_return_sequences)}; use 1 or more"
            )
        if config.num_return_sequences > 1 and not config.do_sample:
            raise OptionError(
                f"num_return_sequences={config.num_return_sequences} would give the same sequence "
                "again and again; add do_sample=True"
            )
    if config.max_length <= ids.shape[1]:
        raise OptionError(
            f"max_length={config.max_length} leaves no room behind the prompt of {ids.shape[1]} "
            "tokens; use max_new_tokens"
        )
    return config


@contextmanager
def _their_refusals() -> Iterator[None]:
    """What transformers does not like about the arguments is an OptionError."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise OptionError(f"transformers refuses these arguments: {error}") from error


def _config_of_row(config: Any, padding: int) -> Any:
    """Lengths count padding, which this row is run without."""
    own = copy.copy(config)
    own.max_length = config.max_length - padding
    if config.min_length is not None:
        own.min_length = max(0, config.min_length - padding)
    return own


_engines: dict[tuple[int, Any], tuple[Any, Engine]] = {}


def _engine(model: Any, draft: Any, drafters: Any, exact: bool | None) -> Engine:
    """An engine for the model: the one that was made for it before, if that was for these."""
    if draft is not None or drafters is not None:
        known = _known(model, exact)
        return Engine(known.model, draft, drafters)
    return _known(model, exact)


def _known(model: Any, exact: bool | None) -> Engine:
    key = (id(model), exact)
    found = _engines.get(key)
    if found is not None and found[0]() is model:
        return found[1]
    engine = Engine(model, exact=exact)
    engine.model.forget_original()  # type: ignore[attr-defined]
    reference = weakref.ref(model, lambda _: _engines.pop(key, None))
    _engines[key] = reference, engine
    return engine


def _output(torch: Any, transformers: Any, config: Any, ids: Any, rows: Sequence[_Row]) -> Any:
    """Sequences padded on the right, as model.generate gives them; scores if they were wanted."""
    longest = max(len(row.tokens) for row in rows)
    pad = config._pad_token_tensor
    padding = 0 if pad is None else int(pad)
    new = torch.full((len(rows), longest), padding, dtype=ids.dtype)
    for index, row in enumerate(rows):
        new[index, : len(row.tokens)] = torch.tensor(row.tokens, dtype=ids.dtype)
    prompts = ids.repeat_interleave(config.num_return_sequences, dim=0)
    sequences = torch.cat([prompts, new.to(ids.device)], dim=1)
    if not config.return_dict_in_generate:
        return sequences

    def stacked(name: str) -> Any:
        steps = []
        for step in range(longest):
            values = [getattr(row, name).get(len(row._prompt) + step) for row in rows]
            width = len(next(value for value in values if value is not None))
            ended = np.zeros(width, np.float32)
            steps.append(
                torch.from_numpy(np.stack([ended if v is None else v for v in values])).to(
                    ids.device
                )
            )
        return tuple(steps)

    return transformers.generation.GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=stacked("scores") if config.output_scores else None,
        logits=stacked("logits") if config.output_logits else None,
    )
