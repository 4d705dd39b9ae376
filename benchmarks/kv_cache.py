"""A decode step with keys and values in int8, in turns with 16 bits: ``python -m benchmarks.kv_cache MODEL``.

The caches hold random numbers, so that every page is read from memory. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import product

import torch

from paceline import LLM
from paceline.core.nodes import Nodes
from paceline.kernels import native
from paceline.models.base import cache_of
from paceline.models.native.model import NativeModel
from paceline.tools.bench.offline import machine, versions

DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8}


def measure(model: NativeModel, rows: int, context: int, turns: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step of one token a row, and of its attention, by dtype: medians of ``turns``."""
    caches = {name: cache_of(model, rows, context + 1, dtype) for name, dtype in DTYPES.items()}
    for cache in caches.values():
        cache.randomise(rows, context, torch.Generator().manual_seed(0))
    place = torch.arange(rows)
    nodes = Nodes(torch.randint(0, model.vocab_size, (rows,)), place, torch.full((rows,), context))
    attention = native.PHASES.index("attention")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in caches}
    model.timed = True
    for turn, (name, cache) in product(range(turns + 1), caches.items()):
        model.seconds.zero_()
        start = time.perf_counter()
        model.logits(model.forward(nodes, cache).hidden)
        if turn:  # the first one warms up
            found[name].append((1e3 * (time.perf_counter() - start), 1e3 * float(model.seconds[attention])))
    model.timed = False
    medians = {name: [statistics.median(part) for part in zip(*times, strict=True)] for name, times in found.items()}
    return {name: {"step_ms": round(step, 3), "attention_ms": round(ms, 3)} for name, (step, ms) in medians.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a checkpoint that runs on the CPU kernels")
    parser.add_argument("--quantization", choices=["int8", "int4"], default=None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args(arguments)
    longest = max(options.contexts) + 8
    llm = LLM(options.model, drafter=None, quantization=options.quantization, max_batch_size=1, max_model_len=longest)
    model = llm.engine.models.target
    assert isinstance(model, NativeModel), "the CPU kernels do not run this model"
    steps = []
    for rows, context in product(options.rows, options.contexts):
        found = measure(model, rows, context, options.turns)
        ratios = {part: round(found["int8"][part] / found["bf16"][part], 3) for part in found["bf16"]}
        steps.append({"rows": rows, "context": context, **found, "int8_over_bf16": ratios})
        print(json.dumps(steps[-1]), flush=True)
    print(json.dumps({"model": options.model, "steps": steps, "machine": machine(), "versions": versions()}))


if __name__ == "__main__":
    main()
