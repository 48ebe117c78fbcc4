"""Drafters, one algorithm per file."""

from foretell.drafters.draft_model import DraftModel
from foretell.drafters.ngram import Ngram
from foretell.drafters.prompt_lookup import PromptLookup
from foretell.drafters.recycling import Recycling
from foretell.drafters.suffix import Suffix, SuffixMemory

__all__ = ["DraftModel", "Ngram", "PromptLookup", "Recycling", "Suffix", "SuffixMemory"]
