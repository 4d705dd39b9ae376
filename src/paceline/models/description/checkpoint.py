"""A decoder whose weights are not read yet: what lies between files or loaded models, and the backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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


def as_stored(spec: DecoderSpec, names: WeightNames, stored: Mapping[str, StoredTensor]) -> DecoderSpec:
    """Set ``tied`` to False if an embedding and a head that differ are stored, and ``headless`` by what is stored."""
    has_head = spec.tied or any(names.ours(name) == "head.weight" for name in stored)
    headless = spec.headless and not has_head
    return replace(spec, tied=headless or (spec.tied and truly_tied(names, stored)), headless=headless)
