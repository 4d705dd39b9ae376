"""Tensors of quantised safetensors checkpoints: codes with scales, in the layouts of several tools.

Every class is a ``StoredTensor`` made of several tensors of the file. Shapes and dtypes are checked before anything is
read. O, I: outputs and inputs of the matrix; G: groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.errors import ModelFormatError
from paceline.kernels.pack import (
    FLOAT8_GROUP,
    INT4_GROUP,
    Coding,
    Float8Weight,
    Int4Weight,
    Int8Weight,
    Weight,
    fp4_numbers,
    fp4_of,
    fp4_values,
)

_ROWS_AT_ONCE = 1 << 20  # numbers of a matrix that are dequantised at a time
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each of eight outputs in a word


class SafeTensor(Protocol):
    """A tensor of a safetensors file, not read yet. dtype: its name in the file, such as "I32"."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def load(self) -> Tensor: ...

    def matrix(self, index: int) -> SafeTensor:
        """Return one entry of the first dimension, not read yet."""
        ...


@dataclass(frozen=True)
class Parts:
    """The tensors of one matrix by their suffixes. where: file and name of the matrix, for messages."""

    where: str
    tensors: Mapping[str, SafeTensor]

    def need(self, suffix: str, *dtypes: str, dimensions: int = 2) -> SafeTensor:
        """Return a tensor. Raises ModelFormatError if it is missing or of another dtype or number of dimensions."""
        self.need_all([suffix])
        found = self.tensors[suffix]
        self.check(
            len(found.shape) == dimensions and found.dtype in dtypes, suffix, f"{dimensions} dimensions of {dtypes}"
        )
        return found

    def need_all(self, suffixes: Sequence[str]) -> None:
        """Raise ModelFormatError if a tensor is missing."""
        for suffix in suffixes:
            if suffix not in self.tensors:
                raise ModelFormatError(f"{self.where} has no {suffix}")

    def check(self, fits: bool, suffix: str, expected: str) -> None:
        """Raise ModelFormatError if the tensor of this suffix does not fit."""
        if not fits:
            found = self.tensors[suffix]
            raise ModelFormatError(
                f"{self.where}.{suffix} is {found.dtype} of the shape {found.shape}, not {expected}; the file is broken"
            )


@dataclass(frozen=True)
class Groups:
    """A quantised matrix: number = (code - zero) * scale, the last two by group of inputs.

    codes: uint8 [O, I]. scales, zeros: float32 [O, G]. of_input: group of each input, int64 [I]; None: equal runs.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    of_input: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of consecutive inputs in a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    def numbers(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the numbers, float32, of a few rows at a time."""
        step = max(1, _ROWS_AT_ONCE // self.codes.shape[1])
        for first in range(0, len(self.codes), step):
            rows = slice(first, first + step)
            yield rows, (self.codes[rows].float() - self._spread(self.zeros[rows])) * self._spread(self.scales[rows])

    def _spread(self, by_group: Tensor) -> Tensor:
        """[rows, G] -> [rows, I]."""
        return by_group.repeat_interleave(self.size, 1) if self.of_input is None else by_group[:, self.of_input]

    def int4(self) -> Int4Weight | None:
        """Return the codes of 4 bits in groups of 32; None if groups are not of 32 inputs, or a multiple.

        Scales and lowest values are rounded to float16. Inputs of one group stand side by side in the weight's order.
        """
        order = None if self.of_input is None else self.of_input.argsort(stable=True)
        if self.size % INT4_GROUP or (order is not None and not self._are_equal()):
            return None
        repeats = self.size // INT4_GROUP
        scales = self.scales.half().repeat_interleave(repeats, 1)
        lows = (-self.zeros * self.scales).half().repeat_interleave(repeats, 1)
        if not bool(scales.isfinite().all() and lows.isfinite().all()):
            return None
        return Int4Weight(self.codes if order is None else self.codes[:, order], scales, lows, INT4_GROUP, order)

    def _are_equal(self) -> bool:
        """Whether every group has as many inputs as the others."""
        assert self.of_input is not None
        return bool((torch.bincount(self.of_input, minlength=self.scales.shape[1]) == self.size).all())

    def int8(self) -> Int8Weight | None:
        """Return codes of 8 bits with one scale per row; None if there are several, or zeros that are not 128."""
        if self.scales.shape[1] != 1 or bool((self.zeros != 128).any()):
            return None
        return Int8Weight((self.codes.to(torch.int16) - 128).to(torch.int8), self.scales[:, 0].contiguous())


class GroupedTensor:
    """A matrix of 4 or 8 bits with a scale per group of inputs. A subclass knows where the numbers are.

    shape: [O, I]. bits: 4 or 8. _count: number of groups. _group_suffix: of the tensor that has each input's group.
    """

    stored_as = "?"
    _group_suffix = ""
    _count: int

    def __init__(self, parts: Parts, shape: tuple[int, int], bits: int) -> None:
        self.parts, self.shape, self.bits = parts, shape, bits

    @property
    def ordered(self) -> bool:
        """Whether its codes of 4 bits may come with an order of inputs (activation order). Raises ModelFormatError."""
        return self.bits == 4 and self._of_input() is not None

    def _of_input(self) -> Tensor | None:
        return _groups_of(self.parts, self._group_suffix, self.shape[1], self._count)

    def groups(self) -> Groups:
        """Read the matrix. Raises ModelFormatError."""
        raise NotImplementedError

    def unpack_into(self, destination: Tensor) -> None:
        """Dequantise into ``destination`` [O, I], a few rows at a time."""
        for rows, numbers in self.groups().numbers():
            destination[rows].copy_(numbers)

    def codes(self, to: Coding) -> Weight | None:
        """Return the codes as a weight of this format; None if the format cannot hold them."""
        if (to, self.bits) == ("int4", 4):
            return self.groups().int4()
        return self.groups().int8() if (to, self.bits) == ("int8", 8) else None

    def _check_groups(self, suffix: str, shape: tuple[int, ...], outputs: int) -> int:
        """Return the number of groups in ``shape``, which is that of the scales as [O, G]."""
        count = shape[1]
        fits = shape[0] == outputs and count > 0 and self.shape[1] % count == 0
        self.parts.check(fits, suffix, f"scales of {self.shape}, whose inputs are whole groups")
        return count


class CompressedTensor(GroupedTensor):
    """A matrix of compressed-tensors' format "pack-quantized": words along the inputs, lowest bits first."""

    stored_as = "pack-quantized"
    _group_suffix = "weight_g_idx"

    def __init__(self, parts: Parts, bits: int, needed: Sequence[str] = ()) -> None:
        packed = parts.need("weight_packed", "I32")
        parts.need_all(needed)
        said = parts.need("weight_shape", "I64", "I32", dimensions=1)
        parts.check(said.shape == (2,), "weight_shape", "two numbers")
        outputs, inputs = (int(size) for size in said.load().tolist())
        super().__init__(parts, (outputs, inputs), bits)
        words = -(-inputs * bits // 32)
        parts.check(inputs > 0 and packed.shape == (outputs, words), "weight_packed", f"{(outputs, words)} of I32")
        scale = parts.need("weight_scale", "BF16", "F16", "F32")
        self._count = self._check_groups("weight_scale", scale.shape, outputs)

    def groups(self) -> Groups:
        tensors = self.parts.tensors
        codes = _unpacked(tensors["weight_packed"].load(), self.bits)[:, : self.shape[1]].contiguous()
        scales = tensors["weight_scale"].load().float()
        return Groups(codes, scales, self._zeros(scales), self._of_input())

    def _zeros(self, scales: Tensor) -> Tensor:
        middle = 1 << (self.bits - 1)
        if "weight_zero_point" not in self.parts.tensors:
            return torch.full_like(scales, middle)
        stored = self.parts.need("weight_zero_point", "I32", "I8")
        if stored.dtype == "I8":
            self.parts.check(stored.shape == tuple(scales.shape), "weight_zero_point", f"I8 of {tuple(scales.shape)}")
            return stored.load().float() + middle
        words = -(-self.shape[0] * self.bits // 32), scales.shape[1]
        self.parts.check(stored.shape == words, "weight_zero_point", f"I32 of {words}")
        return _unpacked(stored.load().t(), self.bits)[:, : self.shape[0]].t().float()


class GPTQTensor(GroupedTensor):
    """A matrix of GPTQ: words along the inputs, transposed. first_zero: 1 if zeros are stored minus 1 (version 1)."""

    stored_as = "GPTQ"
    _group_suffix = "g_idx"

    def __init__(self, parts: Parts, bits: int, first_zero: int, needed: Sequence[str] = ()) -> None:
        packed = parts.need("qweight", "I32")
        parts.need_all(needed)
        inputs, outputs = packed.shape[0] * 32 // bits, packed.shape[1]
        super().__init__(parts, (outputs, inputs), bits)
        self._first_zero = first_zero
        scales = parts.need("scales", "BF16", "F16", "F32")
        self._count = self._check_groups("scales", scales.shape[::-1], outputs)
        zeros, expected = parts.need("qzeros", "I32"), (self._count, -(-outputs * bits // 32))
        parts.check(zeros.shape == expected, "qzeros", f"{expected} of I32")

    def groups(self) -> Groups:
        tensors = self.parts.tensors
        codes = _unpacked(tensors["qweight"].load().t(), self.bits)
        zeros = _unpacked(tensors["qzeros"].load(), self.bits)[:, : self.shape[0]].t()
        zeros = (zeros.to(torch.int16) + self._first_zero) & ((1 << self.bits) - 1)
        return Groups(codes, tensors["scales"].load().t().float(), zeros.float(), self._of_input())


class AWQTensor(GroupedTensor):
    """A matrix of AWQ's "gemm" layout: words along the outputs, transposed, eight outputs in an order of their own."""

    stored_as = "AWQ"

    def __init__(self, parts: Parts) -> None:
        packed = parts.need("qweight", "I32")
        super().__init__(parts, (packed.shape[1] * 8, packed.shape[0]), 4)
        scales = parts.need("scales", "BF16", "F16", "F32")
        self._count = self._check_groups("scales", scales.shape[::-1], self.shape[0])
        zeros = parts.need("qzeros", "I32")
        parts.check(zeros.shape == (self._count, packed.shape[1]), "qzeros", "the shape of the scales")

    def groups(self) -> Groups:
        tensors = self.parts.tensors
        codes, zeros = (_in_order(_unpacked(tensors[name].load(), 4)).t() for name in ("qweight", "qzeros"))
        return Groups(codes.contiguous(), tensors["scales"].load().t().float(), zeros.float())


class ScaledTensor:
    """A matrix of int8 or float8 numbers with scales: one, one per row, or one per block of rows and inputs."""

    def __init__(self, parts: Parts, scale: str, block: tuple[int, int] | None) -> None:
        weight = parts.need("weight", "I8", "F8_E4M3")
        self.parts, self._scale = parts, scale
        self.shape: tuple[int, int] = (weight.shape[0], weight.shape[1])
        self._block = block or (1, self.shape[1])
        self.stored_as = "int8" if weight.dtype == "I8" else "float8"
        parts.need_all([scale])
        found = parts.tensors[scale]
        blocks = tuple(-(-size // of) for size, of in zip(self.shape, self._block, strict=True))
        allowed = {blocks} if block else {(), (1,), (1, 1), (self.shape[0],), blocks}
        fits = found.shape in allowed and found.dtype in ("BF16", "F16", "F32")
        parts.check(fits, scale, f"{' or '.join(map(str, sorted(allowed)))} of floats")
        if "weight_zero_point" in parts.tensors:
            raise ModelFormatError(f"{parts.where} has zero points; 8-bit weights are read if they are symmetric")

    def _scales(self) -> Tensor:
        """Return the scales, float32 [row blocks, input blocks]."""
        scales = self.parts.tensors[self._scale].load().float()
        blocks = tuple(-(-size // of) for size, of in zip(self.shape, self._block, strict=True))
        return scales.view(-1, 1).expand(blocks) if scales.dim() < 2 or scales.numel() == 1 else scales

    def unpack_into(self, destination: Tensor) -> None:
        """Dequantise into ``destination`` [O, I], a block of rows at a time."""
        values, scales = self.parts.tensors["weight"].load(), self._scales()
        height, width = self._block
        step = max(1, _ROWS_AT_ONCE // (height * self.shape[1]))
        for first in range(0, len(scales), step):
            rows = slice(first * height, (first + step) * height)
            of_rows = scales[first : first + step].repeat_interleave(height, 0)[: len(values[rows])]
            destination[rows].copy_(values[rows].float() * of_rows.repeat_interleave(width, 1)[:, : self.shape[1]])

    def codes(self, to: Coding) -> Weight | None:
        """Return int8 numbers with one scale per row as they are, and float8 ones that also have some per 128 inputs.

        None for others.
        """
        if (to, self.stored_as) == ("fp8", "float8"):
            return self._float8()
        if to != "int8" or self.stored_as != "int8" or self._block[1] != self.shape[1]:
            return None
        scales = self._scales().repeat_interleave(self._block[0], 0)[: self.shape[0], 0]
        return Int8Weight(self.parts.tensors["weight"].load(), scales.contiguous())

    def _float8(self) -> Float8Weight | None:
        height, width = self._block
        by_row = self._scales().repeat_interleave(height, 0)[: self.shape[0]]
        if width == self.shape[1]:
            return Float8Weight(self.parts.tensors["weight"].load(), by_row[:, 0].contiguous())
        if width % FLOAT8_GROUP:
            return None
        groups = -(-self.shape[1] // FLOAT8_GROUP)
        by_group = by_row.repeat_interleave(width // FLOAT8_GROUP, 1)[:, :groups]
        return Float8Weight(self.parts.tensors["weight"].load(), by_group.contiguous())


class MXFP4Tensor:
    """Numbers of 4 bits (float) in blocks of 32 with a power of two as scale.

    As [O, I / 2] bytes with scales [O, I / 32], or with a dimension of experts and blocks in a dimension of their own,
    as gpt-oss has them; shape is then [experts, I, O], as transformers has the dequantised numbers.
    """

    stored_as = "MXFP4"

    def __init__(self, parts: Parts, values: str, scales: str) -> None:
        dimensions = 2 if values == "weight_packed" else 4
        stored, by = (
            parts.need(values, "U8", dimensions=dimensions),
            parts.need(scales, "U8", dimensions=max(2, dimensions - 1)),
        )
        self.parts, self._names = parts, (values, scales)
        blocks = (*by.shape[:-1], by.shape[-1] * 16) if dimensions == 2 else (*by.shape, 16)
        parts.check(stored.shape == blocks, values, f"{blocks} of U8")
        rows = (*by.shape[:-1], by.shape[-1] * 32)
        self.shape: tuple[int, ...] = rows if dimensions == 2 else (rows[0], rows[2], rows[1])

    def unpack_into(self, destination: Tensor) -> None:
        """Dequantise into ``destination``, which has ``shape``, a matrix at a time."""
        if len(self.shape) == 2:
            destination.copy_(_mxfp4(*(self.parts.tensors[name].load() for name in self._names)))
            return
        for expert in range(self.shape[0]):
            self.matrix(expert).unpack_into(destination[expert])

    def matrix(self, index: int) -> _MXFP4Matrix:
        """Return the matrix of one expert."""
        values, scales = (self.parts.tensors[name].matrix(index) for name in self._names)
        return _MXFP4Matrix(values, scales, self.shape[1:])

    def codes(self, to: Coding) -> Weight | None:
        """Return the codes and exponents of a matrix; None for other formats, and for numbers that are not finite."""
        if to != "fp4" or len(self.shape) > 2:
            return None
        values, exponents = (self.parts.tensors[name].load() for name in self._names)
        return fp4_of(_unpacked(values, 4), exponents)


@dataclass(frozen=True)
class _MXFP4Matrix:
    """One expert's matrix: values [O, blocks, 16] and scales [O, blocks], of the shape [I, O]."""

    values: SafeTensor
    scales: SafeTensor
    shape: tuple[int, ...]
    stored_as = MXFP4Tensor.stored_as

    def unpack_into(self, destination: Tensor) -> None:
        """Dequantise into ``destination`` [I, O]."""
        destination.copy_(_mxfp4(self.values.load().flatten(1), self.scales.load()).t())

    def codes(self, to: Coding) -> Weight | None:
        """Return the codes [O, I] and exponents; see ``MXFP4Tensor``."""
        return fp4_of(_unpacked(self.values.load().flatten(1), 4), self.scales.load()) if to == "fp4" else None


class NVFP4Tensor:
    """Numbers of 4 bits (float) in blocks of 16 with a float8 scale each, and one float32 scale of the matrix.

    values: suffix of the bytes, uint8 [O, I / 2]; their scales are in weight_scale [O, I / 16]. of_all: suffix of the
    matrix's scale; compressed-tensors divides by it (divides), modelopt multiplies.
    """

    stored_as = "NVFP4"

    def __init__(self, parts: Parts, values: str, of_all: str, *, divides: bool) -> None:
        stored, by = parts.need(values, "U8"), parts.need("weight_scale", "F8_E4M3")
        parts.check(stored.shape == (by.shape[0], by.shape[1] * 8), values, f"{(by.shape[0], by.shape[1] * 8)} of U8")
        parts.need_all([of_all])
        whole = parts.tensors[of_all]
        parts.check(whole.shape in ((), (1,)) and whole.dtype == "F32", of_all, "one float32")
        self.parts, self._values, self._of_all, self._divides = parts, values, of_all, divides
        self.shape: tuple[int, int] = (by.shape[0], by.shape[1] * 16)

    def unpack_into(self, destination: Tensor) -> None:
        """Dequantise into ``destination`` [O, I], a few rows at a time."""
        values, scales, whole = (
            self.parts.tensors[name].load() for name in (self._values, "weight_scale", self._of_all)
        )
        fits = bool(whole.isfinite().all()) and (not self._divides or bool((whole != 0).all()))
        self.parts.check(fits, self._of_all, "a finite number, and not 0 if scales are divided by it")
        factors = scales.float() / whole if self._divides else scales.float() * whole
        step = max(1, _ROWS_AT_ONCE // self.shape[1])
        for first in range(0, self.shape[0], step):
            rows = slice(first, first + step)
            blocks = fp4_values(_unpacked(values[rows], 4)).view(-1, self.shape[1] // 16, 16)
            destination[rows].copy_((blocks * factors[rows, :, None]).flatten(1))

    def codes(self, to: Coding) -> Weight | None:
        """Return None: no format has scales for 16 of these numbers."""
        return None


def _mxfp4(packed: Tensor, exponents: Tensor) -> Tensor:
    """packed uint8 [O, I / 2], the first of two numbers in the low half; exponents uint8 [O, I / 32] -> [O, I]."""
    return fp4_numbers(_unpacked(packed, 4), exponents.repeat_interleave(32, 1))


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Words [N, W] of any width -> uint8 [N, codes], the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _in_order(nibbles: Tensor) -> Tensor:
    return nibbles.view(len(nibbles), -1, 8)[..., list(_AWQ_ORDER)].flatten(1)


def _groups_of(parts: Parts, suffix: str, inputs: int, count: int) -> Tensor | None:
    """Return the group of each input; None if groups are equal runs of inputs (no activation order).

    Raises ModelFormatError for an unknown group.
    """
    if suffix not in parts.tensors:
        return None
    stored = parts.need(suffix, "I32", "I64", dimensions=1)
    parts.check(stored.shape == (inputs,), suffix, f"one group for each of {inputs} inputs")
    found = stored.load().long()
    if bool((found < 0).any() or (found >= count).any()):
        raise ModelFormatError(
            f"{parts.where}.{suffix} names groups that do not exist ({count} do); the file is broken"
        )
    return None if torch.equal(found, torch.arange(inputs) // (inputs // count)) else found
