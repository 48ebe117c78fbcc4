"""`--engine`: from words to configurations, and what is refused."""

from __future__ import annotations

import pytest

from foretell import OptionError
from foretell.bench._engines import Places, Skipped, parse, settings_of


def names(*words, dtype="native", draft=False, spec_types=("ngram-simple", "ngram-mod")):
    return [s.name for s in parse(words, dtype, draft=draft, spec_types=lambda: spec_types)]


def test_a_kind_alone_is_all_its_modes():
    assert names("foretell") == ["foretell native plain", "foretell native auto"]
    assert names("llama.cpp", dtype="int8") == [
        "llama.cpp int8 plain",
        "llama.cpp int8 ngram-simple",
        "llama.cpp int8 ngram-mod",
    ]
    assert names("openvino") == ["openvino native plain", "openvino native prompt_lookup"]
    assert len(names("transformers")) == 2
    assert names("transformers", draft=True)[-1] == "transformers native assisted"


def test_each_engine_comes_with_the_plain_one_it_is_compared_with():
    assert names("llama.cpp:ngram-mod") == ["llama.cpp native plain", "llama.cpp native ngram-mod"]
    assert names("foretell:4,dtype=int8,drafters=suffix+recycling") == [
        "foretell int8 plain",
        "foretell int8 4 suffix+recycling",
    ]


def test_engines_named_twice_are_there_once():
    assert names("foretell", "foretell:auto") == names("foretell")
    assert names("foretell:auto,name=mine", "foretell:plain") == ["foretell native plain", "mine"]


def test_modes_of_the_same_weights_share_a_process_where_they_can():
    plain, auto = parse(["foretell"], "int8", draft=False, spec_types=tuple)
    assert plain.process == auto.process
    plain, ngram = parse(["llama.cpp:ngram-mod"], "int8", draft=False, spec_types=tuple)
    assert plain.process != ngram.process


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("vllm", "unknown engine 'vllm'"),
        ("foretell:fast", "foretell:plain, foretell:auto or foretell:N"),
        ("foretell:0", "0 drafted tokens are foretell:plain"),
        ("foretell,dtype=fp4", "dtype is 'fp4'"),
        ("foretell,drafters=magic", "unknown drafter 'magic'"),
        ("foretell:plain,drafters=suffix", "drafters are for foretell when it drafts"),
        ("foretell,colour=red", "'colour=red' is no option"),
        ("foretell,dtype", "'dtype' is no option"),
        ("foretell,dtype=int8,dtype=int8", "has dtype twice"),
        ("foretell,name=x", "one name for 2 engines"),
        ("foretell,model=m", "model= gives a peer another one"),
        ("foretell,url=http://x", "no other engine has a url"),
        ("openai", "add url="),
        ("openai,url=localhost:80", "is no address"),
        ("openvino:assisted", "has the modes plain, prompt_lookup"),
        ("transformers:assisted", "needs a smaller model: --draft"),
    ],
)
def test_what_is_no_engine_is_refused(word, says):
    with pytest.raises(OptionError) as error:
        names(word)
    assert says in str(error.value)


def settings(tmp_path, word, model="m.gguf", **places):
    (tmp_path / model).write_bytes(b"")
    [*specs] = parse([word], "native", draft=False, spec_types=tuple)
    place = Places(str(tmp_path / model), threads=3, **places)
    return settings_of([s for s in specs if not s.is_plain] or specs, place, tmp_path)


def test_a_peer_is_told_the_file_the_threads_and_its_mode(tmp_path):
    told = settings(tmp_path, "llama.cpp:ngram-mod", llama_server="/a/server")
    assert told["model"].endswith("m.gguf")
    assert (told["threads"], told["modes"]) == (3, ["ngram-mod"])
    assert told["llama_server"] == "/a/server"


def test_a_peer_that_cannot_have_these_weights_is_skipped_with_the_reason(tmp_path):
    with pytest.raises(Skipped, match="float32 or bfloat16, not in native"):
        settings(tmp_path, "transformers")
    with pytest.raises(Skipped, match=r"does not read folder; .*llama.cpp,model=FILE"):
        settings(tmp_path, "llama.cpp:ngram-mod", model="folder")


def test_a_peer_can_be_given_a_model_of_its_own(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    assert settings(tmp_path, f"openvino:prompt_lookup,model={own}")["model"] == str(own)


def test_a_draft_model_is_for_drafters_that_use_one(tmp_path):
    told = settings(tmp_path, "foretell:auto,drafters=suffix", draft="small")
    assert told["draft"] is None
    assert settings(tmp_path, "foretell:auto", draft="small")["draft"] == "small"


def test_foretell_is_told_how_to_load_the_model_and_may_leave_it_at_any_layer(tmp_path):
    told = settings(
        tmp_path, "foretell:auto,drafters=early_exit:6", loading={"backend": "transformers"}
    )
    assert told["loading"] == {"backend": "transformers"}
    assert told["drafters"] == ["early_exit:6"]
    with pytest.raises(OptionError, match="unknown drafter 'suffix:2'"):
        names("foretell:auto,drafters=suffix:2")


def test_peers_get_as_many_bits_for_a_weight(tmp_path, monkeypatch):
    import foretell.bench._convert as convert

    asked = []
    monkeypatch.setattr(
        convert, "converted", lambda source, kind, folder: asked.append(kind) or source
    )
    for dtype in ("float32", "bfloat16", "int8", "native"):
        settings(tmp_path, f"llama.cpp:ngram-mod,dtype={dtype}")
    assert asked == ["F32", "F16", "Q8_0"]
    asked.clear()
    settings(tmp_path, "openvino:prompt_lookup,dtype=float32")
    assert asked == ["F16"]  # which its worker expands: it reads no F32
