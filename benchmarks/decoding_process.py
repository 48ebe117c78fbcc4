"""Plain greedy decoding in a process of its own, by Foretell or by llama.cpp, for `llama_cpp.py`.

Each engine has its own threads, waits on a pipe while others are measured, and may run under
another Python. Requests and answers are lines of JSON over stdin and stdout:

    {"prompt": [504, 3575], "max_tokens": 32}
    {"token_ids": [...], "seconds": [...], "waiting": [...]}

with the time of every step after the first token, and the share of it that threads of the
process waited for a core. Started as

    python -P decoding_process.py foretell|llama.cpp MODEL THREADS [DTYPE]

(-P: or this folder's own llama_cpp.py would be taken for the library). The first line it writes
has the version, or what is missing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

# At the end: what this Python has comes first.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from foretell.bench._watch import Watch

INSTALL = 'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python'
LONGEST = 2048

Start = Callable[[list[int]], int]
"""Reads a prompt and returns the first token."""
Step = Callable[[int], int]
"""Decodes a token and returns the next."""


def foretell_engine(path: str, threads: int, dtype: str) -> tuple[Start, Step, str]:
    """The model's passes with the choice of a token behind them."""
    import numpy as np

    import foretell
    from foretell._model import Rows
    from foretell.backends.cpu._model import load

    model = load(path, dtype=dtype, threads=threads)
    session = model.new_session()

    def forward(tokens: list[int]) -> int:
        output = model.forward([Rows(session, tokens, logits="last")])
        session.keep(range(len(tokens)))
        return int(np.argmax(output.logits[0]))

    def start(prompt: list[int]) -> int:
        session.rollback(session.length)
        return forward(prompt)

    return start, lambda token: forward([token]), foretell.__version__


def llama_cpp_engine(path: str, threads: int) -> tuple[Start, Step, str]:
    """llama.cpp through its C functions, with its own defaults but for the threads."""
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    model_params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_load_model_from_file(path.encode(), model_params)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = LONGEST
    params.n_batch = LONGEST
    params.n_threads = params.n_threads_batch = threads
    context = llama_cpp.llama_new_context_with_model(model, params)
    vocabulary = llama_cpp.llama_n_vocab(llama_cpp.llama_model_get_vocab(model))
    memory = llama_cpp.llama_get_memory(context)

    def forward(tokens: list[int]) -> int:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))):
            raise SystemExit("llama.cpp did not take the tokens")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, (vocabulary,))))

    def start(prompt: list[int]) -> int:
        llama_cpp.llama_memory_clear(memory, True)
        return forward(prompt)

    return start, lambda token: forward([token]), llama_cpp.__version__


def serve(start: Start, step: Step, answers: TextIO) -> None:
    """Answer requests until stdin ends."""
    watch = Watch()
    for line in sys.stdin:
        request = json.loads(line)
        tokens = [start(request["prompt"])]
        seconds: list[float] = []
        waiting: list[float] = []
        watch.look()
        while len(tokens) < request["max_tokens"]:
            sample = watch.time(lambda tokens=tokens: tokens.append(step(tokens[-1])))
            seconds.append(sample.seconds)
            waiting.append(round(sample.waiting, 4))
        send(answers, {"token_ids": tokens, "seconds": seconds, "waiting": waiting})


def send(answers: TextIO, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=answers, flush=True)


def main(answers: TextIO) -> None:
    name, path, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    try:
        if name == "foretell":
            start, step, version = foretell_engine(path, threads, sys.argv[4])
        else:
            start, step, version = llama_cpp_engine(path, threads)
    except ImportError as error:
        send(answers, {"missing": f"{error}; {INSTALL}"})
        return
    send(answers, {"version": version})
    serve(start, step, answers)


if __name__ == "__main__":
    # Whatever a library prints must not get among the answers.
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(own)
