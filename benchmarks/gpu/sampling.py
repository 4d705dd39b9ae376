"""Min-p, top-k and top-p alone: the kernels, those of version 0.3, and torch's sort, over vocabularies and lines.

One call is what a round does for its logits, or a draft step for its own. The kept tokens are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

import torch
from benchmarks.gpu.bisection import bisected
from benchmarks.gpu.floors import best_seconds
from torch import Tensor

from paceline.config import SamplingParams
from paceline.core import sampling
from paceline.core.batch import Batch, RowStart
from paceline.core.rows import RowState, StepFeatures
from paceline.kernels.gpu.cut import cut
from paceline.kernels.gpu.draw import Blocks
from paceline.kernels.gpu.graphs import Graphs

Logits = Literal["peaked", "flat"]
PASSES = 5  # reads of the logits, and writes of their size
BLOCK = 64  # of --tiny


@dataclass(frozen=True)
class Case:
    """``lines`` rows of ``vocab`` logits each, with top_k (0: none) and top_p (1: none) at temperature 0.6.

    logits: peaked as a chat's, where a few tokens have most of the mass, or flat as a random model's.
    """

    vocab: int
    lines: int
    top_k: int
    top_p: float
    logits: Logits

    @property
    def name(self) -> str:
        """A name for output."""
        return f"{self.lines} x {self.vocab} {self.logits} logits, top_k {self.top_k}, top_p {self.top_p:g}"


@dataclass(frozen=True)
class Timed:
    """A case's microseconds by way, its floor, and the ways whose tokens are not those of torch."""

    case: Case
    us: dict[str, float]
    floor_us: float
    wrong: list[str]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self.case), "us": self.us, "floor_us": self.floor_us, "wrong": self.wrong}


def cases(*, tiny: bool = False) -> list[Case]:
    """The cases, the most important first."""
    kinds: tuple[Logits, ...] = ("peaked", "flat")
    if tiny:
        return [Case(50, 1, 20, 0.95, "peaked")]
    asked = ((20, 0.95), (0, 0.9), (50, 1.0))
    order = product((151_936, 128_256, 248_320), asked, kinds, (64, 8, 1, 256))
    return [Case(vocab, lines, *cuts, kind) for vocab, cuts, kind, lines in order]


def logits_of(case: Case, device: torch.device) -> Tensor:
    """Random logits [lines, V] float32."""
    make = torch.Generator(device).manual_seed(0)
    logits = torch.randn(case.lines, case.vocab, generator=make, device=device)
    if case.logits == "peaked":
        logits *= 2.5
        logits[:, ::997] += 12 + 2 * torch.randn(logits[:, ::997].shape, generator=make, device=device)
    return logits


def measure(case: Case, device: torch.device, copy_bytes: float, repeats: int) -> Timed:
    """Time every way on one case. copy_bytes: the device's bandwidth, for the floor."""
    logits, batch = logits_of(case, device), Batch(case.lines, 20, case.vocab, device)
    params = SamplingParams(temperature=0.6, top_k=case.top_k, top_p=case.top_p, max_tokens=9)
    for row in range(case.lines):
        batch.set_row(row, RowStart([1], params, row))
    batch.set_live(range(case.lines))
    rows, blocks = batch.state(case.lines), Blocks(case.vocab) if device.type == "cuda" else Blocks(case.vocab, BLOCK)
    ways: dict[str, Callable[[], Tensor]] = {
        "cut": lambda: cut(logits, rows, blocks),
        "bisection": lambda: bisected(logits, rows, blocks),
        "torch": lambda: _by_torch(logits, rows),
    }
    expected = ways["torch"]()
    wrong = [name for name, way in ways.items() if not torch.equal(way(), expected)]
    graphs = Graphs(device)  # without the host's overhead, which a captured round does not have
    us = {
        name: 1e6 * best_seconds(lambda name=name, way=way: graphs.run(name, way), device, repeats)  # type: ignore[misc]
        for name, way in ways.items()
    }
    return Timed(case, us, 1e6 * PASSES * logits.nbytes / copy_bytes, wrong)


def _by_torch(logits: Tensor, rows: RowState) -> Tensor:
    none = rows.text.new_empty(rows.rows, 0)
    return sampling.shaped(logits[:, None], rows, StepFeatures(cuts=True), none)[:, 0]


def sweep(
    wanted: Iterable[Case], device: torch.device, copy_bytes: float, seconds: float, repeats: int
) -> Iterator[Timed]:
    """Measure the cases that can begin within ``seconds``."""
    end = time.perf_counter() + seconds
    for case in wanted:
        if time.perf_counter() > end:
            return
        yield measure(case, device, copy_bytes, repeats)


def describe(timed: Timed) -> str:
    """One line of progress."""
    times = ", ".join(f"{name} {us:.1f}" for name, us in timed.us.items())
    wrong = f"; WRONG: {', '.join(timed.wrong)}" if timed.wrong else ""
    return f"cuts, {timed.case.name}: {times} µs, floor {timed.floor_us:.1f}{wrong}"
