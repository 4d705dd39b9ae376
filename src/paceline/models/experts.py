"""A mixture of experts in torch: every token runs through the few experts that its router scores highest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.gpu.steps import LayerSteps
from paceline.models.description import ExpertsSpec
from paceline.models.linear import Linear


class Experts:
    """The experts of one layer. N tokens, W width, E experts, I their inner width.

    gate_up [E, 2 I, W], down [E, W, I]. The products of an expert are made for all of its tokens together, expert by
    expert in ascending order, so the sum of a token's outputs has one order whatever other tokens are there.
    """

    linears = ("router",)

    def __init__(self, spec: ExpertsSpec, router: Linear, gate_up: Tensor, down: Tensor) -> None:
        self.spec, self.router, self.gate_up, self.down = spec, router, gate_up, down

    def __call__(self, x: Tensor, steps: LayerSteps) -> Tensor:
        """x [N, W] -> [N, W]. Synchronises with the device."""
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            inner = steps.gate(functional.linear(x[token], self.gate_up[expert]), self.spec.expert.activation)
            out.index_add_(0, token, functional.linear(inner, self.down[expert]) * weights[token, place, None])
        return out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, W] -> weights, in the dtype of x, and numbers, int64, of each token's experts, [N, used] each."""
        scores = self.router(x).float()
        if self.spec.softmax == "chosen":
            best, chosen = scores.topk(self.spec.used, dim=-1)
            return best.softmax(-1).to(x.dtype), chosen
        weights, chosen = scores.softmax(-1).topk(self.spec.used, dim=-1)
        if self.spec.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def used_multiply_adds(self) -> int:
        """Return the multiply-adds of one token's experts."""
        return self.spec.used * (self.gate_up[0].numel() + self.down[0].numel())
