"""4-bit weights as the GPU kernels read them: their layout in memory, packing, and the dequantised reference.

N outputs, K inputs. A run is 128 inputs; word i of a run has the codes of its inputs i, i + 32, i + 64 and i + 96, from
the lowest bits up. So 32 words hold four groups of 32 inputs, which a product multiplies one after the other, and the
words of neighbouring outputs are one block of memory. Matrices of experts have one more dimension in front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.errors import ModelFormatError
from paceline.kernels.pack import Fp4Weight, Int4Weight, fp4_numbers

Grid = Literal["int4", "fp4"]
RUN, WORDS = 128, 32  # inputs of a run, and words that hold their codes
GROUPS = (32, 64, 128)  # numbers of inputs that share a scale
MIDDLE = 8  # the code of zero in symmetric groups


@dataclass(frozen=True)
class FourBitWeight:
    """Packed weights of 4 bits; R = ceil(K / 128) runs, G groups of R * 128 / G inputs.

    words: int16 [..., R, N, 32]; codes beyond K are 0.
    scales: float16 [..., G, N] of the grid "int4": number = code * scale + low.
        uint8 [..., G, N] of the grid "fp4" (MXFP4): number = FP4[code] * 2 ** (scale - 127).
    lows: float16 [..., G, N]; None: -8 * scale ("int4"), or the grid has none ("fp4").
    order: int32 [..., K], the input of the layer that each input here is; None: they are in the layer's order. A
        product takes the activations in this order.
    inputs: K, in any number.
    """

    words: Tensor
    scales: Tensor
    lows: Tensor | None
    order: Tensor | None
    inputs: int

    @property
    def grid(self) -> Grid:
        """The numbers that codes stand for, before their scale."""
        return "fp4" if self.scales.dtype == torch.uint8 else "int4"

    @property
    def kind(self) -> str:
        """Name of the format, for tables of tiles."""
        shifts = "" if self.lows is None else " with lows"
        return f"{self.grid} by {self.group}{shifts}"

    @property
    def group(self) -> int:
        """Number of inputs that share a scale."""
        return self.words.shape[-3] * RUN // self.scales.shape[-2]

    @property
    def outputs(self) -> int:
        """N."""
        return self.words.shape[-2]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors in memory, the codes first."""
        return tuple(part for part in (self.words, self.scales, self.lows, self.order) if part is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def stacked(self, others: Sequence[FourBitWeight]) -> FourBitWeight:
        """Stack the matrices of experts; see ``stack``. Raises ModelFormatError for inputs in an order of their own."""
        if self.order is not None:
            raise ModelFormatError("experts with GPTQ's activation order in 4 bits; load them with quantization='int8'")
        return stack([self, *others])

    def of_expert(self, expert: int, count: int) -> FourBitWeight:
        """The matrix of one of ``count`` experts."""
        assert len(self.words) == count, "matrices of experts are stacked"
        lows = None if self.lows is None else self.lows[expert]
        return FourBitWeight(self.words[expert], self.scales[expert], lows, None, self.inputs)

    def to(self, device: torch.device) -> FourBitWeight:
        """Return the weights on a device."""
        words, scales = self.words.to(device), self.scales.to(device)
        lows, order = (None if part is None else part.to(device) for part in (self.lows, self.order))
        return FourBitWeight(words, scales, lows, order, self.inputs)

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the numbers [..., N, K], by the layer's inputs."""
        codes = _codes(self.words)
        scales, lows = (None if part is None else self._by_input(part) for part in (self.scales, self.lows))
        assert scales is not None
        if self.grid == "fp4":
            numbers = fp4_numbers(codes, scales)
        else:
            numbers = codes * scales.float() + (-MIDDLE * scales.float() if lows is None else lows.float())
        numbers = numbers[..., : self.inputs].to(dtype)
        if self.order is None:
            return numbers
        places = self.order.long().unsqueeze(-2).expand_as(numbers)
        return torch.empty_like(numbers).scatter_(-1, places, numbers)

    def _by_input(self, of_groups: Tensor) -> Tensor:
        """[..., G, N] -> [..., N, R * 128]."""
        return of_groups.mT.repeat_interleave(self.group, -1)

    def in_groups_of(self, group: int) -> FourBitWeight:
        """Return the same numbers in smaller groups. group: one of ``GROUPS`` that divides this one."""
        scales, lows = (
            None if part is None else part.repeat_interleave(self.group // group, -2)
            for part in (self.scales, self.lows)
        )
        assert scales is not None
        return replace(self, scales=scales, lows=lows)


def pack(weight: Int4Weight | Fp4Weight, inputs: int) -> FourBitWeight:
    """Pack a weight [N, K], whose groups are of 32 inputs, in the widest of ``GROUPS`` that hold the same numbers.

    inputs: K; the weight may have more columns, which are dropped.
    """
    codes = pad(weight.values[:, :inputs], (0, -inputs % RUN)).view(len(weight.values), -1, 4, WORDS)
    octets = torch.stack((codes[:, :, 0] | codes[:, :, 1] << 4, codes[:, :, 2] | codes[:, :, 3] << 4), -1)
    words = octets.view(torch.int16)[..., 0].transpose(0, 1).contiguous()
    if isinstance(weight, Fp4Weight):
        tables, order = [_by_group(weight.exponents, words)], None
    else:
        shifts = [] if torch.equal(weight.lows, -MIDDLE * weight.scales) else [weight.lows]
        tables = [_by_group(table, words) for table in (weight.scales, *shifts)]
        order = None if weight.order is None else weight.order.to(torch.int32)
    for _ in GROUPS[1:]:
        if all(torch.equal(table[::2], table[1::2]) for table in tables):
            tables = [table[::2] for table in tables]
    scales, *lows = (table.contiguous() for table in tables)
    return FourBitWeight(words, scales, lows[0] if lows else None, order, inputs)


def _by_group(of_groups: Tensor, words: Tensor) -> Tensor:
    """[N, groups of 32] -> [R * 4, N], filled up with zeros."""
    return pad(of_groups, (0, len(words) * RUN // GROUPS[0] - of_groups.shape[1])).t()


def stack(parts: Sequence[FourBitWeight]) -> FourBitWeight:
    """Stack matrices of one shape and one grid, such as those of experts -> words [E, R, N, 32] and so on.

    The smallest of their groups is everybody's, and lows are kept if one of them has any. Matrices whose inputs are in
    an order must all have one.
    """
    group = min(part.group for part in parts)
    parts = [part.in_groups_of(group) for part in parts]
    shifted = any(part.lows is not None for part in parts)
    lows = [-MIDDLE * part.scales if part.lows is None else part.lows for part in parts] if shifted else None
    orders = [part.order for part in parts if part.order is not None]
    assert len(orders) in (0, len(parts)), "all of them have an order or none has"
    return FourBitWeight(
        torch.stack([part.words for part in parts]),
        torch.stack([part.scales for part in parts]),
        None if lows is None else torch.stack(lows),
        torch.stack(orders) if orders else None,
        parts[0].inputs,
    )


def empty(shape: tuple[int, ...], grid: Grid, group: int, *, shifted: bool, device: torch.device) -> FourBitWeight:
    """Return weights of ``shape`` [..., N, K], uninitialised. shifted: whether they have lows."""
    *before, outputs, inputs = shape
    runs = -(-inputs // RUN)
    of_groups = (*before, runs * RUN // group, outputs)
    return FourBitWeight(
        torch.empty((*before, runs, outputs, WORDS), dtype=torch.int16, device=device),
        torch.empty(of_groups, dtype=torch.uint8 if grid == "fp4" else torch.float16, device=device),
        torch.empty(of_groups, dtype=torch.float16, device=device) if shifted else None,
        None,
        inputs,
    )


def _codes(words: Tensor) -> Tensor:
    """int16 [..., R, N, 32] -> uint8 [..., N, R * 128]."""
    turned = words.transpose(-3, -2).contiguous()
    octets = turned.view(torch.uint8).view(*turned.shape, 2)
    parts = (octets[..., 0] & 15, octets[..., 0] >> 4, octets[..., 1] & 15, octets[..., 1] >> 4)
    return torch.stack(parts, -2).flatten(-3)
