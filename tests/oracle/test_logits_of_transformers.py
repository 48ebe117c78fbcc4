"""On random configs of every family the cpu backend gives transformers' logits.

The checkpoints are made and saved by transformers itself, so its present way
of naming, sharding and describing a model is what the backend has to read.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from foretell._model import Rows
from foretell.backends.cpu import load

torch = pytest.importorskip("torch", reason="needs: pip install torch")
transformers = pytest.importorskip("transformers", reason="needs: pip install transformers")

TOLERANCE = 1e-3
CONFIG_CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
ROPE_SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)


def random_config(family: str, seed: int) -> Any:
    """Odd and even sizes, shared and unshared key heads, every option the family has."""
    draw = random.Random(f"{family} {seed}")
    key_heads = draw.choice([1, 2, 3])
    heads = key_heads * draw.choice([1, 2, 3])
    head_dim = draw.choice([6, 8, 10, 16, 32])
    hidden = heads * head_dim if family == "qwen2" else heads * draw.randint(5, 24)
    options: dict[str, Any] = {
        "vocab_size": draw.randint(60, 400),
        "hidden_size": hidden,
        "intermediate_size": draw.randint(20, 200),
        "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": 256,
        "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        "tie_word_embeddings": seed in (0, 3, 4),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([1e4, 5e5, 1e6])},
        # The default of 0.02 would give such narrow models logits that are nearly zero.
        "initializer_range": 1.5 / hidden**0.5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family != "qwen2":
        options["head_dim"] = head_dim
    if family == "llama":
        # By seed and not by chance, so that every kind has its turn.
        options["attention_bias"] = seed % 2 == 0
        options["mlp_bias"] = seed % 3 == 0
        options["rope_parameters"].update(ROPE_SCALINGS[seed % 3])
    if family == "mistral":
        options["sliding_window"] = None
    if family == "qwen3":
        options["attention_bias"] = seed % 2 == 0
    return CONFIG_CLASSES[family](**options)


@torch.no_grad()
def random_model(family: str, seed: int, dtype: str) -> Any:
    """A float32 model whose weights can be stored in `dtype` without loss."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        random_config(family, seed), attn_implementation="eager", dtype=torch.float32
    ).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            # transformers starts norms at exactly 1 and biases at exactly 0, which would
            # hide a backend that leaves them out.
            parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))
        parameter.copy_(parameter.to(getattr(torch, dtype)))
    return model


def save(model: Any, folder: Path, dtype: str, *, sharded: bool) -> Path:
    """Store the model as transformers does, in `dtype`."""
    stored = transformers.AutoModelForCausalLM.from_config(
        model.config, dtype=getattr(torch, dtype)
    )
    stored.load_state_dict(model.state_dict())
    size = sum(parameter.nbytes for parameter in stored.parameters())
    stored.save_pretrained(folder, max_shard_size=size // 3 if sharded else size)
    files = list(folder.glob("*.safetensors"))
    assert (len(files) > 1) == sharded, files
    return folder


@torch.inference_mode()
def logits_of_transformers(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", CONFIG_CLASSES)
def test_a_saved_random_model_gives_the_same_logits(
    family: str, seed: int, dtype: str, sharded: bool, tmp_path: Path
) -> None:
    model = random_model(family, seed, dtype)
    folder = save(model, tmp_path / "model", dtype, sharded=sharded)
    draw = random.Random(seed)
    tokens = [draw.randrange(model.config.vocab_size) for _ in range(draw.randint(30, 90))]
    expected = logits_of_transformers(model, tokens)

    ours = load(folder, dtype=dtype, threads=1)
    output = ours.forward([Rows(ours.new_session(), tokens, logits="all")])

    difference = float(np.abs(output.logits - expected).max())
    print(f"{family}, seed {seed}: logits within {difference:.1e}, spread {expected.std():.1f}")
    assert expected.std() > 0.5, "too flat to prove anything"
    assert difference < TOLERANCE


@pytest.mark.parametrize("family", CONFIG_CLASSES)
def test_each_node_of_a_draft_tree_gives_the_logits_of_its_own_path(
    family: str, tmp_path: Path
) -> None:
    model = random_model(family, 11, "float32")
    folder = save(model, tmp_path / "model", "float32", sharded=False)
    draw = random.Random(11)
    prompt = [draw.randrange(model.config.vocab_size) for _ in range(40)]
    nodes = [draw.randrange(model.config.vocab_size) for _ in range(7)]
    parents = [-1, 0, 0, 1, 1, 2, 3]

    ours = load(folder, dtype="float32", threads=1)
    session = ours.new_session()
    ours.forward([Rows(session, prompt, logits="none")])
    session.keep(list(range(len(prompt))))
    output = ours.forward([Rows(session, nodes, parents, logits="all")])

    for node in range(len(nodes)):
        path = []
        ancestor = node
        while ancestor >= 0:
            path.insert(0, nodes[ancestor])
            ancestor = parents[ancestor]
        expected = logits_of_transformers(model, prompt + path)[-1]
        assert float(np.abs(output.logits[node] - expected).max()) < TOLERANCE
