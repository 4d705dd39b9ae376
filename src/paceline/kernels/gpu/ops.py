"""The operations of rounds on a device (``core.ops.RoundOps``): Triton's kernels, or their reference in torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.draft_tensors import DraftTensors
from paceline.core.ops import RoundOps
from paceline.core.rows import RowState, StepFeatures
from paceline.core.rules import accept_at_rate, accept_by_ratio, accept_matching
from paceline.core.sampling import checked, draw_at_temperature, probabilities_at_temperature, shaped
from paceline.core.slots import Slots
from paceline.core.values import Accepted, DeviceAcceptance, LogprobTensors, Purpose
from paceline.kernels.gpu.launch import why_not
from paceline.kernels.gpu.lookup import last_match
from paceline.kernels.gpu.masks import TokenMasks, masked
from paceline.kernels.gpu.state import with_path


class DeviceOps(RoundOps, Protocol):
    """``RoundOps`` with the masks that the host makes, and the search for n-gram drafts."""

    def mask(self, logits: Tensor, masks: TokenMasks) -> Tensor:
        """Set logits [B, L, V] of tokens that may not come to -inf, in a copy."""
        ...

    def last_match(self, table: Tensor, rows: Slots, size: Tensor, suffix: Tensor) -> tuple[Tensor, Tensor]:
        """Find the longest match of each row's last tokens (``lookup.last_match``)."""
        ...


class _ComposedOps(ABC):
    """What both implementations share: the choice of a rule, and operations made of draws and torch operators."""

    @abstractmethod
    def draw(self, logits: Tensor, rows: RowState, first: int, purpose: Purpose) -> Tensor:
        """See ``RoundOps``."""

    @abstractmethod
    def _coupled(self, draft: DraftTensors, logits: Tensor, rows: RowState, synthetic: float | None) -> Tensor:
        """Accept and commit chains by the coupled rule, or at a rate -> the record (``gpu.accept.coupled``)."""

    @abstractmethod
    def _rejection(self, draft: DraftTensors, logits: Tensor, rows: RowState) -> Tensor:
        """Accept and commit chains by the rejection rule -> the record (``gpu.accept.rejection``)."""

    @abstractmethod
    def _own_logprobs(self, logits: Tensor, record: Tensor) -> Tensor:
        """Log-probabilities of a record's tokens -> [B, k + 1] float32 (``gpu.accept.own_logprobs``)."""

    def top_candidates(self, logits: Tensor, rows: RowState, first: int, width: int) -> Tensor:
        candidates: list[Tensor] = []
        for _ in range(width):
            drawn = self.draw(logits, rows, first, Purpose.DRAW)
            candidates.append(drawn)
            logits = logits.scatter(2, drawn[..., None], -torch.inf)
        return torch.cat(candidates, dim=1)

    def accept(self, draft: DraftTensors, logits: Tensor, rows: RowState, rule: DeviceAcceptance, width: int) -> Tensor:
        if draft.parents is not None:
            return self._coupled_trees(draft, logits, rows, width)
        if rule.independent and draft.logits is not None:
            return self._rejection(draft, logits, rows)
        return self._coupled(draft, logits, rows, rule.synthetic)

    def _coupled_trees(self, draft: DraftTensors, logits: Tensor, rows: RowState, width: int) -> Tensor:
        draws = logits.new_empty(logits.shape[:2], dtype=torch.int64)
        draws[:, :1] = self.draw(logits[:, :1], rows, 0, Purpose.DRAW)
        for place in range(1, 1 + width):  # siblings share a text position
            draws[:, place::width] = self.draw(logits[:, place::width].contiguous(), rows, 1, Purpose.DRAW)
        accepted = accept_matching(draft, checked(draws, logits, logits))
        assert accepted.path is not None, "trees have a path"
        return with_path(committed(draft, accepted, rows), accepted.path)

    def logprobs(self, logits: Tensor, record: Tensor, most: int) -> LogprobTensors:
        own = self._own_logprobs(logits, record)
        if most == 0:
            return LogprobTensors.alone(own)
        logits = logits.float()
        values, ids = logits.topk(min(most, logits.shape[-1]), dim=-1)
        return LogprobTensors(own, ids, values - logits.logsumexp(-1, keepdim=True))


class ReferenceOps(_ComposedOps):
    """Plain torch: the host rounds' operations in a form that can be captured (``RowState.may_sync`` is false)."""

    name = "torch"

    def shape(self, logits: Tensor, rows: RowState, asks: StepFeatures, draft_tokens: Tensor, first: int) -> Tensor:
        return shaped(logits, rows, asks, draft_tokens, first)

    def draw(self, logits: Tensor, rows: RowState, first: int, purpose: Purpose) -> Tensor:
        return draw_at_temperature(logits, rows, first, purpose)

    def mask(self, logits: Tensor, masks: TokenMasks) -> Tensor:
        return masked(logits, masks)

    def last_match(self, table: Tensor, rows: Slots, size: Tensor, suffix: Tensor) -> tuple[Tensor, Tensor]:
        return last_match(table, rows, size, suffix)

    def _coupled(self, draft: DraftTensors, logits: Tensor, rows: RowState, synthetic: float | None) -> Tensor:
        draws = checked(draw_at_temperature(logits, rows), logits, logits)
        if synthetic is None:
            return committed(draft, accept_matching(draft, draws), rows)
        return committed(draft, accept_at_rate(draft, draws, rows, synthetic), rows)

    def _rejection(self, draft: DraftTensors, logits: Tensor, rows: RowState) -> Tensor:
        assert draft.logits is not None, "draft tokens without logits follow the coupled rule"
        p, q = (probabilities_at_temperature(table, rows) for table in (logits, draft.logits))
        accepted = accept_by_ratio(draft, p, q, rows)
        return committed(draft, accepted._replace(tokens=checked(accepted.tokens, logits, logits)), rows)

    def _own_logprobs(self, logits: Tensor, record: Tensor) -> Tensor:
        logits = logits.float()
        own = logits.gather(-1, record[:, : logits.shape[1], None].clamp(min=0)).squeeze(-1)
        return own - logits.logsumexp(-1)


def committed(draft: DraftTensors, accepted: Accepted, rows: RowState) -> Tensor:
    """Commit what was accepted of a draft -> the round's record [B, k + 4]."""
    gained, ended = rows.gain(accepted.tokens, accepted.accepted)
    numbers = accepted.accepted.masked_fill(ended, 0), draft.counts.masked_fill(ended, 0), gained
    return torch.cat([accepted.tokens, torch.stack(numbers, dim=1)], dim=1)


class TritonOps(_ComposedOps):
    """Triton: a few small launches per operation."""

    name = "triton"

    def shape(self, logits: Tensor, rows: RowState, asks: StepFeatures, draft_tokens: Tensor, first: int) -> Tensor:
        from paceline.kernels.gpu.shape import shaped  # needs triton

        return shaped(logits, rows, asks, draft_tokens, first)

    def draw(self, logits: Tensor, rows: RowState, first: int, purpose: Purpose) -> Tensor:
        from paceline.kernels.gpu.draw import Noise, draw

        return draw(logits, Noise.of(rows), first, purpose)

    def mask(self, logits: Tensor, masks: TokenMasks) -> Tensor:
        from paceline.kernels.gpu.shape import masked as by_triton

        return by_triton(logits, masks)

    def last_match(self, table: Tensor, rows: Slots, size: Tensor, suffix: Tensor) -> tuple[Tensor, Tensor]:
        from paceline.kernels.gpu.search import last_match as by_triton

        return by_triton(table, rows, size, suffix)

    def _coupled(self, draft: DraftTensors, logits: Tensor, rows: RowState, synthetic: float | None) -> Tensor:
        from paceline.kernels.gpu.accept import coupled

        return coupled(draft, logits, rows, synthetic)

    def _rejection(self, draft: DraftTensors, logits: Tensor, rows: RowState) -> Tensor:
        from paceline.kernels.gpu.accept import rejection

        return rejection(draft, logits, rows)

    def _own_logprobs(self, logits: Tensor, record: Tensor) -> Tensor:
        from paceline.kernels.gpu.accept import own_logprobs

        return own_logprobs(logits, record)


def ops_for(device: torch.device) -> DeviceOps:
    """Triton's kernels on a GPU that can run them, else plain torch (the interpreter is for tests that ask for it)."""
    return TritonOps() if device.type == "cuda" and why_not(device) is None else ReferenceOps()
