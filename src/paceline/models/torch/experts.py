"""A mixture of experts in torch: every token runs through the few experts that its router scores highest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

from paceline.kernels.experts import Mixture
from paceline.kernels.gpu.state import Norm
from paceline.kernels.gpu.steps import LayerSteps
from paceline.models.description.spec import ExpertsSpec
from paceline.models.torch.linear import Linear

SharedMLP: TypeAlias = Callable[[Tensor, LayerSteps], Tensor]
"""An MLP of all tokens: x [N, W] -> [N, W]."""


class Experts:
    """The experts of one layer, their router, and the MLP beside them. N tokens, W width.

    shared: the MLP that every token runs through besides. shared_gate: its gate, [1, W].
    norms: those of ``EXPERTS_NORMS`` by name, if the spec asks for them.
    latent: the maps to the experts' width L, [L, W], and back, [W, L], if the spec asks for them.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        router: Linear,
        mixture: Mixture,
        shared: tuple[SharedMLP, Linear | None] | None = None,
        norms: Mapping[str, Norm] | None = None,
        latent: tuple[Linear, Linear] | None = None,
    ) -> None:
        """shared: the MLP and its gate."""
        self.spec, self.router, self.mixture = spec, router, mixture
        beside: tuple[SharedMLP | None, Linear | None] = (None, None) if shared is None else shared
        self.shared, gate = beside
        self.norms = norms or {}
        self.linears: tuple[str, ...] = ("router",)
        if gate is not None:
            self.shared_gate = gate
            self.linears = ("router", "shared_gate")
        if latent is not None:
            self.latent_in, self.latent_out = latent
            self.linears = (*self.linears, "latent_in", "latent_out")

    def __call__(self, x: Tensor, steps: LayerSteps) -> Tensor:
        """x [N, W] -> [N, W]."""
        out = self._mixed(x, self.router(x), steps)
        return out if self.shared is None else out + self._shared(x, self.shared(x, steps))

    def with_own_norms(self, x: Tensor, normed: Tensor, steps: LayerSteps) -> Tensor:
        """Hidden states x and the shared MLP's input ``normed``, [N, W] each -> [N, W]."""
        assert self.shared is not None
        norms = self.norms
        mixed = self._mixed(norms["experts_norm"](x), self.router(norms["router_norm"](x)), steps)
        return norms["shared_out_norm"](self.shared(normed, steps)) + norms["experts_out_norm"](mixed)

    def _mixed(self, x: Tensor, scores: Tensor, steps: LayerSteps) -> Tensor:
        """x [N, W], scores [N, E] -> [N, W]."""
        if self.spec.latent is None:
            return steps.experts(x, scores, self.mixture)
        return self.latent_out(steps.experts(self.latent_in(x), scores, self.mixture))

    def _shared(self, x: Tensor, out: Tensor) -> Tensor:
        scale = self.spec.shared_scale
        return out * self.shared_gate(x).sigmoid() if self.spec.shared_gate else out if scale == 1.0 else out * scale

    def idle_bytes(self) -> int:
        """Return the bytes of the experts that one token does not run through."""
        weights = self.mixture.first.weight.nbytes + self.mixture.second.weight.nbytes
        return weights * (self.spec.count - self.spec.used) // self.spec.count

    def used_multiply_adds(self) -> int:
        """Return the multiply-adds of one token's experts."""
        first, second = self.mixture.first, self.mixture.second
        return self.spec.used * (first.outputs + self.spec.expert.width) * second.outputs
