"""A model's tokenizer and limits, without its weights: what the driver needs to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from foretell._errors import TokenizerError
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
    ) -> ModelText:
        """A checked model's. Raises ModelError and its kin."""
        checkpoint = open_checkpoint(source, tokenizer=tokenizer, progress=progress)
        if checkpoint.tokenizer is None:
            raise TokenizerError(
                f"{source} came without a tokenizer; pass its tokenizer.json: --tokenizer FILE"
            )
        config = checkpoint.config
        return cls(checkpoint.tokenizer, checkpoint.eos_token_ids, config.max_length)

    def prompt(self, text: str, messages: Sequence[Mapping[str, str]] | None) -> list[int]:
        if messages is None:
            return list(self.tokenizer.encode(text, add_special_tokens=True))
        formatted = self.tokenizer.apply_chat_template(messages)
        return list(self.tokenizer.encode(formatted, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)
