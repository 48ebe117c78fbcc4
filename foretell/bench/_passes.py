"""T(k) of a loaded model against the limits of the machine, and where its time goes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from foretell._model import Rows
from foretell.backends.cpu._model import CpuModel
from foretell.bench._limits import Bandwidth, MatrixProduct, filled_session, work_of
from foretell.bench._watch import Watch

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
PROFILE_WIDTHS = (1, 4, 8)
CONTEXT = 512
ROUNDS = 5
TRIES = 3


def measure_passes(
    model: CpuModel,
    *,
    widths: Sequence[int] = WIDTHS,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    buffer_bytes: int | None = None,
    matrix_size: int | None = None,
) -> dict[str, Any]:
    """Median seconds of passes of each width, beside the limit at the rates of the same rounds.

    Passes have all their logits, after ``context`` positions whose cache holds random numbers: no
    time depends on which. Every width is measured once a round, between readings of the memory's
    bandwidth and of NumPy's rate of arithmetic.
    """
    bandwidth = Bandwidth(model.threads, **({"size": buffer_bytes} if buffer_bytes else {}))
    product = MatrixProduct(**({"size": matrix_size} if matrix_size else {}))
    work, watch = work_of(model), Watch()
    context = min(context, model.max_length - max(widths))
    session = filled_session(model, context)

    def run(width: int) -> None:
        model.forward([Rows(session, list(range(10, 10 + width)), logits="all")])
        session.keep([])

    seconds: dict[int, list[float]] = {width: [] for width in widths}
    rates: list[tuple[float, float]] = []
    watch.look()
    for round_ in range(rounds + 1):
        rate = bandwidth.measure(watch, TRIES)[0], product.measure(watch, TRIES)[0]
        run(1)  # what lies in caches is the model's again
        for width in widths:
            sample = watch.undisturbed(TRIES, lambda width=width: run(width))  # type: ignore[misc]
            if round_:  # the first round pays for page faults
                seconds[width].append(sample.seconds)
        rates += [rate] if round_ else []
    bytes_per_second = statistics.median(rate[0] for rate in rates)
    operations_per_second = statistics.median(rate[1] for rate in rates)
    parts = []
    for width in PROFILE_WIDTHS:
        if width in widths:
            with model.profile() as shares:
                for _ in range(rounds):
                    run(width)
            whole = statistics.median(seconds[width])
            parts.append(
                {
                    "width": width,
                    "seconds": {part: share * whole for part, share in shares.items() if share},
                }
            )
    watch.close()
    return {
        "context": context,
        "bytes_per_second": bytes_per_second,
        "operations_per_second": operations_per_second,
        "widths": [
            {
                "width": width,
                "seconds": statistics.median(taken),
                "limit_seconds": max(
                    work.pass_bytes(context) / bytes_per_second,
                    work.operations(context, width) / operations_per_second,
                ),
            }
            for width, taken in seconds.items()
        ],
        "parts": parts,
    }
