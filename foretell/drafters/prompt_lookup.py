"""Drafts what followed the same words earlier in the prompt or the output."""

from __future__ import annotations

from collections.abc import Sequence

from foretell._draft import Draft, Drafter
from foretell._errors import OptionError


class PromptLookup(Drafter):
    """Prompt lookup decoding (Saxena 2023): n-grams of the request itself.

    The last ``max_ngram`` tokens are looked up in everything before them, then one fewer, down
    to ``min_ngram``; of several places the most recent one counts. Drafts the tokens that
    followed there. Each n-gram's latest place is kept in a table, so a step costs the same
    whatever the length of the context.
    """

    name = "prompt_lookup"

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise OptionError(
                f"min_ngram {min_ngram} and max_ngram {max_ngram} must satisfy "
                "1 <= min_ngram <= max_ngram"
            )
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def spawn(self) -> PromptLookup:
        return PromptLookup(self._lengths[0], self._lengths[-1])

    def start(self, prompt: Sequence[int]) -> None:
        self._ends.clear()
        self._indexed = 0

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        # The n-grams that end at the last token stay out: they would find themselves.
        for end in range(self._indexed + 1, len(context)):
            for length in self._lengths:
                if length <= end:
                    self._ends[tuple(context[end - length : end])] = end
        self._indexed = max(self._indexed, len(context) - 1)
        for length in self._lengths:
            place = self._ends.get(tuple(context[-length:]))
            if place is not None:
                return Draft.one_hot(context[place : place + limit])
        return Draft.empty()
