"""OpenVINO GenAI in a process of its own, for ``foretell bench``."""

from __future__ import annotations

import time
from typing import Any

from foretell.bench._protocol import Answer, Missing, Request, Worker, main

INSTALL = "pip install openvino-genai"
LOOKUP_TOKENS, LOOKUP_NGRAM = 5, 3
"""What OpenVINO GenAI's own example of prompt lookup uses."""


class OpenVinoWorker(Worker):
    """A pipeline on the CPU. Its modes: "plain", "prompt_lookup"; each has its own pipeline.

    It is given token ids, and keeps nothing between requests: its prefix cache would remember
    earlier repetitions as well as earlier turns.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        try:
            import openvino
            import openvino_genai
        except ImportError as error:
            raise Missing(f"{error}; {INSTALL}") from None
        self._openvino, self._genai = openvino, openvino_genai
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings["threads"]}
        if settings["dtype"] == "float32":
            # Else it computes in bfloat16 where the processor can.
            options["INFERENCE_PRECISION_HINT"] = "f32"
        if settings["modes"] == ["prompt_lookup"]:
            options["prompt_lookup"] = True
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.LLMPipeline(
            settings["model"], "CPU", scheduler_config=scheduler, **options
        )
        self.versions = {
            "openvino": openvino.get_version(),
            "openvino-genai": openvino_genai.get_version(),
        }

    def answer(self, request: Request) -> Answer:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.apply_chat_template = False
        config.stop_token_ids = set(request.stop_token_ids)
        sampling = dict(request.sampling)
        config.do_sample = bool(sampling.get("temperature"))
        if config.do_sample:
            config.rng_seed = sampling.pop("seed", 0)
            for name, value in sampling.items():
                setattr(config, name, value)
        if request.mode == "prompt_lookup":
            config.num_assistant_tokens = LOOKUP_TOKENS
            config.max_ngram_size = LOOKUP_NGRAM
        ids = self._tensor(list(request.prompt))
        mask = self._tensor([1] * len(request.prompt))
        start = time.perf_counter()
        result = self._pipeline.generate(self._genai.TokenizedInputs(ids, mask), config)
        total = time.perf_counter() - start
        tokens = [int(token) for token in result.tokens[0]]
        metrics = result.perf_metrics
        first = float(metrics.get_ttft().mean) / 1000
        steps = list(metrics.raw_metrics.m_batch_sizes)[1:]  # tokens of each pass after the prompt
        return Answer(
            tokens=tokens,
            text="",
            num_tokens=len(tokens),
            decode_tokens=sum(steps),
            decode_seconds=max(float(metrics.get_generate_duration().mean) / 1000 - first, 0.0),
            total_seconds=total,
            prompt_tokens=len(request.prompt),
            stats={
                "num_steps": len(steps),
                "num_accepted_tokens": sum(count - 1 for count in steps),
            },
        )

    def _tensor(self, values: list[int]) -> Any:
        tensor = self._openvino.Tensor(
            self._openvino.Type.i64, self._openvino.Shape([1, len(values)])
        )
        tensor.data[0, :] = values
        return tensor


def run() -> None:
    """The process's whole life."""
    main(OpenVinoWorker)
