"""Model-FLOP utilisation: the fraction of a machine's peak arithmetic that ends up in output tokens.

BASS (2404.15778, abstract) reports it for its GPU: at most 15.8 % while decoding. That is over 3 times the best of
regular decoding, and about 10 times that of speculation with one sequence. Here it is

    2 x multiply-adds of the target's matrices per token x output tokens / seconds / peak

Only output tokens count. Rejected draft tokens, the draft model and attention (some percent at a few hundred positions)
do not. Prefill and its time are left out. The peak is in operations per second, in the precision of the target. On a
CPU it is measured in the same run: by the same kernels on weights in the cache, or by torch's matrix product. On a GPU
it is the maker's data sheet, without sparsity.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core.hardware import torch_threads
from paceline.kernels import native, pack, structs
from paceline.kernels.pack import Format
from paceline.models.base import AnyModel, Counted
from paceline.models.native.model import LAYER_FORMAT, NativeModel

SECONDS = 0.5  # duration of a peak measurement
_WIDTH = 1024  # width of the square matrices for torch's product

# Dense peak in 10^12 operations per second: (bfloat16 and float16, float32 without tensor cores, torch's default).
# 8-bit weights are widened in registers and multiplied in bfloat16.
_DATA_SHEETS: dict[str, tuple[float, float]] = {
    "GH200": (989.5, 67.0),
    "H200": (989.5, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.0, 60.0),
    "H100": (989.5, 67.0),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "A10": (125.0, 31.2),
    "A30": (165.0, 10.3),
}


@dataclass(frozen=True)
class Peak:
    """Peak operations per second, where a multiply-add is two; None if unknown.

    source: where the number comes from, or why it is unknown.
    """

    operations_per_second: float | None
    source: str

    def __str__(self) -> str:
        if self.operations_per_second is None:
            return self.source
        return f"{self.operations_per_second / 1e12:.3g} TOP/s, {self.source}"


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic per output token of a model, and the machine's peak.

    multiply_adds: per token; None if unknown.
    """

    multiply_adds: int | None
    peak: Peak

    @property
    def operations(self) -> int | None:
        """Operations per token; None if unknown."""
        return None if self.multiply_adds is None else 2 * self.multiply_adds

    def utilisation(self, tokens: int, seconds: float) -> float | None:
        """Return the utilisation from 0 to 1 (see the module); None if unknown.

        tokens: output tokens of all samples.
        seconds: decoding time, without prefill.
        """
        peak = self.peak.operations_per_second
        if self.operations is None or peak is None or seconds <= 0:
            return None
        return self.operations * tokens / seconds / peak

    def as_document(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"multiply_adds_a_token": self.multiply_adds, "peak": asdict(self.peak)}


def arithmetic_of(model: AnyModel, threads: int, seconds: float = SECONDS) -> Arithmetic:
    """Return the arithmetic of a target.

    On a CPU the peak is measured now, on ``threads`` threads, for ``seconds``.
    """
    return Arithmetic(model.multiply_adds() if isinstance(model, Counted) else None, peak_of(model, threads, seconds))


def peak_of(model: AnyModel, threads: int, seconds: float = SECONDS) -> Peak:
    """Return the machine's peak in the precision in which the model multiplies."""
    if model.device.type == "cuda":
        return data_sheet(torch.cuda.get_device_name(model.device), model.dtype)
    kernels = native.select() if isinstance(model, NativeModel) else None
    if kernels is not None and isinstance(model, NativeModel):
        to = LAYER_FORMAT[model.quantization]
        rate = kernel_rate(kernels, to, threads, seconds)
        return Peak(2 * rate, f"measured: {to} kernels ({kernels.name}) on weights in the cache, {threads} threads")
    name = str(model.dtype).removeprefix("torch.")
    return Peak(2 * torch_rate(model.dtype, threads, seconds), f"measured: torch's {name} product, {threads} threads")


def data_sheet(device: str, dtype: torch.dtype) -> Peak:
    """Return the peak of a GPU by its name as the driver spells it, such as "NVIDIA H100 PCIe"."""
    words = set(re.split(r"[\s-]+", device))
    for name, (in_bfloat16, in_float32) in _DATA_SHEETS.items():
        if words.issuperset(name.split()):
            rate = in_float32 if dtype == torch.float32 else in_bfloat16
            return Peak(rate * 1e12, f"data sheet of {name}, {str(dtype).removeprefix('torch.')}, dense")
    return Peak(None, f"unknown: no data sheet for {device}")


def kernel_rate(kernels: native.Kernels, to: Format, threads: int, seconds: float) -> float:
    """Measure multiply-adds per second of the CPU kernels: many rows, weights in the cache."""
    rows, inputs, outputs = 96, 512, 1024 * threads
    packed = pack.pack(pack.quantise(_noise(outputs, inputs), to))
    layer = structs.linear(packed)
    x, out = _noise(rows, inputs), torch.empty(rows, outputs, dtype=torch.float32)
    pool = native.pool(kernels, threads).handle
    place = pool, ctypes.addressof(layer), x.data_ptr(), rows, 0, out.data_ptr(), outputs
    took = fastest(lambda: kernels.library.pl_linear(kernels.handle, *place), seconds)
    return rows * inputs * outputs / took


def torch_rate(dtype: torch.dtype, threads: int, seconds: float) -> float:
    """Measure multiply-adds per second of torch's matrix product on the CPU."""
    a, b = _noise(2, _WIDTH, _WIDTH).to(dtype)
    with torch_threads(threads):
        return float(_WIDTH**3 / fastest(lambda: a @ b, seconds))


def _noise(*shape: int) -> Tensor:
    """Return normally distributed float32 numbers. The caller's global generator is not used."""
    return torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0))


def fastest(function: Callable[[], object], seconds: float) -> float:
    """Return the least seconds of one call, over as many calls as fit; one warm-up call is not counted."""
    function()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() >= end:
            return best
