"""Products of float8 weights and activations against their references in torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.float8 import EmulatedFloat8
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl
from triton.runtime import interpreter

from paceline.kernels.gpu.float8 import FP8, LARGEST, Float8Linear, RoundedRows, round_rows
from paceline.kernels.gpu.linear import Linears, SmallRowLinear
from paceline.kernels.gpu.state import Norm
from paceline.kernels.gpu.steps import TritonSteps
from paceline.kernels.pack import Float8Weight, quantise
from paceline.kernels.spec import LinearWeights

pytestmark = pytest.mark.usefixtures("one_thread", "rounding_float8")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def rounding_float8() -> Iterator[None]:
    """torch's conversion to float8 stands in for the interpreter's, which does not carry: 124.3 becomes 64."""
    own = interpreter._convert_float

    def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target != tl.float8e4nv or source != tl.float32:
            return own(numbers, source, target, rounding)
        return torch.from_numpy(numbers.view(np.float32)).to(FP8).view(torch.uint8).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", convert)
        yield


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference implementation of ``round_rows``."""
    scales = x.float().abs().amax(1, keepdim=True).clamp(min=1e-30) / LARGEST
    return (x.float() / scales).to(FP8), scales


@settings(max_examples=12)
@given(rows=st.integers(1, 6), width=st.integers(1, 300), scale=st.sampled_from([0.0, 1e-6, 1.0, 3e4]))
def test_rows_are_rounded_as_by_torch(rows: int, width: int, scale: float) -> None:
    x = (torch.randn(rows, width + 3, device=DEVICE)[:, :width] * scale).bfloat16()
    values, scales = round_rows(x)
    expected, expected_scales = rounded(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.float(), expected.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])  # the interpreter truncates to bfloat16
def test_norms_and_gates_are_rounded_as_their_results(dtype: torch.dtype) -> None:
    """So a product is the same whether its activations were rounded with the operation before, or alone."""
    plain, rounding = TritonSteps(), TritonSteps(rounds=True)
    x, added, norm = (
        torch.randn(3, 48).to(dtype),
        torch.randn(3, 48).to(dtype),
        Norm(48, 1e-5, torch.rand(48).to(dtype)),
    )
    gate_up = torch.randn(3, 2 * 1100).to(dtype)
    pairs = [
        (rounding.add_norm(x, added, norm)[1], plain.add_norm(x, added, norm)[1]),
        (rounding.gate(gate_up, "silu"), plain.gate(gate_up, "silu")),
    ]
    for found, expected in pairs:
        assert isinstance(found, RoundedRows)
        assert torch.equal(found, expected)
        assert type(found + 1) is torch.Tensor
        assert not isinstance(found[:1], RoundedRows)
        values, scales = rounded(expected)
        assert torch.equal(found.scales, scales)
        assert torch.equal(found.rounded.float(), values.float())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 300])
def test_products_are_those_of_the_rounded_numbers(rows: int, biased: bool) -> None:
    """Whatever the number of rows."""
    weight = torch.randn(48, 64, device=DEVICE)
    bias = torch.randn(48, device=DEVICE).bfloat16() if biased else None
    layer = Linears("fp8", rounds_rows=True)(LinearWeights(weight, bias))
    assert isinstance(layer, Float8Linear)
    stored = quantise(weight, "fp8")
    assert isinstance(stored, Float8Weight)
    x = torch.randn(rows, 1, 64, device=DEVICE).bfloat16()
    values, scales = rounded(x[:, 0])
    expected = values.float() @ stored.values.float().T * scales * stored.scales
    expected = expected if bias is None else expected + bias.float()
    torch.testing.assert_close(layer(x)[:, 0].float(), expected, atol=2e-2, rtol=1e-2)
    assert torch.equal(layer(RoundedRows.of(x[:, 0], values, scales)), layer(x)[:, 0])


def test_the_emulation_on_cpus_rounds_as_the_products_do() -> None:
    """``benchmarks.float8``: weights and, where torch's kernels multiply them, activations."""
    for outputs, inputs, is_rounded in ((48, 64, True), (48, 60, False)):
        weights = LinearWeights(torch.randn(outputs, inputs), torch.randn(outputs).bfloat16())
        layer = Linears("fp8", rounds_rows=True)(weights)
        emulated, of_weights = (EmulatedFloat8.of(weights, rounds_rows=rounds) for rounds in (True, False))
        x = torch.randn(3, 1, inputs).bfloat16()
        assert isinstance(layer, Float8Linear) == emulated.rounds_rows == is_rounded
        if not is_rounded:
            assert torch.equal(emulated(x), of_weights(x))
            continue
        values, scales = round_rows(x[:, 0])
        expected = values.float() * scales @ emulated.numbers.T + weights.bias.float()
        torch.testing.assert_close(emulated(x)[:, 0].float(), expected, atol=1e-3, rtol=2**-8)
        torch.testing.assert_close(emulated(x).float(), layer(x).float(), atol=1e-3, rtol=2**-7)
        assert not torch.equal(emulated(x), of_weights(x))


@pytest.mark.parametrize(("outputs", "inputs"), [(48, 60), (40, 64)])
def test_shapes_that_torch_does_not_multiply_keep_their_activations(outputs: int, inputs: int) -> None:
    layer = Linears("fp8", rounds_rows=True)(LinearWeights(torch.randn(outputs, inputs, device=DEVICE)))
    assert isinstance(layer, SmallRowLinear)
