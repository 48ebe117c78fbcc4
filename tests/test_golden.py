"""The cpu backend's logits are those of transformers, stored in `tests/golden/`.

`scripts/make_golden.py` made them; the checkpoints are made anew from
`tests/families.py`, so what is compared is the whole way from the files of a
checkpoint to the logits. No torch is needed here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import (
    FAMILIES,
    ConfigStyle,
    StorageDtype,
    checkpoint_digest,
    from_bfloat16,
    make_tensors,
    to_bfloat16,
    write_checkpoint,
)
from numpy.typing import NDArray

from foretell._model import Rows
from foretell.backends.cpu import load

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 1e-3

all_families = pytest.mark.parametrize("family", FAMILIES)


def golden(family: str, dtype: StorageDtype) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Stored arrays and what is said about them, if they belong to today's checkpoint."""
    with np.load(GOLDEN / f"{family}-{dtype}.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    about = json.loads(str(arrays.pop("about")))
    digest = checkpoint_digest(FAMILIES[family], seed=about["seed"], dtype=dtype)
    assert digest == about["digest"], (
        f"{family} is no longer the checkpoint that its logits were stored for; "
        "run: python scripts/make_golden.py"
    )
    return arrays, about


def assert_logits_are_golden(folder: Path, arrays: dict[str, NDArray[Any]], dtype: str) -> None:
    """One pass over all tokens, and the logits at the stored rows within the tolerance."""
    model = load(folder, dtype=dtype, threads=1)
    output = model.forward([Rows(model.new_session(), arrays["tokens"].tolist(), logits="all")])
    logits = output.logits[arrays["rows"]]
    assert logits.shape == arrays["logits"].shape
    difference = float(np.abs(logits - arrays["logits"]).max())
    print(f"{folder.name}, {dtype}: largest difference {difference:.2e}")
    assert difference < TOLERANCE


@all_families
@pytest.mark.parametrize("config_style", ["classic", "modern"])
@pytest.mark.parametrize("shards", [1, 3], ids=["one file", "sharded"])
def test_float32_logits_equal_those_of_transformers(
    family: str, shards: int, config_style: ConfigStyle, tmp_path: Path
) -> None:
    arrays, about = golden(family, "float32")
    folder = write_checkpoint(
        tmp_path / family,
        FAMILIES[family],
        seed=about["seed"],
        shards=shards,
        config_style=config_style,
    )
    assert_logits_are_golden(folder, arrays, "float32")


@all_families
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3], ids=["one file", "sharded"])
def test_a_checkpoint_stored_in_bfloat16_gives_the_same_logits_in_either_dtype(
    family: str, shards: int, dtype: str, tmp_path: Path
) -> None:
    arrays, about = golden(family, "bfloat16")
    folder = write_checkpoint(
        tmp_path / family, FAMILIES[family], seed=about["seed"], dtype="bfloat16", shards=shards
    )
    assert_logits_are_golden(folder, arrays, dtype)


@all_families
def test_float32_weights_are_rounded_to_the_nearest_bfloat16(family: str, tmp_path: Path) -> None:
    arrays, about = golden(family, "bfloat16")
    # Norms and biases may stay in float32 in the backend, so they are rounded before.
    tensors = {
        name: from_bfloat16(to_bfloat16(values)) if values.ndim == 1 else values
        for name, values in make_tensors(FAMILIES[family], seed=about["seed"]).items()
    }
    folder = write_checkpoint(tmp_path / family, FAMILIES[family], tensors=tensors)
    assert_logits_are_golden(folder, arrays, "bfloat16")


@all_families
def test_token_by_token_gives_the_logits_of_one_pass(family: str, tmp_path: Path) -> None:
    arrays, about = golden(family, "float32")
    folder = write_checkpoint(tmp_path / family, FAMILIES[family], seed=about["seed"])
    model = load(folder, dtype="float32", threads=1)
    session = model.new_session()
    rows = []
    for token in arrays["tokens"].tolist():
        rows.append(model.forward([Rows(session, [token])]).logits[0])
        session.keep([0])
    difference = float(np.abs(np.stack(rows)[arrays["rows"]] - arrays["logits"]).max())
    assert difference < TOLERANCE
