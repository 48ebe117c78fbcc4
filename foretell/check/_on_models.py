"""What is tested on the user's own model: the same bits with speculation and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from foretell._draft import Drafter
from foretell._engine import Engine, Prompt
from foretell._errors import ForetellError, InputError, OptionError
from foretell._sampling import SamplingParams
from foretell._verify import RULES, Rule
from foretell.check._bitwise import Difference, Run, difference, run, scored
from foretell.check._job import Job
from foretell.check._on_tables import planted_result
from foretell.check._planted import PLANTED, MisrollingModel
from foretell.check._replay import Replay
from foretell.check._report import Case, Planted, Result
from foretell.drafters import Ngram, PromptLookup, Recycling, Suffix

TEXTS = (
    "Repeat: one two three one two three one two three one two three one two three",
    "Why is the sky blue?",
)
"""The first repeats itself, so that drafters which look back have something to say."""
SAMPLED: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
}
"""How the bitwise tests sample, beside the seed."""


@dataclass(frozen=True)
class _Request:
    """A prompt with what plain decoding makes of it."""

    prompt: list[int]
    sampling: SamplingParams
    plain: Run

    @property
    def text(self) -> list[int]:
        return [*self.prompt, *self.plain.result.token_ids]


def model_jobs(
    engine: Engine,
    prompts: Sequence[Prompt] | None,
    rules: Mapping[str, Rule],
    seed: int,
    quick: bool,
) -> list[Job]:
    """Plain decoding of every prompt, then every drafter under every rule against it."""
    encoded = _encoded(engine, prompts)
    if quick:
        encoded = encoded[:1]
    if not engine.model.capabilities.rollback:
        skipped = Case(
            "bitwise",
            "this model",
            None,
            Result.SKIPPED,
            "the model cannot roll back, so it always decodes plainly",
        )
        return [Job("bitwise", 1, lambda: [skipped])]
    requests: dict[str, list[_Request]] = {}
    length = 8 if quick else 12

    def decode_plainly() -> Sequence[Case]:
        for name, options in (("greedy", dict[str, Any]()), ("sampled", SAMPLED)):
            sampling = SamplingParams(max_tokens=length, seed=seed, **options)
            requests[name] = [
                _Request(prompt, sampling, run(engine, prompt, sampling)) for prompt in encoded
            ]
        return []

    jobs = [Job("bitwise: plain decoding", 2 * len(encoded), decode_plainly)]
    names = [*dict.fromkeys([d.name for d in engine.drafters] + list(_COMMON)), *_REPLAYED]
    for rule, name, way in product(rules.values(), names, ("greedy", "sampled")):
        trees = _makes_trees(engine, name)
        if (trees and not rule.trees) or (not rule.same_tokens and name not in _FOR_DRAWING):
            continue
        lengths = (4,) if quick or not rule.same_tokens else (4, 1, 12)
        jobs.append(
            Job(
                f"bitwise: {rule.name}, {way}, {name}",
                len(lengths) + len(encoded) - 1,
                _bitwise_job(engine, rule, name, way, lengths, requests),
            )
        )
    for surplus in (1, -1):
        jobs.append(Job("bitwise: control", 1, _control_job(engine, surplus, requests)))
    return jobs


_COMMON: dict[str, type[Drafter]] = {
    "prompt_lookup": PromptLookup,
    "ngram": Ngram,
    "suffix": Suffix,
    "recycling": Recycling,
}
_FOR_DRAWING = ("ngram", "draft_model", "half right")
"""What rules that draw are tried with: drafters of chains, with a q and without."""
_REPLAYED = {
    "perfect": (0.0, False),
    "half right": (0.5, False),
    "half right tree": (0.5, True),
    "adversarial": (1.0, False),
}


def _makes_trees(engine: Engine, name: str) -> bool:
    if name in _REPLAYED:
        return _REPLAYED[name][1]
    own = next((drafter for drafter in engine.drafters if drafter.name == name), None)
    return own.trees if own is not None else bool(_COMMON[name].trees)


def _drafter(engine: Engine, name: str, request: _Request) -> Drafter:
    if name in _REPLAYED:
        mistakes, trees = _REPLAYED[name]
        return Replay(request.text, engine.model.vocab_size, mistakes, trees=trees)
    own = next((drafter for drafter in engine.drafters if drafter.name == name), None)
    return _COMMON[name]() if own is None else own


def _bitwise_job(
    engine: Engine,
    rule: Rule,
    name: str,
    way: str,
    lengths: Sequence[int],
    requests: Mapping[str, list[_Request]],
) -> Callable[[], Sequence[Case]]:
    return lambda: [bitwise(engine, rule, name, way, lengths, requests[way])]


def bitwise(
    engine: Engine,
    rule: Rule,
    name: str,
    way: str,
    lengths: Sequence[int],
    requests: Sequence[_Request],
) -> Case:
    """One drafter under one rule, over prompts and draft lengths, against plain decoding.

    The first draft length is tried on every prompt, the others on the first prompt.

    A drafter that had nothing to say was not tested, and the case says so.

    A rule that promises the same tokens is held to them. The others promise, where something
    is drawn, only the distribution: there the run must repeat, and its log-probabilities and
    cache must be those that the target gives to the same tokens one at a time.
    """
    same = rule.same_tokens or way == "greedy"
    compared = drafted = accepted = 0
    found: list[tuple[str, Difference]] = []
    pairs = [(index, lengths[0]) for index in range(len(requests))]
    pairs += [(0, num_draft_tokens) for num_draft_tokens in lengths[1:]]
    for index, num_draft_tokens in pairs:
        request = requests[index]
        options = {
            "drafter": _drafter(engine, name, request),
            "num_draft_tokens": num_draft_tokens,
            "verification": rule.name,
        }
        speculative = run(engine, request.prompt, request.sampling, **options)  # type: ignore[arg-type]
        if same:
            different = difference(request.plain, speculative)
        else:
            again = run(engine, request.prompt, request.sampling, **options)  # type: ignore[arg-type]
            alone = scored(engine.model, request.prompt, speculative.result)
            different = difference(speculative, again) or difference(alone, speculative)
        if different is not None:
            found.append((f"prompt {index}, {num_draft_tokens} drafted", different))
        compared += len(speculative.result.token_ids)
        drafted += speculative.result.stats.num_draft_tokens
        accepted += speculative.result.stats.num_accepted_tokens
    promised = (
        "tokens, log-probabilities and cache"
        if same
        else "repeats; log-probabilities and cache are those of its own tokens (the tokens "
        "themselves are promised in distribution only)"
    )
    detail = (
        f"{compared} tokens, {drafted} drafted, {accepted} accepted: {promised}"
        if drafted
        else f"drafted nothing in {compared} tokens, so this shows nothing"
    )
    if found:
        where, first = found[0]
        detail = f"{where}: {first}" + (f" (and {len(found) - 1} more)" if found[1:] else "")
    return Case(
        "bitwise",
        f"{way}, {name}",
        rule.name,
        Result.FAILED if found else Result.PASSED if drafted else Result.SKIPPED,
        detail,
        {
            "tokens": compared,
            "drafted": drafted,
            "accepted": accepted,
            "num_draft_tokens": list(lengths),
            "promised": "same tokens" if same else "same distribution",
            "differences": [
                {
                    "where": where,
                    "what": one.what,
                    "position": one.position,
                    "expected": one.expected,
                    "got": one.got,
                    "gap": one.gap,
                }
                for where, one in found
            ],
        },
    )


def _control_job(
    engine: Engine, surplus: int, requests: Mapping[str, list[_Request]]
) -> Callable[[], Sequence[Planted]]:
    name = f"rolled back one token too {'few' if surplus > 0 else 'many'}"
    error = next(error for error in PLANTED if error.name == name)

    def control() -> Sequence[Planted]:
        request = requests["greedy"][0]
        try:
            spoiled = run(
                engine,
                request.prompt,
                request.sampling,
                model=MisrollingModel(engine.model, surplus),
                drafter=Replay(request.text, engine.model.vocab_size, 1.0),
                num_draft_tokens=4,
            )
            different = difference(request.plain, spoiled)
            detail = "nothing differs" if different is None else str(different)
        except ForetellError as raised:
            different, detail = Difference("error", 0), str(raised)
        found = different is not None
        return [planted_result(error, RULES["match"], "bitwise", found, detail)]

    return control


def _encoded(engine: Engine, prompts: Sequence[Prompt] | None) -> list[list[int]]:
    if prompts is not None and (isinstance(prompts, str) or not prompts):
        raise OptionError(f"prompts is {prompts!r}; pass a list of texts or of lists of token ids")
    if engine.tokenizer is None:
        if prompts is None:
            size = engine.model.vocab_size
            prompts = [
                [i % 4 % size for i in range(1, 13)],
                [i * i % size for i in range(1, 9)],
            ]
        elif any(isinstance(prompt, str) for prompt in prompts):
            raise InputError("the model has no tokenizer; pass prompts as lists of token ids")
    encoded: list[list[int]] = []
    for prompt in prompts or TEXTS:
        if (
            isinstance(prompt, str)
            and engine.tokenizer is not None
            and (engine.tokenizer.chat_template is not None)
        ):
            encoded.append(engine.encode(messages=[{"role": "user", "content": prompt}]))
        else:
            encoded.append(engine.encode(prompt))
    return encoded
