"""The cpu backend: the same bits for every pass, thread, drafter and draft length."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import gguf
import gguf_files
import model_contract
import numba
import numpy as np
import psutil
import pytest
from demo import demo_file
from families import FAMILIES, tiny_checkpoint
from helpers_core import held_elsewhere

from foretell import (
    CorruptModelError,
    Draft,
    Drafter,
    Engine,
    InputError,
    InsufficientMemoryError,
    OptionError,
    Rows,
    Session,
)
from foretell.backends.cpu import CpuModel, _buffers, _formats, _kernels, load
from foretell.backends.cpu._pass import PARTS_OF_A_PASS, run_pass
from foretell.backends.cpu._weights import aligned_empty, to_bfloat16, to_q8_0
from foretell.drafters import DraftModel, PromptLookup

DTYPES = ("float32", "bfloat16", "int8")
DRAFT_LENGTHS = (1, 2, 5, 16)
PASS_LENGTHS = range(1, 34)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


# Block formats want widths of whole blocks.
GGUF_SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
MIXES = [
    ["Q8_0"],
    ["Q4_0"],
    ["Q4_1"],
    ["Q4_K"],
    ["Q5_K"],
    ["Q6_K"],
    ["BF16"],
    ["F16"],
    ["Q4_K", "Q6_K", "F16", "Q8_0", "F32", "Q5_K", "Q4_1", "BF16", "Q4_0", "Q5_0"],
]


def write_mix(path: Path, kinds: list[str], *, damage: bool = False) -> Path:
    """A GGUF file of a tiny llama whose matrices are stored as ``kinds``, one after another."""
    config = {**FAMILIES["llama"], **GGUF_SHAPE}
    rng = np.random.default_rng(0)
    tensors, types = {}, {}
    for name, values in gguf_files.tensors_of(config).items():
        if values.ndim == 2:
            kind = kinds[len(types) % len(kinds)]
            types[name] = gguf.GGMLQuantizationType[kind]
            values = stored_as(kind, values, rng)
            if damage:
                bad = "bfloat16" if kind == "BF16" else "float16"
                first = slice(208, 210) if kind == "Q6_K" else slice(0, 2)
                values.view(np.uint8)[3, first] = NAN_BYTES[bad]
        tensors[name] = values
    return gguf_files.write_gguf(path, config, tensors=tensors, raw_types=types)


NAN_BYTES = {"bfloat16": (0xC0, 0x7F), "float16": (0x00, 0x7E)}


def stored_as(kind: str, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The rows quantized; in the K formats, which the package cannot write, any blocks."""
    if not kind.endswith("_K"):
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    stored = _formats.FORMATS[getattr(_formats, kind)]
    blocks = rng.integers(0, 256, (len(values), values.shape[1] // 256, stored.size), np.uint8)
    for at in (208,) if kind == "Q6_K" else (0, 2):
        small = rng.uniform(1e-5, 1e-4, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[..., at : at + 2] = small.view(np.uint8)
    return blocks.reshape(len(values), -1)


def tiny(checkpoints: Path, family: str, dtype: str = "float32", threads: int = 2, **changes):
    return load(tiny_checkpoint(checkpoints, family, **changes), dtype=dtype, threads=threads)


def tokens_of(model: CpuModel, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(model.vocab_size, size=count).tolist()


# -- the contract of every model ---------------------------------------------------------------


@pytest.mark.parametrize("check", model_contract.CHECKS, ids=model_contract.name)
@pytest.mark.parametrize("family", ["llama", "qwen3-odd"])
def test_contract(check, family: str, checkpoints: Path) -> None:
    check(tiny(checkpoints, family, changes={"max_position_embeddings": 200}))


# -- row invariance ----------------------------------------------------------------------------


def single_steps(model: CpuModel, prompt: list[int], tokens: list[int]) -> tuple[Session, list]:
    """Plain decoding's logits, one pass a token."""
    session = model.new_session()
    model.forward([Rows(session, prompt, logits="none")])
    session.keep(range(len(prompt)))
    logits = []
    for token in tokens:
        logits.append(model.forward([Rows(session, [token])]).logits[0])
        session.keep([0])
    return session, logits


def assert_passes_of_any_length_equal_single_steps(model: CpuModel, prompt_length: int) -> None:
    prompt, tokens = tokens_of(model, prompt_length), tokens_of(model, PASS_LENGTHS[-1], seed=1)
    plain, logits = single_steps(model, prompt, tokens)
    session = model.new_session()
    model.forward([Rows(session, prompt, logits="none")])
    session.keep(range(len(prompt)))
    for count in PASS_LENGTHS:
        together = model.forward([Rows(session, tokens[:count])]).logits
        np.testing.assert_array_equal(together, logits[:count])
    session.keep(range(len(tokens)))
    for got, expected in zip(session.keys_values(), plain.keys_values(), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_of_any_length_have_the_bits_of_single_steps(family, dtype, checkpoints) -> None:
    # From 50 on, the passes straddle the first two blocks of keys.
    assert_passes_of_any_length_equal_single_steps(tiny(checkpoints, family, dtype), 50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [37, 100, 250])
def test_odd_widths_have_the_bits_of_single_steps(width, dtype, checkpoints) -> None:
    changes = {"hidden_size": width, "intermediate_size": width + 1, "vocab_size": width}
    model = tiny(checkpoints, "qwen3", dtype, changes=changes)
    assert_passes_of_any_length_equal_single_steps(model, 7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_to_cut_a_prompt_gives_the_same_bits(dtype, checkpoints) -> None:
    model = tiny(checkpoints, "llama", dtype)
    prompt = tokens_of(model, 300)
    expected = None
    for size in (1, 7, 64, 100, 128, 129, 300):
        session = model.new_session()
        for start in range(0, len(prompt), size):
            chunk = prompt[start : start + size]
            logits = model.forward([Rows(session, chunk, logits="last")]).logits
            session.keep(range(len(chunk)))
        result = (logits, *session.keys_values())
        expected = expected or result
        for got, wanted in zip(result, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype, checkpoints) -> None:
    expected = None
    for threads in (1, 2, 4):
        model = tiny(checkpoints, "qwen2", dtype, threads)
        session = model.new_session()
        prompt = tokens_of(model, 150)
        result = [model.forward([Rows(session, prompt)]).logits]
        session.keep(range(len(prompt)))
        for token in tokens_of(model, 3, seed=2):
            result.append(model.forward([Rows(session, [token])]).logits)
            session.keep([0])
        result += session.keys_values()
        expected = expected or result
        for got, wanted in zip(result, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_long_contexts_split_over_threads_have_the_bits_of_a_prefill(checkpoints) -> None:
    # A step splits its attention into blocks for the threads; a prefill folds them as it goes.
    model = tiny(checkpoints, "llama", threads=4)
    prompt = tokens_of(model, 500)
    session = model.new_session()
    at_once = model.forward([Rows(session, prompt)]).logits
    session.keep(range(490))
    for index in range(490, 500):
        np.testing.assert_array_equal(
            model.forward([Rows(session, [prompt[index]])]).logits[0], at_once[index]
        )
        session.keep([0])


def test_hidden_states_are_those_of_single_steps_and_of_each_layer(checkpoints) -> None:
    model = tiny(checkpoints, "llama")
    tokens = tokens_of(model, 9)
    session = model.new_session()
    together = model.forward([Rows(session, tokens, logits="last", hidden=(0, 2))])
    assert sorted(together.hidden) == [0, 2]
    assert together.hidden[0].shape == (9, model.config.hidden_size)
    for index, token in enumerate(tokens):
        alone = model.forward([Rows(session, [token], hidden=(0, 2))])
        session.keep([0])
        for layer in (0, 2):
            np.testing.assert_array_equal(alone.hidden[layer][0], together.hidden[layer][index])
    assert not np.array_equal(together.hidden[0], together.hidden[2])


def test_a_layer_that_does_not_exist_has_no_hidden_state(checkpoints) -> None:
    model = tiny(checkpoints, "llama")
    with pytest.raises(InputError, match=r"layer 3.*0\.\.2"):
        model.forward([Rows(model.new_session(), [1], hidden=(3,))])


# -- speculation -------------------------------------------------------------------------------


class RandomTrees(Drafter):
    """Trees that grow the right continuation among wrong branches."""

    name = "random_trees"

    def __init__(self, continuation: list[int], prompt_length: int, vocab_size: int) -> None:
        self.arguments = (continuation, prompt_length, vocab_size)
        self.rng = np.random.default_rng(5)

    def spawn(self) -> RandomTrees:
        return RandomTrees(*self.arguments)

    def propose(self, context, limit):
        continuation, prompt_length, vocab_size = self.arguments
        right = continuation[len(context) - prompt_length :]
        tokens, parents, depth, on_path = [], [-1], [0], [True]
        for _ in range(limit):
            parent = int(self.rng.integers(len(parents)))
            token = int(self.rng.integers(vocab_size))
            good = on_path[parent] and depth[parent] < len(right) and self.rng.random() < 0.8
            if good:
                token = right[depth[parent]]
            if (parent, token) in zip(parents[1:], tokens, strict=True):
                continue
            tokens.append(token)
            parents.append(parent)
            depth.append(depth[parent] + 1)
            on_path.append(good)
        return Draft.one_hot(tuple(tokens), tuple(parents))


class Contrary(DraftModel):
    """Never says what the target would."""

    name = "contrary"

    def spawn(self) -> Contrary:
        return Contrary(self._model)

    def propose(self, context, limit):
        right = super().propose(context, limit)
        return Draft.one_hot(tuple((token + 1) % self._model.vocab_size for token in right.tokens))


def generate(model: CpuModel, drafters, prompt: list[int], draft_length: int, max_tokens: int):
    """Token ids and the final cache of the target's session."""
    sessions: list[Session] = []
    new_session, model.new_session = model.new_session, lambda: remember(sessions, new_session())
    try:
        result = Engine(model, drafters=drafters).generate(
            prompt, max_tokens=max_tokens, num_draft_tokens=draft_length, ignore_eos=True
        )
    finally:
        del model.new_session
    return result, sessions[0].keys_values()


def remember(sessions: list[Session], session: Session) -> Session:
    sessions.append(session)
    return session


def drafters_for(model: CpuModel, other: CpuModel, prompt: list[int], plain: list[int]):
    yield DraftModel(model)
    yield DraftModel(other)
    yield Contrary(model)
    yield PromptLookup()
    yield RandomTrees(plain, len(prompt), model.vocab_size)


def assert_speculation_changes_nothing(
    model: CpuModel, other: CpuModel, prompt: list[int], max_tokens: int, lengths=DRAFT_LENGTHS
) -> None:
    plain, cache = generate(model, [], prompt, 0, max_tokens)
    assert len(plain.token_ids) == max_tokens
    accepted = 0
    for drafter in drafters_for(model, other, prompt, plain.token_ids):
        for length in lengths:
            result, its_cache = generate(model, [drafter], prompt, length, max_tokens)
            assert result.token_ids == plain.token_ids, (drafter.name, length)
            for got, expected in zip(its_cache, cache, strict=True):
                np.testing.assert_array_equal(got, expected)
            accepted += result.stats.num_accepted_tokens
    assert accepted > max_tokens  # the drafts were not all refused


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_changes_no_token_and_no_bit_of_the_cache(family, dtype, checkpoints) -> None:
    model = tiny(checkpoints, family, dtype)
    other = tiny(checkpoints, family, dtype, seed=7)
    assert_speculation_changes_nothing(model, other, tokens_of(model, 40), 60)


@pytest.fixture(scope="module", params=("float32", "bfloat16"))
def demo(request) -> Iterator[CpuModel]:
    model = load(demo_file(), dtype=request.param, threads=2)
    yield model
    del model
    gc.collect()


def test_demo_passes_of_any_length_have_the_bits_of_single_steps(demo) -> None:
    assert_passes_of_any_length_equal_single_steps(demo, 90)


@pytest.mark.parametrize("dtype", ["int8", "native"])
def test_demo_passes_in_blocks_have_the_bits_of_single_steps(dtype) -> None:
    assert_passes_of_any_length_equal_single_steps(load(demo_file(), dtype=dtype), 90)


def test_demo_speculation_changes_no_token_and_no_bit_of_the_cache(demo, checkpoints) -> None:
    changes = {"vocab_size": demo.vocab_size, "num_hidden_layers": 1}
    other = tiny(checkpoints, "llama", changes=changes)
    prompt = demo.tokenizer.encode(
        "Correct the spelling: The quik brown fox jumps over the lazi dog. The quik brown fox",
        add_special_tokens=False,
    )
    assert_speculation_changes_nothing(demo, other, prompt, 24, lengths=(1, 5, 16))


def test_demo_threads_change_no_token(demo) -> None:
    prompt = demo.tokenizer.encode("Once upon a time", add_special_tokens=False)
    expected, _ = generate(demo, [], prompt, 0, 16)
    for threads in (1, 4):
        model = load(demo_file(), dtype=demo.dtype, threads=threads)
        assert generate(model, [], prompt, 0, 16)[0].token_ids == expected.token_ids


# -- how weights and caches are kept ---------------------------------------------------------------


def test_native_blocks_give_the_bits_of_float32(tmp_path) -> None:
    for kinds in MIXES:
        file = write_mix(tmp_path / "model.gguf", kinds)
        native, exact = (load(file, dtype=dtype, threads=2) for dtype in ("native", "float32"))
        assert native.weights.num_bytes < exact.weights.num_bytes
        tokens = tokens_of(native, 40)
        for count in (1, 2, 3, 4, 5, 7, 9, 40):
            got, expected = (
                model.forward([Rows(model.new_session(), tokens[:count])]).logits
                for model in (native, exact)
            )
            np.testing.assert_array_equal(got, expected, err_msg=str(kinds))


def test_the_demo_in_native_gives_the_bits_of_float32() -> None:
    native, exact = (load(demo_file(), dtype=dtype) for dtype in ("native", "float32"))
    tokens = tokens_of(native, 70)
    got, expected = (
        model.forward([Rows(model.new_session(), tokens)]).logits for model in (native, exact)
    )
    np.testing.assert_array_equal(got, expected)
    assert native.weights.num_bytes < 1.02 * demo_file().stat().st_size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_native_safetensors_are_kept_as_stored(dtype, checkpoints) -> None:
    folder = tiny_checkpoint(checkpoints, "qwen3-odd", dtype=dtype)
    native, exact = (load(folder, dtype=kept) for kept in ("native", "float32"))
    assert (native.weights.num_bytes == exact.weights.num_bytes) == (dtype == "float32")
    for count in (1, 3, 6, 20):
        tokens = tokens_of(native, count)
        got, expected = (
            model.forward([Rows(model.new_session(), tokens)]).logits for model in (native, exact)
        )
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_are_read_to_the_bits_of_the_gguf_package(kind) -> None:
    rng = np.random.default_rng(3)
    stored = _formats.FORMATS[getattr(_formats, kind)]
    blocks = rng.integers(0, 256, (500, stored.size), dtype=np.uint8)
    halves = [0] if kind in ("Q8_0", "Q4_0") else [208] if kind == "Q6_K" else [0, 2]
    for at in halves:  # any finite half, small and negative ones too
        bits = rng.integers(0, 0x7C00, 500, dtype=np.uint16) | (
            rng.integers(0, 2, 500, dtype=np.uint16) << 15
        )
        blocks[:, at : at + 2] = bits.view(np.uint8).reshape(500, 2)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    got = np.empty((500, stored.elements), np.float32)
    for block, row in zip(blocks, got, strict=True):
        unpack(getattr(_formats, kind), block.ctypes.data, stored.elements, row.ctypes.data)
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@numba.njit
def unpack(kind, source, count, target):
    _kernels.load_row(kind, source, count, target)


def test_int8_is_q8_0_with_half_scales_and_zeros_stay_zero() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(3, 70)).astype(np.float32)
    values[1] = 0
    blocks = to_q8_0(values)
    assert blocks.shape == (3, 3 * 34)
    back = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    assert not back[1].any()
    assert not back[:, 70:].any()
    assert np.abs(back[:, :70] - values).max() < np.abs(values).max() / 127
    scales = blocks.reshape(9, 34)[:, :2].copy().view(np.float16)
    assert np.isfinite(scales).all()
    assert scales[3] == 0


@pytest.mark.parametrize("family", ["llama", "qwen3-odd"])
def test_a_bfloat16_cache_is_a_bit_equal_world_of_its_own(family, checkpoints) -> None:
    folder = tiny_checkpoint(checkpoints, family)
    model = load(folder, cache_dtype="bfloat16", threads=2)
    other = load(tiny_checkpoint(checkpoints, family, seed=7))
    assert_passes_of_any_length_equal_single_steps(model, 50)
    assert_speculation_changes_nothing(model, other, tokens_of(model, 40), 40, lengths=(1, 5))
    exact = load(folder, threads=2)
    tokens = tokens_of(model, 100)
    keys, exact_keys = [], []
    for each, into in ((model, keys), (exact, exact_keys)):
        session = each.new_session()
        each.forward([Rows(session, tokens, logits="none")])
        session.keep(range(100))
        into += session.keys_values()
    # Layer 0 sees the same inputs in both: its keys and values are those, rounded.
    for got, whole in zip(keys, exact_keys, strict=True):
        rounded = to_bfloat16(np.ascontiguousarray(whole[0])).astype(np.uint32) << np.uint32(16)
        np.testing.assert_array_equal(got[0], rounded.view(np.float32))
        assert not np.array_equal(got[1], whole[1])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K", "BF16", "F16"])
def test_nan_scales_are_found_while_loading_native(kind, tmp_path) -> None:
    file = write_mix(tmp_path / "model.gguf", [kind], damage=True)
    with pytest.raises(CorruptModelError, match="NaN or an infinity in rows"):
        load(file, dtype="native")


def test_a_profile_says_where_the_time_of_a_pass_goes(checkpoints) -> None:
    model = tiny(checkpoints, "llama")
    with model.profile() as shares:
        model.forward([Rows(model.new_session(), [1, 2, 3])])
    assert set(shares) == set(PARTS_OF_A_PASS)
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share >= 0 for share in shares.values())


# -- many at once ------------------------------------------------------------------------------


def test_threads_that_share_a_model_get_their_own_tokens(checkpoints) -> None:
    model = tiny(checkpoints, "llama")
    engine = Engine(model, drafters=["prompt_lookup"])
    prompts = [tokens_of(model, 20, seed) for seed in range(6)]
    options = {"max_tokens": 30, "ignore_eos": True}
    expected = [engine.generate(prompt, **options).token_ids for prompt in prompts]
    results: dict[int, list[int]] = {}

    def work(index: int) -> None:
        results[index] = engine.generate(prompts[index], **options).token_ids

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[index] for index in range(len(prompts))] == expected


def test_sessions_in_one_pass_have_the_bits_of_passes_of_their_own(checkpoints) -> None:
    model = tiny(checkpoints, "qwen2")
    lengths = (1, 70, 3, 129, 20)
    alone, together = [], []
    for index, length in enumerate(lengths):
        prompt = tokens_of(model, length, seed=index)
        for sessions in (alone, together):
            session = model.new_session()
            model.forward([Rows(session, prompt, logits="none")])
            session.keep(range(length))
            sessions.append(session)
    parts = [
        ([5, 6, 7, 8, 9], [-1, 0, 0, 2, 1], "all"),
        ([1], None, "all"),
        ([2, 3], None, "last"),
        ([4, 4, 4], None, "none"),
        (tokens_of(model, 140, seed=9), None, "all"),
    ]
    output = model.forward(
        [Rows(session, *part) for session, part in zip(together, parts, strict=True)]
    )
    for index, (session, part) in enumerate(zip(alone, parts, strict=True)):
        np.testing.assert_array_equal(
            model.forward([Rows(session, *part)]).logits, output.of(index).logits
        )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_generates_the_same(checkpoints) -> None:
    model = tiny(checkpoints, "llama")
    prompt = tokens_of(model, 10)
    expected = Engine(model).generate(prompt, max_tokens=8).token_ids
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # no pytest in here
        try:
            tokens = Engine(model).generate(prompt, max_tokens=8).token_ids
            os.write(write, " ".join(map(str, tokens)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read().split() == [str(token) for token in expected]
    os.waitpid(child, 0)


def test_helpers_end_with_their_model(checkpoints) -> None:
    before = set(threading.enumerate())
    model = tiny(checkpoints, "llama", threads=4)
    model.forward([Rows(model.new_session(), [1])])
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 3
    del model
    gc.collect()
    for thread in helpers:
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_process_forked_while_another_thread_compiles_can_use_the_kernels() -> None:
    run_pass.prepare()
    with held_elsewhere(run_pass._lock):
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # a lock that stays taken would be waited for for ever
            run_pass.prepare()
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert status == 0


def test_forks_share_pages_until_one_of_them_writes(checkpoints) -> None:
    model = tiny(checkpoints, "llama")
    session = model.new_session()
    tokens = tokens_of(model, 200)
    model.forward([Rows(session, tokens, logits="none")])
    session.keep(range(200))
    fork = session.fork()
    before = [array.copy() for array in fork.keys_values()]
    session.rollback(150)
    model.forward([Rows(session, tokens_of(model, 150, seed=3), logits="none")])
    session.keep(range(150))
    for got, expected in zip(fork.keys_values(), before, strict=True):
        np.testing.assert_array_equal(got, expected)


# -- interrupted at the worst moment ---------------------------------------------------------------


class Interrupted(BaseException):
    """What Ctrl-C is, without the signal."""


def raise_interrupted(*_args, **_options):
    raise Interrupted


def logits_after(model: CpuModel, tokens: list[int]) -> np.ndarray:
    return model.forward([Rows(model.new_session(), tokens)]).logits


def test_helpers_leave_a_pass_that_thread_0_never_began(checkpoints, monkeypatch) -> None:
    model = tiny(checkpoints, "llama", threads=4)
    tokens = tokens_of(model, 100)
    expected = logits_after(model, tokens)
    run_pass = model._run_pass
    main = threading.get_ident()

    def interrupted_here(p, thread):
        if threading.get_ident() == main:
            raise Interrupted
        run_pass(p, thread)

    for _ in range(50):
        monkeypatch.setattr(model, "_run_pass", interrupted_here)
        with pytest.raises(Interrupted):
            logits_after(model, tokens)
        monkeypatch.undo()
        np.testing.assert_array_equal(logits_after(model, tokens), expected)


def test_buffers_that_could_not_grow_are_grown_the_next_time(checkpoints, monkeypatch) -> None:
    model = tiny(checkpoints, "llama")
    tokens = tokens_of(model, 100)
    logits_after(model, tokens[:1])
    for fails_at in range(8):
        allocations = iter(range(100))

        def allocate(shape, dtype, allocations=allocations, fails_at=fails_at):
            if next(allocations) == fails_at:
                raise MemoryError
            return aligned_empty(shape, dtype)

        monkeypatch.setattr(_buffers, "aligned_empty", allocate)
        with contextlib.suppress(MemoryError):
            logits_after(model, tokens)
        monkeypatch.undo()
    expected = logits_after(tiny(checkpoints, "llama"), tokens)
    np.testing.assert_array_equal(logits_after(model, tokens), expected)


def test_a_rotary_table_grows_whole_or_not_at_all(checkpoints, monkeypatch) -> None:
    model = tiny(checkpoints, "llama", changes={"max_position_embeddings": 2000})
    expected = logits_after(model, tokens_of(model, 900))
    other = tiny(checkpoints, "llama", changes={"max_position_embeddings": 2000})
    logits_after(other, [1])
    monkeypatch.setattr(np, "sin", raise_interrupted)
    with pytest.raises(Interrupted):
        logits_after(other, tokens_of(model, 900))
    monkeypatch.undo()
    np.testing.assert_array_equal(logits_after(other, tokens_of(model, 900)), expected)


def test_pages_are_changed_whole_or_not_at_all(checkpoints, monkeypatch) -> None:
    model = tiny(checkpoints, "llama")
    tokens = tokens_of(model, 100)
    session = model.new_session()
    model.forward([Rows(session, tokens, logits="none")])
    session.keep(range(100))
    fork = session.fork()
    before = [array.copy() for array in fork.keys_values()]
    session.rollback(50)
    monkeypatch.setattr(np, "array", raise_interrupted)
    with pytest.raises(Interrupted):
        session.reserve(10)
    monkeypatch.undo()
    model.forward([Rows(session, [5] * 50, logits="none")])
    session.keep(range(50))
    for got, expected in zip(fork.keys_values(), before, strict=True):
        np.testing.assert_array_equal(got, expected)
    again = model.new_session()
    model.forward([Rows(again, [*tokens[:50], *[5] * 50], logits="none")])
    again.keep(range(100))
    for got, expected in zip(session.keys_values(), again.keys_values(), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
def test_a_storm_of_interrupts_leaves_the_model_whole(checkpoints) -> None:
    model = tiny(checkpoints, "llama", threads=3)
    tokens = tokens_of(model, 80)
    expected = logits_after(model, tokens)
    old = signal.signal(signal.SIGALRM, raise_interrupted)
    interrupts = 0
    try:
        for index in range(400):
            with contextlib.suppress(Interrupted):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0001 * (1 + index % 40))
                    for _ in range(20):
                        logits_after(model, tokens)
                except Interrupted:
                    interrupts += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert interrupts > 100
    np.testing.assert_array_equal(logits_after(model, tokens), expected)


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, -1, 1.5, True, 1000, "2"])
def test_threads_must_be_a_sensible_number(threads, checkpoints) -> None:
    with pytest.raises(OptionError, match="threads is"):
        tiny(checkpoints, "llama", threads=threads)


def test_an_unknown_dtype_is_refused_by_name(checkpoints) -> None:
    with pytest.raises(OptionError, match=r"dtype is 'float16'.*'bfloat16' or 'int8'"):
        tiny(checkpoints, "llama", "float16")


def test_an_unknown_cache_dtype_is_refused_by_name(checkpoints) -> None:
    with pytest.raises(OptionError, match=r"cache_dtype is 'int8'.*'float32' or 'bfloat16'"):
        load(tiny_checkpoint(checkpoints, "llama"), cache_dtype="int8")


def test_too_little_memory_is_said_with_both_numbers(checkpoints, monkeypatch) -> None:
    class Little:
        available = 150_000_000

    monkeypatch.setattr(psutil, "virtual_memory", Little)
    with pytest.raises(InsufficientMemoryError, match=r"0\.2 GB in float32.*0\.1 GB.*bfloat16"):
        tiny(checkpoints, "llama")
    with pytest.raises(InsufficientMemoryError, match="smaller model"):
        tiny(checkpoints, "llama", "bfloat16")


def test_a_session_of_another_model_is_refused(checkpoints) -> None:
    one, other = tiny(checkpoints, "llama"), tiny(checkpoints, "qwen2")
    with pytest.raises(InputError, match="another model"):
        one.forward([Rows(other.new_session(), [1])])


def test_nan_weights_are_found_while_loading(checkpoints) -> None:
    folder = tiny_checkpoint(checkpoints, "llama", seed=99)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4:] = np.float32("nan").tobytes()
    file.write_bytes(data)
    with pytest.raises(CorruptModelError, match="NaN"):
        load(folder)


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, 0.0, 3e38], np.float32)
    bits = to_bfloat16(values)
    back = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(back[:5], np.float32([1.0, 1.0, 1.015625, -2.5, 0.0]))
    assert np.isfinite(back[5])


# -- kernels on disk ---------------------------------------------------------------------------

# A kernel of one line: compiling the real one takes half a minute.
PREPARE = """
import numpy as np
from numba import types
from foretell._kernel_cache import Kernel

def double(values):
    values *= 2

values = np.arange(3)
Kernel(double, types.void(types.int64[::1])).prepare(print)(values)
assert values.tolist() == [0, 2, 4]
"""


def prepare(cache: Path, before: str = "", **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", before + PREPARE],
        env={**os.environ, "FORETELL_CACHE": str(cache), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout


@pytest.mark.parametrize(
    ("kind", "damage"), [("nbc", "a flipped bit"), ("nbi", "nothing left"), ("json", "gone")]
)
def test_kernels_are_compiled_once_and_a_damaged_cache_is_made_anew(kind, damage, tmp_path) -> None:
    assert "compiling" in prepare(tmp_path)
    assert prepare(tmp_path) == ""
    (file,) = tmp_path.rglob(f"*.{kind}")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data if damage == "a flipped bit" else b"")
    if damage == "gone":
        file.unlink()
    assert "compiling" in prepare(tmp_path)
    assert prepare(tmp_path) == ""


def test_a_full_disk_costs_the_compile_time_only(tmp_path) -> None:
    full = """
from numba.core import caching
def no_room(*_):
    raise OSError(28, "No space left on device")
caching.IndexDataCacheFile._save_data = no_room
"""
    assert "compiling" in prepare(tmp_path, full)
    assert "compiling" in prepare(tmp_path)
    assert prepare(tmp_path) == ""


def test_code_that_numba_will_not_keep_runs_all_the_same(tmp_path) -> None:
    assert "compiling" in prepare(tmp_path, NUMBA_OPT="0")


def test_a_cache_that_cannot_be_written_costs_the_compile_time_only(tmp_path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a directory")
    assert "compiling" in prepare(in_the_way)
