"""Changes of linear layers by LoRA adapters (2106.09685), in torch and packed for the CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels import abi, pack
from paceline.kernels.abi import Changed

_PLACES = {
    "qkv": Changed.CHANGED_QKV,
    "o": Changed.CHANGED_ATTENTION_OUT,
    "gate_up": Changed.CHANGED_GATE_UP,
    "up": Changed.CHANGED_GATE_UP,  # of an MLP without a gate
    "down": Changed.CHANGED_DOWN,
}


@dataclass(frozen=True)
class LowRank:
    """A change of ``width`` of a linear layer's ``total`` outputs, from ``first`` on: (x @ down.T) @ up.T.

    down [rank, inputs]; up [width, rank], with the adapter's scale; float32.
    """

    first: int
    total: int
    down: Tensor
    up: Tensor


def pack_changes(
    model: abi.CModelSpec, by_layer: Mapping[str, Mapping[int, Sequence[LowRank]]], count: int
) -> list[Tensor]:
    """Describe the changes of ``count`` adapters in the kernels' model -> the tensors, which must outlive it.

    by_layer: changes by the name of a linear layer (as in ``description.weights``, without suffix), then by the number
        of the adapter.
    """
    kept: list[Tensor] = []
    for index in range(model.layer_count):
        layer = model.layers[index]
        for name, place in _PLACES.items():
            changes = by_layer.get(f"layers.{index}.{name}")
            if changes is None:
                continue
            packed = [_packed(changes.get(number, ()), name == "gate_up", kept) for number in range(1, count + 1)]
            layer.changes[place] = (abi.CLowRank * count)(*packed)
    model.adapters = count
    return kept


def _packed(changes: Sequence[LowRank], interleaved: bool, kept: list[Tensor]) -> abi.CLowRank:
    """Return an adapter's changes of one layer as one pair of matrices: the second has blocks, and zeros elsewhere."""
    if not changes:
        return abi.CLowRank()
    down = torch.cat([change.down for change in changes])
    up = torch.zeros(changes[0].total, len(down))
    first = 0
    for change in changes:
        width, rank = change.up.shape
        up[change.first : change.first + width, first : first + rank] = change.up
        first += rank
    ordered = pack.interleave_gate_up(up) if interleaved else up
    whole = pack.pad_rows(ordered, pack.round_up(len(ordered), abi.PANEL))
    return abi.CLowRank(down=_router(down, abi.INPUT_MULTIPLE, kept), up=_router(whole, abi.ROUTER_PANEL, kept))


def _router(matrix: Tensor, input_multiple: int, kept: list[Tensor]) -> abi.CRouter:
    panels = pack.router_panels(matrix, input_multiple).contiguous()
    kept.append(panels)
    return abi.CRouter(weights=panels.data_ptr(), inputs=panels.shape[1], outputs=len(matrix))
