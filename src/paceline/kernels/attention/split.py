"""BASS-SPLIT (2404.15778): one kernel call a row, each over its own length, so no row pays for another's."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from paceline.kernels.attention.base import Plan
from paceline.kernels.attention.padded import PaddedAttention

_STREAMS = 8  # rows whose kernels may run at the same time on a GPU


class SplitAttention:
    """Each row's queries over exactly the keys that row has; the loop over rows is what the paper's variant is.

    On CUDA the rows' kernels run on streams of their own, side by side.
    """

    name = "split"

    def __init__(self) -> None:
        self._one_row = PaddedAttention()

    def plan(self, positions: Tensor, longest: int, ancestors: Tensor | None = None) -> Plan:
        plan = Plan(positions, longest, ancestors)
        ends = (plan.slots[:, -1] + 1).clamp(max=longest).tolist()
        trees = [None] * len(ends) if ancestors is None else [tree[None] for tree in ancestors]
        rows = zip(positions, ends, trees, strict=True)
        plan.rows = [Plan(at[None], int(end), tree) for at, end, tree in rows]
        return plan

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, *, scale: float | None, window: int | None
    ) -> Tensor:
        def one(row: int) -> Tensor:
            keys, values = k_cache[row : row + 1], v_cache[row : row + 1]
            return self._one_row.attend(q[row : row + 1], keys, values, plan.rows[row], scale=scale, window=window)

        if not q.is_cuda:
            return torch.cat([one(row) for row in range(len(plan.rows))])
        out = torch.empty_like(q)
        main, streams = torch.cuda.current_stream(q.device), _streams(q.device)[: len(plan.rows)]
        for stream in streams:
            stream.wait_stream(main)
        for row in range(len(plan.rows)):
            with torch.cuda.stream(streams[row % len(streams)]):
                out[row] = one(row)[0]
        for stream in streams:
            main.wait_stream(stream)
        return out


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    return tuple(torch.cuda.Stream(device) for _ in range(_STREAMS))  # type: ignore[no-untyped-call]
