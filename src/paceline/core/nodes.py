"""What a target reads in one forward pass: a flat list of nodes. N nodes; B rows of k draft tokens, L = k + 1 places.

A row's nodes form a tree below its cached text; a chain is the tree without branches. A key is visible to a node if and
only if it is the row's text before the block, an ancestor, or the node itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Nodes(NamedTuple):
    """tokens, rows (of the cache), positions, slots, parents: [N] int64, on the model's device.

    slots: where in its row of the cache a node's key and value go; None: at its position.
    parents: the node of this list that a node follows, -1: the row's cached text; None: the node before, if it is of
        the same row, else the text. Both are None or neither is.
    read: so many of them were read before: their keys and values lie in their slots, and nothing is asked of them but
        to be followed. Not 0 in trees alone.

    The nodes of a row are consecutive, those read before and the others each. Without parents their positions ascend by
    one; with parents a node comes after its own, one position further on.
    """

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    slots: Tensor | None = None
    parents: Tensor | None = None
    read: int = 0


class Seen(NamedTuple):
    """What a node sees: the first ``text`` slots of its row, and those of its ancestors and itself, by position."""

    text: int
    tail: tuple[int, ...]


def seen_by(nodes: Nodes) -> list[Seen]:
    """Of every node, in plain Python: for the kernels' twin and for tests."""
    positions = nodes.positions.tolist()
    if nodes.slots is None or nodes.parents is None:
        return [Seen(position, (position,)) for position in positions]
    seen: list[Seen] = []
    for position, slot, parent in zip(positions, nodes.slots.tolist(), nodes.parents.tolist(), strict=True):
        text, tail = (position, ()) if parent < 0 else seen[parent]
        seen.append(Seen(text, (*tail, slot)))
    return seen


class Tree(NamedTuple):
    """Of each row's unseen token (place 0, the root) and its k draft tokens (places 1 .. k).

    ancestors [B, L, L] bool: whether the second place is an ancestor of the first, or the first itself. depths [B, L].
    What is no draft token stands where the root stands, so that it sees something and disturbs nobody.
    """

    ancestors: Tensor
    depths: Tensor

    @staticmethod
    def of(parents: Tensor, counts: Tensor) -> Tree:
        """parents [B, k]: the draft token that each draft token follows, one before it, or -1: the root. counts [B]:
        real ones.
        """
        rows, k = parents.shape
        steps = torch.eye(k + 1, dtype=torch.float32, device=parents.device).repeat(rows, 1, 1)
        steps[:, 1:].scatter_(2, parents[..., None] + 1, 1.0)
        for _ in range(k.bit_length()):  # paths of at most 1, 2, 4, ... steps
            steps = (steps @ steps).clamp(max=1.0)
        real = torch.arange(k + 1, device=parents.device) <= counts[:, None]
        ancestors = torch.where(real[..., None], steps, steps[:, :1]) > 0
        return Tree(ancestors, ancestors.sum(2) - 1)
