"""Reference implementation: every row and head on its own. Tests compare the other backends with it."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.eight_bits import restored, vector_width
from paceline.kernels.attention.base import PLAIN, AttentionTerms, Plan


class ReferenceAttention:
    """Softmax over the visible keys of each row, one row at a time, in float32."""

    name = "reference"

    def plan(self, positions: Tensor, longest: int, ancestors: Tensor | None = None) -> Plan:
        """Nothing to prepare."""
        return Plan(positions, longest, ancestors)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, terms: AttentionTerms = PLAIN) -> Tensor:
        """Attend from q [B, H, L, D] over k_cache [R, G, P, D], v_cache [R, G, P, V] -> [B, H, L, V]."""
        k_cache, v_cache = plan.of_rows(k_cache), plan.of_rows(v_cache)
        group = q.shape[1] // k_cache.shape[1]
        out = q.new_empty(*q.shape[:-1], vector_width(v_cache))
        for row in range(q.shape[0]):
            visible = visible_keys(plan, row, terms.window)
            tables = (table[row] for table in (k_cache, v_cache))
            k, v = (restored(table, torch.float32).repeat_interleave(group, dim=0) for table in tables)  # [H, P, D]
            scores = q[row].float() @ k.transpose(1, 2) * terms.scale_of(q.shape[-1])
            out[row] = (_weights(scores, visible, terms) @ v).to(q.dtype)
        return out


def _weights(scores: Tensor, visible: Tensor, terms: AttentionTerms) -> Tensor:
    """Return the softmax of the scores [H, L, P] of visible keys [L, P]."""
    if terms.cap is not None:
        scores = terms.cap * (scores / terms.cap).tanh()
    scores = scores.masked_fill(~visible, -torch.inf)
    if terms.sinks is None:
        return scores.softmax(dim=-1)
    sinks = terms.sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sinks], 2).softmax(dim=-1)[..., :-1]


def visible_keys(plan: Plan, row: int, window: int | None) -> Tensor:
    """[L, longest] bool: per query, the text before the block, the query's ancestors, and its own key."""
    visible = torch.zeros(plan.positions.shape[1], plan.longest, dtype=torch.bool, device=plan.positions.device)
    positions = plan.positions[row].tolist()
    for place, position in enumerate(positions):
        first = 0 if window is None else max(0, position - window + 1)  # position of the first visible key
        if plan.ancestors is None:
            visible[place, first : position + 1] = True
            continue
        visible[place, first : positions[0]] = True
        new = plan.ancestors[row, place].nonzero()[:, 0].tolist()
        slots = [positions[0] + other for other in new if positions[other] >= first]
        visible[place, [slot for slot in slots if slot < plan.longest]] = True
    return visible
