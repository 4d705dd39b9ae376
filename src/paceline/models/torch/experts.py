"""A mixture of experts in torch: every token runs through the few experts that its router scores highest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.experts import route
from paceline.kernels.gpu.state import Norm
from paceline.kernels.gpu.steps import ACTIVATIONS, LayerSteps
from paceline.models.description.spec import ExpertsSpec
from paceline.models.torch.linear import Linear

SharedMLP: TypeAlias = Callable[[Tensor, LayerSteps], Tensor]
"""An MLP of all tokens: x [N, W] -> [N, W]."""


class Experts:
    """The experts of one layer. N tokens, W width, E experts, I their inner width.

    gate_up [E, 2 I, W], or up [E, I, W] of experts without gates; down [E, W, I]; and their biases [E, 2 I or I],
    [E, W] or None. The products of an expert are made
    for all of its tokens together, expert by expert in ascending order, so the sum of a token's outputs has one order
    whatever other tokens are there.
    shared: the MLP that every token runs through besides. shared_gate: its gate, [1, W].
    norms: those of ``EXPERTS_NORMS`` by name, if the spec asks for them.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        router: Linear,
        stacked: Mapping[str, Tensor],
        shared: SharedMLP | None = None,
        shared_gate: Linear | None = None,
        norms: Mapping[str, Norm] | None = None,
    ) -> None:
        """stacked: tensors of all experts, by their names in ``description.weights``."""
        self.spec, self.router, self.shared, self.stacked = spec, router, shared, stacked
        self.norms = norms or {}
        first = "experts_gate_up" if spec.expert.gated else "experts_up"
        self.gate_up, self.down = stacked[f"{first}.weight"], stacked["experts_down.weight"]
        self._gate_up_bias, self._down_bias = stacked.get(f"{first}.bias"), stacked.get("experts_down.bias")
        self.linears: tuple[str, ...] = ("router",)
        if shared_gate is not None:
            self.shared_gate = shared_gate
            self.linears = ("router", "shared_gate")

    def __call__(self, x: Tensor, steps: LayerSteps) -> Tensor:
        """x [N, W] -> [N, W]. Synchronises with the device."""
        out = self._mixed(x, *self.route(x), steps)
        return out if self.shared is None else out + self._shared(x, self.shared(x, steps))

    def with_own_norms(self, x: Tensor, normed: Tensor, steps: LayerSteps) -> Tensor:
        """Hidden states x and the shared MLP's input ``normed``, [N, W] each -> [N, W]."""
        assert self.shared is not None
        norms = self.norms
        mixed = self._mixed(norms["experts_norm"](x), *self.route(norms["router_norm"](x)), steps)
        return norms["shared_out_norm"](self.shared(normed, steps)) + norms["experts_out_norm"](mixed)

    def _mixed(self, x: Tensor, weights: Tensor, chosen: Tensor, steps: LayerSteps) -> Tensor:
        """The weighted sum of the outputs of each token's experts; weights, chosen: of ``route``."""
        out = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            part = _multiply(x[token], self.gate_up, self._gate_up_bias, expert)
            part = _multiply(self._activated(part, steps), self.down, self._down_bias, expert)
            out.index_add_(0, token, part * weights[token, place, None])
        return out

    def _activated(self, x: Tensor, steps: LayerSteps) -> Tensor:
        activation = self.spec.expert.activation
        return steps.gate(x, activation) if self.spec.expert.gated else ACTIVATIONS[activation](x)

    def _shared(self, x: Tensor, out: Tensor) -> Tensor:
        scale = self.spec.shared_scale
        return out * self.shared_gate(x).sigmoid() if self.spec.shared_gate else out if scale == 1.0 else out * scale

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, W] -> weights, in the dtype of x, and numbers, int64, of each token's experts, [N, used] each."""
        scores = self.router(x).float() * self.spec.scores_scale
        weights, chosen = route(scores, self.spec.routing, self.stacked.get("router_correction.weight"))
        factors = self.stacked.get("experts_scale.weight")
        weights = weights if factors is None else weights * factors.float()[chosen]
        weights = weights * self.spec.output_scale
        return weights.to(x.dtype), chosen

    def idle_bytes(self) -> int:
        """Return the bytes of the experts that one token does not run through."""
        return (self.gate_up.nbytes + self.down.nbytes) * (self.spec.count - self.spec.used) // self.spec.count

    def used_multiply_adds(self) -> int:
        """Return the multiply-adds of one token's experts."""
        return self.spec.used * (self.gate_up[0].numel() + self.down[0].numel())


def _multiply(x: Tensor, weights: Tensor, biases: Tensor | None, expert: int) -> Tensor:
    return functional.linear(x, weights[expert], None if biases is None else biases[expert])
