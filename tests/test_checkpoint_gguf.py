"""GGUF files: names, row orders and blocks undone; damage and foreign models refused."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from demo import demo_file
from families import FAMILIES, make_tensors
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import gguf_name, tensors_of, write_gguf

from foretell._errors import CorruptModelError, ForetellError, UnsupportedModelError
from foretell.backends.cpu._checkpoint import open_checkpoint
from foretell.backends.cpu._config import RopeScaling

# The block size of most types is 32 and of the others 256: rows that fit both.
WIDE = {
    **FAMILIES["llama"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 1,
}


@pytest.mark.parametrize("family", ["llama", "llama-biases", "qwen2", "qwen3", "qwen3-odd"])
def test_every_family_gives_the_weights_of_its_hugging_face_checkpoint(tmp_path, family):
    config = FAMILIES[family]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", config))
    weights = make_tensors(config, seed=0)
    assert set(checkpoint.tensors) == set(weights)
    for name, source in checkpoint.tensors.items():
        got = source.read()
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got, weights[name])
        np.testing.assert_array_equal(source.raw(), weights[name])


def test_the_config_is_that_of_the_hugging_face_checkpoint(tmp_path):
    from foretell.backends.cpu._config import DecoderConfig

    for family in ["llama", "llama-biases", "qwen2", "qwen3"]:
        got = open_checkpoint(write_gguf(tmp_path / f"{family}.gguf", family)).config
        expected = DecoderConfig.from_huggingface(FAMILIES[family])
        # GGUF keeps this number in float32.
        assert np.float32(got.rms_norm_eps) == np.float32(expected.rms_norm_eps)
        object.__setattr__(got, "rms_norm_eps", expected.rms_norm_eps)
        assert got == expected


@pytest.mark.parametrize(
    "kind",
    [Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0],
)
def test_blocks_decode_row_by_row_in_the_right_order(tmp_path, kind):
    path = tmp_path / "model.gguf"
    write_gguf(path, WIDE, quantization=lambda name: kind)
    checkpoint = open_checkpoint(path)
    for name, weights in make_tensors(WIDE, seed=0).items():
        source = checkpoint.tensors[name]
        if weights.ndim == 1:
            continue
        assert source.dtype_name == kind.name
        stored = gguf.quants.quantize(weights, kind)
        expected = gguf.quants.dequantize(stored, kind).reshape(weights.shape)
        np.testing.assert_array_equal(source.read(), expected)
        np.testing.assert_array_equal(source.read(slice(7, 50)), expected[7:50])
        raw = source.raw(slice(7, 50))
        assert raw.dtype == {Type.F16: np.float16, Type.BF16: np.uint16}.get(kind, np.uint8)
        assert raw.tobytes() == stored[7:50].tobytes()


@pytest.mark.parametrize("kind", [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K])
def test_types_that_are_only_read_decode_like_the_gguf_package(tmp_path, kind):
    path = tmp_path / "model.gguf"
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    # Bytes below 0x3C keep every float16 scale among them finite.
    stored = np.random.default_rng(0).integers(
        0, 0x3C, (512, 256 // block_size * block_bytes), np.uint8
    )
    tensors = tensors_of(WIDE)
    tensors["blk.0.ffn_up.weight"] = stored
    write_gguf(path, WIDE, tensors=tensors, raw_types={"blk.0.ffn_up.weight": kind})
    source = open_checkpoint(path).tensors["model.layers.0.mlp.up_proj.weight"]
    assert (source.shape, source.dtype_name) == ((512, 256), kind.name)
    np.testing.assert_array_equal(source.read(), gguf.quants.dequantize(stored, kind))
    assert source.raw(slice(3, 5)).tobytes() == stored[3:5].tobytes()


def test_types_that_cannot_be_decoded_are_refused(tmp_path):
    tensors = tensors_of(WIDE)
    tensors["blk.0.ffn_up.weight"] = np.zeros((512, 256), np.int8)
    path = write_gguf(tmp_path / "model.gguf", WIDE, tensors=tensors)
    with pytest.raises(UnsupportedModelError, match="has the type I8, which cannot be decoded"):
        open_checkpoint(path)


def test_the_head_is_tied_where_the_file_has_none(tmp_path):
    tensors = tensors_of(FAMILIES["llama"])
    del tensors["output.weight"]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "tied.gguf", "llama", tensors=tensors))
    assert checkpoint.config.tied
    assert "lm_head.weight" not in checkpoint.tensors


def test_rope_scaling_is_read_in_each_of_its_forms(tmp_path):
    def scaling(**metadata) -> RopeScaling:
        path = write_gguf(
            tmp_path / "rope.gguf",
            "llama",
            metadata={key.replace("__", "."): value for key, value in metadata.items()},
        )
        return open_checkpoint(path).config.rope_scaling

    assert scaling() == RopeScaling()
    assert scaling(llama__rope__scaling__type="none") == RopeScaling()
    assert scaling(
        llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0
    ) == RopeScaling("linear", 4.0)
    assert scaling(llama__rope__scale_linear=2.0) == RopeScaling("linear", 2.0)
    factors = np.linspace(1, 8, 12, dtype=np.float32)
    tensors = {**tensors_of(FAMILIES["llama"]), "rope_freqs.weight": factors}
    path = write_gguf(tmp_path / "factors.gguf", "llama", tensors=tensors)
    expected = RopeScaling("factors", factors=tuple(factors.tolist()))
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.rope_scaling == expected
    assert "rope_freqs.weight" not in checkpoint.tensors


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"general.architecture": "gemma2"}, UnsupportedModelError, "architecture is 'gemma2'"),
        ({"llama.expert_count": 8}, UnsupportedModelError, "expert_count is 8"),
        ({"llama.attention.sliding_window": 64}, UnsupportedModelError, "sliding_window is 64"),
        ({"llama.rope.scaling.type": "yarn"}, UnsupportedModelError, "scaling.type is 'yarn'"),
        ({"llama.rope.dimension_count": 12}, UnsupportedModelError, "dimension_count is 12"),
        ({"llama.attention.value_length": 8}, UnsupportedModelError, "value_length is 8"),
        ({"llama.attention.causal": False}, UnsupportedModelError, "causal is False"),
        ({"llama.logit_scale": 0.5}, UnsupportedModelError, "logit_scale is 0.5"),
        ({"split.count": 3}, UnsupportedModelError, "split.count is 3.*gguf-split --merge"),
        ({"llama.block_count": None}, CorruptModelError, "block_count is missing"),
        ({"llama.block_count": 0}, CorruptModelError, "block_count is 0"),
        ({"llama.block_count": 4_000_000_000}, CorruptModelError, "block_count is 4000000000"),
        ({"llama.block_count": 4}, CorruptModelError, "model.layers.3.* is missing .and 8 more"),
        ({"llama.block_count": 2}, UnsupportedModelError, "layers.2.* has no place"),
        ({"llama.attention.head_count": [4, 4, 4]}, CorruptModelError, "head_count is array"),
        (
            {"llama.embedding_length": 80},
            CorruptModelError,
            "shape .288, 64., .* asks for .288, 80",
        ),
        ({"llama.context_length": "long"}, CorruptModelError, "context_length is 'long'"),
        ({"general.alignment": 33}, CorruptModelError, "alignment is 33"),
    ],
)
def test_other_models_are_refused_by_the_name_of_the_key(tmp_path, metadata, error, message):
    path = tmp_path / "model.gguf"
    architecture = metadata.get("general.architecture")
    if architecture is not None:
        write_gguf(path, {**FAMILIES["llama"], "model_type": architecture})
    else:
        write_gguf(path, "llama", metadata=metadata)
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_tensors_that_do_not_belong_are_refused(tmp_path):
    tensors = {**tensors_of(FAMILIES["llama"]), "blk.1.attn_q.bias": np.zeros(96, np.float32)}
    path = write_gguf(tmp_path / "model.gguf", "llama", tensors=tensors)
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn\.q_proj\.bias"):
        open_checkpoint(path)


def test_weights_that_are_no_numbers_are_found_when_read(tmp_path):
    tensors = tensors_of(FAMILIES["llama"])
    tensors["blk.0.attn_q.weight"] = np.full_like(tensors["blk.0.attn_q.weight"], np.nan)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "nan.gguf", "llama", tensors=tensors))
    with pytest.raises(CorruptModelError, match=r"layers.0.self_attn.q_proj.weight holds a NaN"):
        checkpoint.tensors["model.layers.0.self_attn.q_proj.weight"].read()


def header(num_tensors: int = 0, num_values: int = 0, *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", CorruptModelError, "cannot be read"),
        (b"PK\x03\x04 no gguf at all", CorruptModelError, "not a GGUF file"),
        (b"GGUF", CorruptModelError, "ends inside its header"),
        (header(version=1), UnsupportedModelError, "GGUF version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModelError, "big-endian"),
        (header(), CorruptModelError, "general.architecture is missing"),
        (header(2**63, 0), CorruptModelError, "ends inside its header"),
        (header(0, 2**64 - 1), CorruptModelError, "ends inside its header"),
        (header(0, 1) + struct.pack("<Q", 2**62), CorruptModelError, "claims 4611686018427387904"),
        (header(0, 1) + text(b"\xff") + b"\0" * 8, CorruptModelError, "not UTF-8"),
        (header(0, 1) + text(b"a") + struct.pack("<I", 77), CorruptModelError, "type 77"),
        (
            header(0, 1) + text(b"a") + struct.pack("<IIQ", 9, 0, 2**60),
            CorruptModelError,
            "ends inside",
        ),
        (
            header(0, 1) + text(b"a") + struct.pack("<IIQ", 9, 8, 2**60),
            CorruptModelError,
            "claims 1152921504606846976 strings",
        ),
        (
            header(0, 1) + text(b"a") + struct.pack("<IIQ", 9, 9, 1),
            CorruptModelError,
            "elements of the type 9",
        ),
        (
            header(0, 2) + 2 * (text(b"a") + struct.pack("<IB", 7, 1)),
            CorruptModelError,
            "'a' appears twice",
        ),
        (
            header(1, 0) + text(b"t") + struct.pack("<I", 10**9),
            CorruptModelError,
            "has 1000000000 dimensions",
        ),
        (
            header(1, 0) + text(b"t") + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0),
            CorruptModelError,
            "ends at byte",
        ),
        (
            header(1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 4, 999, 0),
            UnsupportedModelError,
            "unknown type 999",
        ),
        (
            header(1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 31, 2, 0),
            CorruptModelError,
            "Q4_0 cannot store in blocks of 32",
        ),
    ],
)
def test_damaged_headers_are_refused_at_once(tmp_path, content, error, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    begun = time.perf_counter()
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert time.perf_counter() - begun < 1.0


def read_everything(path: Path) -> None:
    for source in open_checkpoint(path).tensors.values():
        source.read()


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", "llama").read_bytes()
    path = tmp_path / "cut.gguf"
    # The very end of the file is padding, which nothing needs.
    for size in [*range(0, 4000, 37), *range(4000, len(whole) - 64, len(whole) // 50)]:
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptModelError):
            read_everything(path)


def test_a_file_with_bytes_changed_anywhere_never_fails_in_another_way(tmp_path):
    whole = write_gguf(
        tmp_path / "whole.gguf", "llama", metadata={"tokenizer.ggml.tokens": ["a", "b"] * 5}
    ).read_bytes()
    path = tmp_path / "damaged.gguf"
    dice = random.Random(0)
    refused = 0
    begun = time.perf_counter()
    for _ in range(600):
        damaged = bytearray(whole)
        for _ in range(dice.choice([1, 1, 2, 8])):
            damaged[dice.randrange(4, 4500)] = dice.choice([0, 1, 0x7F, 0xFF, dice.randrange(256)])
        path.write_bytes(damaged)
        try:
            read_everything(path)
        except ForetellError:
            refused += 1
    assert refused > 200
    assert time.perf_counter() - begun < 60


def test_the_demo_opens_quickly_and_completely():
    path = demo_file()
    begun = time.perf_counter()
    checkpoint = open_checkpoint(path)
    assert time.perf_counter() - begun < 5.0
    config = checkpoint.config
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config.tied
    assert checkpoint.eos_token_ids == (2,)
    embedding = checkpoint.tensors["model.embed_tokens.weight"]
    assert embedding.dtype_name == "Q8_0"
    assert embedding.read(slice(100, 200)).shape == (100, 576)
    # llama.cpp's own names and numbers, read with its own package.
    name = "model.layers.7.self_attn.k_proj.weight"
    stored = next(
        tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == gguf_name(name)
    )
    rows = gguf.quants.dequantize(stored.data, stored.tensor_type)
    got = checkpoint.tensors[name].read()
    np.testing.assert_array_equal(got[:32], rows[0:64:2])
    np.testing.assert_array_equal(got[32:64], rows[1:64:2])
