"""Options that would change nothing: refused, so that none is ignored without a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretell._errors import OptionError
from foretell._sampling import SamplingParams

OFF = SamplingParams()


def refuse_ignored(
    sampling: SamplingParams,
    verification: str,
    num_draft_tokens: int | str,
    drafters: Sequence[str],
    draft: str | None,
) -> None:
    """Raise OptionError for options that others make meaningless."""
    if sampling.temperature == 0:
        given = [
            f"--{name.replace('_', '-')} {value}"
            for name in ("top_p", "top_k", "min_p", "seed")
            if (value := getattr(sampling, name)) != getattr(OFF, name)
        ]
        given += [f"--verification {verification}"] if verification != "match" else []
        if given:
            change = "changes" if len(given) == 1 else "change"
            raise OptionError(
                f"{' and '.join(given)} {change} nothing at temperature 0, where the best token is "
                "always taken; add --temperature X, for example 0.7"
            )
    if num_draft_tokens == 0:
        given = [f"--draft {draft}"] if draft is not None else []
        given += [f"--drafter {name}" for name in drafters]
        if given:
            raise OptionError(
                f"{' and '.join(given)} cannot be used with --num-draft-tokens 0, which drafts "
                "nothing; leave one of them out"
            )


def sampled(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> dict[str, Any]:
    """What engines are told where they sample, nothing where they do not; checked."""
    sampling = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed or None
    )
    refuse_ignored(sampling, "match", "auto", (), None)
    if temperature == 0:
        return {}
    given = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    changed = {name: value for name, value in given.items() if value != getattr(OFF, name)}
    return {"temperature": temperature, **changed, "seed": seed}
