"""The training objective: a head learns the target's next-token distributions, several draft tokens ahead.

Positions and steps are those of ``Head.drafts``. Step s at position i drafts token i + 2 + s; the target's state of
token i + 1 + s gives that token's distribution. A position counts where all of these tokens lie in the answer. Drafts
begin after the first token of the answer. A head that drafts in blocks begins one at every ``stride``-th position.
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


class Objective(NamedTuple):
    """What a step of training minimises.

    weights: loss weight of each draft token. divergence: see ``loss``. offset: see ``draft_logits``.
    """

    weights: list[float]
    divergence: Divergence
    offset: int = 0


class StepLogits(NamedTuple):
    """Logits of one step at the M positions that count.

    positions [M] int64: indices into the flattened [B, T - 1]. logits [M, Vd]. confidence [M]: logits of acceptance;
    None if the head does not predict it.
    """

    positions: Tensor
    logits: Tensor
    confidence: Tensor | None


def draft_logits(
    head: Learner, batch: TrainingBatch, scale: Tensor, steps: int, offset: int = 0
) -> Iterator[StepLogits]:
    """The logits of each step of a draft, whose tokens before a step are those of the text.

    scale [S]: factors for the hidden states. offset: of the first position of every text, modulo ``head.stride``.
    """
    begins, passed = counted_positions(batch, 0, head.stride, offset), []
    for step, states in enumerate(head.drafts(batch.tokens, features_of(head, batch, scale), begins, steps)):
        passed.append(states)
        positions = counted_positions(batch, step, head.stride, offset)
        before = [batch.tokens.flatten()[token_index(batch, positions, 1 + earlier)] for earlier in range(step + 1)]
        known = torch.stack(passed, dim=1)[torch.isin(begins, positions)]
        yield StepLogits(positions, *head.continued(known, torch.stack(before, dim=1)))


def features_of(head: Learner, batch: TrainingBatch, scale: Tensor) -> Tensor:
    """The hidden states [B, T, S, W] that the head reads. scale: factors for the recorded ones."""
    if isinstance(head, Head) and head.reads_ends:
        return torch.stack((head.embed_tokens(batch.tokens), batch.hidden.to(head.dtype)), dim=2)
    return batch.features.to(head.dtype) * scale[:, None]


def counted_positions(batch: TrainingBatch, step: int, stride: int = 1, offset: int = 0) -> Tensor:
    """[M] int64: positions i of the flattened [B, T - 1] that count for a step.

    They begin with the prompt's last token and end where the text has no token i + 2 + step. Of these, the ones that
    leave the remainder of ``offset`` when divided by ``stride``.
    """
    position = torch.arange(batch.tokens.shape[1] - 1, device=batch.tokens.device)
    counts = (position >= batch.prompts[:, None] - 1) & (position + 2 + step < batch.lengths[:, None])
    return (counts & ((position - offset) % stride == 0)).flatten().nonzero().squeeze(1)


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
    head: Learner, batch: TrainingBatch, scale: Tensor, objective: Objective, counts: Sequence[int] | None = None
) -> tuple[Tensor, float]:
    """Return the weighted mean of the steps' losses, and the divergence of the first step.

    kl: cross-entropy with the target's distribution (forward KL up to a constant). total_variation: the probability
    that the draft token is rejected, 1 - sum(min(p, q)).
    A predicted acceptance adds its cross-entropy with the true one, sum(min(p, q)), as a loss of the same weight
    (DSpark, section 3.3).
    counts: for each step, the number of positions to divide by; the batch's own by default. It is given where the
    batch is one rank's part of a step.
    """
    teacher, weights = Teacher(head, batch), objective.weights
    total, first = scale.new_zeros(()), 0.0
    for step, drafted in enumerate(draft_logits(head, batch, scale, len(weights), objective.offset)):
        distribution, logits = teacher.distribution(drafted.positions, step), drafted.logits.float()
        if objective.divergence == "kl":
            terms = -(distribution * functional.log_softmax(logits, -1)).sum(-1)
        else:
            terms = 1 - _acceptance(distribution, logits)
        count = max(1, len(drafted.positions) if counts is None else counts[step])
        first = first if step else float(terms.detach().sum()) / count
        if drafted.confidence is not None:
            accepted = _acceptance(distribution, logits.detach())
            terms = terms + functional.binary_cross_entropy_with_logits(drafted.confidence, accepted, reduction="none")
        total = total + weights[step] / sum(weights) * terms.sum() / count
    return total, first


def _acceptance(distribution: Tensor, logits: Tensor) -> Tensor:
    """[M]: the probability that a token drawn by the logits [M, Vd] is accepted, by the target's probabilities."""
    return torch.minimum(distribution, logits.softmax(-1)).sum(-1)
