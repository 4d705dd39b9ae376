"""A checkpoint's matrices, read into the kernels' formats one by one while they are packed.

No copy of the whole model in bfloat16 is ever in memory, numbers are rounded once, and codes that a format can hold are
taken as they are stored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from paceline.errors import ModelFormatError
from paceline.kernels import pack
from paceline.kernels.pack import Coding, Float8Weight, Format, Fp4Weight, Int4Weight, Weight
from paceline.kernels.spec import NativeSpec
from paceline.models.description.checkpoint import Checkpoint
from paceline.models.description.weights import CodedTensor, HasInputOrder, Placement, assemble, check_finite
from paceline.models.native.spec import spec_of

# paceline's names of matrices that only multiply, or are read from their packed form
_INPUTS = ("input_gate", "input_out", "input_project", "input_table")
_EXPERTS = ("experts_gate_up", "experts_up", "experts_down", "latent_in", "latent_out")
_LINEAR = frozenset({"qkv", "q_b", "o", "gate_up", "down", "head", *_EXPERTS, *_INPUTS})

FEW_NUMBERS = 1 << 16  # of a matrix: rounding them takes less than starting threads, 0.1 ms each


@runtime_checkable
class ExactTensor(Protocol):
    """A stored tensor that need not be read in float32 to keep its numbers."""

    @property
    def exact_dtype(self) -> torch.dtype: ...


def are_ordered(parts: Iterable[Placement]) -> bool:
    """Return whether codes of 4 bits of any of these tensors may have inputs in an order."""
    return any(part.stored.ordered for part in parts if isinstance(part.stored, HasInputOrder))


@dataclass
class Outcome:
    """Counts what became of the stored matrices.

    tell: called after each matrix with the share of all numbers that are packed. kept, rounded: number of matrices by
    encoding. done, total: numbers that are packed, and all.
    """

    tell: Callable[[float], None] | None = None
    done: int = 0
    total: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    rounded: Counter[str] = field(default_factory=Counter)

    def add(self, numbers: int) -> None:
        """Count the numbers of a matrix that is packed."""
        self.done += numbers
        if self.tell is not None:
            self.tell(min(1.0, self.done / self.total))

    def count(self, part: Placement, *, kept: bool) -> None:
        """Count a stored matrix, if it is of codes."""
        if isinstance(part.stored, CodedTensor):
            (self.kept if kept else self.rounded)[part.stored.stored_as] += 1

    def __str__(self) -> str:
        parts = [f"{count} {kind} as stored" for kind, count in sorted(self.kept.items())]
        return ", ".join([*parts, *(f"{count} {kind} rounded" for kind, count in sorted(self.rounded.items()))])


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix of the model, made of the rows of one or several stored tensors."""

    parts: Sequence[Placement]
    outcome: Outcome

    @property
    def ordered(self) -> bool:
        """See ``ReadMatrix``."""
        return are_ordered(self.parts)

    def of_expert(self, expert: int) -> Self:
        """Return the matrix of one expert, of those that this one has side by side."""
        parts = (part.of_expert(expert) for part in self.parts)
        return replace(self, parts=[part for part in parts if part is not None])

    def __call__(self, to: Format) -> Weight:
        """Read the matrix in a format. Raises ModelFormatError for numbers that are not finite."""
        numbers = numbers_in(self.parts)
        if len(self.parts) == 1 or numbers < FEW_NUMBERS:
            weights = self._read(to, map)
        else:
            with ThreadPoolExecutor(len(self.parts)) as pool:
                weights = self._read(to, pool.map)
        self.outcome.add(numbers)
        return pack.stack(weights)

    def _read(self, to: Format, each: Callable[..., Iterable[Any]]) -> list[Weight]:
        """Read all parts. each: ``map``, or that of a thread pool."""
        codes = list(each(lambda part: self._codes(part, to), self.parts))
        if not all(_stack(codes[0], other) for other in codes[1:]):
            codes = [None if one is None or _stands_alone(one) else one for one in codes]
        return list(each(lambda part, own: self._kept(part, own, to), self.parts, codes))

    def _codes(self, part: Placement, to: Format) -> Weight | None:
        """Return the stored codes of a part that are kept; None if it has none."""
        return codes_of(part, to)

    def _kept(self, part: Placement, codes: Weight | None, to: Format) -> Weight:
        """Return the codes of a part; without any, its numbers rounded to the format."""
        self.outcome.count(part, kept=codes is not None)
        return pack.quantise(numbers_of(part), to) if codes is None else codes


def _stands_alone(codes: Weight) -> bool:
    """Whether rows of other codes, or of rounded numbers, cannot stand below these in one matrix."""
    return kind_of(codes) != "plain" or (isinstance(codes, Int4Weight) and codes.order is not None)


def kind_of(codes: Weight | None) -> str:
    """Return what rounded numbers are not, or "plain"."""
    if isinstance(codes, Fp4Weight):
        return "fp4"
    return "float8 in groups" if isinstance(codes, Float8Weight) and codes.scales.dim() > 1 else "plain"


def _stack(one: Weight | None, other: Weight | None) -> bool:
    """Whether two parts' codes, None for numbers to round, can be rows of one matrix."""
    orders = [part.order for part in (one, other) if isinstance(part, Int4Weight) and part.order is not None]
    if orders:
        return len(orders) == 2 and torch.equal(*orders)
    return kind_of(one) == kind_of(other)


def codes_of(part: Placement, to: Coding) -> Weight | None:
    """Return the stored codes of a part in a format, its rows in their order here; None if it cannot hold them."""
    stored = part.stored
    codes = stored.codes(to) if isinstance(stored, CodedTensor) else None
    if isinstance(codes, Fp4Weight) and part.alternating is not None:
        return pack.reorder_rows(codes, partial(_apart, parts=part.alternating))
    if not isinstance(codes, Fp4Weight) and (part.transposed or part.alternating):  # codes of MXFP4 are by output
        return None
    if isinstance(codes, pack.Int8Weight | pack.Float8Weight):
        check_finite(codes.scales, part.name)
    if isinstance(codes, pack.Float8Weight) and bool((codes.values.view(torch.int8) & 127 == 127).any()):
        raise ModelFormatError(f"{part.name} has values that are not finite")  # e4m3 has NaN only
    return codes if codes is None or part.slot.order is None else pack.reorder_rows(codes, part.slot.order)


def _apart(rows: Tensor, parts: tuple[int, int]) -> Tensor:
    """Take the parts whose rows alternate apart; parts: see ``Placement.alternating``."""
    return rows.view(-1, *parts, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def numbers_of(part: Placement) -> Tensor:
    """Read the numbers of a part into memory of the host. Raises ModelFormatError for others than finite ones."""
    stored = part.stored
    dtype = stored.exact_dtype if isinstance(stored, ExactTensor) else torch.float32
    numbers = torch.empty(part.slot.shape, dtype=dtype)
    part.read_into(numbers)
    check_finite(numbers, part.name)
    return numbers


def unread_spec(checkpoint: Checkpoint, dtype: torch.dtype, outcome: Outcome) -> NativeSpec:
    """Return the kernels' spec of a checkpoint, whose matrices are read when they are packed.

    dtype: of what is not packed (norms and biases) or also read by token (the embedding).
    Raises ModelFormatError if neither the kernels nor their reference can run the model, or for other numbers than
    finite ones.
    """
    return spec_of(checkpoint.spec, *unread_weights(checkpoint, dtype, outcome))


def unread_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, outcome: Outcome
) -> tuple[dict[str, Tensor], dict[str, StoredMatrix]]:
    """Return a checkpoint's tensors, its matrices on device "meta", and what reads those; see ``unread_spec``."""
    parts = matrices_of(checkpoint.placements)
    outcome.total = sum(map(numbers_in, parts.values()))
    tensors = shapes_of(parts) | assemble(others_than(parts, checkpoint.placements), dtype, torch.device("cpu"))
    return tensors, {target: StoredMatrix(found, outcome) for target, found in parts.items()}


def matrices_of(placements: Sequence[Placement]) -> dict[str, list[Placement]]:
    """Return the stored parts of the matrices that are read while they are packed, by target, in their order."""
    parts: dict[str, list[Placement]] = {}
    for placement in placements:
        stem, _, kind = placement.slot.target.rpartition(".")
        if kind == "weight" and stem.rpartition(".")[2] in _LINEAR:
            parts.setdefault(placement.slot.target, []).append(placement)
    return {target: sorted(found, key=lambda part: part.slot.first) for target, found in parts.items()}


def others_than(matrices: Mapping[str, Sequence[Placement]], placements: Sequence[Placement]) -> list[Placement]:
    """Return the placements that are of no matrix."""
    return [placement for placement in placements if placement.slot.target not in matrices]


def shapes_of(matrices: Mapping[str, Sequence[Placement]]) -> dict[str, Tensor]:
    """Return tensors of the matrices' shapes, on device "meta"."""
    return {target: torch.empty(parts[0].slot.target_shape, device="meta") for target, parts in matrices.items()}


def numbers_in(parts: Sequence[Placement]) -> int:
    """Return how many numbers the parts have."""
    return sum(math.prod(part.slot.shape) for part in parts)
