"""What a target reads in one forward pass: a flat list of nodes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Nodes(NamedTuple):
    """tokens, rows (of the cache), positions: [N] int64, on the model's device.

    The nodes of a row are consecutive and their positions ascend: each follows the one before it, the first the row's
    cached text.
    """

    tokens: Tensor
    rows: Tensor
    positions: Tensor
