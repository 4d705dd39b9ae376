"""The CPU kernels compared with their floor: ``PYTHONPATH=src:. python -m benchmarks.kernels``.

The last line of the output is a JSON document. ``--table FILE ...`` prints what is in such documents as a table.

First the machine is measured: read bandwidth, and the kernels' multiply-adds per second on cached weights. Then come
    whole decode steps (forward and head) with random weights of a shape, or with those of a checkpoint: the floor of a
    step is the larger of the time to read its weights, keys, values and states once, and of its arithmetic. The memory
    speed of a shared machine varies from minute to minute, so every step takes turns with a read of plain memory; step
    and bandwidth are medians of these turns, the parts of a step its fastest times.

A step of a model with recurrent layers applies all but the first of the last step's tokens to the states, as in a round
    whose draft tokens were all accepted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline import LLM
from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.core.recurrent_state import StatefulCache
from paceline.engine.utilisation import fastest, kernel_rate
from paceline.kernels import native
from paceline.kernels.pack import Format
from paceline.kernels.spec import LayerWeights, LinearWeights, NativeSpec, Rotary
from paceline.models.base import cache_of, kv_layers_of
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.native.short_head import column_bytes

_READ_BYTES = 1 << 29
_LEAST_TURNS = 5
_TURN_SECONDS = 0.05
_FORMATS: dict[str, Format] = {"bf16": "bf16", "int8": "int8", "int4": "int4"}
_STEPS = ("1x1", "2x1", "4x1", "8x1", "16x1", "8x4", "16x4")  # rows x tokens per row


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int


SHAPES = {
    "smollm2-135m": Shape(576, 30, 9, 3, 64, 1536, 49152),
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 64, 4864, 151936),
    "qwen2.5-1.5b": Shape(1536, 28, 12, 2, 128, 8960, 151936),
}


class Reader:
    """Reads plain memory with the kernels' own threads."""

    def __init__(self, kernels: native.Kernels, threads: int) -> None:
        self._library, self._arena = kernels.library, native.Arena(kernels.library, _READ_BYTES)
        memory = self._arena.take(_READ_BYTES).fill_(1)
        self._place = native.pool(kernels, threads).handle, memory.data_ptr(), _READ_BYTES // 8
        time.sleep(0.2)  # torch's threads spin for a while after filling the memory, and occupy the cores

    def seconds(self) -> float:
        """Seconds to read all of the memory."""
        start = time.perf_counter()
        self._library.pl_read(*self._place)
        return time.perf_counter() - start


def in_turn(step: Callable[[], object], reader: Reader, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of a step and of a read, taking turns.

    Short steps run several times per turn, because a read evicts their data from the caches.
    """
    several = max(1, round(_TURN_SECONDS / fastest(step, 0)))
    steps: list[float] = []
    reads: list[float] = []
    end = time.perf_counter() + seconds
    while len(steps) < _LEAST_TURNS or time.perf_counter() < end:
        reads.append(reader.seconds())
        start = time.perf_counter()
        for _ in range(several):
            step()
        steps.append((time.perf_counter() - start) / several)
    return steps, reads


@dataclass(frozen=True)
class Machine:
    """The machine's rates."""

    kernels: str
    threads: int
    read_gb_s: float
    gmac_s: dict[str, float]


@dataclass(frozen=True)
class Step:
    """One step and its floor, in milliseconds; phases: parts of the forward pass, on the first thread.

    read_gb_s: of plain memory, in turn with the steps. of_memory_floor: the median of the turns' own ratios.
    """

    shape: str
    format: str
    rows: int
    tokens: int
    context: int
    forward_ms: float
    head_ms: float
    total_ms: float
    read_gb_s: float
    of_memory_floor: float
    memory_floor_ms: float
    compute_floor_ms: float
    phases_ms: dict[str, float]

    @property
    def of_floor(self) -> float:
        return max(self.memory_floor_ms, self.compute_floor_ms) / self.total_ms


def measure_machine(kernels: native.Kernels, reader: Reader, threads: int, seconds: float) -> Machine:
    """Bandwidth of all threads, and the kernels' rate on cached weights."""
    read = _READ_BYTES / fastest(reader.seconds, max(seconds, 0.5)) / 1e9
    rates = {name: round(kernel_rate(kernels, to, threads, seconds) / 1e9, 1) for name, to in _FORMATS.items()}
    return Machine(kernels.name, threads, round(read, 1), rates)


def random_spec(shape: Shape, positions: int) -> NativeSpec:
    """Random weights of a shape; all layers share one, of which packing then makes copies."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

    def linear(outputs: int, inputs: int) -> LinearWeights:
        return LinearWeights((torch.randn(outputs, inputs) * inputs**-0.5).bfloat16())

    layer = LayerWeights(
        qkv=linear(qkv, shape.width),
        attention_out=linear(shape.width, shape.heads * shape.head_dim),
        gate_up=linear(2 * shape.ffn, shape.width),
        down=linear(shape.width, shape.ffn),
        input_norm=torch.ones(shape.width),
        post_norm=torch.ones(shape.width),
    )
    half = shape.head_dim // 2
    return NativeSpec(
        width=shape.width,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        max_positions=positions,
        rotary=Rotary(tuple(10000 ** (-i / half) for i in range(half))),
        embedding=torch.randn(shape.vocab_size, shape.width).bfloat16(),
        final_norm=torch.ones(shape.width),
        layers=[layer] * shape.layers,
    )


def _moved_bytes(model: NativeModel, nodes: Nodes, cache: KVCache, positions: int) -> int:
    """Bytes that a forward pass must move: of a mixture, only the experts that its tokens run through; states twice."""
    read = model.expert_bytes_read()
    model.forward(nodes, cache)
    weights = model.weight_bytes() - _table_bytes(model) - model.expert_bytes() + model.expert_bytes_read() - read
    width = sum(layer.heads * sum(layer.stored) for layer in kv_layers_of(model))
    states = 0 if model.state_shape is None else 2 * model.state_shape.state_bytes
    return weights + cache.rows * (width * positions * model.dtype.itemsize + states)


def _table_bytes(model: NativeModel) -> int:
    """Bytes of tables of which a token reads one line: an untied embedding, in bfloat16, and vectors for each layer."""
    packed = model.packed_decoder.model
    embedding = 0 if model.tied else 2 * model.vocab_size * packed.head.inputs
    inputs = packed.inputs
    return embedding + (inputs.contents.table.outputs * column_bytes(inputs.contents.table) if inputs else 0)


def _resume(cache: KVCache, position: int, applied: int) -> None:
    """Let all slots go on at ``position``, with the last ``applied`` inputs not yet applied to their states."""
    if isinstance(cache, StatefulCache):
        cache.states.base.fill_(position - applied)
        cache.states.count.fill_(applied)


def measure_step(
    model: NativeModel,
    shape: str,
    machine: Machine,
    reader: Reader,
    rows: int,
    tokens: int,
    context: int,
    seconds: float,
) -> Step:
    """One step of ``tokens`` tokens per row over a cache of ``context`` positions."""
    cache = cache_of(model, rows, context + tokens)
    cache.randomise(rows, context, torch.Generator().manual_seed(0))  # untouched memory would be read too fast
    flat = torch.randint(0, model.vocab_size, (rows * tokens,))
    place = torch.arange(rows).repeat_interleave(tokens)
    positions = (context + torch.arange(tokens)).repeat(rows)
    nodes = Nodes(flat, place, positions)

    def run() -> torch.Tensor:
        _resume(cache, context, tokens - 1)
        return model.forward(nodes, cache).hidden

    hidden = run()
    forward = fastest(run, seconds)
    head = fastest(lambda: model.logits(hidden), seconds)
    steps, reads = in_turn(lambda: model.logits(run()), reader, seconds)
    name = model.quantization or "bf16"
    macs = rows * tokens * model.multiply_adds()
    _resume(cache, context, tokens - 1)
    moved = _moved_bytes(model, nodes, cache, context + tokens)
    floors = [moved * read / _READ_BYTES for read in reads]
    return Step(
        shape=shape,
        format=name,
        rows=rows,
        tokens=tokens,
        context=context,
        forward_ms=round(1e3 * forward, 3),
        head_ms=round(1e3 * head, 3),
        total_ms=round(1e3 * statistics.median(steps), 3),
        read_gb_s=round(_READ_BYTES / statistics.median(reads) / 1e9, 1),
        of_memory_floor=round(statistics.median(floor / step for floor, step in zip(floors, steps, strict=True)), 3),
        memory_floor_ms=round(1e3 * statistics.median(floors), 3),
        compute_floor_ms=round(macs / machine.gmac_s[name] / 1e6, 3),
        phases_ms=_phases(run, model, seconds),
    )


def _phases(forward: Callable[[], object], model: NativeModel, seconds: float) -> dict[str, float]:
    """The parts of the fastest forward pass."""
    best, parts = float("inf"), torch.zeros_like(model.seconds)
    model.timed = True
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        model.seconds.zero_()
        forward()
        if float(model.seconds.sum()) < best:
            best, parts = float(model.seconds.sum()), model.seconds.clone()
    model.timed = False
    return {name: round(1e3 * part, 3) for name, part in zip(native.PHASES, parts.tolist(), strict=True)}


def _line(step: Step) -> str:
    floor = f"floor {step.memory_floor_ms:7.2f} memory {step.compute_floor_ms:7.2f} compute"
    parts = ", ".join(f"{name} {ms:.2f}" for name, ms in step.phases_ms.items())
    who = f"{step.shape} {step.format:5} {step.rows:2} x {step.tokens}"
    shares = f"{step.of_memory_floor:4.0%} of memory's, {step.of_floor:4.0%} of the floor"
    head = f"{who}: {step.total_ms:8.2f} ms, {step.read_gb_s:.0f} GB/s, {floor}, {shares}"
    return f"{head} | head {step.head_ms:.2f}, {parts}"


def table(documents: Sequence[dict[str, Any]]) -> str:
    """Return the steps of documents in Markdown: a line for each model and format, a column for each kind of step."""
    steps = [step for document in documents for step in document["steps"]]
    found = {
        (f"{step['shape']}, {step['format']}", f"{step['rows']} x {step['tokens']}"): _cell(step) for step in steps
    }
    names, kinds = (list(dict.fromkeys(key)) for key in zip(*found, strict=True))
    lines = [[name, *(found.get((name, kind), "-") for kind in kinds)] for name in names]
    head = ["model: rows x tokens", *kinds]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def _cell(step: dict[str, Any]) -> str:
    """Milliseconds of a step, the floor's share of them, and what sets the floor."""
    floors = {"memory": step["memory_floor_ms"], "arithmetic": step["compute_floor_ms"]}
    limit = max(floors, key=floors.__getitem__)
    return f"{step['total_ms']:.1f} ms, {100 * floors[limit] / step['total_ms']:.0f} % {limit}"


def _models(options: argparse.Namespace) -> Iterator[tuple[str, NativeModel]]:
    """Every shape and every checkpoint, in every format."""
    for shape in options.shapes:
        spec = random_spec(SHAPES[shape], options.context + 8)
        _say(f"{shape}: random weights")
        for name in options.formats:
            yield shape, NativeModel(spec, shape, quantization=_quantization(name))
    for checkpoint in options.checkpoints:
        for name in options.formats:
            llm = LLM(checkpoint, drafter=None, dtype="bfloat16", quantization=_quantization(name))
            model = llm.engine.models.target
            if not isinstance(model, NativeModel):
                sys.exit(f"{checkpoint} does not run on the CPU kernels in {name}")
            yield Path(checkpoint).name.removesuffix(".gguf"), model
            llm.close()


def _quantization(name: str) -> Quantization | None:
    return None if name == "bf16" else name  # type: ignore[return-value]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The CPU kernels compared with their floor.")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["smollm2-135m"])
    parser.add_argument("--checkpoints", nargs="*", default=[], help="models to load, with or instead of shapes")
    parser.add_argument("--formats", nargs="+", choices=_FORMATS, default=["int8", "bf16"])
    parser.add_argument("--steps", nargs="+", default=_STEPS, help="rows x tokens a row (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="for each measurement")
    parser.add_argument("--table", type=Path, nargs="+", help="documents to print as a table; nothing is measured")
    options = parser.parse_args(arguments)
    if options.table:
        _say(table([json.loads(path.read_text(encoding="utf-8")) for path in options.table]))
        return
    torch.set_num_threads(options.threads)
    kernels = native.select()
    if kernels is None:
        sys.exit(f"no kernels to measure: {native.why_none() or native.VARIABLE + '=off'}")
    reader = Reader(kernels, options.threads)
    machine = measure_machine(kernels, reader, options.threads, options.seconds)
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in machine.gmac_s.items())
    _say(f"{machine.kernels}, {machine.threads} threads: read {machine.read_gb_s} GB/s; GMAC/s in cache: {rates}")
    steps = []
    for name, model in _models(options):
        for step in options.steps:
            rows, tokens = map(int, step.split("x"))
            sizes = rows, tokens, options.context
            steps.append(measure_step(model, name, machine, reader, *sizes, options.seconds))
            _say(_line(steps[-1]))
    _say(json.dumps({"machine": asdict(machine), "steps": [asdict(step) for step in steps]}))


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
