"""Reference implementation of the layer kernels in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.pages import PAGE_POSITIONS
from paceline.kernels.attention.base import Plan
from paceline.kernels.gpu.state import PackedHeads


def turn_and_store(packed: PackedHeads, plan: Plan, keys: Tensor, values: Tensor) -> Tensor:
    """Reference implementation of ``gpu.rotary.turn_and_store``."""
    turned = packed.heads + packed.kv_heads
    qk, v = packed.table.split_with_sizes([turned, packed.kv_heads], dim=2)
    if packed.rotation is not None:
        cos, sin = packed.rotation
        if packed.norm is not None:
            qk = functional.rms_norm(qk, (qk.shape[-1],), None, packed.eps) * packed.norm
        qk = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin)
    q, k = qk.split_with_sizes([packed.heads, packed.kv_heads], dim=2)
    assert plan.cache_rows is not None
    row, place = plan.cache_rows.index[:, None], plan.slots
    if plan.pages is not None:
        block = (place // PAGE_POSITIONS).clamp(max=plan.pages.shape[1] - 1)
        row, place = plan.pages[row, block].long(), place % PAGE_POSITIONS
    place = place.clamp(max=keys.shape[2] - 1)
    keys[row, :, place] = k.to(keys.dtype)
    values[row, :, place] = v.to(values.dtype)
    return q.transpose(1, 2)
