"""A tokenizer of transformers as one of Foretell's."""

from __future__ import annotations

from typing import Any

import tokenizers

from foretell._errors import TokenizerError
from foretell._tokenizer import Tokenizer


def tokenizer_of(theirs: Any, source: str) -> Tokenizer:
    """A copy, so that nothing done to it changes theirs. Raises TokenizerError for slow ones."""
    backend = getattr(theirs, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise TokenizerError(
            f"{type(theirs).__name__} has no tokenizer of the 'tokenizers' library in it, which is "
            "what Foretell reads; load the fast one (AutoTokenizer.from_pretrained(..., "
            "use_fast=True))"
        )
    special = {
        name: str(value)
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (value := getattr(theirs, name, None)) is not None
    }
    template = getattr(theirs, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    known = backend.get_vocab(with_added_tokens=True)
    return Tokenizer(
        tokenizers.Tokenizer.from_str(backend.to_str()),
        source=source,
        special_tokens={name: text for name, text in special.items() if text in known},
        chat_template=template if isinstance(template, str) else None,
    )
