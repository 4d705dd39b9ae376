"""Input of one forward pass of the target: a flat list of nodes (tokens).

Shapes: N nodes; B rows of k draft tokens, L = k + 1 positions (pending token and draft tokens).

A row's nodes form a tree below its cached text; a chain is a tree without branches. A node attends to the row's text
before the block, to its ancestors and to itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Nodes(NamedTuple):
    """tokens, rows (of the cache), positions, slots, parents: [N] int64, on the model's device.

    slots: slot in its row of the cache for a node's key and value. None: the slot equals the position.
    parents: index in this list of each node's parent, -1 for the row's cached text. None: the parent is the node
        before if that belongs to the same row, else the text. ``slots`` and ``parents`` are both None or both set.
    read: number of leading nodes that an earlier pass has read. Their keys and values are in their slots already, and
        they only serve as parents. It is 0 except in trees.
    text: number of leading nodes of which only keys, values and features are wanted. It is 0 in trees.

    The nodes of a row are consecutive, separately for nodes that were read before and for new ones. Without parents,
    positions in a row ascend by one. With parents, a node comes after its parent and is one position further.
    """

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    slots: Tensor | None = None
    parents: Tensor | None = None
    read: int = 0
    text: int = 0

    def written(self) -> tuple[list[int], list[int], list[int]]:
        """Return the rows, and of each the first and the end of the slots that its nodes are written to."""
        firsts: dict[int, int] = {}
        stops: dict[int, int] = {}
        slots = (self.positions if self.slots is None else self.slots).tolist()
        for row, slot in zip(self.rows.tolist(), slots, strict=True):
            firsts[row] = min(slot, firsts.get(row, slot))
            stops[row] = max(slot + 1, stops.get(row, 0))
        return list(firsts), list(firsts.values()), list(stops.values())


class Tree(NamedTuple):
    """Tree of each row's pending token (position 0, the root) and its k draft tokens (positions 1 to k).

    ancestors [B, L, L] bool: entry [b, i, j] is true if j is an ancestor of i or i itself. depths [B, L] int64: 0 for
    the root. Padding has the ancestors and the depth of the root, so that its attention is defined.
    """

    ancestors: Tensor
    depths: Tensor

    @staticmethod
    def of(parents: Tensor, counts: Tensor) -> Tree:
        """Build the tree from parents and counts.

        parents [B, k] int64: index of each draft token's parent, which comes before it; -1 is the root. counts [B]
        int64: number of real draft tokens.
        """
        rows, k = parents.shape
        steps = torch.eye(k + 1, dtype=torch.float32, device=parents.device).repeat(rows, 1, 1)
        steps[:, 1:].scatter_(2, parents[..., None] + 1, 1.0)
        for _ in range(k.bit_length()):  # paths of at most 1, 2, 4, ... steps
            steps = (steps @ steps).clamp(max=1.0)
        real = torch.arange(k + 1, device=parents.device) <= counts[:, None]
        ancestors = torch.where(real[..., None], steps, steps[:, :1]) > 0
        return Tree(ancestors, ancestors.sum(2) - 1)
