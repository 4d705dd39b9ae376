"""BASS-PAD (2404.15778): every row attends over as many positions as the longest row has, in one kernel call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.attention.base import Plan


class PaddedAttention:
    """One scaled-dot-product call for all rows; keys that a row must not see are masked.

    The H / G query heads that share a key head are packed along the query axis, so keys and values are never repeated.
    """

    name = "padded"

    def plan(self, positions: Tensor, longest: int, ancestors: Tensor | None = None) -> Plan:
        return Plan(positions, longest, ancestors)

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, *, scale: float | None, window: int | None
    ) -> Tensor:
        q_BHLD = q
        k_BGPD, v_BGPV = (plan.of_rows(table[:, :, : plan.longest]) for table in (k_cache, v_cache))
        rows, heads, length, dim = q_BHLD.shape
        shared = heads // k_BGPD.shape[1]
        packed = q_BHLD.reshape(rows, -1, shared * length, dim)
        out = F.scaled_dot_product_attention(
            packed, k_BGPD, v_BGPV, attn_mask=_mask(plan, shared, window, q.dtype), scale=scale
        )
        return out.reshape(rows, heads, length, -1)


def _mask(plan: Plan, shared: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[B, 1, shared * L, longest]: 0 where visible, -inf where not; made once per forward pass."""
    if (window, shared) not in plan.masks:
        hidden = plan.hidden(window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        plan.masks[window, shared] = mask.repeat(1, shared, 1)[:, None]
    return plan.masks[window, shared]
