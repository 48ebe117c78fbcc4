"""The command line on a small exact engine: a table model that says one text over and over.

    python tests/fake_engine.py '{"says": "abc ", "seconds": 0.1}' generate --max-tokens 9 hello

runs `foretell` with such an engine, for tests that need a process of their own.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from foretell import Engine, Output, Rows, Tokenizer
from foretell.backends.table import TableModel
from foretell.cli import _load, main
from foretell.cli._load import ModelOptions

END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<|end|>"
    "{% endfor %}"
)


def byte_tokenizer(*, chat: bool = True) -> Tokenizer:
    """One token for each byte, and one that ends a turn."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([END])
    return Tokenizer(
        inner,
        special_tokens={"eos_token": END},
        chat_template=CHAT_TEMPLATE if chat else None,
    )


class SayingModel(TableModel):
    """Says ``says``, whose bytes must all differ, again and again; or once, if it ``ends``.

    A pass takes ``seconds``. ``faulty`` plants an error: in a pass of several rows the last
    row's logits are another token's. ``interrupt_at`` is the pass at which Ctrl-C is pressed.
    """

    def __init__(
        self,
        says: str,
        tokenizer: Tokenizer,
        *,
        ends: bool = False,
        seconds: float = 0.0,
        faulty: bool = False,
        interrupt_at: int = 0,
        max_length: int = 4096,
    ) -> None:
        cycle = tokenizer.encode(says, add_special_tokens=False)
        assert len(set(cycle)) == len(cycle), "a table of order 1 needs a text of unlike bytes"
        end = tokenizer.eos_token_ids[0]
        successors = dict(zip(cycle, [*cycle[1:], end if ends else cycle[0]], strict=True))
        table = np.zeros((tokenizer.vocab_size,) * 2, np.float32)
        for token in range(tokenizer.vocab_size):
            table[token, successors.get(token, cycle[0])] = 1.0
        super().__init__(table, eos_token_ids=[end], max_length=max_length)
        self.tokenizer = tokenizer
        self.seconds = seconds
        self.faulty = faulty
        self.interrupt_at = interrupt_at

    def forward(self, rows: Sequence[Rows]) -> Output:
        time.sleep(self.seconds)
        output = super().forward(rows)
        if self.num_passes == self.interrupt_at:
            signal.raise_signal(signal.SIGINT)
        if self.faulty and output.logits.shape[0] > 1:
            output.logits[-1] = np.roll(output.logits[-1], 1)
        return output


def fake_engine(
    options: ModelOptions | None = None,
    *,
    says: str = "fox jumps",
    chat: bool = True,
    tokenizer: bool = True,
    **settings: Any,
) -> Engine:
    """An engine on a SayingModel, with the drafters that were asked for."""
    model = SayingModel(says, byte_tokenizer(chat=chat), **settings)
    if not tokenizer:
        model.tokenizer = None
    return Engine(model, drafters=list(options.drafters) or None if options else None)


if __name__ == "__main__":
    settings = json.loads(sys.argv.pop(1))
    _load.load_engine = lambda options: fake_engine(options, **settings)
    main()
