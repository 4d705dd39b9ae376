"""Compile the kernels of the rounds before any of them is timed: in several processes at once, as CPUs allow.

Triton caches compiled kernels on disk, where the measuring process finds them. A hundred kernels per model, a second
each, would otherwise use up the budget. Nothing depends on it: other kernels are compiled at first use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

import torch
from benchmarks.gpu.cells import Cell, Setting
from benchmarks.gpu.models import Pair, WeightFormat, matrices, random_model
from benchmarks.gpu.stage import ROOM, Stage

from paceline.core.cache import KVCache
from paceline.models.description import DecoderSpec

Task = Callable[[], None]
_MOST_WORKERS = 15
_MOST_CACHE = 1 << 30  # bytes of a rehearsal's cache rows; larger ones are compiled in the measurement
_ROWS = (1, 8, 16, 24, 32, 40, 64, 128)  # one of each kind of row count for which Triton compiles a product


@dataclass(frozen=True)
class Place:
    """Device and precision of the rounds."""

    device: torch.device
    dtype: torch.dtype


def tasks_for(pair: Pair, cells: Sequence[Cell], place: Place) -> list[Task]:
    """The rounds of the cells on one layer, by length; and the products of the 8-bit formats, by matrix."""
    mine = [cell for cell in cells if cell.setting.pair == pair.name and cell.setting.attention == "ragged"]
    formats = list(dict.fromkeys(cell.setting.format for cell in mine if cell.setting.format != "bf16"))
    settings = list(dict.fromkeys(replace(cell.setting, format="bf16") for cell in mine))
    lengths = sorted({cell.k for cell in mine if cell.kind == "round"}, reverse=True)
    rounds: list[Task] = [partial(rehearse_rounds, pair, settings, k, place) for k in lengths]
    return [*_products(pair, formats, place), *rounds]


def _products(pair: Pair, formats: Sequence[WeightFormat], place: Place) -> Iterator[Task]:
    """The products, the largest matrices first."""
    shapes = {
        (shape, config.layers[0].dense.bias and name.startswith("layers."))
        for config in (pair.target, pair.draft)
        for name, shape in matrices(config).items()
    }
    for shape, biased in sorted(shapes, reverse=True):
        for to in formats:
            yield partial(rehearse_products, shape, biased, to, place)


@torch.inference_mode()
def rehearse_rounds(pair: Pair, settings: Sequence[Setting], k: int, place: Place) -> None:
    """Run one round with k draft tokens in every setting, with one layer of each model, without capture."""
    short = replace(pair, target=_one_layer(pair.target), draft=_one_layer(pair.draft))
    target, draft = (random_model(c, pair.name, "bf16", place.dtype, place.device) for c in (short.target, short.draft))
    for setting in settings:
        if _cache_bytes(short.target, setting, place.dtype) <= _MOST_CACHE:
            Stage(target, draft, setting, capture=False).rounds(k, 1)


def _one_layer(config: DecoderSpec) -> DecoderSpec:
    return replace(config, layers=config.layers[:1])


def _cache_bytes(config: DecoderSpec, setting: Setting, dtype: torch.dtype) -> int:
    positions = setting.context + ROOM
    attention = config.layers[0].attention
    shape = len(config.layers), setting.rows, attention.kv_heads, positions, attention.head_dim
    return KVCache.bytes_for(*shape, dtype)


@torch.inference_mode()
def rehearse_products(shape: tuple[int, int], biased: bool, to: WeightFormat, place: Place) -> None:
    """Run every candidate tile for every kind of row count."""
    from paceline.kernels.gpu.linear import Linears

    outputs, inputs = shape
    weight = torch.randn(shape, dtype=place.dtype, device=place.device)
    bias = torch.zeros(outputs, dtype=place.dtype, device=place.device) if biased else None
    assert to != "bf16", "torch's own products need no rehearsal"
    linears = Linears(to)
    layer = linears(weight, bias)
    for rows in _ROWS:
        x = torch.zeros(rows, inputs, dtype=place.dtype, device=place.device)
        for tile in linears.candidates(layer, x):
            layer.run(x, tile)


def in_parallel(tasks: Sequence[Task], seconds: float) -> list[str]:
    """Run the tasks in processes of their own, as far as the time allows -> their errors.

    A task that is running when the time is over is finished; tasks that have not started are skipped.
    """
    if not tasks:
        return []
    end = time.perf_counter() + seconds
    workers = max(1, min(_MOST_WORKERS, (os.cpu_count() or 2) - 1, len(tasks)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(task) for task in tasks]
        done, late = wait(futures, timeout=max(0.0, end - time.perf_counter()))
        pool.shutdown(wait=False, cancel_futures=True)
    errors = [_error(future) for future in done]
    left = [f"{len(late)} tasks were skipped for lack of time"] if late else []
    return [*dict.fromkeys(error for error in errors if error), *left]


def _error(future: Future[None]) -> str | None:
    error = None if future.cancelled() else future.exception()
    return None if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
