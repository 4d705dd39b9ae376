"""BASS-SPLIT (2404.15778): one kernel call per row, each over its own length, so no row pays for another's."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from paceline.core.eight_bits import vector_width
from paceline.kernels.attention.base import PLAIN, AttentionTerms, Plan
from paceline.kernels.attention.padded import PaddedAttention

_STREAMS = 8  # rows whose kernels may run at the same time on a GPU


class SplitAttention:
    """Attention row by row, each over exactly its own keys; the paper's variant is this loop over rows.

    On CUDA the rows' kernels run side by side, each on a CUDA stream of its own.
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

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Plan, terms: AttentionTerms = PLAIN) -> Tensor:
        k_cache, v_cache = plan.of_rows(k_cache), plan.of_rows(v_cache)

        def one(row: int) -> Tensor:
            keys, values = k_cache[row : row + 1], v_cache[row : row + 1]
            own = plan.rows[row]
            return self._one_row.attend(q[row : row + 1], keys, values, own, terms)

        if not q.is_cuda:
            return torch.cat([one(row) for row in range(len(plan.rows))])
        out = q.new_empty(*q.shape[:-1], vector_width(v_cache))
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
