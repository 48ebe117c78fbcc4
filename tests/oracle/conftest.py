"""Tests with torch and transformers live, in an environment of their own.

    pip install torch transformers accelerate gguf
    pytest tests/oracle

Without them every test here is skipped, and the stored logits of
`tests/golden/` stand in for transformers.
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def quiet_and_repeatable_transformers() -> None:
    """No progress bars in the log, and one thread: more can change last bits from run to run."""
    torch = pytest.importorskip("torch", reason="needs: pip install torch")
    transformers = pytest.importorskip("transformers", reason="needs: pip install transformers")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
