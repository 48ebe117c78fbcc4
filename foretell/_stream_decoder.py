"""Decoding one token at a time without ever showing half a character.

Whatever the tokenizer, the pieces joined together are exactly what decoding all ids at once gives.
Three kinds of decoders are told apart by their description:

- byte-level (GPT-2, Llama 3, Qwen, SmolLM): each token is some bytes, and the text is their UTF-8.
  Each byte is looked at once.
- token by token, with runs of byte tokens (SentencePiece models: Llama 2, Mistral). A run of byte
  tokens is valid or replaced as a whole, so it is held back until it ends. Everything after the
  first piece is decoded behind a fixed ordinary token, because the decoder treats the beginning of
  a text differently (it drops the space there).
- anything else is decoded from the start each time: slower with length, but right. Generating
  models do not have such decoders.
"""

from __future__ import annotations

import codecs
import copy
import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from foretell._tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@final
class StreamDecoder:
    """Push ids, get text; `finish` returns what was held back.

    Time per token does not grow with the length of the text. `copy` gives an independent decoder
    in the same state, to try tokens that may be dropped.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        inner = tokenizer.inner
        self._inner = inner
        special = inner.get_added_tokens_decoder() if skip_special_tokens else {}
        self._skipped = {token.content for token in special.values() if token.special}
        self._stream = _stream_for(tokenizer)
        self._known = tokenizer.known_pieces[skip_special_tokens]

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often empty, never a broken character."""
        stream = self._stream
        between = stream.is_between
        if between and (text := self._known.get(token_id)) is not None:
            return text
        token = self._inner.id_to_token(token_id)
        text = "" if token is None or token in self._skipped else stream.push(token_id, token)
        if between and stream.is_between and token is not None:
            self._known[token_id] = text
        return text

    def finish(self) -> str:
        """The text still held back. The decoder is as new afterwards."""
        return self._stream.finish()

    def copy(self) -> StreamDecoder:
        """An independent decoder in the same state."""
        twin = copy.copy(self)
        twin._stream = self._stream.copy()
        return twin


class _Stream(ABC):
    is_between = False
    """Whether nothing is held back, and the next token's text does not depend on earlier ones."""

    @abstractmethod
    def push(self, token_id: int, token: str) -> str: ...

    @abstractmethod
    def finish(self) -> str: ...

    @abstractmethod
    def copy(self) -> _Stream: ...


@final
class _ByteLevelStream(_Stream):
    """Bytes to UTF-8. Python and Rust replace ill-formed sequences alike: one mark for each
    maximal part of a character (Unicode 15, section 3.9, best practice)."""

    is_between = True

    def __init__(self) -> None:
        self._rest = b""

    def push(self, token_id: int, token: str) -> str:
        data = self._rest + _token_bytes(token)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        self.is_between = not self._rest
        return text

    def finish(self) -> str:
        text, _ = codecs.utf_8_decode(self._rest, "replace", True)
        self._rest, self.is_between = b"", True
        return text

    def copy(self) -> _ByteLevelStream:
        return copy.copy(self)


@final
class _TokenStream(_Stream):
    """Token by token; `anchor` is a token whose text stays itself at the beginning of a text."""

    def __init__(self, decode: Callable[[list[int]], str], anchor: int, anchor_text: str) -> None:
        self._decode = decode
        self._anchor = anchor
        self._anchor_text = anchor_text
        self._pending: list[int] = []
        self._begun = False

    def begin(self) -> None:
        """As if something had been said already."""
        self._begun = True

    def push(self, token_id: int, token: str) -> str:
        self._pending.append(token_id)
        self.is_between = False
        # A run of byte tokens becomes text when it ends; only then is it known to be valid.
        return "" if _BYTE_TOKEN.fullmatch(token) else self._flush()

    def finish(self) -> str:
        rest = self._flush()
        self._pending, self._begun, self.is_between = [], False, False
        return rest

    def copy(self) -> _TokenStream:
        twin = copy.copy(self)
        twin._pending = list(self._pending)
        return twin

    def _flush(self) -> str:
        if not self._pending:
            return ""
        if self._begun:
            text = self._decode([self._anchor, *self._pending]).removeprefix(self._anchor_text)
            self._pending, self.is_between = [], True
            return text
        # Until something is visible, the decoder may still be dropping leading spaces.
        text = self._decode(self._pending)
        if text:
            self._begun, self._pending = True, []
        return text


@final
class _WholeStream(_Stream):
    """Decodes everything each time and returns what was added."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._emitted = ""

    def push(self, token_id: int, token: str) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        # A mark of an incomplete character, or a space that may go, is not certain yet.
        stable = text.rstrip("\ufffd ")
        if not stable.startswith(self._emitted):
            return ""
        added = stable[len(self._emitted) :]
        self._emitted = stable
        return added

    def finish(self) -> str:
        rest = self._decode(self._ids).removeprefix(self._emitted) if self._ids else ""
        self._ids, self._emitted = [], ""
        return rest

    def copy(self) -> _WholeStream:
        twin = copy.copy(self)
        twin._ids = list(self._ids)
        return twin


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The UTF-8 of one token within a text, be it a part of a character; b"" for unknown ids."""
    token = tokenizer.inner.id_to_token(token_id)
    if token is None:
        return b""
    stream = _stream_for(tokenizer)
    if isinstance(stream, _ByteLevelStream):
        return _token_bytes(token)
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    if isinstance(stream, _TokenStream):
        stream.begin()
        return stream.push(token_id, token).encode()
    return tokenizer.token_text(token_id).encode()


def _stream_for(tokenizer: Tokenizer) -> _Stream:
    inner = tokenizer.inner
    decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
    steps = _decoder_steps(inner.decoder)
    if steps is not None and [step["type"] for step in steps] == ["ByteLevel"]:
        return _ByteLevelStream()
    if steps is not None and _is_token_wise(steps):
        anchor = inner.token_to_id("a")
        if anchor is not None and (text := decode([anchor])):
            return _TokenStream(decode, anchor, text)
    return _WholeStream(decode)


def _decoder_steps(decoder: Any) -> list[dict[str, Any]] | None:
    if decoder is None:
        return None
    description = json.loads(decoder.__getstate__())
    if description["type"] == "Sequence":
        steps: list[dict[str, Any]] = description["decoders"]
        return steps
    return [description]


def _is_token_wise(steps: list[dict[str, Any]]) -> bool:
    """Whether each token's text depends on nothing but itself, its run of byte tokens, and whether
    it begins the text (where at most one character is dropped)."""
    fused = False
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip":
            if step["stop"] != 0 or (fused and step["start"] > 1):
                return False
        elif fused or kind not in ("Replace", "ByteFallback", "Metaspace"):
            return False
    return True


@functools.lru_cache(1 << 16)
def _token_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for; a token with other characters is its own UTF-8."""
    table = _byte_of_character()
    try:
        return bytes(map(table.__getitem__, token))
    except KeyError:
        return token.encode("utf-8")


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 as itself, the rest from U+0100."""
    table = {}
    moved = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            table[chr(byte)] = byte
        else:
            table[chr(0x100 + moved)] = byte
            moved += 1
    return table
