"""Hugging Face folders: what is read, what is refused and in which words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, make_tensors, tiny_checkpoint, to_bfloat16, write_safetensors

from foretell._errors import (
    CorruptModelError,
    ModelNotFoundError,
    TokenizerError,
    UnsupportedModelError,
)
from foretell.backends.cpu._checkpoint import Checkpoint, expected_tensors, open_checkpoint


def rewrite_json(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (values | changes).items() if v is not ...}))


def rewrite_tensors(folder: Path, family: str = "llama", **changes: np.ndarray | None) -> None:
    """Write the weights again with some replaced, added, or left out (None)."""
    tensors = {**make_tensors(FAMILIES[family], seed=0), **changes}
    kept = {name: values for name, values in tensors.items() if values is not None}
    write_safetensors(folder / "model.safetensors", kept, dtype="float32")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, "llama", tokenizer=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_weights_it_was_written_with(tmp_path, family):
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path, family))
    weights = make_tensors(FAMILIES[family], seed=0)
    shapes = {name: source.shape for name, source in checkpoint.tensors.items()}
    assert shapes == expected_tensors(checkpoint.config)
    assert set(shapes) == set(weights)
    for name, source in checkpoint.tensors.items():
        got = source.read()
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got, weights[name])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stored_types_decode_exactly_and_rows_are_rows(tmp_path, dtype):
    checkpoint = open_checkpoint(str(tiny_checkpoint(tmp_path, "qwen2", dtype=dtype, shards=3)))
    name = "model.layers.1.mlp.down_proj.weight"
    source = checkpoint.tensors[name]
    weights = make_tensors(FAMILIES["qwen2"], seed=0)[name]
    stored = to_bfloat16(weights) if dtype == "bfloat16" else weights.astype(dtype)
    assert source.dtype_name == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    np.testing.assert_array_equal(source.raw(), stored)
    np.testing.assert_array_equal(source.raw(slice(3, 9)), stored[3:9])
    whole = source.read()
    wide = stored.astype(np.uint32) << 16
    exact = wide.view(np.float32) if dtype == "bfloat16" else stored.astype(np.float32)
    np.testing.assert_array_equal(whole, exact)
    np.testing.assert_array_equal(source.read(slice(5, 11)), whole[5:11])
    assert source.read(slice(7, 3)).shape == (0, *source.shape[1:])
    with pytest.raises(IndexError, match="consecutive"):
        source.read(slice(0, 8, 2))


def test_the_tokenizer_and_its_template_come_along(folder):
    tokenizer = open_checkpoint(folder).tokenizer
    assert tokenizer is not None
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hé"}])
    assert prompt == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(prompt, add_special_tokens=False), False) == prompt


def test_a_folder_without_a_tokenizer_opens_and_another_one_can_be_given(tmp_path, folder):
    bare = tiny_checkpoint(tmp_path, "llama")
    assert open_checkpoint(bare).tokenizer is None
    given = open_checkpoint(bare, tokenizer=folder / "tokenizer.json").tokenizer
    own = open_checkpoint(folder).tokenizer
    assert given is not None
    assert own is not None
    assert given.same_vocabulary(own) is None


def test_the_ends_of_text_are_gathered_from_all_places(folder):
    assert open_checkpoint(folder).eos_token_ids == (2,)
    rewrite_json(folder / "generation_config.json", eos_token_id=[7, 9])
    assert open_checkpoint(folder).eos_token_ids == (7, 9, 2)
    (folder / "generation_config.json").unlink()
    rewrite_json(folder / "config.json", eos_token_id=5)
    assert open_checkpoint(folder).eos_token_ids == (5, 2)
    rewrite_json(folder / "config.json", eos_token_id=...)
    assert open_checkpoint(folder).eos_token_ids == (2,)
    rewrite_json(folder / "config.json", eos_token_id="2")
    with pytest.raises(CorruptModelError, match="eos_token_id is '2', but it must be a token id"):
        open_checkpoint(folder)


def test_ties_are_settled_like_transformers_settles_them(tmp_path):
    tied = tiny_checkpoint(tmp_path, "llama", changes={"tie_word_embeddings": True})
    weights = make_tensors(FAMILIES["llama"], seed=0)
    embedding = weights["model.embed_tokens.weight"]

    def reopened(**changes: np.ndarray | None) -> Checkpoint:
        rewrite_tensors(tied, **changes)
        return open_checkpoint(tied)

    assert reopened(**{"lm_head.weight": None}).config.tied
    same = reopened(**{"lm_head.weight": embedding})
    assert same.config.tied
    assert "lm_head.weight" not in same.tensors
    only_head = reopened(**{"lm_head.weight": embedding, "model.embed_tokens.weight": None})
    np.testing.assert_array_equal(only_head.tensors["model.embed_tokens.weight"].read(), embedding)
    different = reopened(**{"lm_head.weight": embedding + 1})
    assert not different.config.tied
    np.testing.assert_array_equal(different.tensors["lm_head.weight"].read(), embedding + 1)


def test_buffers_of_old_checkpoints_are_ignored(folder):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    rewrite_tensors(folder, **extra)
    assert set(open_checkpoint(folder).tensors).isdisjoint(extra)


Q0 = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({Q0: None}, CorruptModelError, f"the tensor {Q0} is missing"),
        ({"lm_head.weight": None}, CorruptModelError, "lm_head.weight is missing.*tie_word_embed"),
        (
            {Q0: np.zeros((64, 64), np.float32)},
            CorruptModelError,
            rf"{Q0} has the shape \(64, 64\), but the model's config asks for \(96, 64\)",
        ),
        (
            {"model.layers.0.self_attn.q_proj.bias": np.zeros(96, np.float32)},
            UnsupportedModelError,
            "q_proj.bias has no place in a llama model",
        ),
        (
            {"model.layers.3.mlp.up_proj.weight": np.zeros((112, 64), np.float32)},
            UnsupportedModelError,
            "layers.3.mlp.up_proj.weight has no place",
        ),
    ],
)
def test_missing_wrong_and_foreign_tensors_are_named(folder, changes, error, message):
    rewrite_tensors(folder, **changes)
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_found_when_read(folder, bad):
    weights = make_tensors(FAMILIES["llama"], seed=0)[Q0].copy()
    weights[77, 3] = bad
    rewrite_tensors(folder, **{Q0: weights})
    source = open_checkpoint(folder).tensors[Q0]
    assert source.read(slice(0, 77)).shape == (77, 64)
    with pytest.raises(CorruptModelError, match=f"{Q0} holds a NaN or an infinity"):
        source.read()


def test_a_safetensors_file_cut_anywhere_is_refused(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 9, 100, 2000, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptModelError, match="not a whole safetensors file") as caught:
            open_checkpoint(folder)
        assert str(path) in str(caught.value)
    path.write_bytes(whole + b"x")
    with pytest.raises(CorruptModelError):
        open_checkpoint(folder)


def test_a_safetensors_header_that_lies_is_refused(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header, data = whole[8 : 8 + size], whole[8 + size :]
    for old, new in [(b'"F32"', b'"F16"'), (b'"F32"', b'"I99"'), (b"[288, 64]", b"[288,640]")]:
        assert old in header
        path.write_bytes(whole[:8] + header.replace(old, new, 1) + data)
        with pytest.raises(CorruptModelError, match="not a whole safetensors file"):
            open_checkpoint(folder)
    huge = (2**60).to_bytes(8, "little")
    path.write_bytes(huge + header + data)
    with pytest.raises(CorruptModelError):
        open_checkpoint(folder)


def test_other_stored_types_are_refused(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + size].replace(b'"F32"', b'"I32"', 1)
    path.write_bytes(whole[:8] + header + whole[8 + size :])
    with pytest.raises(UnsupportedModelError, match="has the type I32; F32, F16, BF16 and F64"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("../model.safetensors", "only names of .safetensors files in the same folder"),
        ("/etc/passwd", "only names of .safetensors files"),
        ("sub\\x.safetensors", "only names of .safetensors files"),
        (5, "sends .* to 5"),
        (
            "model-00009-of-00003.safetensors",
            "names model-00009-of-00003.safetensors, which is not",
        ),
        ("model-00002-of-00003.safetensors", "says that model-00002-of-00003.safetensors holds"),
    ],
)
def test_an_index_may_only_name_what_is_there(tmp_path, shard, message):
    folder = tiny_checkpoint(tmp_path, "llama", shards=3)
    shutil.copy(folder / "model-00001-of-00003.safetensors", tmp_path / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    first = next(iter(places))
    rewrite_json(index, weight_map={**places, first: shard})
    with pytest.raises(CorruptModelError, match=message) as caught:
        open_checkpoint(folder)
    assert str(caught.value).startswith(str(index))


@pytest.mark.parametrize("weight_map", [..., {}, [], "x"])
def test_an_index_without_a_map_is_refused(tmp_path, weight_map):
    folder = tiny_checkpoint(tmp_path, "llama", shards=2)
    rewrite_json(folder / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(CorruptModelError, match="weight_map is missing or empty"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\xff"])
def test_a_damaged_config_is_refused_by_its_path(folder, text):
    path = folder / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(CorruptModelError) as caught:
        open_checkpoint(folder)
    assert str(caught.value).startswith(str(path))


def test_what_is_not_there_is_named_with_what_to_give_instead(tmp_path, folder):
    with pytest.raises(ModelNotFoundError, match=r"no file or folder './nowhere/x'.*'demo'"):
        open_checkpoint("./nowhere/x")
    with pytest.raises(ModelNotFoundError, match=r"no file or folder .*model.gguf'"):
        open_checkpoint(tmp_path / "model.gguf")
    with pytest.raises(ModelNotFoundError, match=r"no file or folder 'organization/model.gguf'"):
        open_checkpoint("organization/model.gguf")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelNotFoundError, match=r"empty has no config.json; give a folder"):
        open_checkpoint(empty)
    (empty / "some.gguf").touch()
    with pytest.raises(
        ModelNotFoundError, match=r"it holds GGUF files, name one of them.*some.gguf"
    ):
        open_checkpoint(empty)
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ModelNotFoundError, match=r"neither model.safetensors nor model.safetensors"
    ):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(ModelNotFoundError, match=r"a pickle.*never loaded.*save_pretrained"):
        open_checkpoint(folder)


def test_a_tokenizer_of_another_model_is_refused(tmp_path, folder):
    small = tiny_checkpoint(tmp_path, "llama", changes={"vocab_size": 260})
    with pytest.raises(TokenizerError, match=r"ids up to 274, but the model .* knows 260 tokens"):
        open_checkpoint(small, tokenizer=folder / "tokenizer.json")
    with pytest.raises(TokenizerError, match=r"nowhere.json does not exist"):
        open_checkpoint(folder, tokenizer=tmp_path / "nowhere.json")
