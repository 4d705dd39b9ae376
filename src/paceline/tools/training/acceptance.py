"""How many draft tokens a target would keep: greedy drafts from every place of texts that nothing was learnt from."""

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
    """conditional[s]: how often draft token s is kept, those before it having been kept; nan: it never came to that.

    length[k - 1]: tokens a round gives with k draft tokens each, the target's own included, round after round through
    the answers. places: drafts that were begun.
    """

    conditional: tuple[float, ...]
    length: tuple[float, ...]
    places: int


@torch.inference_mode()
def measure(
    head: Learner, dataset: ExampleDataset, scale: Tensor, batch_tokens: int, autocast: torch.autocast
) -> Acceptance:
    """Over all of ``dataset``, whose answers are the target's greedy ones: what it says next is the next token."""
    begun, kept = torch.zeros(DRAFT_LENGTH), torch.zeros(DRAFT_LENGTH)
    gained, rounds = [0] * DRAFT_LENGTH, [0] * DRAFT_LENGTH
    for batch in dataset.batches(dataset.epoch(0, 0, batch_tokens)):
        here = batch.to(scale.device)
        with autocast, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")  # norms stay in float32
            right = _correct(head, here, scale)
        for step in range(DRAFT_LENGTH):
            before = right[..., :step].all(-1) & (right[..., step] >= 0)
            begun[step] += int(before.sum())
            kept[step] += int((before & (right[..., step] == 1)).sum())
        for k in range(1, DRAFT_LENGTH + 1):
            for row in range(right.shape[0]):
                more = _rounds_through(right[row, :, :k].tolist(), int(batch.prompts[row]) - 1, int(batch.lengths[row]))
                gained[k - 1], rounds[k - 1] = gained[k - 1] + more[0], rounds[k - 1] + more[1]
    conditional = tuple((kept / begun).tolist())
    lengths = tuple(g / max(1, r) for g, r in zip(gained, rounds, strict=True))
    return Acceptance(conditional, lengths, int(begun[0]))


def _correct(head: Learner, batch: TrainingBatch, scale: Tensor) -> Tensor:
    """[B, T - 1, DRAFT_LENGTH]: 1 where a step draft tokens the next token, 0 where another, -1 where there is none to draft
    token.
    """
    rows, width = batch.tokens.shape
    right = torch.full((rows * (width - 1), DRAFT_LENGTH), -1)
    for step, draft_token in enumerate(draft_logits(head, batch, scale, DRAFT_LENGTH)):
        said = head.targets[draft_token.logits.argmax(-1)]
        place = draft_token.place.cpu()
        right[place, step] = (
            (said == batch.tokens.flatten()[token_index(batch, draft_token.place, 2 + step)]).long().cpu()
        )
    return right.view(rows, width - 1, DRAFT_LENGTH)


def _rounds_through(right: Sequence[Sequence[int]], place: int, length: int) -> tuple[int, int]:
    """Tokens gained and rounds played from ``place`` to the end of an answer."""
    start, rounds = place, 0
    while place + 2 < length:
        kept = next((n for n, each in enumerate(right[place]) if each != 1), len(right[place]))
        place, rounds = place + kept + 1, rounds + 1
    return place - start, rounds
