"""The operations of rounds on a device (``core.ops.RoundOps``): Triton's kernels, or their reference in torch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from paceline.core.draft import Draft, Verdict
from paceline.core.ops import RoundOps
from paceline.core.rows import RowState, StepFeatures
from paceline.core.rules import accept_at_rate, accept_by_ratio, accept_matching
from paceline.core.sampling import Purpose, draw_at_temperature, probabilities_at_temperature, shaped
from paceline.kernels.gpu.launch import why_not
from paceline.kernels.gpu.state import with_path


class _ComposedOps(ABC):
    """The operations of trees and of top log-probabilities, made of draws and torch operators."""

    @abstractmethod
    def draw(self, logits: Tensor, rows: RowState, first: int, purpose: Purpose) -> Tensor:
        """See ``RoundOps``."""

    def top_candidates(self, logits: Tensor, rows: RowState, first: int, width: int) -> Tensor:
        candidates: list[Tensor] = []
        for _ in range(width):
            drawn = self.draw(logits, rows, first, Purpose.DRAW)
            candidates.append(drawn)
            logits = logits.scatter(2, drawn[..., None], -torch.inf)
        return torch.cat(candidates, dim=1)

    def coupled_trees(self, draft: Draft, logits: Tensor, rows: RowState, width: int) -> Tensor:
        draws = logits.new_empty(logits.shape[:2], dtype=torch.int64)
        draws[:, :1] = self.draw(logits[:, :1], rows, 0, Purpose.DRAW)
        for place in range(1, 1 + width):  # siblings share a text position
            draws[:, place::width] = self.draw(logits[:, place::width].contiguous(), rows, 1, Purpose.DRAW)
        verdict = accept_matching(draft, draws)
        assert verdict.path is not None, "trees have a path"
        return with_path(committed(verdict, rows), verdict.path)

    def top_logprobs(self, logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        values, ids = logits.topk(min(most, logits.shape[-1]), dim=-1)
        return ids, values - logits.logsumexp(-1, keepdim=True)


class ReferenceOps(_ComposedOps):
    """Plain torch: the host rounds' operations in a form that can be captured (``RowState.may_sync`` is false)."""

    name = "torch"

    def shaped(self, logits: Tensor, rows: RowState, asks: StepFeatures, draft_tokens: Tensor, first: int) -> Tensor:
        return shaped(logits, rows, asks, draft_tokens, first)

    def draw(self, logits: Tensor, rows: RowState, first: int, purpose: Purpose) -> Tensor:
        return draw_at_temperature(logits, rows, first, purpose)

    def coupled(self, draft: Draft, logits: Tensor, rows: RowState, synthetic: float | None) -> Tensor:
        draws = draw_at_temperature(logits, rows)
        verdict = accept_matching(draft, draws) if synthetic is None else accept_at_rate(draft, draws, rows, synthetic)
        return committed(verdict, rows)

    def rejection(self, draft: Draft, logits: Tensor, rows: RowState) -> Tensor:
        if draft.logits is None:
            return self.coupled(draft, logits, rows, None)
        p, q = (probabilities_at_temperature(table, rows) for table in (logits, draft.logits))
        return committed(accept_by_ratio(draft, p, q, rows), rows)

    def own_logprobs(self, logits: Tensor, record: Tensor) -> Tensor:
        logits = logits.float()
        own = logits.gather(-1, record[:, : logits.shape[1], None]).squeeze(-1)
        return own - logits.logsumexp(-1)


def committed(verdict: Verdict, rows: RowState) -> Tensor:
    """Commit a verdict -> the round's record [B, k + 4]."""
    gained, ended = rows.gain(verdict.tokens, verdict.accepted)
    numbers = verdict.accepted.masked_fill(ended, 0), verdict.drafted.masked_fill(ended, 0), gained
    return torch.cat([verdict.tokens, torch.stack(numbers, dim=1)], dim=1)


class TritonOps(_ComposedOps):
    """Triton: a few small launches per operation."""

    name = "triton"

    def shaped(self, logits: Tensor, rows: RowState, asks: StepFeatures, draft_tokens: Tensor, first: int) -> Tensor:
        from paceline.kernels.gpu.shape import shaped

        return shaped(logits, rows, asks, draft_tokens, first)

    def draw(self, logits: Tensor, rows: RowState, first: int, purpose: Purpose) -> Tensor:
        from paceline.kernels.gpu.draw import Noise, draw  # needs triton

        return draw(logits, Noise.of(rows), first, purpose)

    def coupled(self, draft: Draft, logits: Tensor, rows: RowState, synthetic: float | None) -> Tensor:
        from paceline.kernels.gpu.accept import coupled

        return coupled(draft, logits, rows, synthetic)

    def rejection(self, draft: Draft, logits: Tensor, rows: RowState) -> Tensor:
        from paceline.kernels.gpu.accept import rejection

        return rejection(draft, logits, rows)

    def own_logprobs(self, logits: Tensor, record: Tensor) -> Tensor:
        from paceline.kernels.gpu.accept import own_logprobs

        return own_logprobs(logits, record)


def ops_for(device: torch.device) -> RoundOps:
    """Triton's kernels on a GPU that can run them, else plain torch (the interpreter is for tests that ask for it)."""
    return TritonOps() if device.type == "cuda" and why_not(device) is None else ReferenceOps()
