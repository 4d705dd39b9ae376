"""All instruction sets of this CPU in turn: ``PYTHONPATH=src:. python -m benchmarks.instruction_sets --json FILE``.

A decode step (one token per row) and a verification (three draft tokens per row more), forward pass and logits, with
    random weights. All sets share one model's memory, and run one after another between reads of plain memory, in an
    order that rotates: a slow minute falls on all of them. The floor of a step is the larger of the time to
    read weights, keys and values once, and of its multiply-adds at the set's own rate on weights in the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from benchmarks.kernels import _READ_BYTES, SHAPES, Reader, random_spec

from paceline.core.cache import KVCache
from paceline.core.hardware import cpu_name
from paceline.core.nodes import Nodes
from paceline.engine.utilisation import kernel_rate
from paceline.kernels import native
from paceline.kernels.pack import Format
from paceline.models.native.model import HEAD_FORMAT, LAYER_FORMAT, NativeModel, Quantization

_ROWS = (1, 4, 8, 16)
_TOKENS = {"decode": 1, "verify 3": 4}  # per row
_TURN_SECONDS = 0.05  # short steps run several times per turn, because a read evicts their data from the caches
_FORMATS: dict[str, Quantization | None] = {"int8": "int8", "int4": "int4", "bf16": None}


@dataclass(frozen=True)
class Result:
    """One step on one set, in milliseconds; medians of the turns.

    over_best: the time over that of the machine's best set, the median of the turns' own ratios.
    """

    shape: str
    format: str
    step: str
    rows: int
    kernels: str
    ms: float
    memory_floor_ms: float
    compute_floor_ms: float
    of_floor: float
    over_best: float


class Machine:
    """The sets under test, their rates in multiply-adds per second, and the reader of plain memory."""

    def __init__(self, sets: Sequence[native.Kernels], threads: int, seconds: float) -> None:
        self.sets, self.threads = sets, threads
        self.reader = Reader(sets[0], threads)
        formats: tuple[Format, ...] = ("int8", "int4", "bf16")
        self.rates = {
            kernels.name: {to: kernel_rate(kernels, to, threads, seconds) for to in formats} for kernels in sets
        }


class Steps:
    """Steps of one model on every set: all decoders are on the same packed weights."""

    def __init__(self, machine: Machine, shape: str, quantization: Quantization | None, context: int) -> None:
        self.machine, self.context, self._quantization = machine, context, quantization
        spec = random_spec(SHAPES[shape], context + max(_TOKENS.values()))
        first = machine.sets[0]
        self.model = NativeModel(spec, shape, quantization=quantization, threads=machine.threads, kernels=first)
        own = self.model.packed_decoder.decoder
        self._decoders = {
            kernels.name: native.NativeDecoder(kernels, own._model, own._keep, machine.threads)
            for kernels in machine.sets
        }

    def step(self, rows: int, tokens: int) -> tuple[Callable[[str], None], int]:
        """A function that runs a step on the set of a name, and the bytes that a step reads."""
        model = self.model
        cache = KVCache(model.kv_layers, rows, self.context + tokens, dtype=model.dtype)
        place = torch.arange(rows).repeat_interleave(tokens)
        positions = (self.context + torch.arange(tokens)).repeat(rows)
        nodes = Nodes(torch.randint(0, model.vocab_size, (rows * tokens,)), place, positions)

        def run(name: str) -> None:
            self.model.packed_decoder.decoder = self._decoders[name]
            model.logits(model.forward(nodes, cache).hidden)

        return run, model.weight_bytes() + 2 * cache.keys.nbytes

    def arithmetic_seconds(self, name: str, tokens: int) -> float:
        """Seconds of a step's multiply-adds at the set's rates on weights in the cache."""
        rates, head = self.machine.rates[name], self.model.vocab_size * self.model.width
        layers = self.model.multiply_adds() - head
        to, head_to = LAYER_FORMAT[self._quantization], HEAD_FORMAT[self._quantization]
        return tokens * (layers / rates[to] + head / rates[head_to])


def in_turn(
    run: Callable[[str], None], names: Sequence[str], reader: Reader, turns: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of a step by set and turn, and of the reads before them."""
    several = {}
    for name in names:
        run(name)
        start = time.perf_counter()
        run(name)
        several[name] = max(1, round(_TURN_SECONDS / (time.perf_counter() - start)))
    steps: dict[str, list[float]] = {name: [] for name in names}
    reads = []
    for turn in range(turns):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            reads.append(reader.seconds())
            start = time.perf_counter()
            for _ in range(several[name]):
                run(name)
            steps[name].append((time.perf_counter() - start) / several[name])
    return steps, reads


def measure(steps: Steps, kind: str, rows: int, turns: int) -> list[Result]:
    """One kind of step at this number of rows, on every set."""
    run, moved = steps.step(rows, _TOKENS[kind])
    names = [kernels.name for kernels in steps.machine.sets]
    seconds, reads = in_turn(run, names, steps.machine.reader, turns)
    memory = moved * statistics.median(reads) / _READ_BYTES
    best = seconds[names[0]]
    results = []
    for name in names:
        took, compute = statistics.median(seconds[name]), steps.arithmetic_seconds(name, rows * _TOKENS[kind])
        results.append(
            Result(
                shape=steps.model.name,
                format=steps.model.quantization or "bf16",
                step=kind,
                rows=rows,
                kernels=name,
                ms=round(1e3 * took, 3),
                memory_floor_ms=round(1e3 * memory, 3),
                compute_floor_ms=round(1e3 * compute, 3),
                of_floor=round(max(memory, compute) / took, 3),
                over_best=round(statistics.median(a / b for a, b in zip(seconds[name], best, strict=True)), 3),
            )
        )
    return results


def _line(result: Result) -> str:
    what = f"{result.shape:13} {result.format} {result.step:8} {result.rows:2} rows {result.kernels:16}"
    floors = f"floor {result.memory_floor_ms:8.2f} memory {result.compute_floor_ms:8.2f} compute"
    return (
        f"{what} {result.ms:8.2f} ms, {floors}, {result.of_floor:4.0%}, {result.over_best:.2f} of the best set's time"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a line per result, write the JSON document."""
    parser = argparse.ArgumentParser(description="All instruction sets of this CPU in turn.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["smollm2-135m", "qwen2.5-1.5b"])
    parser.add_argument("--formats", nargs="+", choices=_FORMATS, default=list(_FORMATS))
    parser.add_argument("--rows", nargs="+", type=int, default=_ROWS)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=11, help="of all sets, for each result")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args(arguments)
    if not native.available():
        sys.exit(f"no kernels to measure: {native.why_none()}")
    machine = Machine(native.available(), options.threads, seconds=0.5)
    print(
        json.dumps(
            {
                name: {to: f"{rate / 1e9:.1f} GMAC/s" for to, rate in rates.items()}
                for name, rates in machine.rates.items()
            }
        )
    )
    results = []
    for shape in options.shapes:
        for name in options.formats:
            steps = Steps(machine, shape, _FORMATS[name], options.context)
            for kind in _TOKENS:
                for rows in options.rows:
                    results += measure(steps, kind, rows, options.turns)
                    print("\n".join(map(_line, results[-len(machine.sets) :])), flush=True)
    if options.json:
        document = {
            "machine": cpu_name(),
            "threads": options.threads,
            "context": options.context,
            "turns": options.turns,
            "multiply_adds_per_second": machine.rates,
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
