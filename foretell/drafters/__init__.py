"""Drafters, one algorithm per file."""

from foretell.drafters.draft_model import DraftModel
from foretell.drafters.early_exit import EarlyExitDrafter
from foretell.drafters.ngram import Ngram
from foretell.drafters.prompt_lookup import PromptLookup
from foretell.drafters.recycling import Recycling, RecyclingMemory
from foretell.drafters.suffix import Suffix, SuffixMemory
from foretell.drafters.text_draft import TextDraft

__all__ = [
    "DraftModel",
    "EarlyExitDrafter",
    "Ngram",
    "PromptLookup",
    "Recycling",
    "RecyclingMemory",
    "Suffix",
    "SuffixMemory",
    "TextDraft",
]
