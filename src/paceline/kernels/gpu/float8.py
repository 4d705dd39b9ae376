"""Products of float8 weights and activations (W8A8) by torch's kernels, with one arithmetic for any number of rows.

M rows (tokens), K inputs, N outputs. Activations are rounded to float8 (e4m3) with one scale per row, by the norm or
the gate before the product (``elementwise``), else in a launch of their own. Weights have one scale per output. The
products are summed and scaled in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C import _disabled_torch_function_impl

from paceline.kernels.pack import Float8Weight

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
_MULTIPLE = 16  # of inputs and outputs, which torch's kernels ask for
_SMALLEST = tl.constexpr(1e-30)  # amplitude of a row, so that rows of zeros have a scale
_WARPS, _WIDE = 4, 4096  # longer lines get twice the warps


class RoundedRows(Tensor):
    """Activations [M, K] that also have their numbers in float8 and a scale per row, by the kernel that made them.

    To everything but ``Float8Linear`` they are a plain tensor, and so are the results of operations with them.
    """

    rounded: Tensor
    scales: Tensor
    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, rows: Tensor, rounded: Tensor, scales: Tensor) -> RoundedRows:
        """Return rows with their numbers in float8 [M, K] and their scales, float32 [M, 1]."""
        found = rows.as_subclass(cls)
        found.rounded, found.scales = rounded, scales
        return found


def memory_for(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return memory for the numbers of rows in float8, and for their scales."""
    values = torch.empty((rows, width), dtype=FP8, device=device)
    return values, torch.empty((rows, 1), dtype=torch.float32, device=device)


@triton.jit
def store_rounded(
    row: tl.tensor, values: tl.tensor, scale_place: tl.tensor, inside: tl.tensor, LARGEST: tl.constexpr
) -> None:
    """Round a whole row of activations, float32, to float8. values: pointers. LARGEST: the format's largest number."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(row), 0), _SMALLEST), LARGEST)
    tl.store(values, tl.div_rn(row, scale).to(values.dtype.element_ty), mask=inside)
    tl.store(scale_place, scale)


@triton.jit
def round_rows_kernel(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (M): values [M, K] float8 = x / scales [M], whose largest amplitude is the format's largest number."""
    line = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(x + line * stride + column, mask=inside, other=0.0).to(tl.float32)
    store_rounded(row, values + line * width + column, scales + line, inside, LARGEST)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> its numbers in float8 [M, K], and the scale of each row, float32 [M, 1]."""
    rows, width = x.shape
    values, scales = memory_for(rows, width, x.device)
    warps = _WARPS if width <= _WIDE else 2 * _WARPS
    block = triton.next_power_of_2(width)
    round_rows_kernel[(rows,)](x, values, scales, x.stride(0), width, LARGEST, BLOCK=block, num_warps=warps)
    return values, scales


@dataclass(frozen=True)
class Float8Linear:
    """A linear layer whose activations are rounded, too; implements ``models.torch.linear.Linear``.

    weight: float8 [N, K]. scales: float32 [N]. bias: bfloat16 [N] or None. Activations are bfloat16.
    """

    weight: Tensor
    scales: Tensor
    bias: Tensor | None = None

    @staticmethod
    def fits(weight: Float8Weight) -> bool:
        """Whether torch's kernels multiply with these weights: whole sixteens, and one scale per output."""
        return weight.scales.dim() == 1 and all(size % _MULTIPLE == 0 for size in weight.values.shape)

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = (x.rounded, x.scales) if isinstance(x, RoundedRows) else round_rows(x.reshape(-1, x.shape[-1]))
        return self.product(values, scales, x.dtype).view(*x.shape[:-1], -1)

    def product(self, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounded rows [M, K] and their scales [M, 1] -> [M, N] in ``dtype``."""
        return torch._scaled_mm(
            values, self.weight.t(), scale_a=scales, scale_b=self.scales[None], bias=self.bias, out_dtype=dtype
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight, self.scales) if self.bias is None else (self.weight, self.scales, self.bias)
