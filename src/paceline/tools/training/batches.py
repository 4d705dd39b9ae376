"""Conversations side by side, in an order that the seed and the epoch alone decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.tools.training.shards import Example, Shard

_POOL = 16  # steps' worth of conversations that are sorted by length, so that few tokens are padding


@dataclass(frozen=True)
class TrainingBatch:
    """B conversations padded to T tokens; W: the streams' width, S their number.

    tokens, best [B, T] int64; features [B, T, S, W] and hidden [B, T, W] bfloat16; norm [B, T] float32. prompts,
    lengths [B] int64: where answers begin, and end.
    """

    tokens: Tensor
    features: Tensor
    hidden: Tensor
    best: Tensor
    norm: Tensor
    prompts: Tensor
    lengths: Tensor

    def to(self, device: torch.device) -> TrainingBatch:
        return TrainingBatch(*(tensor.to(device) for tensor in vars(self).values()))


class ExampleDataset(Dataset[Example]):
    """The conversations of some shards. tokens: of all of them."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._places = [(shard, index) for shard in shards for index in range(len(shard))]
        self.lengths = [shard.lengths[index] for shard, index in self._places]
        self.prompts = [shard.prompts[index] for shard, index in self._places]
        self.tokens = sum(self.lengths)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Example:
        shard, place = self._places[index]
        return shard.read(place)

    def epoch(self, number: int, seed: int, tokens: int) -> list[list[int]]:
        """Which conversations each step takes, at most ``tokens`` with their padding unless one alone is longer."""
        generator = torch.Generator().manual_seed((seed + 1_000_003 * number) % 2**63)
        order: list[int] = torch.randperm(len(self), generator=generator).tolist()
        pool = max(1, _POOL * tokens * len(self) // max(1, self.tokens))
        steps = [
            step
            for first in range(0, len(order), pool)
            for step in self._steps(sorted(order[first : first + pool], key=self.lengths.__getitem__), tokens)
        ]
        return [steps[place] for place in torch.randperm(len(steps), generator=generator).tolist()]

    def _steps(self, ordered: Sequence[int], tokens: int) -> Iterator[list[int]]:
        step: list[int] = []
        for index in ordered:  # rising lengths: the last is the longest
            if step and (len(step) + 1) * self.lengths[index] > tokens:
                yield step
                step = []
            step.append(index)
        yield step

    def counts(self, step: Sequence[int], draft_tokens: int) -> list[int]:
        """Of these conversations the places that count (``objective.counted``), for each of so many draft tokens."""
        answers = [self.lengths[index] - self.prompts[index] for index in step]
        return [sum(max(0, answer - 1 - draft_token) for answer in answers) for draft_token in range(draft_tokens)]

    def batches(self, steps: Sequence[Sequence[int]]) -> Iterator[TrainingBatch]:
        """One for each step."""
        return iter(DataLoader(self, batch_sampler=steps, collate_fn=collate))  # type: ignore[arg-type]


def collate(dataset: Sequence[Example]) -> TrainingBatch:
    """Padded with zeros."""

    def padded(name: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([getattr(example, name) for example in dataset], batch_first=True)

    return TrainingBatch(
        **{name: padded(name) for name in ("tokens", "features", "hidden", "best", "norm")},
        prompts=torch.tensor([example.prompt for example in dataset]),
        lengths=torch.tensor([len(example.tokens) for example in dataset]),
    )
