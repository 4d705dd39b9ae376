"""The training objective: a head learns the target's next-token distributions, several draft tokens ahead.

Positions and steps are those of ``Head.unroll``. Step s at position i drafts token i + 2 + s; the target's state of
token i + 1 + s gives that token's distribution. A position counts where all of these tokens lie in the answer. Drafts
begin after the first token of the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from paceline.drafters.heads.head import Head
from paceline.tools.training.batches import TrainingBatch
from paceline.tools.training.student import Student

Learner: TypeAlias = Head | Student
Divergence = Literal["kl", "total_variation"]


class StepLogits(NamedTuple):
    """Logits of one step at the M positions that count.

    positions [M] int64: indices into the flattened [B, T - 1]. logits [M, Vd].
    """

    positions: Tensor
    logits: Tensor


def draft_logits(head: Learner, batch: TrainingBatch, scale: Tensor, steps: int) -> Iterator[StepLogits]:
    """The logits of each step of a draft. scale [S]: factors for the hidden states."""
    for step, normed in enumerate(head.drafts(batch.tokens, features_of(head, batch, scale), steps)):
        positions = counted_positions(batch, step)
        yield StepLogits(positions, head.logits(normed.flatten(0, 1)[positions]))


def features_of(head: Learner, batch: TrainingBatch, scale: Tensor) -> Tensor:
    """The hidden states [B, T, S, W] that the head reads. scale: factors for the recorded ones."""
    if isinstance(head, Head) and head.reads_ends:
        return torch.stack((head.embed_tokens(batch.tokens), batch.hidden.to(head.dtype)), dim=2)
    return batch.features.to(head.dtype) * scale[:, None]


def counted_positions(batch: TrainingBatch, step: int) -> Tensor:
    """[M] int64: positions i of the flattened [B, T - 1] that count for a step.

    They begin with the prompt's last token and end where the text has no token i + 2 + step.
    """
    position = torch.arange(batch.tokens.shape[1] - 1, device=batch.tokens.device)
    counts = (position >= batch.prompts[:, None] - 1) & (position + 2 + step < batch.lengths[:, None])
    return counts.flatten().nonzero().squeeze(1)


def token_index(batch: TrainingBatch, positions: Tensor, offset: int) -> Tensor:
    """[M] int64: the index of token i + offset in the flattened [B, T], for each counted position i."""
    width = batch.tokens.shape[1]
    return positions // (width - 1) * width + positions % (width - 1) + offset


class Teacher:
    """The target's distributions of a batch, over the Vd tokens of the head.

    The probabilities of other tokens are left out, so a row sums to at most 1.
    """

    def __init__(self, head: Learner, batch: TrainingBatch) -> None:
        self._batch = batch
        index = token_index(batch, counted_positions(batch, 0), 1)
        with torch.no_grad():
            state = batch.hidden.flatten(0, 1)[index].to(head.lm_head.weight.dtype)
            logits = head.logits(state).float()
            self._distribution = (logits - batch.norm.flatten()[index, None]).exp()
        self._row = torch.full((batch.tokens.numel(),), -1, device=index.device)
        self._row[index] = torch.arange(len(index), device=index.device)

    def distribution(self, positions: Tensor, step: int) -> Tensor:
        """[M, Vd]: the target's probabilities of the token that ``step`` drafts at these positions."""
        return self._distribution[self._row[token_index(self._batch, positions, 1 + step)]]


def loss(
    head: Learner,
    batch: TrainingBatch,
    scale: Tensor,
    weights: list[float],
    divergence: Divergence,
    counts: Sequence[int] | None = None,
) -> tuple[Tensor, float]:
    """Return the weighted mean of the steps' losses, and the loss of the first step.

    kl: cross-entropy with the target's distribution (forward KL up to a constant). total_variation: the probability
    that the draft token is rejected, 1 - sum(min(p, q)).
    counts: for each step, the number of positions to divide by; the batch's own by default. It is given where the
    batch is one rank's part of a step.
    """
    teacher = Teacher(head, batch)
    losses: list[Tensor] = []
    for step, drafted in enumerate(draft_logits(head, batch, scale, len(weights))):
        distribution, logits = teacher.distribution(drafted.positions, step), drafted.logits.float()
        if divergence == "kl":
            terms = -(distribution * functional.log_softmax(logits, -1)).sum(-1)
        else:
            terms = 1 - torch.minimum(distribution, logits.softmax(-1)).sum(-1)
        losses.append(terms.sum() / max(1, len(drafted.positions) if counts is None else counts[step]))
    total = sum(weight * term for weight, term in zip(weights, losses, strict=True)) / sum(weights)
    assert isinstance(total, Tensor)
    return total, float(losses[0].detach())
