"""Small-row matrix products over 8-bit weights against their torch reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from covering import in_pairs
from kernels.gpu.four_bit_support import grouped, mxfp4

pytest.importorskip("triton", reason="triton is not installed")

from paceline.errors import ParameterError
from paceline.kernels.gpu import linear as module
from paceline.kernels.gpu.four_bit import FourBitWeight, pack
from paceline.kernels.gpu.four_bit_kernels import widen_four_bit
from paceline.kernels.gpu.linear import (
    CANDIDATES,
    LARGEST_ROWS,
    KeptWeight,
    Linears,
    LinearTile,
    Quantized,
    kept,
    linear,
    paired,
    quantise,
    unpaired,
    widen,
    widened_linear,
)
from paceline.kernels.pack import Float8Weight
from paceline.kernels.spec import LinearWeights
from paceline.models.torch.linear import Linear

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ["int8", "fp8", "same"]
DTYPES = [torch.float32, torch.float16]
if DEVICE == "cuda":  # the interpreter does not multiply bfloat16
    DTYPES.append(torch.bfloat16)
CLOSE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def linear_reference(x: torch.Tensor, weight: KeptWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Float32 sums, the scale last, or those of the dequantised 4-bit weights."""
    if isinstance(weight, FourBitWeight) or weight.group:
        return functional.linear(x.float(), weight.widened(torch.float32), None if bias is None else bias.float()).to(
            x.dtype
        )
    sums = x.float() @ weight.unscaled(torch.float32).T
    sums = sums if weight.scales is None else sums * weight.scales
    return (sums if bias is None else sums + bias.float()).to(x.dtype)


@pytest.mark.parametrize("to", FORMATS)
@settings(max_examples=12)
@given(data=st.data())
def test_the_kernel_equals_the_reference(to: str, data: st.DataObject) -> None:
    pick = data.draw
    rows, inputs, outputs = (
        pick(st.integers(1, 40)),
        16 * pick(st.integers(1, 8)) + pick(st.sampled_from([0, 3])),
        pick(st.integers(1, 70)),
    )
    tile = LinearTile(outputs=16, inputs=64 if to == "int8" else 16, parts=pick(st.sampled_from([1, 1, 2, 3, 4])))
    weight = quantise(torch.randn(outputs, inputs, device=DEVICE), to)  # type: ignore[arg-type]
    bias = torch.randn(outputs, device=DEVICE) if pick(st.booleans()) else None
    dtype = pick(st.sampled_from(DTYPES))
    x = torch.randn(rows, inputs + 5, device=DEVICE)[:, :inputs].to(dtype)
    bias = None if bias is None else bias.to(dtype)
    if weight.scales is None:
        weight = replace(weight, values=weight.values.to(dtype))
    tickets = torch.zeros(100, dtype=torch.int32, device=DEVICE)
    found = linear(x, weight, bias, tile, tickets, block_m=pick(st.sampled_from([16, 32])))
    torch.testing.assert_close(found, linear_reference(x, weight, bias), atol=CLOSE[dtype], rtol=CLOSE[dtype])
    assert not tickets.any()


FOUR_BITS = ["symmetric", "shifted", "fp4", "float8"]


def grouped_weights(kind: str, outputs: int, inputs: int, group: int) -> KeptWeight:
    """Random weights whose scales are of groups of inputs."""
    if kind == "float8":
        scales = torch.rand(outputs, -(-inputs // 128)) + 0.5
        return kept(Float8Weight(torch.randn(outputs, inputs).to(torch.float8_e4m3fn), scales), inputs)
    if kind == "fp4":
        return pack(mxfp4(outputs, inputs), inputs)
    return pack(grouped(outputs, inputs, group, symmetric=kind == "symmetric"), inputs)


@pytest.mark.parametrize("kind", FOUR_BITS)
@settings(max_examples=8)
@given(data=st.data())
def test_the_kernel_multiplies_weights_in_groups_as_they_are(kind: str, data: st.DataObject) -> None:
    """In every grid, group and number of parts, and with widths that are no whole runs."""
    pick, dtype = data.draw, data.draw(st.sampled_from(DTYPES))
    group, rows, outputs = pick(st.sampled_from([32, 64, 128])), pick(st.integers(1, 40)), pick(st.integers(1, 70))
    inputs = pick(st.integers(1, 600 // group)) * group + pick(st.sampled_from([0, 0, -5]))
    inputs = max(32, inputs // 32 * 32) if kind == "fp4" else inputs
    weight = grouped_weights(kind, outputs, inputs, group)
    bias = torch.randn(outputs, device=DEVICE).to(dtype) if pick(st.booleans()) else None
    x = torch.randn(rows, inputs + 5, device=DEVICE)[:, :inputs].to(dtype)
    tile = LinearTile(outputs=16, inputs=128, parts=pick(st.sampled_from([1, 1, 2, 3])))
    tickets = torch.zeros(100, dtype=torch.int32, device=DEVICE)
    found = linear(x, weight, bias, tile, tickets, block_m=pick(st.sampled_from([16, 32])))
    torch.testing.assert_close(found, linear_reference(x, weight, bias), atol=CLOSE[dtype], rtol=CLOSE[dtype])
    whole = widen_four_bit(weight, dtype) if isinstance(weight, FourBitWeight) else widen(weight, dtype, scaled=True)
    torch.testing.assert_close(whole, weight.widened(dtype), atol=1e-6, rtol=2**-8)
    assert not tickets.any()


@pytest.mark.parametrize("inputs", [1, 32, 63, 64, 300])
def test_pairs_hold_every_int8_number_in_its_place(inputs: int) -> None:
    values = torch.arange(7 * inputs).view(7, inputs).to(torch.int8)
    assert torch.equal(unpaired(paired(values), torch.bfloat16)[:, :inputs], values.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_widens_every_int8_number_exactly(dtype: torch.dtype) -> None:
    values = torch.arange(-128, 128, device=DEVICE).to(torch.int8)
    weight = Quantized(paired(torch.diag(values)), torch.ones(256, device=DEVICE), 256)
    tickets = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    found = linear(torch.eye(256, dtype=dtype, device=DEVICE), weight, None, LinearTile(), tickets, block_m=64)
    assert torch.equal(found, torch.diag(values).to(dtype))


@pytest.mark.parametrize(("to", "error"), [("int8", 0.005), ("fp8", 0.04), ("same", 1e-9)])
def test_quantised_weights_are_as_close_as_their_format(to: str, error: float) -> None:
    weight = torch.randn(32, 256) * torch.logspace(-3, 3, 32)[:, None]
    found = quantise(weight, to).widened(torch.float32)  # type: ignore[arg-type]
    assert ((found - weight).norm(dim=1) / weight.norm(dim=1)).max() <= error * 3
    assert quantise(torch.zeros(2, 4), to).widened(torch.float32).tolist() == [[0.0] * 4] * 2  # type: ignore[arg-type]


@in_pairs(to=[*FORMATS, "int4"], rows=[1, 100, LARGEST_ROWS + 1], deterministic=[False, True])
def test_the_layer_takes_any_number_of_rows(to: str, rows: int, deterministic: bool) -> None:
    weight, bias = torch.randn(48, 32, device=DEVICE), torch.randn(48, device=DEVICE)
    layer: Linear = Linears(to, deterministic=deterministic)(LinearWeights(weight, bias))  # type: ignore[arg-type]
    x = torch.randn(rows, 1, 32, device=DEVICE)
    expected = linear_reference(x[:, 0], quantise(weight, to), bias)  # type: ignore[arg-type]
    assert layer(x).shape == (rows, 1, 48)
    torch.testing.assert_close(layer(x)[:, 0], expected, atol=1e-4, rtol=1e-4)
    assert layer.tensors()[0].nbytes == {"same": 4 * 48 * 32, "fp8": 48 * 32}.get(to, 48 * 64)  # 64 and 128 inputs


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("to", ["same", "int4"])
def test_deterministic_rows_do_not_depend_on_their_neighbours(to: Any) -> None:
    layer = Linears(to, deterministic=True)(LinearWeights(torch.randn(40, 1100, device=DEVICE)))
    x = torch.randn(70, 1100, device=DEVICE)
    together = layer(x)
    for row in (0, 15, 16, 69):
        assert torch.equal(layer(x[row : row + 1])[0], together[row])


def test_the_fastest_tile_is_measured_once_for_each_shape() -> None:
    seconds = iter([5.0, 4.0, 1.0])
    calls: list[float] = []

    def timer(call: object) -> float:
        calls.append(next(seconds))
        return calls[-1]

    linears = Linears("int8", timer=timer)  # type: ignore[arg-type]
    layer, x = linears(LinearWeights(torch.randn(40, 32, device=DEVICE))), torch.randn(3, 32, device=DEVICE)
    for rows in (x, x, x[:1]):
        layer(rows)
    assert len(calls) == 3
    assert linears.tile(layer, x) == CANDIDATES[2]


def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The grids of all products from now on."""
    grids: list[tuple[int, int, int]] = []
    kernel = module.linear_kernel

    class Counted:
        def __getitem__(self, grid: tuple[int, int, int]) -> object:
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(module, "linear_kernel", Counted())
    return grids


@pytest.mark.parametrize(("deterministic", "tiles"), [(False, 2), (True, 3)])
def test_tiles_of_rows_run_side_by_side_so_that_weights_are_fetched_once(
    deterministic: bool, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids = launches(monkeypatch)
    layer = Linears("int8", deterministic=deterministic)(LinearWeights(torch.randn(80, 32, device=DEVICE)))
    for _ in range(2):  # at first the tile is checked
        grids.clear()
        layer(torch.randn(150, 32, device=DEVICE))
    assert grids == [(tiles, 2, 1)]


def test_many_rows_of_fixed_order_are_one_launch_unless_its_inputs_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = launches(monkeypatch)
    linears = Linears("same", deterministic=True)
    for inputs in (32, 1100):
        layer = linears(LinearWeights(torch.randn(16, inputs, device=DEVICE)))
        checks = len(grids)
        linears.tile(layer, torch.empty(1, inputs, device=DEVICE))
        del grids[checks:]
        layer(torch.randn(300, inputs, device=DEVICE))
    assert grids == [(5, 1, 1), (4, 1, 2), (1, 1, 2)]  # the second matrix in parts


class Widths(TorchDispatchMode):
    """Records the bytes of each operator's results."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        writes = not func.is_view and func is not torch.ops.aten.empty.memory_format
        self.written += out.nbytes if isinstance(out, torch.Tensor) and writes else 0
        return out


class Widening:
    """Counts launches of the widening kernel, and hides what the interpreter does for it from ``Widths``."""

    def __init__(self) -> None:
        self.kernel, self.launches = module.widen_kernel, 0

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launches += 1
            with _disable_current_modes():
                self.kernel[grid](*args, **kwargs)

        return launch


@pytest.mark.parametrize("to", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_beyond_that_the_matrix_is_widened_by_one_launch(
    to: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = quantise(torch.randn(128, 300, device=DEVICE), to), torch.randn(128, device=DEVICE).to(dtype)  # type: ignore[arg-type]
    x, widening = torch.randn(4, 300, device=DEVICE).to(dtype), Widening()
    monkeypatch.setattr(module, "widen_kernel", widening)
    with Widths() as widths:
        found = widened_linear(x, weight, bias)
    torch.testing.assert_close(found, linear_reference(x, weight, bias), atol=0.3, rtol=3e-2)
    assert widening.launches == 1
    assert widths.written < 0.1 * 128 * 320 * dtype.itemsize


@pytest.mark.parametrize("to", ["int8", "fp8"])
@pytest.mark.parametrize("inputs", [1, 63, 300, 2500])
def test_the_widening_kernel_equals_its_reference(to: str, inputs: int) -> None:
    """Exactly; with more inputs than a program has."""
    weight = quantise(torch.randn(5, inputs, device=DEVICE), to)  # type: ignore[arg-type]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(widen(weight, dtype, scaled=False), weight.unscaled(dtype))
    for dtype in (torch.float16, torch.float32):  # bf16 sums are scaled instead
        assert torch.equal(widen(weight, dtype, scaled=True), weight.widened(dtype))


def test_a_tile_whose_product_is_wrong_here_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One number in a thousand is off by the others' size, which a compiler's mistake did to some."""
    wrong: list[LinearTile | None] = []
    right = module.linear

    def spoilt(x: torch.Tensor, weight: Quantized, bias: torch.Tensor | None, tile: LinearTile, *rest: Any) -> Any:
        found = right(x, weight, bias, tile, *rest)
        if tile in wrong:
            found.flatten()[::1000] += found.square().mean().sqrt()
        return found

    monkeypatch.setattr(module, "linear", spoilt)
    timed, untimed = Linears("int8", timer=lambda _call: 1.0), Linears("int8")
    fixed = Linears("int8", deterministic=True)
    weight, x = torch.randn(40, 32, device=DEVICE), torch.randn(3, 32, device=DEVICE)
    for linears, rows in ((timed, 3), (untimed, 16), (fixed, 64)):
        layer = linears(LinearWeights(weight))
        *wrong[:], last = linears.candidates(layer, x)
        assert linears.tile(layer, x) == last
        text = f"wrong products on this GPU and is not used ({rows} x 32 by 40, LinearTile("
        assert caplog.text.count(text) == 2
        linears.tiles.clear()
    wrong += [*timed.candidates(timed(LinearWeights(weight)), x), *fixed.candidates(fixed(LinearWeights(weight)), x)]
    assert (
        timed.tile(timed(LinearWeights(weight)), x) is untimed.tile(untimed(LinearWeights(weight)), x) is None
    )  # torch's own
    with pytest.raises(ParameterError, match=r"deterministic=True.*False: every kernel"):
        fixed.tile(fixed(LinearWeights(weight)), x)


def test_sums_of_float16_do_not_overflow_before_they_are_scaled() -> None:
    weight = quantise(torch.full((1, 4096), 1e-3), "fp8")
    assert widened_linear(torch.ones(1, 4096).half(), weight, None).item() == pytest.approx(4.096, rel=1e-2)


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
def test_tiles_fit_the_devices_shared_memory(shared: int) -> None:
    """Ada's, Ampere's and Hopper's. A tile without memory for two stages takes fewer inputs at a time."""
    for tile in CANDIDATES:
        for block_m in module.ROW_TILES:
            for weight, x in ((1, 2), (2, 2), (4, 4)):
                fitted = tile.fitted(block_m, weight, x, shared)
                assert fitted.shared_bytes(block_m, weight, x) <= shared
                assert fitted.stages >= 2
                assert fitted.registers(block_m) <= 80
                if tile.shared_bytes(block_m, weight, x) <= shared and tile.registers(block_m) <= 80:
                    assert fitted == tile


def test_parts_put_one_to_three_programs_on_every_multiprocessor() -> None:
    here = torch.device("cpu")  # stands for an H100 and its 132

    def parts(outputs: int, inputs: int) -> list[int]:
        return [tile.parts for tile in LinearTile(outputs=64).split(outputs, inputs, here)]

    assert parts(4096, 14336) == [4, 2, 6]  # of 64 tiles
    assert parts(6144, 4096) == [2, 1, 4]
    assert parts(28672, 4096) == [1]  # 448 tiles fill it three times
    assert parts(64, 1100) == [2]  # a part has at least 512 inputs
    assert parts(64, 100) == [1]
