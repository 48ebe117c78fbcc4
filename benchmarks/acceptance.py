"""How much of a draft each accept rule keeps, on the demo model.

    python benchmarks/acceptance.py --output acceptance.json

The drafter is `ngram`, a smoothed n-gram model over the request, which has a real q. Every rule
decodes the same prompts with the same seeds at each temperature. Acceptance is vLLM's
draft_acceptance_rate (accepted / drafted), once more for first tokens alone; the mean length counts
the correction or bonus.
`best_first_token` is what any rule can accept of a first token at most: the sum of min(p, q),
averaged over the places where `match` began a draft. `rejection` reaches it on average.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np

from foretell import Engine, Generation, Rows, SamplingParams, __version__
from foretell._sampling import DraftSampler, RequestSampler
from foretell._verify import RULES, Origin
from foretell.drafters import Ngram

TEMPERATURES = (0.3, 0.7, 1.0)
PROMPTS = (
    "Please correct the grammar mistakes in the following text. Answer with the whole corrected "
    "text.\n\nThe ferry leaves the harbour at nine in the morning. It arive on the island at ten. "
    "The last ferry leaves the island at six in the evening. Tickets costs four pounds for adults "
    "and two pounds for childrens. Dogs travels for free, but they has to stay on deck.",
    "Summarize in two sentences: The lighthouse stood on a rock half a mile from the shore. Every "
    "evening the keeper climbed its two hundred and twelve steps, trimmed the lamp and wrote the "
    "weather into a book: wind from the west, four; sea moderate; two ships passed. In winter the "
    "boat could not cross for weeks, and the keeper read the old books again from the beginning.",
    "Write a Python function that returns the sum of the squares of the even numbers in a list, "
    "and then the same function with a for loop.",
    "What are the steps to make a cup of tea? Number them.",
    "Translate to French: The cat is on the table. The dog is under the table. The book is on the "
    "chair. The bird is in the garden. The tree is in the garden.",
    "Write a short story about a river and a bridge.",
)


def run(engine: Engine, prompt: str, rule: str, options: dict[str, Any]) -> Generation:
    messages = [{"role": "user", "content": prompt}]
    return engine.generate(messages=messages, verification=rule, **options)


def best_acceptances(
    engine: Engine, result: Generation, prompt: str, temperature: float
) -> list[float]:
    """The sum of min(p, q) at every place of a text at which a step began."""
    tokens = engine.encode(messages=[{"role": "user", "content": prompt}])
    whole = [*tokens, *result.token_ids]
    sampler = RequestSampler(SamplingParams(temperature=temperature))
    drafter = Ngram()
    drafter.sample_with(DraftSampler(sampler, engine.model.vocab_size, shares_noise=True))
    drafter.start(tokens)
    session = engine.model.new_session()
    engine.model.forward([Rows(session, tokens[:-1], logits="none")])
    session.keep(range(len(tokens) - 1))
    sums = []
    logits = engine.model.forward([Rows(session, whole[len(tokens) - 1 : -1])]).logits
    for index, row in enumerate(logits[1:], start=1):  # the first token is never drafted
        if result.origins[index - 1] is Origin.DRAFT:
            continue
        context = whole[: len(tokens) + index]
        drafter.propose(context, 1)
        own = np.log(drafter.distribution(context)).astype(np.float32)
        p = sampler.distribution(row, context, len(context))
        sums.append(float(np.minimum(p, sampler.distribution(own, context, len(context))).sum()))
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()

    engine = Engine(options.model, drafters=["ngram"], threads=options.threads)
    began = time.perf_counter()
    table: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        counts = {rule: np.zeros(5, int) for rule in RULES}
        best: list[float] = []
        for prompt in PROMPTS:
            for seed in range(options.seeds):
                asked = {
                    "temperature": temperature,
                    "seed": seed,
                    "max_tokens": options.max_tokens,
                    "num_draft_tokens": options.num_draft_tokens,
                }
                for rule in RULES:
                    result = run(engine, prompt, rule, asked)
                    stats = result.stats
                    counts[rule] += (
                        stats.num_drafts,
                        stats.num_draft_tokens,
                        stats.num_accepted_tokens,
                        sum(stats.num_accepted_tokens_per_pos[:1]),
                        len(result.token_ids),
                    )
                    if rule == "match" and len(result.token_ids) > 2:
                        best.extend(best_acceptances(engine, result, prompt, temperature))
        for rule, counted in counts.items():
            drafts, drafted, accepted, first, tokens = counted.tolist()
            row = {
                "temperature": temperature,
                "verification": rule,
                "num_tokens": tokens,
                "num_drafts": drafts,
                "num_draft_tokens": drafted,
                "num_accepted_tokens": accepted,
                "draft_acceptance_rate": accepted / drafted,
                "first_token_acceptance": first / drafts,
                "mean_acceptance_length": 1 + accepted / drafts,
            }
            table.append(row)
            print(
                f"temperature {temperature}  {rule:10} acceptance "
                f"{row['draft_acceptance_rate']:.3f}  of first tokens "
                f"{row['first_token_acceptance']:.3f}  mean length "
                f"{row['mean_acceptance_length']:.2f}  ({drafts} drafts, {tokens} tokens)",
                flush=True,
            )
        table.append({"temperature": temperature, "best_first_token": float(np.mean(best))})
        print(f"temperature {temperature}  of the first drafted token at most {np.mean(best):.3f}")
    record = {
        "foretell": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "model": options.model,
        "num_draft_tokens": options.num_draft_tokens,
        "max_tokens": options.max_tokens,
        "num_prompts": len(PROMPTS),
        "seeds": options.seeds,
        "seconds": time.perf_counter() - began,
        "results": table,
    }
    options.output.write_text(json.dumps(record, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
