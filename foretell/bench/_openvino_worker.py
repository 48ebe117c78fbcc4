"""OpenVINO GenAI in a process of its own, for ``foretell bench``."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
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
        model = settings["model"]
        if settings["dtype"] == "float32":
            # Else it computes in bfloat16 where the processor can.
            options["INFERENCE_PRECISION_HINT"] = "f32"
            if model.endswith(".gguf"):
                model = str(expanded(Path(model)))
        if settings["modes"] == ["prompt_lookup"]:
            options["prompt_lookup"] = True
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.LLMPipeline(
            model, "CPU", scheduler_config=scheduler, **options
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


def expanded(file: Path) -> Path:
    """A folder with the model of a GGUF file, its 16-bit weights as float32; made if not there.

    OpenVINO reads no float32 from GGUF, and keeps 16-bit weights as they are in memory.
    """
    import numpy as np
    import openvino
    import openvino_genai
    from openvino import opset13

    target = file.with_name(f"{file.stem}-openvino-float32")
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=file.parent) as name:
        own, made = Path(name) / "read", Path(name) / "made"
        own.mkdir()
        made.mkdir()
        (own / file.name).symlink_to(file)
        # It writes what it has read beside the file.
        openvino_genai.LLMPipeline(str(own / file.name), "CPU", enable_save_ov_model=True)
        model = openvino.Core().read_model(own / "openvino_model.xml")
        for node in model.get_ops():
            if node.get_type_name() != "Convert":
                continue
            source = node.input_value(0).get_node()
            kind = node.get_output_element_type(0)
            if source.get_type_name() == "Constant" and kind == openvino.Type.f32:
                constant = opset13.constant(source.data.astype(np.float32))
                for reader in list(node.output(0).get_target_inputs()):
                    reader.replace_source_output(constant.output(0))
        openvino.save_model(model, made / "openvino_model.xml", compress_to_fp16=False)
        for part in own.glob("openvino_*tokenizer.*"):
            part.rename(made / part.name)
        made.rename(target)
    return target


def run() -> None:
    """The process's whole life."""
    main(OpenVinoWorker)
