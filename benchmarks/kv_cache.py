"""A step over caches of one length: pages over rows side by side, and 8 bits over 16, in turn in one process.

    PYTHONPATH=src:. python -m benchmarks.kv_cache --output kv-cache.json

RANDOM WEIGHTS: four layers with the attention of Qwen2.5-1.5B and small products, so that attention is most of a step.
Keys and values are random. Sides take turns step by step; ratios are of the medians of a repeat, and the median of all
repeats is shown. The last line of stdout is every repeat's milliseconds, as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.kernels import Shape, random_spec

from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.models.base import cache_of
from paceline.models.native.model import NativeModel
from paceline.tools.bench.offline import machine, versions

SHAPE = Shape(width=1536, layers=4, heads=12, kv_heads=2, head_dim=128, ffn=1024, vocab_size=4096)
SIDES = {"rows": (False, torch.bfloat16), "pages": (True, torch.bfloat16), "int8": (True, torch.int8)}


def filled_cache(model: NativeModel, side: str, rows: int, positions: int) -> KVCache:
    """Return a cache with ``positions`` random keys and values a row, and room for one more."""
    model.paged, dtype = SIDES[side]
    cache = cache_of(model, rows, positions + 1, dtype)
    cache.randomise(rows, positions, torch.Generator().manual_seed(0))
    return cache


def step_times(model: NativeModel, caches: dict[str, KVCache], nodes: Nodes, seconds: float) -> dict[str, list[float]]:
    """Return milliseconds [whole step, attention] of each cache: medians of steps that take turns for ``seconds``."""
    steps: dict[str, list[tuple[float, float]]] = {side: [] for side in caches}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(steps["rows"]) < 5:
        for side, cache in caches.items():
            model.seconds.zero_()
            start = time.perf_counter()
            model.forward(nodes, cache)
            steps[side].append((1000 * (time.perf_counter() - start), 1000 * model.seconds[-1].item()))
    return {side: [*map(statistics.median, zip(*found, strict=True))] for side, found in steps.items()}


def measure(model: NativeModel, rows: int, positions: int, repeats: int, seconds: float) -> dict[str, Any]:
    """Return the times of each repeat, and ratios [whole step, attention] of the sides."""
    caches = {side: filled_cache(model, side, rows, positions) for side in SIDES}
    nodes = Nodes(torch.arange(rows) % SHAPE.vocab_size, torch.arange(rows), torch.full((rows,), positions))
    model.timed = True
    for cache in caches.values():
        model.forward(nodes, cache)
    times = [step_times(model, caches, nodes, seconds) for _ in range(repeats)]
    ratios = {
        f"{side}_over_{base}": [
            round(statistics.median(each[side][part] / each[base][part] for each in times), 3) for part in (0, 1)
        ]
        for side, base in (("pages", "rows"), ("int8", "pages"))
    }
    return {"rows": rows, "positions": positions, "ms": times} | ratios


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--positions", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a repeat")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    spec = random_spec(SHAPE, max(options.positions) + 1)
    model = NativeModel(spec, "random weights", quantization="int8", threads=options.threads)
    found = []
    print("rows positions   pages over rows: step, attention   int8 over 16 bits: step, attention")
    for rows in options.rows:
        for positions in options.positions:
            found.append(measure(model, rows, positions, options.repeats, options.seconds))
            pages, int8 = (found[-1][name] for name in ("pages_over_rows", "int8_over_pages"))
            print(
                f"{rows:4} {positions:9}   {pages[0]:24.3f} {pages[1]:9.3f} {int8[0]:26.3f} {int8[1]:9.3f}", flush=True
            )
    what = {"machine": machine(options.threads), "versions": versions(), "kernels": model.kernels, "cells": found}
    if options.output is not None:
        options.output.write_text(json.dumps(what) + "\n")
    print(json.dumps(what))


if __name__ == "__main__":
    main()
