"""Batches of padded conversations, in an order that depends only on the seed and the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.tools.training.shards import Example, Shard

_POOL = 16  # steps whose conversations are sorted by length together, so that few tokens are padding


@dataclass(frozen=True)
class TrainingBatch:
    """B conversations, padded to T tokens.

    tokens, best [B, T] int64; features [B, T, S, W] (S hidden states of width W) and hidden [B, T, W] bfloat16;
    norm [B, T] float32. prompts, lengths [B] int64: tokens of the prompt, and of prompt and answer.
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
    """The conversations of several shards.

    lengths, prompts: tokens of each conversation and of its prompt. tokens: tokens of all conversations.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._entries = [(shard, index) for shard in shards for index in range(len(shard))]
        self.lengths = [shard.lengths[index] for shard, index in self._entries]
        self.prompts = [shard.prompts[index] for shard, index in self._entries]
        self.tokens = sum(self.lengths)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Example:
        shard, index_in_shard = self._entries[index]
        return shard.read(index_in_shard)

    def epoch(self, number: int, seed: int, tokens: int) -> list[list[int]]:
        """The steps of an epoch, as indices of conversations.

        A step has at most ``tokens`` tokens, padding included, unless it is one longer conversation.
        """
        generator = torch.Generator().manual_seed((seed + 1_000_003 * number) % 2**63)
        order: list[int] = torch.randperm(len(self), generator=generator).tolist()
        pool = max(1, _POOL * tokens * len(self) // max(1, self.tokens))
        steps = [
            step
            for first in range(0, len(order), pool)
            for step in self._steps(sorted(order[first : first + pool], key=self.lengths.__getitem__), tokens)
        ]
        return [steps[index] for index in torch.randperm(len(steps), generator=generator).tolist()]

    def _steps(self, ordered: Sequence[int], tokens: int) -> Iterator[list[int]]:
        step: list[int] = []
        for index in ordered:  # lengths rise, so the last conversation of a step is its longest
            if step and (len(step) + 1) * self.lengths[index] > tokens:
                yield step
                step = []
            step.append(index)
        yield step

    def counts(self, step: Sequence[int], draft_tokens: int, stride: int = 1, offset: int = 0) -> list[int]:
        """For each draft token, the number of positions that ``objective.counted_positions`` finds in a step."""
        spans = [(self.prompts[index] - 1, self.lengths[index] - 2) for index in step]
        spans = [(first + (offset - first) % stride, end) for first, end in spans]
        return [sum(len(range(first, end - token, stride)) for first, end in spans) for token in range(draft_tokens)]

    def batches(self, steps: Sequence[Sequence[int]]) -> Iterator[TrainingBatch]:
        """One batch for each step."""
        return iter(DataLoader(self, batch_sampler=steps, collate_fn=collate))  # type: ignore[arg-type]


def collate(examples: Sequence[Example]) -> TrainingBatch:
    """A batch of the examples, padded with zeros."""

    def padded(name: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([getattr(example, name) for example in examples], batch_first=True)

    return TrainingBatch(
        **{name: padded(name) for name in ("tokens", "features", "hidden", "best", "norm")},
        prompts=torch.tensor([example.prompt for example in examples]),
        lengths=torch.tensor([len(example.tokens) for example in examples]),
    )
