"""What a request asks for, and the target's choice under it."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from foretell._errors import CorruptModelError, OptionError, shown
from foretell._noise import Floats, key_of, uniform
from foretell._support import Support

Logits = npt.NDArray[np.float32]

# What a random number is for; the first part of every key.
_CHOICE, _DRAFT, _ACCEPT, _RECOVER, _COMPLETION = range(1, 6)
_MAX_SEED = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request, validated on construction; unknown names raise.

    Meanings are those of vLLM and the OpenAI API; where these differ, or Foretell differs from
    both, it is said below. Speculation honours every one of them.

    *Length and end*

    - ``max_tokens``: most tokens to emit (None: until the model stops or its context is full).
    - ``min_tokens``: before that many, end-of-sequence tokens and ``stop_token_ids`` cannot be
      chosen (the former even with ``ignore_eos``), and stop strings do not count (vLLM).
    - ``stop``: strings that end the text; they are not part of it.
    - ``stop_token_ids``: tokens that end it besides the model's own end-of-sequence tokens,
      which ``ignore_eos`` switches off.

    *The distribution*, in the order in which it is applied, which is vLLM's:

    - ``logit_bias``: {token id: number added to its logit}, -100 to 100 as in the OpenAI API,
      or -inf, which forbids a token for good. Then ``min_tokens``.
    - ``repetition_penalty``, above 0: positive logits of all tokens of prompt and output are
      divided by it, others multiplied (vLLM).
    - ``frequency_penalty``, -2 to 2: subtracted once for every time a token is in the output;
      ``presence_penalty``, -2 to 2: subtracted once if it is there at all. The prompt does not
      count (vLLM; the OpenAI API speaks of the text so far).
    - ``temperature``: 0, the default here, is greedy decoding: the best token, ties to the
      lowest id. Any larger finite number is applied as it is (vLLM takes those below 1e-5 for
      0, and the OpenAI API ends at 2).
    - ``min_p``, 0 to 1: drops tokens less probable than that share of the best one's
      probability; 0 is off.
    - ``top_k``: keeps the k best, ties to the lowest id (vLLM keeps all that tie with the last);
      0 or -1 is off.
    - ``top_p``, 0 to 1: keeps the fewest best tokens that together reach it, at least one; 1 is
      off, and 0 keeps the best (as in the OpenAI API; vLLM refuses 0).

    At temperature 0 the last three, and ``seed``, change nothing, and that is no error (as in
    vLLM); the command line refuses such options.

    *What else*

    - ``seed``, 0 to 2^64 - 1: the same seed gives the same output. Without one, one is drawn
      and reported in the result. (vLLM takes -1 for none; here negative seeds are refused.)
    - ``n``: completions of one prompt, which is read once. The first uses the seed itself, the
      others seeds derived from it, so that each is the same whatever n is. At temperature 0
      they are equal (as in the OpenAI API; vLLM refuses that).
    - ``logprobs``: report each emitted token's log-probability and that of so many best
      alternatives; 0 is the token alone, -1 the whole vocabulary, None nothing (vLLM's
      meaning). They are the target's own, before all of the above. ``prompt_logprobs``: the same
      for the prompt's tokens.

    ``stop`` and ``stop_token_ids`` are kept as tuples, ``logit_bias`` as a tuple of pairs.
    """

    max_tokens: int | None = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    min_tokens: int = 0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _tuple_of(stop, str, "stop", "a string or list of them"))
        ids = _tuple_of(self.stop_token_ids, int, "stop_token_ids", "a list of token ids")
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        if "" in self.stop:
            raise OptionError("stop holds an empty string, which would end every text at once")
        for text in self.stop:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise OptionError(
                    f"stop holds {shown(text)}, which has lone surrogates: they are no characters, "
                    "and no text ever holds them; decode the input as UTF-8"
                ) from None
        if not isinstance(self.ignore_eos, bool):
            raise OptionError(f"ignore_eos is {shown(self.ignore_eos)}; use True or False")
        self._check_whole("max_tokens", "a whole number from 1, or None", 1, optional=True)
        self._check_whole("min_tokens", "a whole number from 0", 0)
        self._check_whole("top_k", "a whole number from 1, or 0 for off", -1)
        self._check_whole("n", "a whole number from 1", 1)
        self._check_whole("seed", "a whole number from 0 to 2^64 - 1, or None", 0, optional=True)
        if self.seed is not None and self.seed > _MAX_SEED:
            raise OptionError(f"seed is {shown(self.seed)}; use a whole number from 0 to 2^64 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            self._check_whole(name, "a whole number from 0, -1 for all, or None", -1, optional=True)
        self._check_number("temperature", "a finite number from 0", 0, math.inf)
        self._check_number("top_p", "a number from 0 to 1", 0, 1)
        self._check_number("min_p", "a number from 0 to 1", 0, 1)
        self._check_number("presence_penalty", "a number from -2 to 2", -2, 2)
        self._check_number("frequency_penalty", "a number from -2 to 2", -2, 2)
        self._check_number("repetition_penalty", "a finite number above 0", 0, math.inf)
        if self.repetition_penalty == 0:
            raise OptionError("repetition_penalty is 0; use a finite number above 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise OptionError(
                f"min_tokens is {self.min_tokens}, but max_tokens ends the output at "
                f"{self.max_tokens}; use a smaller min_tokens"
            )

    @classmethod
    def from_options(cls, base: SamplingParams | None, options: dict[str, Any]) -> SamplingParams:
        """``base``, or the defaults, with keyword ``options`` on top; unknown ones raise."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise OptionError(
                    f"unknown option {shown(name)}; the options are {', '.join(known)}"
                )
        if base is not None and not isinstance(base, SamplingParams):
            raise OptionError(f"sampling is {shown(base)}; pass a SamplingParams")
        return replace(base or cls(), **options)

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that ``logit_bias`` forbids."""
        return tuple(token for token, bias in dict(self.logit_bias).items() if bias == -math.inf)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise OptionError for token ids the model lacks, or if no token may be chosen."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", dict(self.logit_bias)),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise OptionError(
                        f"{name} holds {shown(token)}, which is not a token id of this model "
                        f"(0..{vocab_size - 1})"
                    )
        if len(self.banned) == vocab_size:
            raise OptionError("logit_bias forbids every token of the model; leave some of them")

    def _check_whole(self, name: str, what: str, low: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if not (optional and value is None) and not (is_int(value) and value >= low):
            raise OptionError(f"{name} is {shown(value)}; use {what}")
        if value is not None:
            object.__setattr__(self, name, int(value))

    def _check_number(self, name: str, what: str, low: float, high: float) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float | np.integer | np.floating)
        if not is_number or isinstance(value, bool) or not low <= value <= high:
            raise OptionError(f"{name} is {shown(value)}; use {what}")
        try:
            number = float(value)
        except OverflowError:  # a whole number that is larger than every float
            number = math.inf
        if number == math.inf:
            raise OptionError(f"{name} is {shown(value)}; use {what}")
        object.__setattr__(self, name, number)


class Draws(Protocol):
    """Independent random decisions of one step, each asked for at most once."""

    def accept(self, node: int, probability: float) -> bool:
        """True with that probability."""

    def recover(self, node: int, weights: Floats) -> int:
        """The target's own token after ``node``: id v with probability proportional to its weight.

        ``weights`` is (vocab_size,), not negative, not all 0.
        """


class Sampler(Protocol):
    """The target's side of a request: all that an accept rule may ask. Pure functions.

    ``logits`` is one row, (vocab_size,) float32; ``history`` is the prompt and every token before
    the one in question, drafted tokens on its path included; ``position`` is len(history), the
    absolute index of that token.
    """

    def choose(self, logits: Logits, history: Sequence[int], position: int) -> int:
        """The one token the target chooses, the same whoever asks."""

    def distribution(self, logits: Logits, history: Sequence[int], position: int) -> Floats:
        """p after all processors, (vocab_size,) float64; one-hot at temperature 0."""

    def draws(self, step: int) -> Draws:
        """The random decisions of the step that begins at the absolute index ``step``."""


class KeyedDraws:
    """Draws from numbers keyed by (use, seed, step, node)."""

    def __init__(self, seed: int, step: int) -> None:
        self._seed, self._step = seed, step

    def accept(self, node: int, probability: float) -> bool:
        return self._uniform(_ACCEPT, node) <= probability

    def recover(self, node: int, weights: Floats) -> int:
        return draw(weights, self._uniform(_RECOVER, node))

    def draft(self, node: int, weights: Floats) -> int:
        """A drafted token, to be ``node``."""
        return draw(weights, self._uniform(_DRAFT, node))

    def _uniform(self, use: int, node: int) -> float:
        return uniform(key_of(use, self._seed, self._step, node))


class RequestSampler:
    """A Sampler under SamplingParams.

    Raises CorruptModelError for NaN logits, and for a row that leaves nothing to choose from.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int = 0,
        prompt_length: int = 0,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        self._params = params
        self._seed = seed
        self._is_greedy = params.temperature == 0
        self._processors = Processors(params, prompt_length, eos_token_ids)

    def choose(self, logits: Logits, history: Sequence[int], position: int) -> int:
        if self._is_greedy and not self._processors.changes(position):
            return _best(logits, position)
        row = self._processors(logits, history, position)
        if self._is_greedy:
            return int(row.argmax())
        return self._support(row).choose(key_of(_CHOICE, self._seed, position))

    def distribution(self, logits: Logits, history: Sequence[int], position: int) -> Floats:
        row = self._processors(logits, history, position)
        if self._is_greedy:
            one_hot = np.zeros(len(row))
            one_hot[row.argmax()] = 1.0
            return one_hot
        return self._support(row).probabilities()

    def draws(self, step: int) -> KeyedDraws:
        return KeyedDraws(self._seed, step)

    def _support(self, row: Logits | Floats) -> Support:
        params = self._params
        support = Support.of(row, params.temperature)
        support = support.min_p(params.min_p)
        if params.top_k > 0:
            support = support.top_k(params.top_k)
        return support.top_p(params.top_p)


class Processors:
    """What changes the logits before the temperature: biases, ``min_tokens``, penalties.

    Counts of tokens are kept between calls, as a memo of the last history; the result depends on
    the arguments alone.
    """

    def __init__(
        self, params: SamplingParams, prompt_length: int, eos_token_ids: Collection[int]
    ) -> None:
        bias = {token: add for token, add in dict(params.logit_bias).items() if add > -math.inf}
        self._banned = np.array(params.banned, np.int64)
        self._biased = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float64)
        self._ends = np.array(sorted({*eos_token_ids, *params.stop_token_ids}), np.int64)
        self._min_position = prompt_length + params.min_tokens
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._penalizes = (self._repetition, self._presence, self._frequency) != (1, 0, 0)
        self._always = bool(len(self._biased) or len(self._banned) or self._penalizes)
        self._prompt_length = prompt_length
        self._counted: list[int] = []
        self._total = self._output = np.zeros(0, np.int64)

    def changes(self, position: int) -> bool:
        """Whether anything is to be done at ``position``."""
        return self._always or (position < self._min_position and len(self._ends) > 0)

    def __call__(self, logits: Logits, history: Sequence[int], position: int) -> Logits | Floats:
        """The processed row; the row itself where nothing is to be done."""
        _best(logits, position)
        if not self.changes(position):
            return logits
        row = logits.astype(np.float64)
        row[self._biased] += self._bias
        row[self._banned] = -math.inf
        if position < self._min_position:
            row[self._ends] = -math.inf
        if self._penalizes:
            self._penalize(row, history)
        if row.max() == -math.inf:
            raise OptionError(
                f"no token is left to choose at position {position}: logit_bias or min_tokens "
                "forbid all those the model allows"
            )
        return row

    def _penalize(self, row: Floats, history: Sequence[int]) -> None:
        self._count(history, len(row))
        if self._repetition != 1:
            seen = np.flatnonzero(self._total)
            values = row[seen]
            row[seen] = np.where(values > 0, values / self._repetition, values * self._repetition)
        if self._frequency or self._presence:
            seen = np.flatnonzero(self._output)
            row[seen] -= self._frequency * self._output[seen]
            row[seen] -= self._presence

    def _count(self, history: Sequence[int], vocab_size: int) -> None:
        counted = self._counted
        if len(self._total) != vocab_size:
            self._forget(vocab_size)
        # Back to what both share at the end, then a check of the whole, which is quick.
        while counted and (len(counted) > len(history) or counted[-1] != history[len(counted) - 1]):
            self._add(counted.pop(), len(counted), -1)
        if counted != list(history[: len(counted)]):
            self._forget(vocab_size)
        for token in history[len(self._counted) :]:
            self._add(token, len(self._counted), 1)
            self._counted.append(token)

    def _forget(self, vocab_size: int) -> None:
        self._counted.clear()
        self._total = np.zeros(vocab_size, np.int64)
        self._output = np.zeros(vocab_size, np.int64)

    def _add(self, token: int, index: int, change: int) -> None:
        self._total[token] += change
        if index >= self._prompt_length:
            self._output[token] += change


def _best(logits: Logits, position: int) -> int:
    """The token of the highest logit, ties to the lowest id; raises where there is none."""
    best = int(logits.argmax())  # the first NaN, where there is one
    value = logits.item(best)
    if value != value:
        raise CorruptModelError(
            f"the model gave NaN for token {best} at position "
            f"{position}; its weights or the cache are damaged"
        )
    if value == -math.inf:
        raise CorruptModelError(
            f"the model gave -inf for every token at position {position}, which leaves none "
            "to choose; its weights or the cache are damaged"
        )
    return best


class Drawn(NamedTuple):
    """A drafted token and the distribution it was drawn from.

    ``q`` is (vocab_size of the target,), after all processors. It is None where the draw follows
    from the request's own noise, so that there is nothing random about the token.
    """

    token: int
    q: Floats | None


class DraftSampler:
    """How drafters draw: with the request's processors, as its accept rule needs it.

    Under ``match`` with the target's own noise, which makes draft and target agree more often
    (Daliri, Musco and Suresh 2024); under the other rules independently of everything else.
    """

    def __init__(self, sampler: RequestSampler, vocab_size: int, *, shares_noise: bool) -> None:
        self.vocab_size = vocab_size
        self._sampler = sampler
        self._shares_noise = shares_noise

    def draw(self, logits: Logits, history: Sequence[int], node: int) -> Drawn | None:
        """A token for ``node`` of the draft, the first being 1, drawn after ``history``.

        ``logits`` is the drafter's own row, (tokens it knows,): cut at the target's vocabulary,
        or filled up with -inf. None where it leaves nothing to draw.
        """
        row = np.full(self.vocab_size, -np.inf, np.float32)
        known = min(len(logits), self.vocab_size)
        row[:known] = logits[:known]
        position = len(history)
        try:
            if self._shares_noise:
                return Drawn(self._sampler.choose(row, history, position), None)
            q = self._sampler.distribution(row, history, position)
        except (CorruptModelError, OptionError):
            return None  # a drafter with nothing to say is no error
        step = position - (node - 1)
        return Drawn(self._sampler.draws(step).draft(node, q), q)


def draw(weights: Floats, uniform_number: float) -> int:
    """An index with probability proportional to its weight, by inversion."""
    sums = weights.cumsum()
    index = int(np.searchsorted(sums, uniform_number * sums[-1], side="right"))
    # The product may round up to the whole sum; the last index with any weight is meant then.
    return index if index < len(sums) else int(np.flatnonzero(weights)[-1])


def seed_for(params: SamplingParams) -> int | None:
    """The request's seed, drawn where it needs one and has none."""
    if params.seed is None and params.temperature > 0:
        return secrets.randbits(64)
    return params.seed


def completion_seed(seed: int, index: int) -> int:
    """The seed of completion ``index`` of a request; the first uses the request's own."""
    return seed if index == 0 else key_of(_COMPLETION, seed, index)


def is_int(value: object) -> bool:
    """Whether ``value`` is a whole number and not a bool, which Python takes for one."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _bias(value: object) -> tuple[tuple[int, float], ...]:
    what = "{token id: number from -100 to 100, or -inf}"
    try:
        pairs = dict(value) if isinstance(value, Mapping | list | tuple) else None
    except (TypeError, ValueError):
        pairs = None
    if pairs is None:
        raise OptionError(f"logit_bias is {shown(value)}; use {what}")
    for token, bias in pairs.items():
        if not is_int(token):
            raise OptionError(f"logit_bias holds the token id {shown(token)}; use {what}")
        is_number = isinstance(bias, int | float | np.integer | np.floating)
        if (
            not is_number
            or isinstance(bias, bool)
            or not (-100 <= bias <= 100 or bias == -math.inf)
        ):
            raise OptionError(f"logit_bias gives token {token} {shown(bias)}; use {what}")
    return tuple(sorted((int(token), float(bias)) for token, bias in pairs.items()))


def _tuple_of(values: object, kind: type, name: str, what: str) -> tuple[Any, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise OptionError(f"{name} is {shown(values)}; use {what}")
    for value in values:
        if not (is_int(value) if kind is int else isinstance(value, kind)):
            raise OptionError(f"{name} holds {shown(value)}; use {what}")
    return tuple(values)
