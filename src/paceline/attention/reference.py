"""The slow reference: every row and head on its own, as in the textbook. Tests hold the other backends against it."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.attention.base import Plan


class ReferenceAttention:
    """Softmax over the visible keys of each row, one row at a time, in float32."""

    name = "reference"

    def plan(self, positions: Tensor, longest: int) -> Plan:
        """Nothing to prepare."""
        return Plan(positions, longest)

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Attend from q [B, H, L, D] over k_cache, v_cache [B, G, P, D] -> [B, H, L, D]."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        group = q.shape[1] // k_cache.shape[1]
        out = torch.empty_like(q)
        for row in range(q.shape[0]):
            k = k_cache[row, :, : plan.longest].float().repeat_interleave(group, dim=0)  # [H, P, D]
            v = v_cache[row, :, : plan.longest].float().repeat_interleave(group, dim=0)
            query, key = plan.positions[row][:, None], torch.arange(plan.longest, device=q.device)[None, :]
            visible = (key <= query) if window is None else (key <= query) & (key > query - window)
            scores = (q[row].float() @ k.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
            out[row] = (scores.softmax(dim=-1) @ v).to(q.dtype)
        return out
