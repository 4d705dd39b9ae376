"""The device's peak rates, and the floor of a round's time.

A forward pass reads every matrix once, and each row's keys and values once; it multiplies every matrix with every
token. Its floor is the larger of (bytes / copy bandwidth) and (operations / matrix rate). Activations, logits and other
traffic are not counted, so no real pass reaches the floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from benchmarks.gpu.models import WEIGHT_BYTES, WeightFormat, matrix_parameters

from paceline.models.description.spec import DecoderSpec

_COPY_BYTES, _MATRIX_SIZE = 1 << 30, 8192  # large enough that caches do not help and the GPU is full
_TINY_BYTES, _TINY_SIZE = 1 << 20, 128
_REPEATS = 20


@dataclass(frozen=True)
class Ceiling:
    """A device's peak rates.

    copy_bytes: bytes per second, read and written together. flops: per second, in one large matrix product.
    """

    copy_bytes: float
    flops: float


@dataclass(frozen=True)
class Work:
    """Bytes moved and operations of a pass."""

    bytes: float
    flops: float

    def seconds(self, ceiling: Ceiling) -> float:
        return max(self.bytes / ceiling.copy_bytes, self.flops / ceiling.flops)


@dataclass(frozen=True)
class Weights:
    """The sizes of a model that its floor depends on. cache_bytes: bytes per number in the cache."""

    config: DecoderSpec
    format: WeightFormat
    cache_bytes: int = 2


def measure_ceiling(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Ceiling:
    """Measure copy bandwidth and matrix rate, the best of several calls; ``small``: a functional test."""
    size, side = (_TINY_BYTES, _TINY_SIZE) if small else (_COPY_BYTES, _MATRIX_SIZE)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = best_seconds(lambda: target.copy_(source), device)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    multiplying = best_seconds(lambda: torch.mm(left, right, out=out), device)
    return Ceiling(2 * size / copying, 2 * side**3 / multiplying)


def best_seconds(function: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Seconds of the fastest call on the device, after one warm-up."""
    function()
    return min(seconds_of(function, device) for _ in range(repeats))


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call; on CUDA from its first work on the device to the last."""
    if device.type != "cuda":
        began = time.perf_counter()
        function()
        return time.perf_counter() - began
    first, last = _event(), _event()
    first.record()
    function()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def pass_work(model: Weights, rows: int, tokens: int, context: float) -> Work:
    """One forward pass of ``tokens`` tokens per row, over ``context`` positions per row."""
    config, parameters = model.config, matrix_parameters(model.config)
    cached = 2 * sum(a.kv_width for a in config.attentions) * model.cache_bytes * rows * context
    attending = 4 * sum(a.query_width for a in config.attentions) * rows * tokens * context
    return Work(parameters * WEIGHT_BYTES[model.format] + cached, 2 * parameters * rows * tokens + attending)


def round_floor(
    target: Weights, draft: Weights, rows: int, k: int, context: float, ceiling: Ceiling, width: int = 1
) -> float:
    """Lower bound on a round's seconds: k passes of the draft model, one after the other, and one of the target.

    width: draft tokens per row that the target verifies for each of them.
    """
    drafting = k * pass_work(draft, rows, 1, context).seconds(ceiling)
    return drafting + pass_work(target, rows, k * width + 1, context).seconds(ceiling)


def tokens_a_round(acceptance: float, k: int) -> float:
    """Mean tokens per round and row when each draft token is accepted with this probability.

    The formula is (1 - a^(k + 1)) / (1 - a).
    """
    return sum(acceptance**place for place in range(k + 1))
