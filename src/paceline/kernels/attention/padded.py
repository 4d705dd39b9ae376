"""BASS-PAD (2404.15778): every row attends over as many positions as the longest row has, in one kernel call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.eight_bits import restored
from paceline.kernels.attention.base import PLAIN, AttentionTerms, Plan


class PaddedAttention:
    """One scaled-dot-product call for all rows; keys that a row must not see are masked.

    The H / G query heads that share a key head are packed along the query axis, so keys and values are never repeated.
    """

    name = "padded"

    def plan(self, positions: Tensor, longest: int, ancestors: Tensor | None = None) -> Plan:
        return Plan(positions, longest, ancestors)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, terms: AttentionTerms = PLAIN) -> Tensor:
        q_BHLD = q
        k_BGPD, v_BGPV = (restored(plan.of_rows(table), q.dtype) for table in (k_cache, v_cache))
        rows, heads, length, dim = q_BHLD.shape
        shared = heads // k_BGPD.shape[1]
        packed, mask = q_BHLD.reshape(rows, -1, shared * length, dim), _mask(plan, shared, terms.window, q.dtype)
        if terms.cap is None and terms.sinks is None:
            out = F.scaled_dot_product_attention(packed, k_BGPD, v_BGPV, attn_mask=mask, scale=terms.scale)
        else:
            scores = packed.float() @ k_BGPD.float().mT * terms.scale_of(dim)
            out = (_weights(scores, mask, length, terms) @ v_BGPV.float()).to(q.dtype)
        return out.reshape(rows, heads, length, -1)


def _weights(scores: Tensor, mask: Tensor, length: int, terms: AttentionTerms) -> Tensor:
    """Return the softmax of the scores [B, G, shared * L, P], to which the mask is added; length: L."""
    if terms.cap is not None:
        scores = terms.cap * (scores / terms.cap).tanh()
    scores = scores + mask
    if terms.sinks is None:
        return scores.softmax(-1)
    sinks = terms.sinks.float().repeat_interleave(length).view(1, scores.shape[1], -1, 1)
    return torch.cat([scores, sinks.expand(len(scores), -1, -1, 1)], -1).softmax(-1)[..., :-1]


def _mask(plan: Plan, shared: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[B, 1, shared * L, longest]: 0 where visible, -inf where not; made once per forward pass."""
    if (window, shared) not in plan.masks:
        hidden = plan.hidden(window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        plan.masks[window, shared] = mask.repeat(1, shared, 1)[:, None]
    return plan.masks[window, shared]
