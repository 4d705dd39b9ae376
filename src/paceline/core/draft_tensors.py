"""A draft as tensors, where the logits are: in rounds that torch runs step by step, and in captured ones.

Shapes: B rows, k draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.core.draft import Draft
from paceline.core.nodes import Tree


@dataclass(frozen=True, eq=False)
class DraftTensors:
    """Draft tokens of a batch, padded to the longest row.

    tokens: [B, k] int64. counts: [B] int64, number of real draft tokens of each row; the rest is padding.
    probabilities: [B, k, V] float32, see ``Draft``.
    logits: [B, k, V], in captured rounds. They replace ``probabilities``, which are their softmax at the rows'
        temperatures.
    parents: [B, k] int64, see ``Draft``; None: chains.
    read: [B, k] int64, the draft model's own draft in captured rounds where n-gram drafts replace some rows'. None:
        ``tokens``.
    matched: [B] int64, tokens matched in these rows, 0 in others.
    """

    tokens: Tensor
    counts: Tensor
    probabilities: Tensor | None = None
    logits: Tensor | None = None
    parents: Tensor | None = None
    read: Tensor | None = None
    matched: Tensor | None = None

    @staticmethod
    def of(draft: Draft, device: torch.device) -> DraftTensors:
        """Copy a draft to a device."""
        rows, k = len(draft.draft_tokens), draft.k

        def padded(lines: Sequence[list[int]], padding: int) -> Tensor:
            table = [line + [padding] * (k - len(line)) for line in lines]
            return torch.tensor(table, dtype=torch.int64, device=device).view(rows, k)

        return DraftTensors(
            padded(draft.draft_tokens, 0),
            torch.tensor(draft.drafted, dtype=torch.int64, device=device),
            None if draft.probabilities is None else draft.probabilities[:, :k],
            parents=None if draft.parents is None else padded(draft.parents, -1),
        )

    @property
    def k(self) -> int:
        return self.tokens.shape[1]

    @cached_property
    def real(self) -> Tensor:
        """Mask of each row's pending token and real draft tokens, [B, k + 1] bool."""
        return real_places(self.counts + 1, self.k + 1)

    @cached_property
    def tree(self) -> Tree | None:
        """Ancestors and depths of the positions; None for chains."""
        return None if self.parents is None else Tree.of(self.parents, self.counts)

    @cached_property
    def paths(self) -> list[list[list[int]]]:
        """For each row, the draft tokens on the path to its pending token (none) and to each real draft token."""
        tokens, counts = self.tokens.tolist(), self.counts.tolist()
        parents = [list(range(-1, self.k - 1))] * len(tokens) if self.parents is None else self.parents.tolist()
        paths: list[list[list[int]]] = []
        for row_tokens, row_parents, count in zip(tokens, parents, counts, strict=True):
            paths.append([[]])
            for token, parent in zip(row_tokens[:count], row_parents[:count], strict=True):
                paths[-1].append([*paths[-1][parent + 1], token])
        return paths


def real_places(counts: Tensor, width: int) -> Tensor:
    """Mask of the first counts[i] positions of row i: [B, width] bool."""
    return torch.arange(width, device=counts.device) < counts[:, None]
