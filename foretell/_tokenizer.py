"""Text to token ids and back.

`Tokenizer` wraps a `tokenizers.Tokenizer`, whether it came from a tokenizer.json or from a GGUF
file's own vocabulary, and adds what generation needs around it: chat templates, end-of-text ids,
decoding piece by piece, and a comparison by content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import tokenizers
from tokenizers.processors import TemplateProcessing

from foretell._chat_template import ChatTemplate
from foretell._errors import InputError, OptionError, TokenizerError, shown
from foretell._fork import ForkLock
from foretell._stream_decoder import StreamDecoder, token_bytes

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@final
class Tokenizer:
    """A vocabulary with the rules around it.

    Ids run from 0 to `vocab_size` - 1, added tokens included; a model's embedding may have more
    rows, which are padding. `source` names the file it came from, `inner` is the wrapped object.
    Safe to use from many threads.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        source: str = "a tokenizer",
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        """`special_tokens` maps "bos_token", "eos_token", ... to the tokens a template may print.

        Raises TokenizerError where one of them is not in the vocabulary.
        """
        # A tokenizer.json may carry the settings of its training: none of them belong here.
        inner.no_truncation()
        inner.no_padding()
        if getattr(inner.model, "dropout", None):
            inner.model.dropout = None
        self.inner = inner
        self._lock = ForkLock()
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        for name, text in {**self._special_tokens, "the chat template": chat_template}.items():
            _check_unicode(name, text or "", source)
        self._texts = {i: t for t, i in inner.get_vocab(with_added_tokens=True).items()}
        if not self._texts:
            raise TokenizerError(f"{source}: the vocabulary is empty")
        self.vocab_size = max(self._texts) + 1
        self.bos_token_id = self._special_id("bos_token")
        eos = self._special_id("eos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
        self.chat_template = chat_template
        self._chat: ChatTemplate | None = None
        self._bytes: dict[int, bytes] = {}
        self.known_pieces: dict[bool, dict[int, str]] = {True: {}, False: {}}
        """Texts of tokens within a text, as a StreamDecoder met them; with and without special
        tokens skipped."""
        leading = self.encode("", add_special_tokens=True)
        self.add_bos = self.bos_token_id is not None and leading[:1] == [self.bos_token_id]

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json` (or a folder with one) and the settings that lie next to it.

        `tokenizer_config.json` gives the special tokens, whether a begin token is added and the
        chat template; `chat_template.jinja` (or `.json`) takes precedence for the template, as in
        transformers. Raises TokenizerError, and OptionError for what is no path.
        """
        if not isinstance(path, str | Path):
            raise OptionError(f"the tokenizer is {shown(path)}; give the path of a tokenizer.json")
        path = Path(path)
        try:
            path = path / "tokenizer.json" if path.is_dir() else path
            found = path.is_file()
        except OSError as error:  # too long a name, a folder that must not be read
            raise TokenizerError(
                f"{shown(str(path))} cannot be looked for ({error.strerror})"
            ) from error
        if not found:
            raise TokenizerError(
                f"{path} does not exist; a tokenizer.json is needed (Hugging Face repositories of "
                "the model have one)"
            )
        try:
            # Read here and not by the library, whose errors do not name the file.
            inner = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
        except BaseException as error:  # the library raises plain Exception, or panics
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise TokenizerError(
                f"{path}: not a usable tokenizer.json ({error}); download it again"
            ) from error
        config = _read_json(path.parent / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        _apply_added_tokens(inner, config, special_tokens, str(path))
        return cls(
            inner,
            source=str(path),
            special_tokens=special_tokens,
            chat_template=_find_chat_template(path.parent, config),
        )

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds what the model wants around a prompt.

        As in transformers, special tokens written out in the text ("<|im_end|>") become those
        tokens. Text from strangers can therefore end a chat turn; `parse_special=False` encodes it
        as the plain characters it consists of. Raises InputError for text that is no valid Unicode.
        """
        if not isinstance(text, str):
            raise InputError(f"text to encode must be a str, not {type(text).__name__}")
        try:
            with self._lock:
                self.inner.encode_special_tokens = not parse_special
                encoding = self.inner.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InputError(
                "the text holds lone surrogates, which are no characters; decode the input as "
                "UTF-8 with errors='replace'"
            ) from error
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise self._inconsistent(error) from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids outside the vocabulary have no text; negative ones raise."""
        try:
            text: str = self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise InputError(f"token ids must be integers, zero or more ({error})") from error
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise self._inconsistent(error) from error
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id ("Ġthe"), or None for an id it does not have."""
        return self._texts.get(token_id)

    def token_text(self, token_id: int) -> str:
        """The text of one token alone (" the"), special tokens spelled out, for showing."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 of one token as it stands in the middle of a text, be it half a character."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = token_bytes(self, token_id)
        return known

    @property
    def has_chat_template(self) -> bool:
        """Whether the model was made for conversations."""
        return self.chat_template is not None

    @property
    def fingerprint(self) -> str:
        """SHA-256 over what every id means: equal exactly where `same_vocabulary` finds nothing.

        Normalizer, pre-tokenizer and special flags are left out, since GGUF files do not keep
        them: ids with equal meanings are what a draft and its target have to share.
        """
        digest = hashlib.sha256()
        for token_id, text in sorted(self._texts.items()):
            data = text.encode("utf-8", "surrogatepass")
            digest.update(token_id.to_bytes(8, "little") + len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()

    def same_vocabulary(self, other: Tokenizer) -> str | None:
        """None where every id means the same in both, else the first difference as a sentence."""
        if self._texts == other._texts:
            return None
        for token_id in range(max(self.vocab_size, other.vocab_size)):
            here, there = self._texts.get(token_id), other._texts.get(token_id)
            if here != there:
                shown = ["unused" if text is None else repr(text) for text in (here, there)]
                return f"id {token_id} is {shown[0]} here and {shown[1]} there"
        return None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt text of a conversation, special tokens spelled out.

        Messages are mappings with "role" and "content". Encode the result with
        `add_special_tokens=False`: templates write the begin token themselves. Raises InputError
        for malformed messages, for a conversation the template rejects, and without a template.
        """
        if self.chat_template is None:
            raise InputError(
                f"{self.source} has no chat template, so messages cannot become a prompt; give a "
                "plain prompt, or use an instruction-tuned model"
            )
        if self._chat is None:
            self._chat = ChatTemplate(self.chat_template, self._special_tokens, self.source)
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt)

    def _inconsistent(self, error: BaseException) -> TokenizerError:
        return TokenizerError(
            f"{self.source}: the tokenizer is inconsistent ({error}); download it again"
        )

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        if token is None:
            return None
        return _known_id(self.inner, name, token, self.source)


def _check_unicode(name: str, text: str, source: str) -> None:
    # JSON can spell lone surrogates, which nothing could encode later.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"{source}: {name} holds lone surrogates, which are no characters; get a fixed version "
            "of the model"
        ) from error


def _known_id(inner: tokenizers.Tokenizer, name: str, token: str, source: str) -> int:
    _check_unicode(name, token, source)
    token_id: int | None = inner.token_to_id(token)
    if token_id is None:
        raise TokenizerError(f"{source}: {name} is {shown(token)}, which is not in the vocabulary")
    return token_id


def _is_panic(error: BaseException) -> bool:
    """Whether the library's Rust code gave up, which is no Exception and has no public name."""
    return type(error).__name__ == "PanicException"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(
            f"{path}: not a readable JSON file ({error}); download it again"
        ) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: holds {type(value).__name__} where an object is needed")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens of a tokenizer_config.json, which are strings or serialized AddedTokens."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _apply_added_tokens(
    inner: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    source: str,
) -> None:
    """An explicit add_bos_token or add_eos_token replaces the post-processor (transformers 5)."""
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    parts, specials = ["$A"], []
    for name, place in (("bos_token", 0), ("eos_token", 2)):
        token = special_tokens.get(name)
        if config.get(f"add_{name}") and token is not None:
            token_id = _known_id(inner, name, token, source)
            parts.insert(place, token)
            specials.append((token, token_id))
    inner.post_processor = TemplateProcessing(single=parts, special_tokens=specials)


def _find_chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise TokenizerError(f"{jinja}: not readable ({error}); download it again") from error
    template = _read_json(folder / "chat_template.json").get("chat_template")
    if template is None:
        template = config.get("chat_template")
    if isinstance(template, list):
        # Several templates by name: "default" is the one for plain conversations.
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


__all__ = ["StreamDecoder", "Tokenizer"]
