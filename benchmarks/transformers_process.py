"""transformers' own greedy decoding, in a process of its own, for `speed.py`.

It has its own thread pool, and may run under another Python. Requests and answers
are lines of JSON over stdin and stdout:

    {"prompt": [504, 3575], "max_tokens": 64}
    {"decode_seconds": 4.1, "total_seconds": 4.3, "token_ids": [...]}

Started as: transformers_process.py GGUF_FILE THREADS. The first line it writes has the
versions, or what is missing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

INSTALL = "pip install torch transformers accelerate gguf"


class TokenClock:
    """A transformers streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Called with the prompt first, then with each new token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Called after the last token."""


def serve(path: Path, threads: int, answers: TextIO) -> None:
    """Load the model, say which versions these are, then answer requests until stdin ends."""
    try:
        import accelerate  # noqa: F401  (transformers reads GGUF files with it)
        import gguf  # noqa: F401
        import torch
        import transformers
    except ImportError as error:
        send(answers, {"missing": f"{error}; {INSTALL}"})
        return
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    # Every run is as long as the other side's, which ignores the end of text too.
    model.generation_config.eos_token_id = None
    send(answers, {"torch": torch.__version__, "transformers": transformers.__version__})
    for line in sys.stdin:
        request = json.loads(line)
        clock = TokenClock()
        prompt = torch.tensor([request["prompt"]])
        start = time.perf_counter()
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request["max_tokens"],
            do_sample=False,
            streamer=clock,
        )
        total = time.perf_counter() - start
        # times[0] is the prompt, times[1] the token that prefill gives.
        send(
            answers,
            {
                "decode_seconds": clock.times[-1] - clock.times[1],
                "total_seconds": total,
                "token_ids": output[0, prompt.shape[1] :].tolist(),
            },
        )


def send(answers: TextIO, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=answers, flush=True)


if __name__ == "__main__":
    # Whatever a library prints must not get among the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Path(sys.argv[1]), int(sys.argv[2]), answers)
