"""Text to ids and back: whole and piece by piece, chat templates, vocabularies compared."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
from demo import demo_file
from families import write_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from foretell import _template_sandbox
from foretell._errors import InputError, TokenizerError
from foretell._tokenizer import StreamDecoder, Tokenizer

CONVERSATION = [{"role": "user", "content": "hé 🙂"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, 288)
    return tmp_path


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(folder)


def change_config(folder: Path, **changes: Any) -> Tokenizer:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return Tokenizer.from_file(folder)


def damage(folder: Path, part: str, value: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), part: value}))


def test_a_file_the_library_panics_over_is_an_error(folder):
    damage(folder, "normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    with pytest.raises(TokenizerError, match=r"not a usable tokenizer.json .*download it again"):
        Tokenizer.from_file(folder)


def test_a_post_processor_the_library_panics_over_is_an_error(folder):
    piece = {"SpecialToken": {"id": "none such", "type_id": 0}}
    nothing = {"type": "TemplateProcessing", "single": [piece], "pair": [], "special_tokens": {}}
    damage(folder, "post_processor", nothing)
    with pytest.raises(TokenizerError, match=r"the tokenizer is inconsistent .*download it again"):
        Tokenizer.from_file(folder).encode("a", add_special_tokens=True)


def test_a_decoder_the_library_panics_over_is_an_error(folder):
    damage(folder, "decoder", {"type": "Strip", "content": "a", "start": 3, "stop": 3})
    tokenizer = Tokenizer.from_file(folder)
    ids = tokenizer.encode("ab", add_special_tokens=False)
    with pytest.raises(TokenizerError, match=r"the tokenizer is inconsistent .*download it again"):
        tokenizer.decode(ids)
    with pytest.raises(TokenizerError, match=r"the tokenizer is inconsistent .*download it again"):
        list(map(StreamDecoder(tokenizer).push, ids))


# --- Tokenizers of different kinds ---------------------------------------------------


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ab"])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    inner.add_tokens(["<think>", "two words", "é\u4f60"])
    return Tokenizer(inner)


def sentencepiece(decoder: Any) -> Tokenizer:
    words = ["▁", "▁▁", "▁a", "a", "b", "▁the", "é", "你", "", "▁ ", "x▁", "\ufffd"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: i for i, token in enumerate(["<unk>", *words, *fallback])}
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoder
    inner.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(inner)


def llama2() -> Tokenizer:
    return sentencepiece(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )


KINDS = {
    "byte-level": byte_level(),
    "llama 2": llama2(),
    "metaspace": sentencepiece(decoders.Metaspace("▁", "always")),
    "metaspace, never": sentencepiece(decoders.Metaspace("▁", "never")),
    "without fuse": sentencepiece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    ),
    "word pieces": sentencepiece(decoders.WordPiece("▁", cleanup=True)),
    "no decoder": sentencepiece(None),
}


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_the_pieces_of_any_tokens_are_the_whole_text(kind, skip, data):
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    stream = StreamDecoder(tokenizer, skip_special_tokens=skip)
    pieces = [stream.push(token_id) for token_id in ids]
    pieces.append(stream.finish())
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=300)
@given(text=st.text(), kind=st.sampled_from(["byte-level", "llama 2", "metaspace"]))
def test_no_piece_of_a_text_holds_a_broken_character(text, kind):
    tokenizer = KINDS[kind]
    text = text.replace("\ufffd", "")
    stream = StreamDecoder(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = [stream.push(token_id) for token_id in ids] + [stream.finish()]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_character_is_held_back_until_its_last_byte():
    tokenizer = KINDS["byte-level"]
    stream = StreamDecoder(tokenizer)
    pieces = [stream.push(i) for i in tokenizer.encode("é🙂a", add_special_tokens=False)]
    assert pieces == ["", "é", "", "", "", "🙂", "a"]
    assert stream.finish() == ""


def test_a_character_that_never_ends_appears_at_the_end():
    tokenizer = KINDS["byte-level"]
    stream = StreamDecoder(tokenizer)
    ids = tokenizer.encode("🙂", add_special_tokens=False)[:3]
    assert [stream.push(i) for i in ids] == ["", "", ""]
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_a_copy_goes_its_own_way(kind, data):
    tokenizer = KINDS[kind]
    numbers = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)
    begin, one, other = data.draw(numbers), data.draw(numbers), data.draw(numbers)
    stream = StreamDecoder(tokenizer)
    said = "".join(map(stream.push, begin))
    twin = stream.copy()
    texts = {}
    for name, decoder, ids in (("twin", twin, other), ("first", stream, one)):
        texts[name] = said + "".join(map(decoder.push, ids)) + decoder.finish()
    assert texts["first"] == tokenizer.decode(begin + one)
    assert texts["twin"] == tokenizer.decode(begin + other)


@pytest.mark.parametrize("kind", ["byte-level", "llama 2", "metaspace"])
def test_the_time_for_a_token_does_not_grow_with_the_text(kind):
    tokenizer = KINDS[kind]
    stream = StreamDecoder(tokenizer)
    token_id = tokenizer.encode("a", add_special_tokens=False)[-1]
    text = "".join(stream.push(token_id) for _ in range(20_000)) + stream.finish()
    assert len(text) == 20_000
    # Nothing but the last few tokens is kept.
    assert len(getattr(stream._stream, "_pending", [])) == 0


# --- Encoding and decoding -----------------------------------------------------------


@given(text=st.text())
def test_any_text_comes_back(text):
    tokenizer = KINDS["byte-level"]
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_in_a_text_are_special_unless_asked_otherwise(tokenizer):
    end = tokenizer.eos_token_ids[0]
    assert tokenizer.encode("a<|im_end|>", add_special_tokens=False)[-1] == end
    plain = tokenizer.encode("a<|im_end|>", add_special_tokens=False, parse_special=False)
    assert end not in plain
    assert tokenizer.decode(plain) == "a<|im_end|>"
    assert tokenizer.encode("a<|im_end|>", add_special_tokens=False)[-1] == end


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token": "\ud800"},
        {"bos_token": {"content": "\ud800"}},
        {"bos_token": "\ud800", "add_bos_token": True},
        {"pad_token": "a\udfff"},
        {"chat_template": "{{ messages }}\ud800"},
    ],
)
def test_a_model_with_lone_surrogates_is_a_tokenizer_error(folder, changes):
    with pytest.raises(TokenizerError, match="holds lone surrogates"):
        change_config(folder, **changes)


def test_a_process_forked_while_another_thread_encodes_can_encode(tokenizer):
    expected = tokenizer.encode("hello", add_special_tokens=False)
    with tokenizer._lock:  # as another thread may hold it; none is left in the child to release it
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            same = tokenizer.encode("hello", add_special_tokens=False) == expected
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert tokenizer.encode("hello", add_special_tokens=False) == expected


def test_lone_surrogates_and_other_nonsense_are_input_errors(tokenizer):
    with pytest.raises(InputError, match="lone surrogates"):
        tokenizer.encode("a\ud800", add_special_tokens=False)
    with pytest.raises(InputError, match="must be a str, not bytes"):
        tokenizer.encode(b"a", add_special_tokens=False)
    with pytest.raises(InputError, match="zero or more"):
        tokenizer.decode([-1])
    with pytest.raises(InputError, match="must be integers"):
        tokenizer.decode(["a"])


def test_ids_are_looked_up_both_ways(tokenizer):
    assert tokenizer.vocab_size == 275
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    the = tokenizer.encode(" the", add_special_tokens=False)[0]
    assert tokenizer.token(the) == "Ġthe"
    assert tokenizer.token_text(the) == " the"
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token(5000) is None
    assert tokenizer.token_text(5000) == ""
    assert tokenizer.decode([2, the, 5000]) == " the"


def test_settings_of_the_training_are_dropped(folder):
    path = folder / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    inner.model.dropout = 0.9
    inner.save(str(path))
    text = "the other thing is there"
    tokenizer = Tokenizer.from_file(folder)
    runs = {tuple(tokenizer.encode(text, add_special_tokens=True)) for _ in range(20)}
    assert len(runs) == 1
    assert tokenizer.decode(runs.pop()) == text


def test_begin_tokens_follow_the_post_processor_unless_the_config_is_explicit(folder):
    assert not Tokenizer.from_file(folder).add_bos
    with_begin = change_config(folder, add_bos_token=True)
    assert with_begin.add_bos
    assert with_begin.encode("a", add_special_tokens=True)[0] == 1
    assert 1 not in with_begin.encode("a", add_special_tokens=False)
    both = change_config(folder, add_bos_token=True, add_eos_token=True)
    ids = both.encode("a", add_special_tokens=True)
    assert (ids[0], ids[-1], len(ids)) == (1, 2, 3)
    path = folder / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    inner.save(str(path))
    assert not change_config(folder, add_bos_token=False, add_eos_token=False).add_bos
    write_json = folder / "tokenizer_config.json"
    write_json.write_text(json.dumps({"bos_token": {"content": "<|im_start|>"}}))
    assert Tokenizer.from_file(folder).add_bos


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "\xff"])
def test_a_damaged_tokenizer_file_is_refused_by_its_path(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(TokenizerError, match=r"not a usable tokenizer.json") as caught:
        Tokenizer.from_file(path)
    assert str(path) in str(caught.value)


def test_what_lies_next_to_a_tokenizer_is_checked_too(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: not a readable JSON"):
        Tokenizer.from_file(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<nowhere>"}')
    with pytest.raises(TokenizerError, match="eos_token is '<nowhere>', which is not in the voc"):
        Tokenizer.from_file(folder)
    with pytest.raises(TokenizerError, match=r"tokenizer.json does not exist"):
        Tokenizer.from_file(folder / "sub" / "tokenizer.json")


# --- Vocabularies compared -----------------------------------------------------------


def small(*tokens: str, added: tuple[str, ...] = ()) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}))
    inner.add_tokens([AddedToken(token) for token in added])
    return Tokenizer(inner)


def test_equal_vocabularies_are_equal_however_they_were_made():
    one, other = small("a", "b", added=("c",)), small("a", "b", "c")
    assert one.same_vocabulary(other) is None
    assert one.fingerprint == other.fingerprint


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        (small("a", "b"), small("a", "c"), "id 1 is 'b' here and 'c' there"),
        (small("a", "b"), small("b", "a"), "id 0 is 'a' here and 'b' there"),
        (small("a"), small("a", added=("<x>",)), "id 1 is unused here and '<x>' there"),
        (small("a", "b"), small("a"), "id 1 is 'b' here and unused there"),
    ],
)
def test_the_first_difference_is_told_in_a_sentence(one, other, difference):
    assert one.same_vocabulary(other) == difference
    assert one.fingerprint != other.fingerprint


# --- Chat templates ------------------------------------------------------------------


def with_template(template: str) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(inner, source="model.gguf", special_tokens=names, chat_template=template)


def test_a_conversation_becomes_a_prompt(tokenizer):
    prompt = "<|im_start|>user\nhé 🙂<|im_end|>\n"
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=False) == prompt
    assert tokenizer.apply_chat_template(CONVERSATION) == prompt + "<|im_start|>assistant\n"


def test_templates_are_found_in_every_place(folder):
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    assert change_config(folder, chat_template=named).chat_template == "D"
    assert change_config(folder, chat_template=named[:1]).chat_template is None
    (folder / "chat_template.json").write_text('{"chat_template": "J"}')
    assert Tokenizer.from_file(folder).chat_template == "J"
    (folder / "chat_template.jinja").write_text("own file")
    assert Tokenizer.from_file(folder).chat_template == "own file"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hé 🙂</s>"),
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "hé 🙂"}'),
        ("{{ '<a&b>' }}", "<a&b>"),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ tools is none }}{{ undefined_name }}", "True"),
    ],
)
def test_templates_have_the_environment_of_transformers(template, prompt):
    assert with_template(template).apply_chat_template(CONVERSATION) == prompt


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "list object has no element 5"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% for i in range(10**9) %}a{% endfor %}", "Range too big"),
        ("{{ 10 ** 100000000 }}", "numbers that are too large"),
        ("{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "writes without end"),
        ("{{ messages | map(attribute='role') | sum }}", "unsupported operand"),
        ("{{ raise_exception('a' * 9999) }}", r"a{500}\.\.\.$"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
    ],
)
def test_a_template_that_fails_or_is_hostile_is_an_input_error(template, reason):
    with pytest.raises(InputError, match=reason) as caught:
        with_template(template).apply_chat_template(CONVERSATION)
    assert "the chat template of model.gguf rejects" in str(caught.value)
    assert "roles: user" in str(caught.value)


TOO_MUCH = "does more than any prompt needs"
DOUBLING = "{% set ns = namespace(s=START) %}{% for i in range(99) %}STEP{% endfor %}"


def doubling(start: str, step: str) -> str:
    return DOUBLING.replace("START", start).replace("STEP", "{% set ns.s = " + step + " %}")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 10**9 }}", TOO_MUCH),
        ("{{ [1] * 10**9 }}", TOO_MUCH),
        (doubling("'x'", "ns.s ~ ns.s"), TOO_MUCH),
        (doubling("'x'", "ns.s + ns.s"), TOO_MUCH),
        (doubling("[1]", "ns.s + ns.s"), TOO_MUCH),
        (doubling("'x'", "ns.s.replace('x', 'xx')"), TOO_MUCH),
        (doubling("'x'", "ns.s | replace('x', 'xx')"), TOO_MUCH),
        (doubling("'x'", "[ns.s, ns.s] | join"), TOO_MUCH),
        (doubling("'x'", "'%s%s' % (ns.s, ns.s)"), TOO_MUCH),
        (doubling("'x'", "'{0}{0}'.format(ns.s)"), TOO_MUCH),
        (doubling("'x'", "'{a}{a}'.format_map({'a': ns.s})"), TOO_MUCH),
        (doubling("'x'", "'{0!r}{0!r}'.format(ns.s)"), TOO_MUCH),
        (doubling("[1]", "[ns.s, ns.s]"), TOO_MUCH + "|too deeply"),
        (doubling("[1]", "{'a': ns.s, 'b': ns.s}"), TOO_MUCH + "|too deeply"),
        (doubling("1", "namespace(a=ns.s, b=ns.s)") + "{{ ns.s }}", TOO_MUCH + "|too deeply"),
        ("{% set ns = namespace() %}{% set ns.s = ns %}{{ ns }}", "too deeply"),
        (
            "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set x %}{{ ns.s }}{{ ns.s }}"
            "{% endset %}{% set ns.s = x %}{% endfor %}",
            TOO_MUCH,
        ),
        (doubling("3", "ns.s * ns.s"), "numbers that are too large"),
        ("{{ ('f' * 5000) | int(base=16) }}", "numbers that are too large"),
        ("{{ '%9999999d' % 1 }}", "asks for a width of 9999999"),
        ("{{ '%*d' % (10**9, 1) }}", "takes the width of a text from a value"),
        ("{{ '%.*f' % (10**9, 1) }}", "takes the width of a text from a value"),
        ("{{ '%9999999d' | format(1) }}", "asks for a width of 9999999"),
        ("{{ '{:9999999}'.format(1) }}", "asks for a width of 9999999"),
        ("{{ '{:{}}'.format(1, 9999999) }}", "asks for a width of 9999999"),
        ("{{ '{0[}]:{1}}'.format({'}': 1}, 9999999) }}", "asks for a width of 9999999"),
        ("{{ 'x\n' | indent(9999999) }}", "asks for a width of 9999999"),
        ("{{ [1] | tojson(indent=99) }}", "indents JSON by 99"),
        ("{{ 1.5 | round(9999999, 'ceil') }}", "rounds to 9999999 digits"),
        ("{{ [[1]] | sum(start=[]) }}", "adds up what are no numbers"),
        ("{{ strftime_now('%999999d') }}", "a date of a strange form"),
        ("{{ 'x'.ljust(9999999) }}", "unsafe"),
        ("{{ ('x' | attr('center'))(9999999) }}", "unsafe"),
        ("{{ (1).to_bytes(9999999, 'big') }}", "unsafe"),
        ("{{ 'x'.encode() }}", "unsafe"),
        ("{{ lipsum(9999) }}", "'lipsum' is undefined"),
        ("{{ range(99999) | join('x' * 999) | length }}", TOO_MUCH),
        ("{{ ('x' * 999).join(['a'] * 9999) | length }}", TOO_MUCH),
        ("{{ ('a,' * 99999).split(',') | length }}", TOO_MUCH),
        ("{{ ('a ' * 99999).split() | length }}", TOO_MUCH),
        ("{{ ('a' * 99999) | list | length }}", TOO_MUCH),
        ("{{ ['a' * 9999] * 999 }}", TOO_MUCH),
        ("{% set s = 'x' * 9999 %}{{ range(999) | map('replace', 1, s) | list }}", TOO_MUCH),
        (
            "{% set s = 'x' * 9999 %}{% for i in range(999) %}{% set t = s[1:] %}{% endfor %}",
            TOO_MUCH,
        ),
        ("{% set s = 'x' * 9999 %}{% for i in range(9999) %}{{ 'y' in s }}{% endfor %}", TOO_MUCH),
        ("{% set s = 'x' * 9999 %}{% for i in range(999) %}{{ s is upper }}{% endfor %}", TOO_MUCH),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", TOO_MUCH),
        ("{% for i in range(9999) if false %}{% endfor %}" * 9, TOO_MUCH),
        (
            "{% set x %}{% for i in range(999) %}" + "text" * 999 + "{% endfor %}{% endset %}",
            TOO_MUCH,
        ),
        (
            "{% for i in ['a'] recursive %}{% if loop.depth < 3 %}{{ loop('x' * 99999) }}"
            "{% endif %}{% endfor %}",
            TOO_MUCH,
        ),
        (
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
            "{{ m(60) }}",
            TOO_MUCH,
        ),
    ],
)
def test_what_a_template_may_do_is_bounded(template, reason, monkeypatch):
    monkeypatch.setattr(_template_sandbox, "BUDGET", 1 << 20)
    with pytest.raises(InputError, match=reason):
        with_template(template).apply_chat_template(CONVERSATION)


def test_a_template_that_runs_out_of_memory_says_so(monkeypatch):
    def fail(self, *args):
        raise MemoryError

    monkeypatch.setattr(_template_sandbox.Budget, "spend", fail)
    with pytest.raises(InputError, match="there is not enough memory for what it does"):
        with_template("{{ messages }}").apply_chat_template(CONVERSATION)


@pytest.mark.parametrize(
    "template",
    [
        "{{ " + "9" * 5000 + " }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 300 + "{% endif %}" * 300,
        "{{ 'x' | center(10**10) }}",
        "{% autoescape 'x' | center(10**10) %}{% endautoescape %}",
        "{{ [1] | batch(10**10, 0) | list }}",
        "x" * 300_000,
    ],
)
def test_a_template_that_cannot_be_compiled_is_a_tokenizer_error(template):
    with pytest.raises(TokenizerError, match="the chat template is not valid"):
        with_template(template).apply_chat_template(CONVERSATION)


@pytest.mark.parametrize(
    "template",
    [
        ("{% for m in [1, 2] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}"),
        ("{% for m in nothing %}a{% else %}b{% endfor %}"),
        ("{% for m in [3, 4, 5] if m != 4 %}{{ loop.index0 }}{{ m }}{% endfor %}"),
        ("{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k ~ v }}{% endfor %}"),
        ("{% for m in [[1, [2]]] recursive %}{{ m if m is number else loop(m) }}{% endfor %}"),
        ("{{ '{} {:>5} {x!r}'.format(1, 2, x='y') }}{{ '%02d|%5s' % (3, 'x') }}"),
        ("{{ '%s and %s' | format('a', 'b') }}{{ '100%' }}"),
        ("{{ 'a-b-c'.split('-') | join(', ') }}{{ ' x '.strip() }}{{ 'abc'[::-1] }}"),
        ("{{ messages | map(attribute='role') | map('upper') | list }}"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"),
        ("{{ [3, 1, 2] | sort | last }}{{ {'b': 1, 'a': 2} | dictsort }}{{ [1, 2] | sum }}"),
        ("{{ 2.5 | round }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 3 * 'ab' }}{{ -3 | abs }}"),
        ("{{ 1 in [1, 2] }}{{ 'a' not in 'bc' }}{{ 1 < 2 <= 2 }}{{ (1, 2) == (1, 2) }}"),
        (
            "{% set ns = namespace(n=0) %}{% for m in [1, 2] %}{% set ns.n = ns.n + m %}"
            "{% endfor %}{{ ns.n }}"
        ),
        (
            "{% macro m(a, b='q') %}{{ a ~ b }}{{ caller() if caller }}{% endmacro %}"
            "{{ m(1) }}{% call m(2, b=3) %}c{% endcall %}"
        ),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x %}y{% endset %}{{ x | length }}"),
        ("{{ 'a\nb' | indent(2) }}{{ 'abcd' | replace('b', 'x', 1) }}{{ none or 'd' }}"),
        ("{% block b %}x{% endblock %}{{ self.b() }}{{ joiner(',')() }}{{ dict(a=1) }}"),
    ],
)
def test_what_templates_use_is_as_in_plain_jinja(template):
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    assert with_template(template).apply_chat_template(CONVERSATION) == plain.render(
        messages=CONVERSATION
    )


def test_a_long_conversation_is_nothing_to_the_budget():
    template = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% if '</think>' in m.content %}{{ m.content.split('</think>') | last }}{% endif %}"
        "{% set ns.text = ns.text + m.role ~ m['content'] | trim %}{% endfor %}{{ ns.text }}"
    )
    messages = [{"role": "user", "content": "word " * 500}] * 200
    prompt = with_template(template).apply_chat_template(messages)
    assert prompt == ("user" + ("word " * 500).strip()) * 200


def test_a_template_that_is_no_template_is_a_tokenizer_error():
    with pytest.raises(TokenizerError, match=r"model.gguf: the chat template is not valid"):
        with_template("{% for %}").apply_chat_template(CONVERSATION)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages is empty"),
        ("hello", "must be a list of .*, not str"),
        ({"role": "user", "content": "x"}, "must be a list of .*, not dict"),
        (["hello"], "message 0 is str"),
        ([{"role": "user"}], "message 0 has no 'content'"),
        ([{"content": "x"}], "message 0 has no 'role'"),
        ([*CONVERSATION, {"role": "user", "content": None}], "message 1: 'content' is NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], "'content' is list"),
        ([{"role": 3, "content": "x"}], "'role' is int"),
        ([{"role": "", "content": "x"}], "empty 'role'"),
    ],
)
def test_malformed_messages_are_named(tokenizer, messages, reason):
    with pytest.raises(InputError, match=reason):
        tokenizer.apply_chat_template(messages)


def test_without_a_template_messages_are_refused():
    with pytest.raises(InputError, match=r"has no chat template.*give a plain prompt"):
        small("a").apply_chat_template(CONVERSATION)


# --- The demo's own tokenizer --------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_the_pieces_of_the_demos_tokens_are_the_whole_text(data):
    tokenizer = demo_tokenizer()
    ids = data.draw(st.lists(st.integers(0, 49151), max_size=60))
    stream = StreamDecoder(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


def demo_tokenizer(found: list[Tokenizer] = []) -> Tokenizer:  # noqa: B006 - read once
    from foretell.backends.cpu._checkpoint import open_checkpoint

    if not found:
        tokenizer = open_checkpoint(demo_file()).tokenizer
        assert tokenizer is not None
        found.append(tokenizer)
    return found[0]
