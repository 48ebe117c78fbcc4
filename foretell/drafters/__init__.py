"""Drafters, one algorithm per file."""

from foretell.drafters.draft_model import DraftModel
from foretell.drafters.ngram import Ngram
from foretell.drafters.prompt_lookup import PromptLookup

__all__ = ["DraftModel", "Ngram", "PromptLookup"]
