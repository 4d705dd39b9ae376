"""A decoder whose weights are not read yet: what lies between files or loaded models, and the backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.description.weights import Placement, StoredTensor, assemble, place, truly_tied


@dataclass(frozen=True)
class Checkpoint:
    """A decoder of a native family, whose weights are not read yet.

    name: path of the files, or name of the loaded model. spec: its description, ``tied`` and ``headless`` as stored.
    placements: every stored tensor with its destination.
    """

    name: str
    spec: DecoderSpec
    placements: Sequence[Placement]

    @classmethod
    def of(cls, name: str, spec: DecoderSpec, names: WeightNames, stored: Mapping[str, StoredTensor]) -> Checkpoint:
        """Pair the stored tensors with the weights that a description asks for.

        spec: as the configuration says. Raises ModelFormatError if the tensors do not fit it.
        """
        spec = as_stored(spec, names, stored)
        return cls(name, spec, place(spec, names, stored, name))

    def tensors(self, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Read the weights, by the names of ``weights.slots``. Raises ModelFormatError for numbers beyond ``dtype``."""
        return assemble(self.placements, dtype, device)

    def tensors_on_demand(self, dtype: torch.dtype, device: torch.device) -> Mapping[str, Tensor]:
        """Return the weights as ``tensors`` does, but read each when it is asked for."""
        return _TensorsOnDemand(self.placements, dtype, device)


class _TensorsOnDemand(Mapping[str, Tensor]):
    """Tensors by name that are read when they are asked for, and held only while someone else holds them."""

    def __init__(self, placements: Sequence[Placement], dtype: torch.dtype, device: torch.device) -> None:
        self._placements: dict[str, list[Placement]] = {}
        for placement in placements:
            self._placements.setdefault(placement.slot.target, []).append(placement)
        self._dtype, self._device = dtype, device
        self._held: WeakValueDictionary[str, Tensor] = WeakValueDictionary()

    def __getitem__(self, name: str) -> Tensor:
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = assemble(self._placements[name], self._dtype, self._device)[name]
        return held

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)


def as_stored(spec: DecoderSpec, names: WeightNames, stored: Mapping[str, StoredTensor]) -> DecoderSpec:
    """Set ``tied`` to False if an embedding and a head that differ are stored, and ``headless`` by what is stored."""
    has_head = spec.tied or any(names.ours(name) == "head.weight" for name in stored)
    headless = spec.headless and not has_head
    return replace(spec, tied=headless or (spec.tied and truly_tied(names, stored)), headless=headless)
