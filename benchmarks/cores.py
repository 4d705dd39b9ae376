"""How decode steps scale with cores: ``PYTHONPATH=src:. python -m benchmarks.cores predict``, ``measure`` or ``hog``.

``predict`` computes a decode step's time on 1 to 64 cores, with the parts in which panels are shared out, and says
what limits it. ``measure --json FILE`` times the same steps here on 1, 2, 4 ... threads, beside what the model predicts
from this machine's own bandwidth and barriers: about two minutes with 16 cores. ``hog`` times steps while another
program competes for a CPU; with ``--turn-us 100``, as root, it halves the CPU's speed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from benchmarks.kernels import _READ_BYTES, SHAPES, Reader, Shape, random_spec

from paceline.core.cache import KVCache
from paceline.core.cpus import Node, performance_cores, pinned, usable_cpus
from paceline.core.hardware import cpu_name
from paceline.core.nodes import Nodes
from paceline.engine.utilisation import kernel_rate
from paceline.kernels import native
from paceline.kernels.abi import PANEL
from paceline.models.native.model import NativeModel

EVERY = SHAPES | {"llama-8b": Shape(4096, 32, 32, 8, 128, 14336, 128256)}
THREADS = (1, 2, 4, 8, 16, 32, 64)
GROUP = 8  # threads that arrive at one line of a barrier, and that help each other (csrc/pool.h)
MEETINGS = 6  # of the threads, in a dense layer with few rows: four products, keys, attention


@dataclass(frozen=True)
class Machine:
    """What the model needs of a machine; all times in seconds.

    core_bytes, socket_bytes: bytes a second that one core reads, and all together. rate: multiply-adds a second of a
    core, on weights in its cache. transfer: of a cache line between two cores. outside: of a step, in Python and on one
    core.
    """

    core_bytes: float
    socket_bytes: float
    rate: float
    transfer: float
    outside: float

    def barrier(self, threads: int, group: int = GROUP) -> float:
        """Seconds in which all threads meet: moves of the lines at which they arrive, then of those they wait at."""
        groups = -(-threads // group)
        arrivals = min(threads, group) + (groups if groups > 1 else 0)
        releases = groups + min(threads, group)
        return 0.0 if threads == 1 else (arrivals + releases) * self.transfer


# Of the EPYC (Zen 4, two cores) of docs/cpu.md, continued to a socket of 64 with 12 channels of DDR5-4800, its threads
# spread over all dies. The time of a transfer is assumed.
EPYC = Machine(core_bytes=20e9, socket_bytes=350e9, rate=187e9, transfer=60e-9, outside=0.2e-3)


@dataclass(frozen=True)
class Prediction:
    """A step's milliseconds by what takes them: bytes or arithmetic, waiting for the last panel, barriers, the rest."""

    shape: str
    rows: int
    threads: int
    work_of: str
    work_ms: float
    waiting_ms: float
    barriers_ms: float
    outside_ms: float

    @property
    def ms(self) -> float:
        return self.work_ms + self.waiting_ms + self.barriers_ms + self.outside_ms

    def described(self) -> str:
        """Return the parts, largest first, in percent of the time."""
        names = self.work_of, "waiting for panels", "barriers", "Python and one core"
        times = self.work_ms, self.waiting_ms, self.barriers_ms, self.outside_ms
        parts = sorted(zip(times, names, strict=True), reverse=True)
        return ", ".join(f"{name} {ms / self.ms:.0%}" for ms, name in parts if ms >= 0.01 * self.ms)


def finish(items: int, speeds: Sequence[float]) -> float:
    """Time at which threads of these speeds, in items a second, have computed all items (csrc/pool.h).

    Each takes a quarter of what is left of its equal part, half of the last 16, then half of what is left to another of
    its group.
    """
    count = len(speeds)
    left = [(thread + 1) * items // count - thread * items // count for thread in range(count)]
    free, end = [(0.0, thread) for thread in range(count)], 0.0
    while free:
        now, thread = heapq.heappop(free)
        first = thread // GROUP * GROUP
        group = range(first, min(first + GROUP, count))
        source = next((other for other in (*group[thread - first :], *group) if left[other]), thread)
        end = max(end, now)
        if size := -(-left[source] // (4 if source == thread and left[source] > 16 else 2)):
            left[source] -= size
            heapq.heappush(free, (now + size / speeds[thread], thread))
    return end


def finish_equal_shares(items: int, speeds: Sequence[float]) -> float:
    """The same if every thread has an equal share."""
    count = len(speeds)
    return max(((i + 1) * items // count - i * items // count) / speed for i, speed in enumerate(speeds))


def products(shape: Shape) -> list[tuple[int, int, int]]:
    """Outputs, inputs and number of the matrices that a step multiplies with."""
    queries = shape.heads * shape.head_dim
    return [
        (queries + 2 * shape.kv_heads * shape.head_dim, shape.width, shape.layers),
        (shape.width, queries, shape.layers),
        (2 * shape.ffn, shape.width, shape.layers),
        (shape.width, shape.ffn, shape.layers),
        (shape.vocab_size, shape.width, 1),
    ]


def predict(name: str, shape: Shape, rows: int, threads: int, machine: Machine) -> Prediction:
    """A decode step of int8 weights with this number of rows."""
    work = waiting = 0.0
    reads = True
    for outputs, inputs, count in products(shape):
        panels, nbytes = -(-outputs // PANEL), inputs * PANEL
        reading, computing = (
            nbytes / min(machine.core_bytes * threads, machine.socket_bytes),
            rows * nbytes / machine.rate,
        )
        reads &= reading >= computing / threads
        even = panels * max(reading, computing / threads)
        alone = max(nbytes / machine.core_bytes, computing)  # a panel's time on a core that the others do not slow down
        work += count * even
        waiting += count * max(0.0, finish(panels, [1 / alone] * threads) - even)
    barriers = MEETINGS * shape.layers * machine.barrier(threads)
    full = threads * machine.core_bytes > machine.socket_bytes
    work_of = "arithmetic" if not reads else "memory of the socket" if full else "memory"
    work_ms, waiting_ms, barriers_ms, outside_ms = (
        1e3 * seconds for seconds in (work, waiting, barriers, machine.outside)
    )
    return Prediction(name, rows, threads, work_of, work_ms, waiting_ms, barriers_ms, outside_ms)


def measured_machine(kernels: native.Kernels, threads: int) -> Machine:
    """The figures of this machine, with at most so many threads."""
    one, all_of_them = (_bytes_a_second(kernels, count) for count in (1, threads))
    meet = _meeting_seconds(kernels, threads)
    moves = Machine(1, 1, 1, 1.0, 0).barrier(threads)
    return Machine(one, all_of_them, kernel_rate(kernels, "int8", 1, 0.5), meet / max(1.0, moves), 0.0)


def _bytes_a_second(kernels: native.Kernels, threads: int) -> float:
    reader = Reader(kernels, threads)
    return _READ_BYTES / min(reader.seconds() for _ in range(5))


def _meeting_seconds(kernels: native.Kernels, threads: int) -> float:
    """Seconds of a job without work: one word to all threads, and one meeting."""
    pool, word = native.pool(kernels, threads).handle, torch.zeros(1, dtype=torch.int64)
    times = []
    for _ in range(2000):
        began = time.perf_counter()
        kernels.library.pl_read(pool, word.data_ptr(), 0)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class Steps:
    """Decode steps of a shape with random int8 weights, after a context of 128 tokens."""

    def __init__(self, name: str, shape: Shape, context: int = 128) -> None:
        self.context = context
        self.model = NativeModel(random_spec(shape, context + 1), name, quantization="int8")

    def ms(self, rows: int, threads: int, seconds: float, nodes: tuple[Node, ...] = ()) -> float:
        """Median milliseconds of a step: forward pass and logits. nodes: see ``kernel_threads``."""
        model = self.model
        cache = KVCache(model.kv_layers, rows, self.context + 1, dtype=model.dtype)
        tokens = Nodes(torch.ones(rows, dtype=torch.int64), torch.arange(rows), torch.full((rows,), self.context))
        times: list[float] = []
        with native.kernel_threads(threads, nodes):
            until = time.perf_counter() + seconds
            while len(times) < 5 or time.perf_counter() < until:
                began = time.perf_counter()
                model.logits(model.forward(tokens, cache).hidden)
                times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)


def thread_counts(most: int) -> list[int]:
    """1, 2, 4 ... and the number itself."""
    return sorted({*(count for count in THREADS if count < most), most})


def measure(options: argparse.Namespace) -> None:
    """Time steps on 1, 2, 4 ... threads beside the predictions from this machine's own figures."""
    kernels, most = native.required(), options.threads or performance_cores()
    results = []
    for name in options.shapes:
        shape = EVERY[name]
        steps = Steps(name, shape)
        for rows in options.rows:
            machine = measured_machine(kernels, most)
            measured = {threads: steps.ms(rows, threads, options.seconds) for threads in thread_counts(most)}
            beyond = measured[1] - predict(name, shape, rows, 1, machine).ms
            machine = replace(machine, outside=max(0.0, beyond / 1e3))
            for threads, ms in measured.items():
                expected = predict(name, shape, rows, threads, machine)
                times = f"{ms:8.2f} ms, predicted {expected.ms:8.2f}, {measured[1] / ms:5.2f} x"
                print(f"{name:13} {rows:2} rows {threads:3} threads {times}: {expected.described()}", flush=True)
                results.append({**asdict(expected), "measured_ms": ms, "machine": asdict(machine)})
    if options.json:
        document = {"machine": cpu_name(), "kernels": kernels.name, "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def table(machine: Machine, shapes: Sequence[str], rows: Sequence[int]) -> str:
    """Predicted speed-ups as a Markdown table, and what the time of the most threads goes to."""
    head = ["shape", "rows", *map(str, THREADS[1:]), f"the time of {THREADS[-1]}"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for name in shapes:
        for count in rows:
            of = [predict(name, EVERY[name], count, threads, machine) for threads in THREADS]
            speedups = (f"{of[0].ms / each.ms:.1f}" for each in of[1:])
            lines.append("| " + " | ".join([name, str(count), *speedups, of[-1].described()]) + " |")
    return "\n".join(lines)


def _hog(cpu: int, turn: float) -> None:
    """Take all time of a CPU that the system gives to one more program, or turns of this many seconds.

    Turns begin as soon as they are due, which the system allows to root only, and leave the CPU for as long: to others
    it is a slower CPU.
    """
    os.sched_setaffinity(0, {cpu})
    if turn:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    while True:
        until = time.perf_counter() + turn
        while not turn or time.perf_counter() < until:
            pass
        time.sleep(turn)


@contextmanager
def busy(cpu: int, turn: float = 0.0) -> Iterator[None]:
    """Context in which another program competes for a CPU, all the time or in turns of this many seconds."""
    program = multiprocessing.get_context("spawn").Process(target=_hog, args=(cpu, turn), daemon=True)
    program.start()
    try:
        time.sleep(0.5)
        if not program.is_alive():
            raise SystemExit("the program has ended: turns (--turn-us) need root")
        yield
    finally:
        program.kill()
        program.join()


def hog(options: argparse.Namespace) -> None:
    """Time steps without and with another program on the last CPU, with panels shared out and in equal shares."""
    most, cpus = options.threads or performance_cores(), usable_cpus()
    equal = tuple(Node(0, (cpus[thread % len(cpus)],)) for thread in range(most))  # threads help those of their node
    # The first thread and the others stay on different CPUs: the system would move them away from the other program.
    with pinned([Node(0, cpus[1:] or cpus)]):
        native.pool(native.required(), most)
    for name in options.shapes:
        steps = Steps(name, EVERY[name])
        for rows in options.rows:
            with pinned([Node(0, cpus[:1])]):
                free = steps.ms(rows, most, options.seconds)
                with busy(cpus[-1], options.turn_us / 1e6):
                    slowed, in_equal = (steps.ms(rows, most, options.seconds, nodes) for nodes in ((), equal))
            with_hog = f"with a hog on one CPU {slowed:.2f} ms, and {in_equal:.2f} ms in equal shares"
            print(f"{name:13} {rows:2} rows {most} threads: {free:.2f} ms, {with_hog}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, measure, or measure with a busy core."""
    parser = argparse.ArgumentParser(description="How decode steps scale with cores.")
    parser.add_argument("what", choices=["predict", "measure", "hog"])
    parser.add_argument("--shapes", nargs="+", choices=EVERY, default=["smollm2-135m", "qwen2.5-1.5b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", type=int, help="the most; default: one per core")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--turn-us", type=float, default=0.0, help="hog: takes turns of so long; 0: all the time")
    parser.add_argument("--json", type=Path, help="file to write, of measure")
    options = parser.parse_args(arguments)
    if options.what == "predict":
        print(table(EPYC, options.shapes, options.rows))
    elif options.what == "measure":
        measure(options)
    else:
        hog(options)


if __name__ == "__main__":
    main()
