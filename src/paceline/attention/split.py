"""BASS-SPLIT (2404.15778): one kernel call a row, each over its own length, so no row pays for another's."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.attention.base import Plan
from paceline.attention.padded import PaddedAttention


class SplitAttention:
    """Each row's queries over exactly the keys that row has; the loop over rows is what the paper's variant is."""

    name = "split"

    def __init__(self) -> None:
        self._one_row = PaddedAttention()

    def plan(self, positions: Tensor, longest: int) -> Plan:
        ends = (positions[:, -1] + 1).clamp(max=longest).tolist()
        rows = [Plan(row[None], int(end)) for row, end in zip(positions, ends, strict=True)]
        return Plan(positions, longest, rows=rows)

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, *, scale: float | None, window: int | None
    ) -> Tensor:
        return torch.cat(
            [
                self._one_row.attend(
                    q[row : row + 1],
                    k_cache[row : row + 1],
                    v_cache[row : row + 1],
                    row_plan,
                    scale=scale,
                    window=window,
                )
                for row, row_plan in enumerate(plan.rows)
            ]
        )
