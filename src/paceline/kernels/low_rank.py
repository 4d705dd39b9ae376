"""Low-rank changes of a linear layer by row of a batch (LoRA, arXiv 2106.09685), in torch.

It is the reference of the kernels in gpu/low_rank.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

RANKS = 16  # multiple of the ranks that are stored: the smallest product of a tensor core


@dataclass(frozen=True)
class LowRankChanges:
    """Changes (x @ down.T) @ up.T of a layer of K inputs and N outputs by A adapters, filled up with zeros to R ranks.

    down: [A, R, K]. up: [A, N, R], with the adapters' scales. ranks: of each adapter, int32 [A]; 0: no change.
    """

    down: Tensor
    up: Tensor
    ranks: Tensor

    def add_to(self, y: Tensor, x: Tensor, adapters: Tensor) -> None:
        """Add each row's change for inputs x [B L, K] to the layer's outputs y [B L, N], in place.

        adapters: int32 [B], the number of each row's adapter from 1 on, 0 for none. Synchronises with the device.
        """
        length = len(x) // len(adapters)
        for row, number in enumerate(adapters.tolist()):
            if number > 0:
                span = slice(row * length, (row + 1) * length)
                change = x[span].float() @ self.down[number - 1].float().T @ self.up[number - 1].float().T
                y[span] = (y[span].float() + change).to(y.dtype)
