"""Compile the kernels of 8-bit products before any is timed: in several processes at once, as CPUs allow.

Triton caches compiled kernels on disk, where the measuring process finds them. A hundred kernels per model, a second
each, would otherwise use up the budget. Nothing depends on it: other kernels are compiled at first use, the few of
attention and of the steps between products among them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import torch
from benchmarks.gpu.cells import Cell
from benchmarks.gpu.models import Pair, WeightFormat, matrices

from paceline.kernels.spec import LinearWeights

Task = Callable[[], None]
_MOST_WORKERS = 15


@dataclass(frozen=True)
class Place:
    """Device and precision of the rounds."""

    device: torch.device
    dtype: torch.dtype


def tasks_for(pair: Pair, cells: Sequence[Cell], place: Place) -> list[Task]:
    """The products of the cells' 8-bit formats, by matrix."""
    mine = [cell for cell in cells if cell.setting.pair == pair.name and cell.setting.format != "bf16"]
    tokens = {cell.setting.rows * count for cell in mine for count in (1, cell.k * cell.setting.width + 1)}
    formats = list(dict.fromkeys(cell.setting.format for cell in mine))
    return list(_products(pair, formats, row_tiles(tokens), place))


def row_tiles(tokens: Iterable[int]) -> list[int]:
    """The tiles of rows that products of so many tokens take: Triton compiles a kernel for each."""
    from paceline.kernels.gpu.linear import ROW_TILES

    return sorted({next((tile for tile in ROW_TILES if count <= tile), ROW_TILES[-1]) for count in tokens})


def _products(pair: Pair, formats: Sequence[WeightFormat], rows: Sequence[int], place: Place) -> Iterator[Task]:
    """The products, the largest matrices first."""
    shapes = {
        (shape, config.layers[0].dense.bias and name.startswith("layers."))
        for config in (pair.target, pair.draft)
        for name, shape in matrices(config).items()
    }
    for shape, biased in sorted(shapes, reverse=True):
        for to in formats:
            yield partial(rehearse_products, shape, biased, to, rows, place)


@torch.inference_mode()
def rehearse_products(
    shape: tuple[int, int], biased: bool, to: WeightFormat, row_counts: Sequence[int], place: Place
) -> None:
    """Run every candidate tile for these numbers of rows."""
    from paceline.kernels.gpu.linear import Linears

    outputs, inputs = shape
    weight = torch.randn(shape, dtype=place.dtype, device=place.device)
    bias = torch.zeros(outputs, dtype=place.dtype, device=place.device) if biased else None
    linears = Linears("same" if to == "bf16" else to)
    layer = linears(LinearWeights(weight, bias))
    for rows in row_counts:
        x = torch.zeros(rows, inputs, dtype=place.dtype, device=place.device)
        for tile in linears.candidates(layer, x):
            layer.run(x, tile)


def in_parallel(tasks: Sequence[Task], seconds: float) -> list[str]:
    """Run the tasks in processes of their own, as far as the time allows -> their errors.

    A task that is running when the time is over is finished, so that no measurement shares the device with it; tasks
    that have not started are skipped.
    """
    if not tasks:
        return []
    end = time.perf_counter() + seconds
    workers = max(1, min(_MOST_WORKERS, (os.cpu_count() or 2) - 1, len(tasks)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(task) for task in tasks]
        wait(futures, timeout=max(0.0, end - time.perf_counter()))
        skipped = [future for future in futures if future.cancel()]
    errors = [_error(future) for future in futures if future not in skipped]
    left = [f"{len(skipped)} tasks were skipped for lack of time"] if skipped else []
    return [*dict.fromkeys(error for error in errors if error), *left]


def _error(future: Future[None]) -> str | None:
    error = future.exception()
    return None if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
