"""Tokenizers rebuilt from GGUF metadata, against a second, naive way to the same ids.

The second way shares nothing with the package: the published regular expressions, spelled out for
Python's `re` with the character classes of `unicodedata`, and byte pair encoding by the book. It
runs on the demo model's real vocabulary and merges, under each of the known splitting rules.
"""

from __future__ import annotations

import functools
import random
import re
import sys
import unicodedata
from array import array
from itertools import pairwise
from typing import Any

import pytest
from demo import demo_file
from families import FAMILIES, _byte_characters
from gguf_files import metadata_of, write_gguf

from foretell._errors import ModelError, TokenizerError
from foretell._tokenizer import Tokenizer
from foretell.backends.cpu._checkpoint import open_checkpoint
from foretell.backends.cpu._gguf_file import GgufFile
from foretell.backends.cpu._gguf_tokenizer import read_tokenizer

TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing  ",
    "don't we'll THEY'RE I'M",
    "1234567890 12.5e10 x86 ½ Ⅷ ٣",
    "def f(x):\n    return x + 1\n\n\n# the end\r\n\t\tpass   \n  ",
    "中文字符和日本語テキスト 한국어",
    "Привет, мир! שלום עולם مرحبا हिन्दी ไทย",
    "café cafe\u0301 A\u030angström ﬁ ǅ",
    "😀👩‍👩‍👧‍👦🇩🇪 \u00a0\u2003x\u200b",
    "   " * 20 + "\n" * 7 + "\t \t",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "http://example.org/a?b=c&d=%20#e_f-g",
    "\x00\x01\x7f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]
ALPHABET = "abcXYZ 's\n\r\t019.,!?<|>_-éßжя中あ한אم½\u0301\u00a0😀"


@functools.cache
def letters_and_numbers() -> tuple[str, str]:
    """The classes \\p{L} and \\p{N} as the inside of a character class of `re`."""
    classes = {"L": [], "N": []}
    for code in range(sys.maxunicode + 1):
        kind = unicodedata.category(chr(code))[0]
        if kind in classes:
            ranges = classes[kind]
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return tuple(
        "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)
        for ranges in classes.values()
    )


@functools.cache
def pattern(rule: str) -> re.Pattern[str]:
    letter, number = letters_and_numbers()
    # Python's \s also has the separators 0x1C to 0x1F, which Unicode's White_Space has not.
    space = r"\t-\r\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
    text = {
        "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?[L]+| ?[N]+| ?[^SLN]+|[S]+(?![^S])|[S]+",
        "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nLN]?[L]+|[N]{1,3}| ?[^SLN]+[\r\n]*"
        r"|[S]*[\r\n]+|[S]+(?![^S])|[S]+",
    }
    text["qwen2"] = text["llama-bpe"].replace("{1,3}", "")
    expanded = text[rule].replace("S", space).replace("L", letter).replace("N", number)
    return re.compile(expanded)


class Naive:
    """Byte pair encoding by the book over a GGUF file's tokens and merges."""

    def __init__(self, metadata: dict[str, Any], rule: str) -> None:
        tokens = metadata["tokenizer.ggml.tokens"]
        self.rule = rule
        self.ids = {token: i for i, token in enumerate(tokens)}
        merges = metadata["tokenizer.ggml.merges"]
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        kinds = metadata["tokenizer.ggml.token_type"]
        self.special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == 3]
        self.characters = _byte_characters()

    def encode(self, text: str) -> list[int]:
        ids = []
        parts = re.split("(" + "|".join(map(re.escape, self.special)) + ")", text)
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self.ids[part])
            else:
                ids += [i for word in self.words(part) for i in self.word_ids(word)]
        return ids

    def words(self, text: str) -> list[str]:
        if self.rule == "qwen2":
            text = unicodedata.normalize("NFC", text)
        if self.rule != "smollm":
            return [match.group() for match in pattern(self.rule).finditer(text)]
        # Every digit on its own, then GPT-2's rule in what lies between.
        words = []
        for part in re.split(f"([{letters_and_numbers()[1]}])", text):
            words += [match.group() for match in pattern("gpt-2").finditer(part)]
        return words

    def word_ids(self, word: str) -> list[int]:
        symbols = [self.characters[byte] for byte in word.encode()]
        if self.rule == "llama-bpe" and "".join(symbols) in self.ids:
            return [self.ids["".join(symbols)]]
        while len(symbols) > 1:
            rank, at = min(
                (self.ranks.get(pair, sys.maxsize), at) for at, pair in enumerate(pairwise(symbols))
            )
            if rank == sys.maxsize:
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return [self.ids[symbol] for symbol in symbols]


@functools.cache
def demo_metadata() -> dict[str, Any]:
    return GgufFile(demo_file()).metadata


@pytest.mark.parametrize("rule", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_the_ids_are_those_of_the_published_rules(rule):
    metadata = {**demo_metadata(), "tokenizer.ggml.pre": rule}
    tokenizer, naive = read_tokenizer(metadata, "demo"), Naive(metadata, rule)
    dice = random.Random(0)
    noise = ["".join(dice.choices(ALPHABET, k=dice.randint(1, 30))) for _ in range(300)]
    mixed = [" ".join(dice.sample(TEXTS, 3)) for _ in range(50)]
    for text in [*TEXTS, *noise, *mixed]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == naive.encode(text), repr(text)
        back = unicodedata.normalize("NFC", text) if rule == "qwen2" else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == back


@pytest.mark.parametrize(
    ("rule", "text", "words"),
    [
        # From the tokenizer.json files of SmolLM2, GPT-2, Llama 3.2 and Qwen2.5.
        ("smollm", "It's 123  a", ["It", "'s", "Ġ", "1", "2", "3", "Ġ", "Ġa"]),
        ("gpt-2", "It's 123  a", ["It", "'s", "Ġ123", "Ġ", "Ġa"]),
        ("llama-bpe", "It'S 12345\n\n a", ["It", "'S", "Ġ", "123", "45", "ĊĊ", "Ġa"]),
        ("qwen2", "It'S 123\n\n a", ["It", "'S", "Ġ", "1", "2", "3", "ĊĊ", "Ġa"]),
    ],
)
def test_words_are_split_like_the_originals_split_them(rule, text, words):
    tokenizer = small_tokenizer(**{"tokenizer.ggml.pre": rule})
    split = tokenizer.inner.pre_tokenizer.pre_tokenize_str(text)
    assert [word for word, _ in split] == words


def test_the_demos_special_tokens_and_template_are_its_own():
    tokenizer = read_tokenizer(demo_metadata(), "demo")
    assert tokenizer is not None
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (49152, 1)
    assert tokenizer.eos_token_ids == (2,)
    assert not tokenizer.add_bos
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    # SmolLM2-135M-Instruct's own tokenizer.json and transformers give these.
    assert ids[:8] == [1, 9690, 198, 2683, 359, 253, 5356, 5646]
    assert ids[-3:] == [520, 9531, 198]
    assert tokenizer.decode(ids).startswith("system\nYou are a helpful AI assistant named SmolLM")


# --- A small vocabulary --------------------------------------------------------------

TOKENS = [*_byte_characters(), "ab", "<|bos|>", "<|end|>", "<think>", "[PAD260]", "<|turn|>"]
TYPES = array("i", [1] * 257 + [3, 3, 4, 5, 3])
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 257,
    "tokenizer.ggml.eos_token_id": 258,
}


def small_tokenizer(**changes: Any) -> Tokenizer:
    metadata = {k: v for k, v in {**METADATA, **changes}.items() if v is not None}
    tokenizer = read_tokenizer(metadata, "model.gguf")
    assert tokenizer is not None
    return tokenizer


def test_token_types_decide_what_is_special():
    tokenizer = small_tokenizer()
    ids = tokenizer.encode("ab<think><|end|>[PAD260]", add_special_tokens=False)
    assert ids[:3] == [256, 259, 258]
    assert tokenizer.decode(ids) == "ab<think>[PAD260]"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<think><|end|>[PAD260]"
    assert 260 not in ids
    assert tokenizer.token(260) is None
    assert tokenizer.vocab_size == 262


def test_begin_and_end_tokens_follow_the_metadata():
    assert small_tokenizer().encode("ab", add_special_tokens=True) == [256]
    both = small_tokenizer(
        **{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    )
    ids = both.encode("ab", add_special_tokens=True)
    assert ids == [257, 256, 258]
    assert both.add_bos
    assert both.encode("ab", add_special_tokens=False) == [256]
    assert not small_tokenizer().add_bos
    # Llama 3 files without the key mean it.
    assert small_tokenizer(**{"tokenizer.ggml.pre": "llama-bpe"}).add_bos
    turns = small_tokenizer(**{"tokenizer.ggml.eot_token_id": 261})
    assert turns.eos_token_ids == (258, 261)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, r"tokenizer.ggml.model is 'llama'.*tokenizer\.json"),
        ({"pre": "viking"}, r"pre is 'viking'.*known: gpt-2, llama-bpe.*tokenizer\.json"),
        ({"pre": None}, "pre is None"),
        ({"pre": 3}, "pre is 3"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is missing or no list"),
        ({"tokens": ["a"] * len(TOKENS)}, "the same token twice"),
        ({"token_type": array("i", [1, 1])}, f"has 2 entries for {len(TOKENS)} tokens"),
        ({"token_type": array("f", [1.0])}, "token_type is no array of integers"),
        ({"token_type": TOKENS}, "token_type is no array of integers"),
        ({"add_bos_token": 1}, "add_bos_token is 1, not true or false"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a nowhere"]}, "do not fit together"),
        ({"merges": ["a"]}, "do not fit together"),
        ({"bos_token_id": 262}, "bos_token_id is 262, but there are 262 tokens"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"eot_token_id": "x"}, "eot_token_id is 'x'"),
        ({"tokens": ["\udcff", *TOKENS[1:]]}, "do not fit together"),
    ],
)
def test_a_vocabulary_that_cannot_be_rebuilt_is_refused_with_what_to_give(changes, message):
    named = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(TokenizerError, match=message) as caught:
        small_tokenizer(**named)
    assert str(caught.value).startswith("model.gguf: ")


def test_a_file_without_a_vocabulary_has_no_tokenizer(tmp_path):
    assert open_checkpoint(write_gguf(tmp_path / "bare.gguf", "llama")).tokenizer is None


def test_a_vocabulary_in_a_file_is_the_checkpoints_tokenizer(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "qwen2", metadata=METADATA)
    checkpoint = open_checkpoint(path)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.same_vocabulary(small_tokenizer()) is None
    assert checkpoint.eos_token_ids == (258,)


def test_a_tokenizer_given_for_a_file_keeps_the_files_ends_and_template(tmp_path):
    given = tmp_path / "tokenizer.json"
    small_tokenizer().inner.save(str(given))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.chat_template": "{{ messages[0].content }}!",
    }
    path = write_gguf(tmp_path / "model.gguf", "qwen2", metadata=metadata)
    with pytest.raises(TokenizerError, match=r"give the model's tokenizer\.json"):
        open_checkpoint(path)
    checkpoint = open_checkpoint(path, tokenizer=given)
    assert checkpoint.eos_token_ids == (7,)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == "a!"


def test_whatever_a_key_holds_nothing_but_a_model_error_comes_out(tmp_path):
    keys = [
        "tokenizer.ggml.add_bos_token",
        "tokenizer.ggml.add_eos_token",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.chat_template",
        "split.count",
        "general.alignment",
        "qwen2.expert_count",
        "qwen2.rope.scaling.type",
        "qwen2.rope.scaling.factor",
        "qwen2.attention.sliding_window",
        "qwen2.whatever",
    ]
    values = ["x", "", 0, 3, 2**31, -1, 0.5, float("nan"), True, [1, 2], [0.5], ["a"], ["x"] * 262]
    whole = {**METADATA, **metadata_of(FAMILIES["qwen2"])}
    path = tmp_path / "model.gguf"
    refused = 0
    for key in [*whole, *keys]:
        for value in values:
            if type(value) is int and value < 0:
                value = [value] * 262
            write_gguf(path, "qwen2", metadata={**METADATA, key: value})
            try:
                checkpoint = open_checkpoint(path)
            except ModelError as error:
                refused += 1
                assert str(path) in str(error)  # noqa: PT017 - every one of them
            else:
                if checkpoint.tokenizer is not None:
                    checkpoint.tokenizer.encode("ab", add_special_tokens=True)
    assert refused > 100
