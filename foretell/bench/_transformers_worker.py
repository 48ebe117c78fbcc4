"""transformers in a process of its own, for ``foretell bench``. The rest needs no torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from foretell.bench._protocol import Answer, Clock, Missing, Request, Worker, main

INSTALL = "pip install torch transformers accelerate gguf"
LOOKUP_TOKENS = 10
"""What transformers' own documentation uses for prompt lookup."""


class TransformersWorker(Worker):
    """``generate``. Its modes: "plain", "prompt_lookup", "assisted" by another model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        try:
            import accelerate  # noqa: F401  (transformers reads GGUF files with it)
            import gguf  # noqa: F401
            import torch
            import transformers
        except ImportError as error:
            raise Missing(f"{error}; {INSTALL}") from None
        torch.set_num_threads(settings["threads"])
        transformers.utils.logging.set_verbosity_error()
        self._torch, self._transformers = torch, transformers
        self._model = self._load(settings["model"], settings["dtype"])
        # What ends an answer is said with each request, and may be nothing.
        self._model.generation_config.eos_token_id = None
        draft = settings["draft"]
        self._assistant = None if draft is None else self._load(draft, settings["dtype"])
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self._rows: list[int] = []
        self._model.register_forward_pre_hook(self._count, with_kwargs=True)
        self._caches: dict[str, tuple[list[int], Any]] = {}

    def _load(self, source: str, dtype: str) -> Any:
        path = Path(source)
        options = {"dtype": getattr(self._torch, dtype)}
        if path.suffix == ".gguf":
            options["gguf_file"] = path.name
            path = path.parent
        return self._transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()

    def _count(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None:
            self._rows.append(int(ids.shape[1]))

    def answer(self, request: Request) -> Answer:
        torch = self._torch
        prompt = torch.tensor([list(request.prompt)])
        options: dict[str, Any] = {"do_sample": False}
        sampling = dict(request.sampling)
        if sampling.get("temperature"):
            torch.manual_seed(sampling.pop("seed", 0))
            options = {"do_sample": True, "top_k": 0, **sampling}
        if request.mode == "prompt_lookup":
            options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        elif request.mode == "assisted":
            options["assistant_model"] = self._assistant
        cache = self._cache(request)
        self._rows.clear()
        clock = _Streamer()
        start = time.perf_counter()
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.max_tokens,
            eos_token_id=list(request.stop_token_ids) or None,
            pad_token_id=0,
            past_key_values=cache,
            streamer=clock,
            **options,
        )
        total = time.perf_counter() - start
        tokens = output[0, prompt.shape[1] :].tolist()
        self._caches[request.mode] = (output[0].tolist(), cache)
        return Answer(
            tokens=tokens,
            text="",
            num_tokens=len(tokens),
            decode_tokens=clock.decode_tokens,
            decode_seconds=clock.decode_seconds,
            total_seconds=total,
            prompt_tokens=len(request.prompt),
            stats={
                "num_steps": len(clock.counts) - 1,
                "num_drafts": sum(rows > 1 for rows in self._rows[1:]),
                "num_draft_tokens": sum(rows - 1 for rows in self._rows[1:]),
                "num_accepted_tokens": sum(count - 1 for count in clock.counts[1:]),
            },
        )

    def _cache(self, request: Request) -> Any:
        """The keys and values of the turn before, as far as the conversation is the same."""
        known, cache = self._caches.pop(request.mode, ([], None))
        if request.turn == 0 or cache is None:
            return self._transformers.DynamicCache()
        same = 0
        longest = min(len(known), len(request.prompt), cache.get_seq_length()) - 1
        while same < longest and known[same] == request.prompt[same]:
            same += 1
        extra = cache.get_seq_length() - same
        if extra:
            cache.crop(-extra)
        return cache


class _Streamer(Clock):
    """What transformers calls a streamer: told of the prompt, then of tokens as they come."""

    def __init__(self) -> None:
        super().__init__()
        self._prompt_came = False

    def put(self, value: Any) -> None:
        if self._prompt_came:
            self.came(int(value.numel()))
        self._prompt_came = True

    def end(self) -> None:
        """Nothing more comes."""


def run() -> None:
    """The process's whole life."""
    main(TransformersWorker)
