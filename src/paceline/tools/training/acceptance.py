"""Acceptance of greedy drafts on held-out answers, measured without an engine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.tools.training.batches import ExampleDataset, TrainingBatch
from paceline.tools.training.objective import Learner, draft_logits, token_index

DRAFT_LENGTH = 4  # draft tokens of a draft


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of drafts of up to ``DRAFT_LENGTH`` tokens.

    conditional[s]: acceptance rate of draft token s where all before it were accepted; nan if that never happened.
    length[k - 1]: mean tokens of a round with k draft tokens, the target's own token included. Rounds follow each
    other through the answers. places: number of positions at which a draft was begun.
    """

    conditional: tuple[float, ...]
    length: tuple[float, ...]
    places: int


@torch.inference_mode()
def measure(
    head: Learner, dataset: ExampleDataset, scale: Tensor, batch_tokens: int, autocast: torch.autocast
) -> Acceptance:
    """Measure acceptance on all of ``dataset``, whose answers have to be the target's greedy ones.

    scale [S]: factors for the hidden states. batch_tokens: tokens of a batch, padding included.
    """
    begun, accepted = torch.zeros(DRAFT_LENGTH), torch.zeros(DRAFT_LENGTH)
    tokens, rounds = [0] * DRAFT_LENGTH, [0] * DRAFT_LENGTH
    for batch in dataset.batches(dataset.epoch(0, 0, batch_tokens)):
        on_device = batch.to(scale.device)
        with autocast, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # norms stay in float32
            correct = _correct(head, on_device, scale)
        for step in range(DRAFT_LENGTH):
            reached = correct[..., :step].all(-1) & (correct[..., step] >= 0)
            begun[step] += int(reached.sum())
            accepted[step] += int((reached & (correct[..., step] == 1)).sum())
        for k in range(1, DRAFT_LENGTH + 1):
            for row in range(correct.shape[0]):
                gained = _rounds_through(
                    correct[row, :, :k].tolist(), int(batch.prompts[row]) - 1, int(batch.lengths[row])
                )
                tokens[k - 1], rounds[k - 1] = tokens[k - 1] + gained[0], rounds[k - 1] + gained[1]
    conditional = tuple((accepted / begun).tolist())
    lengths = tuple(g / max(1, r) for g, r in zip(tokens, rounds, strict=True))
    return Acceptance(conditional, lengths, int(begun[0]))


def _correct(head: Learner, batch: TrainingBatch, scale: Tensor) -> Tensor:
    """[B, T - 1, DRAFT_LENGTH]: 1 for a correct draft token, 0 for a wrong one, -1 where nothing is drafted."""
    rows, width = batch.tokens.shape
    correct = torch.full((rows * (width - 1), DRAFT_LENGTH), -1)
    for offset in range(head.stride):
        for step, drafted in enumerate(draft_logits(head, batch, scale, DRAFT_LENGTH, offset)):
            draft_tokens = head.targets[drafted.logits.argmax(-1)]
            wanted = batch.tokens.flatten()[token_index(batch, drafted.positions, 2 + step)]
            correct[drafted.positions.cpu(), step] = (draft_tokens == wanted).long().cpu()
    return correct.view(rows, width - 1, DRAFT_LENGTH)


def _rounds_through(correct: Sequence[Sequence[int]], position: int, length: int) -> tuple[int, int]:
    """Return the tokens and the rounds that lead from ``position`` to the end of an answer, ``length`` tokens."""
    start, rounds = position, 0
    while position + 2 < length:
        flags = correct[position]
        accepted = next((n for n, flag in enumerate(flags) if flag != 1), len(flags))
        position, rounds = position + accepted + 1, rounds + 1
    return position - start, rounds
