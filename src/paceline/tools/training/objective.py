"""What a head is asked to learn: to say what its target would say, several draft tokens deep.

Places and steps are those of ``Head.unroll``: step s at place i draft tokens token i + 2 + s, whose distribution the
target's state of token i + 1 + s gives. A place counts where all of this lies in the answer, behind whose first
token drafts begin.
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
    """A step at the M places that count. place [M] in the flattened [B, T - 1]; logits [M, Vd]."""

    place: Tensor
    logits: Tensor


def draft_logits(head: Learner, batch: TrainingBatch, scale: Tensor, steps: int) -> Iterator[StepLogits]:
    """The steps of a draft from every place that counts. scale [S]: the streams are multiplied by it."""
    features = batch.features.to(head.dtype) * scale[:, None]
    for step, normed in enumerate(head.drafts(batch.tokens, features, steps)):
        place = counted_positions(batch, step)
        yield StepLogits(place, head.logits(normed.flatten(0, 1)[place]))


def counted_positions(batch: TrainingBatch, step: int) -> Tensor:
    """[M] places i of the flattened [B, T - 1]: from the prompt's last token, as far as token i + 2 + step is there."""
    place = torch.arange(batch.tokens.shape[1] - 1, device=batch.tokens.device)
    counts = (place >= batch.prompts[:, None] - 1) & (place + 2 + step < batch.lengths[:, None])
    return counts.flatten().nonzero().squeeze(1)


def token_index(batch: TrainingBatch, place: Tensor, by: int) -> Tensor:
    """[M] where token i + by of a counted place i lies in the flattened [B, T]."""
    width = batch.tokens.shape[1]
    return place // (width - 1) * width + place % (width - 1) + by


class Teacher:
    """The target's distribution of a batch over the tokens that the head can say; what it gives to others is missing in
    it.
    """

    def __init__(self, head: Learner, batch: TrainingBatch) -> None:
        self._batch = batch
        place = token_index(batch, counted_positions(batch, 0), 1)
        with torch.no_grad():
            state = batch.hidden.flatten(0, 1)[place].to(head.lm_head.weight.dtype)
            logits = head.logits(state).float()
            self._distribution = (logits - batch.norm.flatten()[place, None]).exp()
        self._line = torch.full((batch.tokens.numel(),), -1, device=place.device)
        self._line[place] = torch.arange(len(place), device=place.device)

    def distribution(self, place: Tensor, step: int) -> Tensor:
        """[M, Vd] of what step ``step`` draft tokens at these places; a line's sum is at most 1."""
        return self._distribution[self._line[token_index(self._batch, place, 1 + step)]]


def loss(
    head: Learner,
    batch: TrainingBatch,
    scale: Tensor,
    weights: list[float],
    divergence: Divergence,
    counts: Sequence[int] | None = None,
) -> tuple[Tensor, float]:
    """The weighted mean over the steps, and the first step's own mean.

    counts: of each step, the places that the mean is taken over, where the batch is a part of what is learnt at once.
    kl: cross-entropy with the target's distribution (forward KL up to a constant). total_variation: the chance that the
    draft token would be rejected, 1 - sum(min(p, q)).
    """
    teacher = Teacher(head, batch)
    parts: list[Tensor] = []
    for step, draft_token in enumerate(draft_logits(head, batch, scale, len(weights))):
        distribution, logits = teacher.distribution(draft_token.place, step), draft_token.logits.float()
        if divergence == "kl":
            part = -(distribution * functional.log_softmax(logits, -1)).sum(-1)
        else:
            part = 1 - torch.minimum(distribution, logits.softmax(-1)).sum(-1)
        parts.append(part.sum() / max(1, len(draft_token.place) if counts is None else counts[step]))
    total = sum(weight * part for weight, part in zip(weights, parts, strict=True)) / sum(weights)
    assert isinstance(total, Tensor)
    return total, float(parts[0].detach())
