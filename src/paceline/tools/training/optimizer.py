"""The optimizers: Muon for matrices, AdamW for the other weights.

A drafter is trained for minutes, in hundreds of steps. Muon makes each update of a matrix orthogonal, so that it moves
rare directions as far as frequent ones, and needs fewer steps (Jordan et al. 2024; arXiv 2502.16982). torch's own takes
matrices only, no stacks of them, and multiplies in bfloat16 on all processors, also on those that have no instructions
for it; there it is hundreds of times slower than this one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

_BETAS = 0.9, 0.95
_MOMENTUM = 0.95
_WEIGHT_DECAY = 0.01  # AdamW's usual one
_ITERATIONS = 5
_POLYNOMIAL = 3.4445, -4.7750, 2.0315  # Jordan's: singular values come near 1 in five iterations
_SIZE_OF_ADAMW = 0.2  # root mean square of an update of AdamW: one learning rate suits both (2502.16982, section 2.2)
_TINY = 1e-7


def optimizers(weights: Iterable[Tensor], learning_rate: float) -> tuple[Optimizer, ...]:
    """The optimizers of these weights, which is one for each kind that occurs."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for weight in weights:
        (matrices if weight.ndim > 1 and min(weight.shape[-2:]) > 1 else others).append(weight)
    made: list[Optimizer] = [Muon(matrices, learning_rate)] if matrices else []
    return *made, *([AdamW(others, lr=learning_rate, betas=_BETAS)] if others else ())


class Muon(Optimizer):
    """Trains matrices [..., rows, columns]; leading dimensions count matrices of their own.

    An update is the orthogonal matrix next to the gradients' running mean, a fifth of the learning rate in root mean
    square. Products have the dtype of the autocast around ``step``.
    """

    def __init__(self, weights: Iterable[Tensor], learning_rate: float) -> None:
        super().__init__(weights, {"lr": learning_rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group["lr"])

    def _update(self, weight: Tensor, gradient: Tensor, rate: float) -> None:
        momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
        momentum.lerp_(gradient, 1 - _MOMENTUM)
        update = orthogonal(gradient.lerp(momentum, _MOMENTUM))  # Nesterov's momentum
        weight.mul_(1 - rate * _WEIGHT_DECAY)
        weight.sub_(update, alpha=rate * _SIZE_OF_ADAMW * max(weight.shape[-2:]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest orthogonal matrix to [..., rows, columns], by Newton and Schulz' iteration; float32."""
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = matrix if wide else matrix.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + _TINY)
    a, b, c = _POLYNOMIAL
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    found: Tensor = (x if wide else x.mT).float()
    return found
