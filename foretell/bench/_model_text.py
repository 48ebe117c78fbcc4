"""A model's tokenizer and limits, without its weights: what the driver needs to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretell._errors import TokenizerError, UnsupportedModelError
from foretell._loading import LoadOptions, is_gguf, is_installed, require_transformers
from foretell._tokenizer import Tokenizer
from foretell.backends.cpu._checkpoint import open_checkpoint


class ModelText:
    """Prompts as the model's tokens. A ``Text``."""

    def __init__(
        self, tokenizer: Tokenizer, stop_token_ids: Sequence[int], max_length: int
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = tuple(stop_token_ids)
        self.max_length = max_length

    @classmethod
    def of(
        cls,
        source: str,
        tokenizer: Path | None = None,
        progress: Callable[[str], None] | None = None,
        loading: Mapping[str, Any] | None = None,
    ) -> ModelText:
        """A checked model's; ``loading`` are fields of LoadOptions. Raises ModelError and its kin.

        Read by the backend that foretell will run it on.
        """
        options = LoadOptions(**(loading or {}))
        if options.wants_transformers:
            found = _by_transformers(source, tokenizer, options)
        else:
            try:
                checkpoint = open_checkpoint(source, tokenizer=tokenizer, progress=progress)
            except UnsupportedModelError:
                if options.backend == "cpu" or is_gguf(source) or not is_installed():
                    raise
                found = _by_transformers(source, tokenizer, options)
            else:
                length = checkpoint.config.max_length
                found = checkpoint.tokenizer, checkpoint.eos_token_ids, length
        own, ends, max_length = found
        if own is None:
            raise TokenizerError(
                f"{source} came without a tokenizer; pass its tokenizer.json: --tokenizer FILE"
            )
        return cls(own, ends, max_length)

    def prompt(self, text: str, messages: Sequence[Mapping[str, str]] | None) -> list[int]:
        if messages is None:
            return list(self.tokenizer.encode(text, add_special_tokens=True))
        formatted = self.tokenizer.apply_chat_template(messages)
        return list(self.tokenizer.encode(formatted, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)


def _by_transformers(
    source: str, tokenizer: Path | None, options: LoadOptions
) -> tuple[Tokenizer | None, tuple[int, ...], int]:
    require_transformers(source)
    from foretell.backends.transformers import read_text

    return read_text(source, tokenizer=tokenizer, trust_remote_code=options.trust_remote_code)
