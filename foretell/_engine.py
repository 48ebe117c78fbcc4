"""The text API; the one place where models, drafters and rules are wired together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from foretell._auto_policy import AutoPolicy, Experience
from foretell._decode import decode
from foretell._draft import Drafter
from foretell._errors import (
    ContextLengthError,
    EmptyPromptError,
    InputError,
    OptionError,
    TokenizerError,
    VocabularyMismatchError,
    shown,
)
from foretell._loading import LoadOptions, load_model
from foretell._logprobs import TokenLogprobs
from foretell._model import Model, Session
from foretell._near_ties import NearTies
from foretell._policy import FixedPolicy, Policy
from foretell._profile import Profile
from foretell._request import Answer, Request
from foretell._result import Event, Generation, Stats
from foretell._sampling import (
    DraftSampler,
    RequestSampler,
    Sampler,
    SamplingParams,
    completion_seed,
    is_int,
    seed_for,
)
from foretell._stop import StopConditions
from foretell._tokenizer import StreamDecoder, Tokenizer
from foretell._verify import RULES, Rule
from foretell.drafters import (
    DraftModel,
    EarlyExitDrafter,
    Ngram,
    PromptLookup,
    Recycling,
    RecyclingMemory,
    Suffix,
    SuffixMemory,
    TextDraft,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DRAFTERS = ("suffix", "recycling", "prompt_lookup", "draft_model", "ngram", "early_exit")
DEFAULT_DRAFTERS = ("suffix", "recycling")

NumDraftTokens = int | Literal["auto"]

Message = Mapping[str, str]
Prompt = str | Iterable[int]
Progress = Callable[[str], None]


class Engine:
    """A target model with its drafters, ready to generate.

    ``model``: "demo" (the embedded default), a folder or GGUF file, a hub id, or a Model.
    ``draft``: a draft model, in the same forms. Where its tokenizer differs from the target's, it
    drafts text, which is encoded for the target.
    ``drafters``: names ("suffix", "recycling", "prompt_lookup", "draft_model", "ngram",
    "early_exit", which are the first layers of the target, a third of them, or six with
    "early_exit:6") or Drafter objects; by default "suffix" and "recycling", and "draft_model"
    where a draft is given. What they propose becomes one draft, of the length that pays; where
    ``num_draft_tokens`` fixes the length, the first one with an idea drafts.
    ``suffix_memory``: earlier outputs for "suffix" to draft from too, each ``owner``'s apart; none
    are kept without it. ("recycling" remembers which tokens the target thought likely, each
    owner's apart too, for as long as the engine lives.)
    ``tokenizer``: a tokenizer.json, or a Tokenizer, where the model does not bring its own.
    ``dtype``: how weights are kept. "native", the default: as the file has them, computed with as
    if they were float32, so that "float32" gives the same bits from more memory; "bfloat16" and
    "int8" (groups of 32 with a scale each) round them. ``cache_dtype``: keys and values in
    "float32" or "bfloat16". ``threads``: by default one per core; they never change the output.
    ``backend``: "cpu", "transformers" (needs ``foretell[transformers]``), or "auto": the cpu
    backend for the families it knows, else transformers; ``backend`` of the engine says which and
    why. A loaded ``PreTrainedModel`` is run by transformers, and never changed; ``tokenizer`` is
    its tokenizer then. ``device``, ``exact``, ``trust_remote_code`` (off) and
    ``attn_implementation`` are that backend's, see docs/transformers.md.
    ``progress`` is called with notes about slow work.

    Safe to use from several threads; passes take turns. Raises a ForetellError before any
    work where something does not fit.
    """

    def __init__(
        self,
        model: str | Path | Model | PreTrainedModel,
        draft: str | Path | Model | PreTrainedModel | None = None,
        drafters: Sequence[str | Drafter] | None = None,
        dtype: str = "native",
        threads: int | None = None,
        *,
        tokenizer: str | Path | Tokenizer | PreTrainedTokenizerBase | None = None,
        cache_dtype: str = "float32",
        backend: str = "auto",
        device: str | None = None,
        exact: bool | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        suffix_memory: SuffixMemory | None = None,
        progress: Progress | None = None,
    ) -> None:
        if drafters is None:
            drafters = [*DEFAULT_DRAFTERS, *(["draft_model"] if draft is not None else [])]
        _check_drafters(drafters, draft)
        path = None if isinstance(tokenizer, Tokenizer) else tokenizer
        options = LoadOptions(
            dtype, threads, cache_dtype, backend, device, exact, trust_remote_code,
            attn_implementation,
        )  # fmt: skip
        self.model, self.backend = load_model(model, options, path, progress)
        if isinstance(tokenizer, Tokenizer):
            self.tokenizer: Tokenizer | None = tokenizer
        elif isinstance(model, Model) and tokenizer is not None:
            self.tokenizer = Tokenizer.from_file(cast("str | Path", tokenizer))
        else:
            self.tokenizer = self.model.tokenizer
        if self.tokenizer is not None and self.tokenizer.vocab_size > self.model.vocab_size:
            raise TokenizerError(
                f"the tokenizer has ids up to {self.tokenizer.vocab_size - 1}, but the model only "
                f"{self.model.vocab_size} embeddings; pass the tokenizer the model was trained with"
            )
        self.draft = None if draft is None else load_model(draft, options, None, progress)[0]
        if self.draft is not None:
            self._check_vocabularies(self.draft)
        self.suffix_memory = suffix_memory
        self._recycling_memory = RecyclingMemory()
        self.drafters: list[Drafter] = [self._drafter(entry) for entry in drafters]
        models = [self.model] if self.draft is None else [self.model, self.draft]
        self._profile = Profile.of(models)
        self._experience = Experience() if self._profile is None else self._profile.load()

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        sampling: SamplingParams | None = None,
        num_draft_tokens: NumDraftTokens = "auto",
        verification: str = "match",
        owner: str = "",
        **options: Any,
    ) -> Generation:
        """Generate to the end and return the whole result.

        ``prompt`` is text or token ids, continued as it is; ``messages`` are put through the
        model's chat template. ``num_draft_tokens``: "auto" drafts what pays, by measured costs and
        acceptance; a number is the most tokens to draft at every step, 0 plain decoding.
        ``owner``: whose earlier requests to draft from; nothing goes from one owner to another.
        ``verification``: "match" never changes the output, whatever is drafted;
        "rejection" and "block" promise its exact distribution instead, for drafters that make
        chains. They can accept more where the drafter draws from a distribution of its own
        ("draft_model", "ngram"); other drafts are kept as often as with "match". ``options`` are
        the fields of SamplingParams; with ``n`` above 1 the result is the first completion, and
        its ``completions`` are all of them.
        Raises InputError (EmptyPromptError, ContextLengthError, OptionError) before any work.
        """
        results: dict[int, Generation] = {}
        for event in self.stream(
            prompt,
            messages=messages,
            sampling=sampling,
            num_draft_tokens=num_draft_tokens,
            verification=verification,
            owner=owner,
            **options,
        ):
            if event.result is not None:
                results[event.index] = event.result
        first, *others = (results[index] for index in sorted(results))
        return replace(first, others=tuple(others))

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        sampling: SamplingParams | None = None,
        num_draft_tokens: NumDraftTokens = "auto",
        verification: str = "match",
        owner: str = "",
        is_cancelled: Callable[[], bool] | None = None,
        **options: Any,
    ) -> Iterator[Event]:
        """Like ``generate``, but yields each token as an Event; the last one has the result.

        Of several completions each has such a last event, and ``index`` tells them apart.
        Arguments are checked when this is called, not at the first ``next``. ``is_cancelled`` is
        asked at every step; closing the iterator stops the generation as well.
        """
        params = SamplingParams.from_options(sampling, options)
        tokens = self.encode(prompt, messages)
        session = self.model.new_session()
        requests = self.prepare(
            tokens,
            params,
            num_draft_tokens=num_draft_tokens,
            verification=verification,
            owner=owner,
            session=session,
            is_cancelled=is_cancelled,
        )
        return self._events(requests)

    def chat(self, system: str | None = None) -> Chat:
        """A conversation that keeps its cache between turns."""
        return Chat(self, system)

    def encode(
        self, prompt: Prompt | None = None, messages: Sequence[Message] | None = None
    ) -> list[int]:
        """The token ids of a prompt or of chat messages, checked against the model."""
        if (prompt is None) == (messages is None):
            raise InputError("pass either a prompt or messages=[...]")
        if messages is not None:
            tokenizer = self.require_tokenizer("messages")
            text = tokenizer.apply_chat_template(messages)
            tokens = tokenizer.encode(text, add_special_tokens=False)
        elif isinstance(prompt, str):
            if not prompt:
                raise EmptyPromptError("the prompt is empty; pass some text to continue")
            tokens = self.require_tokenizer("a text prompt").encode(prompt, add_special_tokens=True)
        else:
            tokens = _token_list(prompt, self.model.vocab_size)
        if not tokens:
            raise EmptyPromptError("the prompt holds no tokens; pass some text to continue")
        if len(tokens) >= self.model.max_length:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens, but the model's context is "
                f"{self.model.max_length} and the answer needs room in it; shorten the prompt"
            )
        return tokens

    def require_tokenizer(self, what: str) -> Tokenizer:
        """The tokenizer; raises TokenizerError, naming ``what`` needs it, where there is none."""
        if self.tokenizer is None:
            raise TokenizerError(
                f"{what} needs a tokenizer, and this model came without one; pass its "
                "tokenizer.json (Engine(tokenizer=...), --tokenizer FILE)"
                + ("; in Python, token ids do as well" if what == "a text prompt" else "")
            )
        return self.tokenizer

    def prepare(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        num_draft_tokens: NumDraftTokens = "auto",
        verification: str = "match",
        drafters: Sequence[str] | None = None,
        owner: str = "",
        session: Session | None = None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> list[Request]:
        """One request for each completion, for those who run the passes themselves.

        ``tokens`` are what ``encode`` gives; ``session`` holds a prefix of them (by default
        nothing yet); ``drafters`` are names, by default the engine's own drafters; the rest is as
        for ``stream``. Raises for everything that cannot be carried out.
        """
        params.check_vocabulary(self.model.vocab_size)
        if params.stop:
            self.require_tokenizer("stop")
        if not isinstance(verification, str) or verification not in RULES:
            raise OptionError(
                f"verification is {verification!r}; use {', '.join(map(repr, RULES))}"
            )
        asked = self.drafters if drafters is None else self._named(drafters)
        seed = seed_for(params)
        session = self.model.new_session() if session is None else session
        return [
            self._request(
                list(tokens),
                params,
                None if seed is None else completion_seed(seed, index),
                num_draft_tokens,
                RULES[verification],
                [_for_request(d, owner, RULES[verification]) for d in asked],
                session,
                is_cancelled,
            )
            for index in range(params.n)
        ]

    def pass_seconds(self, rows: int, context: int) -> float | None:
        """What a pass of ``rows`` rows after ``context`` tokens takes here, as far as was measured.

        With one row that is what plain decoding takes for a token. None before any was measured.
        """
        costs = self._experience.costs
        return costs.seconds(rows, context) if costs.known else None

    def _named(self, names: Sequence[str]) -> list[Drafter]:
        """The drafters of these names, those that the engine has first of all."""
        _check_drafters(names, self.draft if "draft_model" in names else None)
        known = {drafter.name: drafter for drafter in self.drafters}
        return [known.get(name) or self._drafter(name) for name in names]

    def _request(
        self,
        tokens: list[int],
        params: SamplingParams,
        seed: int | None,
        num_draft_tokens: NumDraftTokens,
        rule: Rule,
        drafters: Sequence[Drafter],
        session: Session,
        is_cancelled: Callable[[], bool] | None,
    ) -> Request:
        stops = StopConditions(
            eos_token_ids=() if params.ignore_eos else self.model.eos_token_ids,
            stop_token_ids=params.stop_token_ids,
            stop_strings=tuple(params.stop),
            max_tokens=params.max_tokens,
            max_context_tokens=self.model.max_length - len(tokens),
            min_tokens=params.min_tokens,
            decoder=None if self.tokenizer is None else StreamDecoder(self.tokenizer),
        )
        # One for each side: their histories differ, and each remembers its last one.
        ours, theirs = (
            RequestSampler(
                params,
                seed=seed or 0,
                prompt_length=len(tokens),
                eos_token_ids=self.model.eos_token_ids,
            )
            for _ in range(2)
        )
        stats, near = Stats(), self.model.near_tie_gap
        sampler: Sampler = NearTies(ours, near, stats) if near > 0 else ours
        drawing = DraftSampler(theirs, self.model.vocab_size, shares_noise=rule.same_tokens)
        policy = self._policy(num_draft_tokens, drafters, rule, drawing)
        return Request(
            session,
            tokens,
            sampler,
            policy,
            stops,
            is_cancelled or (lambda: False),
            rule=rule,
            seed=seed,
            num_logprobs=params.logprobs,
            num_prompt_logprobs=params.prompt_logprobs,
            stats=stats,
        )

    def _policy(
        self,
        num_draft_tokens: NumDraftTokens,
        drafters: Sequence[Drafter],
        rule: Rule,
        sampler: DraftSampler,
    ) -> Policy:
        if num_draft_tokens == "auto":
            return AutoPolicy(self.model, drafters, self._experience, rule=rule, sampler=sampler)
        return FixedPolicy(
            self.model,
            drafters,
            num_draft_tokens,
            rule=rule,
            sampler=sampler,
            costs=self._experience.costs,
        )

    def _events(self, requests: Sequence[Request]) -> Iterator[Event]:
        answers = [Answer(request) for request in requests]
        for index, emitted in decode(self.model, requests):
            request, answer = requests[index], answers[index]
            answer.add(emitted)
            logprobs: Sequence[TokenLogprobs | None] = emitted.logprobs
            logprobs = logprobs or [None] * len(emitted.tokens)
            for token, origin, piece, scores in zip(
                emitted.tokens, emitted.origins, emitted.pieces, logprobs, strict=True
            ):
                yield Event(piece, token, origin, emitted.step, scores, index)
            if request.finish is not None:
                rest, result = answer.finish(requests[0].prompt_logprobs)
                yield Event(rest, step=request.stats.num_steps, index=index, result=result)

    def _check_vocabularies(self, draft: Model) -> None:
        """Tokenizers that differ can be gone between; without them the ids have to agree."""
        compared = self.tokenizer is not None and draft.tokenizer is not None
        if not compared and draft.vocab_size != self.model.vocab_size:
            raise VocabularyMismatchError(
                f"the draft model has {draft.vocab_size} token ids, the target "
                f"{self.model.vocab_size}, and there are no tokenizers to go between them; use a "
                "draft model of the same family"
            )

    def _drafter(self, entry: str | Drafter) -> Drafter:
        if isinstance(entry, Drafter):
            return entry
        if entry == "prompt_lookup":
            return PromptLookup()
        if entry == "suffix":
            return Suffix(self.suffix_memory)
        if entry == "recycling":
            return Recycling(memory=self._recycling_memory)
        if entry == "ngram":
            return Ngram()
        if entry == "early_exit" or _exit_layers(entry) is not None:
            return EarlyExitDrafter(self.model.early_exit(_exit_layers(entry)))
        assert self.draft is not None
        ours, theirs = self.tokenizer, self.draft.tokenizer
        if ours is not None and theirs is not None and ours.same_vocabulary(theirs) is not None:
            return TextDraft(self.draft, theirs, ours)
        known = self.model.vocab_size if self.tokenizer is None else self.tokenizer.vocab_size
        return DraftModel(self.draft, known)


class Chat:
    """A conversation; each turn reuses the cache of the turns before it."""

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self.engine = engine
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.session = engine.model.new_session()
        self._tokens: list[int] = []
        self._turn: Generator[Event] | None = None

    def send(self, text: str, **options: Any) -> Generation:
        """One turn: the user says ``text``; returns the answer. Options as for ``generate``."""
        for event in self.stream(text, **options):
            if event.result is not None:
                return event.result
        raise AssertionError("a stream ends with its result")

    def stream(
        self,
        text: str,
        *,
        sampling: SamplingParams | None = None,
        num_draft_tokens: NumDraftTokens = "auto",
        verification: str = "match",
        owner: str = "",
        is_cancelled: Callable[[], bool] | None = None,
        **options: Any,
    ) -> Iterator[Event]:
        """One turn, as events. The turn counts once its last event has been read.

        A turn that is still running when the next one begins is closed, and does not count.
        """
        if not text:
            raise EmptyPromptError("the message is empty; say something")
        params = SamplingParams.from_options(sampling, options)
        if params.n > 1:
            raise OptionError(
                f"n is {params.n}, but a conversation goes on from one answer; use n=1, or "
                "Engine.generate(messages=..., n=...)"
            )
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = self.engine.encode(messages=messages)
        if self._turn is not None:
            self._turn.close()
        self._rewind(tokens if params.prompt_logprobs is None else tokens[:1])
        [request] = self.engine.prepare(
            tokens,
            params,
            num_draft_tokens=num_draft_tokens,
            verification=verification,
            owner=owner,
            session=self.session,
            is_cancelled=is_cancelled,
        )
        self._tokens = request.tokens
        self._turn = self._record(messages, self.engine._events([request]))
        return self._turn

    def _record(self, messages: list[dict[str, str]], events: Iterator[Event]) -> Generator[Event]:
        for event in events:
            if event.result is not None:
                self.messages = [*messages, {"role": "assistant", "content": event.result.text}]
            yield event

    def _rewind(self, tokens: list[int]) -> None:
        """Roll the session back to what it shares with ``tokens``, leaving a token to run."""
        longest = min(self.session.length, len(tokens) - 1)
        common = 0
        while common < longest and tokens[common] == self._tokens[common]:
            common += 1
        if self.engine.model.capabilities.rollback:
            self.session.rollback(self.session.length - common)
        elif common < self.session.length:
            self.session = self.engine.model.new_session()


def _for_request(drafter: Drafter, owner: str, rule: Rule) -> Drafter:
    """The drafter, with what it may know of the owner's earlier requests.

    That is nothing where the output depends on drafts, so that a seed gives the same one again.
    """
    if isinstance(drafter, Suffix | Recycling):
        return drafter.for_owner(owner if rule.same_tokens else None)
    return drafter


def _check_drafters(drafters: Sequence[str | Drafter], draft: object) -> None:
    if not isinstance(drafters, list | tuple):
        raise OptionError(f"drafters is {drafters!r}; use a list, drafters=[{drafters!r}]")
    for entry in drafters:
        if not isinstance(entry, Drafter) and not is_drafter(entry):
            raise OptionError(f"unknown drafter {entry!r}; the drafters are {', '.join(DRAFTERS)}")
    if "draft_model" in drafters and draft is None:
        raise OptionError(
            "the drafter 'draft_model' needs a draft model: pass one (draft=..., --draft MODEL)"
        )
    if draft is not None and "draft_model" not in drafters:
        raise OptionError(
            "a draft model was given, but 'draft_model' is not among the drafters; name it too, or "
            "leave the draft model out"
        )


def is_drafter(name: object) -> bool:
    """Whether it is the name of a drafter: one of DRAFTERS, or "early_exit:6"."""
    return name in DRAFTERS or _exit_layers(name) is not None


def _exit_layers(entry: object) -> int | None:
    """6 for "early_exit:6"."""
    name, _, count = entry.partition(":") if isinstance(entry, str) else ("", "", "")
    return int(count) if name == "early_exit" and count.isascii() and count.isdecimal() else None


def _token_list(prompt: Iterable[int] | None, vocab_size: int) -> list[int]:
    if isinstance(prompt, bytes | bytearray | Mapping | Set) or not isinstance(prompt, Iterable):
        raise InputError(f"the prompt is {shown(prompt)}; pass text or a list of token ids")
    tokens = list(prompt)
    for token in tokens:
        if not is_int(token) or not 0 <= token < vocab_size:
            raise InputError(
                f"the prompt holds {shown(token)}, which is not a token id of this model "
                f"(0..{vocab_size - 1})"
            )
    return [int(token) for token in tokens]
