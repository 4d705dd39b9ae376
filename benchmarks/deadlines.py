"""How much later than its time budget a call returns, and how many tokens its answers have by then; in one process.

    python benchmarks/deadlines.py smollm2-135m --quantization int8 --output deadlines.json

Each call has a prompt of its own, of random tokens, and sampled answers that never end by themselves. "late_ms" counts
from the deadline to the return of ``LLM.generate``; a negative number is early. The very first call meets an engine
that knows nothing of the machine, and stands alone. The last line of the standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.cli.document import end
from paceline.tools.bench.offline import machine, versions


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.05, 0.1, 1.0], help="seconds")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="answers of a call")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 512], help="tokens")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--draft-model")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(given)


def call(llm: LLM, prompt: list[int], rows: int, budget: float, seed: int) -> tuple[float, int]:
    """Milliseconds from the deadline to the return, and the tokens of all answers."""
    room = llm.engine.max_model_len - len(prompt)
    params = SamplingParams(n=rows, max_tokens=room, time_budget=budget, ignore_eos=True, seed=seed)
    began = time.monotonic()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    late = 1000 * (time.monotonic() - began - budget)
    return late, sum(len(answer.token_ids) for answer in output.outputs)


def summary(calls: Sequence[tuple[float, int]]) -> dict[str, float]:
    """The median and the extremes of a cell."""
    late = [ms for ms, _ in calls]
    return {
        "late_ms_median": statistics.median(late),
        "late_ms_max": max(late),
        "late_ms_min": min(late),
        "tokens_median": statistics.median(tokens for _, tokens in calls),
    }


def measure(llm: LLM, options: argparse.Namespace) -> dict[str, Any]:
    """All cells; each call's prompt is new."""
    rng, seeds = random.Random(0), itertools.count()

    def calls(budget: float, rows: int, tokens: int, repeats: int) -> list[tuple[float, int]]:
        prompts = [[rng.randrange(llm.engine.models.target.vocab_size) for _ in range(tokens)] for _ in range(repeats)]
        return [call(llm, prompt, rows, budget, next(seeds)) for prompt in prompts]

    ((first, _),) = calls(options.budgets[0], options.rows[0], options.prompts[0], 1)
    cells = [
        {"budget": budget, "rows": rows, "prompt": tokens} | summary(calls(budget, rows, tokens, options.repeats))
        for budget, rows, tokens in itertools.product(options.budgets, options.rows, options.prompts)
    ]
    return {"first_call_late_ms": first, "cells": cells}


def main(given: Sequence[str] | None = None) -> None:
    """From the command line."""
    options = arguments(given)
    named = {name: getattr(options, name) for name in ("draft_model", "quantization", "threads")}
    chosen: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    llm = LLM(options.model, max_batch_size=max(options.rows), max_model_len=2048, **chosen)
    sys.stdout.write(llm.engine.describe() + "\n")
    found = measure(llm, options)
    for cell in found["cells"]:
        sys.stdout.write(", ".join(f"{name} {value:.4g}" for name, value in cell.items()) + "\n")
    told = {name: value for name, value in vars(options).items() if name != "output"}
    document = {"benchmark": "deadlines", "options": told, "machine": machine(), "versions": versions(), **found}
    end(document, options.output)


if __name__ == "__main__":
    main()
