"""A tokenizer out of a GGUF file's own vocabulary.

GGUF stores tokens and merges but not the rules that split text before merging; it names them
(`tokenizer.ggml.pre`). The rules here are those of the tokenizer.json files the names stand for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as InnerTokenizer

from foretell._errors import TokenizerError
from foretell._tokenizer import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


@dataclass(frozen=True)
class _Rules:
    """What surrounds the merges; `ignore_merges` takes whole words found in the vocabulary."""

    pre_tokenizer: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_byte_level() -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _byte_level()])


def _split_by_regex(digits: str) -> Any:
    pattern = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, bytes_])


_GPT2 = _Rules(_byte_level)
_SMOLLM = _Rules(_digits_then_byte_level)
_LLAMA3 = _Rules(lambda: _split_by_regex(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)
_QWEN2 = _Rules(lambda: _split_by_regex(r"\p{N}"), normalizer=normalizers.NFC)
_RULES = {
    "gpt-2": _GPT2,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}


def read_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer | None:
    """The tokenizer in a GGUF file's metadata, or None where it has none.

    Raises TokenizerError for kinds of tokenizers this does not rebuild exactly, and for a
    vocabulary that contradicts itself.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        return None
    hint = "give the model's tokenizer.json with the tokenizer option"
    if kind != "gpt2":
        raise TokenizerError(
            f"{source}: tokenizer.ggml.model is {kind!r}; only byte-level BPE ('gpt2') is rebuilt "
            f"from GGUF metadata, so {hint}"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    rules = _RULES.get(pre) if isinstance(pre, str) else None
    if rules is None:
        raise TokenizerError(
            f"{source}: tokenizer.ggml.pre is {pre!r}, and how that splits text is not known here "
            f"(known: {', '.join(sorted(_RULES))}), so {hint}"
        )
    tokens, types = _vocabulary(metadata, source)
    inner = _build(tokens, types, metadata.get("tokenizer.ggml.merges"), rules, source)
    special_tokens = {}
    for name, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        token_id = _token_id(metadata, key, len(tokens), source)
        if token_id is not None and types[token_id] != _UNUSED:
            special_tokens[name] = tokens[token_id]
    _add_post_processor(inner, metadata, rules, special_tokens, source)
    return Tokenizer(
        inner,
        source=source,
        special_tokens=special_tokens,
        eos_token_ids=read_eos_token_ids(metadata, len(tokens), source),
        chat_template=read_chat_template(metadata),
    )


def read_eos_token_ids(metadata: Mapping[str, Any], vocab_size: int, source: str) -> list[int]:
    """The ends of text, of turn and of message, as far as the file names them."""
    ids = [
        _token_id(metadata, key, vocab_size, source)
        for key in ("eos_token_id", "eot_token_id", "eom_token_id")
    ]
    return [token_id for token_id in ids if token_id is not None]


def read_chat_template(metadata: Mapping[str, Any]) -> str | None:
    """The template for plain conversations, if the file has one."""
    template = metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


def _vocabulary(metadata: Mapping[str, Any], source: str) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise TokenizerError(f"{source}: tokenizer.ggml.tokens is missing or no list of strings")
    stored = metadata.get("tokenizer.ggml.token_type")
    if stored is None:
        return tokens, [_NORMAL] * len(tokens)
    if not isinstance(stored, array) or stored.typecode in "fd":
        raise TokenizerError(f"{source}: tokenizer.ggml.token_type is no array of integers")
    types = stored.tolist()
    if len(types) != len(tokens):
        raise TokenizerError(
            f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    return tokens, types


def _build(
    tokens: list[str], types: list[int], merges: Any, rules: _Rules, source: str
) -> InnerTokenizer:
    if not isinstance(merges, list):
        raise TokenizerError(f"{source}: tokenizer.ggml.merges is missing or no list of strings")
    # Unused entries are padding of the embedding, not part of the tokenizer.
    used = [i for i, kind in enumerate(types) if kind != _UNUSED]
    vocabulary = {tokens[i]: i for i in used}
    if len(vocabulary) != len(used):
        raise TokenizerError(f"{source}: tokenizer.ggml.tokens holds the same token twice")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    try:
        inner = InnerTokenizer(
            models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=rules.ignore_merges)
        )
        inner.add_tokens(
            [
                AddedToken(token, special=kind == _CONTROL, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind in (_CONTROL, _USER_DEFINED)
            ]
        )
    except Exception as error:  # which is what the library raises
        raise TokenizerError(
            f"{source}: the vocabulary and merges do not fit together ({error}); "
            "download the file again"
        ) from error
    inner.pre_tokenizer = rules.pre_tokenizer()
    inner.decoder = decoders.ByteLevel()
    if rules.normalizer is not None:
        inner.normalizer = rules.normalizer()
    return inner


def _token_id(metadata: Mapping[str, Any], key: str, vocab_size: int, source: str) -> int | None:
    token_id = metadata.get(f"tokenizer.ggml.{key}")
    if token_id is None:
        return None
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise TokenizerError(
            f"{source}: tokenizer.ggml.{key} is {token_id!r}, but there are {vocab_size} tokens"
        )
    return token_id


def _flag(metadata: Mapping[str, Any], key: str, default: bool, source: str) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise TokenizerError(f"{source}: tokenizer.ggml.{key} is {value!r}, not true or false")
    return value


def _add_post_processor(
    inner: InnerTokenizer,
    metadata: Mapping[str, Any],
    rules: _Rules,
    special_tokens: Mapping[str, str],
    source: str,
) -> None:
    parts = ["$A"]
    bos, eos = special_tokens.get("bos_token"), special_tokens.get("eos_token")
    if _flag(metadata, "add_bos_token", rules.adds_bos, source) and bos is not None:
        parts.insert(0, bos)
    if _flag(metadata, "add_eos_token", False, source) and eos is not None:
        parts.append(eos)
    specials = [(part, inner.token_to_id(part)) for part in dict.fromkeys(parts) if part != "$A"]
    inner.post_processor = processors.TemplateProcessing(single=parts, special_tokens=specials)
