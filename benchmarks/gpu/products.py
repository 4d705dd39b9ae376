"""Products of 8-bit matrices with many rows: the available methods, compared with the matrix in the activations' type.

Our tiles widen weights in registers; torch's product needs a widened matrix; ``torch._scaled_mm`` multiplies float8 by
float8, so activations are quantised, too (W8A8: one scale per row). Several matrices take turns, so that each comes
from memory as in a forward pass. The quantisation error is reported with the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from benchmarks.gpu.floors import best_seconds
from benchmarks.gpu.models import WeightFormat
from benchmarks.gpu.rehearsal import Place, Task, in_parallel, rehearse_products, row_tiles
from torch import Tensor
from torch.nn import functional

from paceline.kernels.gpu.graphs import Graphs
from paceline.kernels.gpu.linear import (
    LARGEST_ROWS,
    Format,
    KeptWeight,
    Linears,
    Quantized,
    SmallRowLinear,
    quantise,
    widened_linear,
)

FP8 = torch.float8_e4m3fn
_COLD_BYTES = 1 << 28  # weights that take turns: several times the L2 cache
_MOST_MATRICES = 16


@dataclass(frozen=True)
class Product:
    """A product of [rows, inputs] with a matrix [outputs, inputs]."""

    outputs: int
    inputs: int
    rows: int

    @property
    def name(self) -> str:
        return f"{self.rows} rows, {self.outputs} x {self.inputs}"


@dataclass(frozen=True)
class Timed:
    """A product's microseconds by method, relative RMS errors of the results, and failures."""

    product: Product
    us: dict[str, float]
    errors: dict[str, float]
    failed: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self.product), "us": self.us, "errors": self.errors, "failed": self.failed}


Way = Callable[[Tensor], Tensor]  # x [M, K] -> [M, N]
Maker = Callable[[list[Tensor], Tensor], list[Way]]  # matrices [N, K] and rows [M, K] -> one way per matrix


def scaled(x: Tensor, weight: KeptWeight) -> Tensor:
    """float8 times float8: x is quantised to float8 with one scale per row, within the measured time."""
    assert isinstance(weight, Quantized)
    assert weight.scales is not None
    scales = x.float().abs().amax(1, keepdim=True).clamp(min=1e-30) / torch.finfo(FP8).max
    rounded = (x.float() / scales).to(FP8)
    return torch._scaled_mm(rounded, weight.values.t(), scale_a=scales, scale_b=weight.scales[None], out_dtype=x.dtype)


def dense(matrices: list[Tensor], rows: Tensor) -> list[Way]:  # noqa: ARG001
    """Matrices unchanged."""
    return [partial(functional.linear, weight=matrix) for matrix in matrices]


def float8(matrices: list[Tensor], rows: Tensor) -> list[Way]:  # noqa: ARG001
    """Weights and activations in float8."""
    return [partial(scaled, weight=quantise(matrix, "fp8")) for matrix in matrices]


def widened(to: Format, matrices: list[Tensor], rows: Tensor) -> list[Way]:  # noqa: ARG001
    """The engine's method for many rows: the matrix is widened in each call."""
    return [partial(widened_linear, weight=quantise(matrix, to), bias=None) for matrix in matrices]


def tiled(to: Format, matrices: list[Tensor], rows: Tensor) -> list[Way]:
    """The fastest of our tiles for these rows."""
    linears = Linears(to)
    layers = [SmallRowLinear(quantise(matrix, to), None, linears) for matrix in matrices]
    tiles = [tile for tile in linears.candidates(layers[0], rows) if tile is not None]
    best = min(tiles, key=lambda tile: best_seconds(lambda: layers[0].run(rows, tile), rows.device, 5))
    return [partial(layer.run, tile=best) for layer in layers]


def makers(rows: int) -> dict[str, Maker]:
    """The methods by name."""
    found: dict[str, Maker] = {"16 bits, torch": dense, "fp8 x fp8, torch": float8}
    if rows <= LARGEST_ROWS:
        found["16 bits, our tiles"] = partial(tiled, "same")
    formats: tuple[Format, ...] = ("int8", "fp8")
    for to in formats:
        found[f"{to}, widened"] = partial(widened, to)
        if rows <= LARGEST_ROWS:
            found[f"{to}, our tiles"] = partial(tiled, to)
    return found


def measure(case: Product, device: torch.device, dtype: torch.dtype, repeats: int) -> Timed:
    """Time every method; failures are recorded.

    On CUDA the host's overhead is not counted, because a captured round does not have it.
    """
    copies = min(_MOST_MATRICES, -(-_COLD_BYTES // (case.outputs * case.inputs))) if device.type == "cuda" else 1
    x = torch.randn(case.rows, case.inputs, device=device).to(dtype)
    matrices = [torch.randn(case.outputs, case.inputs, device=device).to(dtype) for _ in range(copies)]
    exact = x.double() @ matrices[-1].double().T
    us: dict[str, float] = {}
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, make in makers(case.rows).items():
        try:
            made = make(matrices, x)
            errors[name] = float((made[-1](x).double() - exact).norm() / exact.norm())
            us[name] = _seconds(made, x, device, repeats) * 1e6
        except Exception as error:  # noqa: BLE001 (what one way cannot do must not hide the others)
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return Timed(case, us, errors, failed)


def _seconds(made: list[Way], x: Tensor, device: torch.device, repeats: int) -> float:
    """Seconds of one product, all matrices one after the other."""

    def program() -> Tensor:
        return [way(x) for way in made][-1]

    graphs = Graphs(device)
    return best_seconds(lambda: graphs.run(0, program), device, repeats) / len(made)


def cases(*, tiny: bool = False) -> list[Product]:
    """Llama 8B's matrices; the row counts of decoding, verification and prefill."""
    if tiny:
        return [Product(32, 64, rows) for rows in (3, 80)]
    shapes = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
    return [Product(*shape, rows) for rows, shape in product((8, 64, 1, 128, 256, 32, 512, 16, 2048), shapes)]


def sweep(wanted: Sequence[Product], device: torch.device, dtype: torch.dtype, seconds: float) -> Iterator[Timed]:
    """Compile the first cases' kernels in parallel, then measure the cases that can begin within ``seconds``."""
    end = time.perf_counter() + seconds
    if device.type == "cuda":
        in_parallel(rehearsals(wanted, Place(device, dtype)), seconds / 2)
    for case in wanted:
        if time.perf_counter() > end:
            return
        yield measure(case, device, dtype, 1 if device.type == "cpu" else 20)


def rehearsals(wanted: Sequence[Product], place: Place) -> list[Task]:
    """One task per matrix and format, for the rows of the first two cases of each matrix."""
    shapes = dict.fromkeys((case.outputs, case.inputs) for case in wanted)
    rows = row_tiles([case.rows for case in wanted[: 2 * len(shapes)]])
    formats: tuple[WeightFormat, ...] = ("int8", "bf16", "fp8")
    return [partial(rehearse_products, shape, False, to, rows, place) for to in formats for shape in shapes]


def describe(timed: Timed) -> str:
    """One line of progress."""
    times = ", ".join(f"{name} {us:.1f} ({timed.errors[name]:.4f})" for name, us in timed.us.items())
    failed = "".join(f"; {name} FAILED: {why}" for name, why in timed.failed.items())
    return f"product, {timed.product.name}: µs (error) {times}{failed}"
