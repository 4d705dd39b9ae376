"""The operations between a layer's matrix products, behind one protocol: Triton's kernels, or plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.recurrent_state import RowsPass
from paceline.kernels.delta import DeltaNet
from paceline.kernels.experts import Mixture, run_experts
from paceline.kernels.gpu.launch import why_not
from paceline.kernels.gpu.state import CLAMPED_LIMIT, CLAMPED_SLOPE, Norm
from paceline.kernels.low_rank import LowRankChanges
from paceline.kernels.mamba2 import Mamba2
from paceline.kernels.recurrent import run_rows
from paceline.kernels.short_conv import ShortConv
from paceline.kernels.spec import RecurrentMixer

if TYPE_CHECKING:
    from paceline.kernels.gpu.experts import GroupedProducts


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return torch.square(functional.relu(x))


def xielu(x: Tensor, shape: Tensor) -> Tensor:
    """Return xIELU (arXiv 2411.13010) of x. shape: its numbers p, n, beta and eps [4]; alpha is a softplus of p and n.

    alpha_p x^2 + beta x of positive x, else alpha_n (e^min(x, eps) - 1 - x) + beta x, alpha_n counted from beta.
    """
    p, n, beta, eps = shape.float().unbind()
    alpha_p, alpha_n, wide = functional.softplus(p), beta + functional.softplus(n), x.float()
    low = (wide.minimum(eps).expm1() - wide) * alpha_n
    curved: Tensor = torch.where(wide > 0, alpha_p * wide * wide, low)
    return (curved + beta * wide).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "relu": functional.relu,
    "relu2": _relu2,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
}


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """[N, 2 I], gates first -> activation(gate) * up, [N, I].

    "clamped_silu" (gpt-oss): gate * sigmoid(1.702 gate) * (up + 1), of parts at most 7; up is also at least -7.
    """
    gates, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_silu":
        gates, up = gates.clamp(max=CLAMPED_LIMIT), up.clamp(-CLAMPED_LIMIT, CLAMPED_LIMIT)
        return gates * (gates * CLAMPED_SLOPE).sigmoid() * (up + 1)
    return ACTIVATIONS[activation](gates).mul_(up)


class LayerSteps(Protocol):
    """Operations between matrix products. N tokens, W width, I inner width of the MLP."""

    def add_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """x, added [N, W] -> their sum, and its norm."""
        ...

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """[N, 2 I], gates first -> activation(gate) * up, [N, I]."""
        ...

    def experts(self, x: Tensor, scores: Tensor, mixture: Mixture) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts: x [N, W], scores [N, E] -> [N, W]."""
        ...

    def add_changes(self, y: Tensor, x: Tensor, changes: LowRankChanges, adapters: Tensor) -> None:
        """Add each row's low-rank change to a layer's outputs y, in place; see ``LowRankChanges.add_to``."""
        ...

    def recurrent(
        self, mixer: RecurrentMixer, part: RowsPass, layer: int, projected: Tensor, gates: Tensor | None
    ) -> Tensor:
        """Run a padded pass through a recurrent layer's states -> the input of its second matrix [N, ...].

        layer: of the states. projected, gates [N, ...]: outputs of the first matrix and of ``mixer.gates``.
        """
        ...

    @property
    def groups_rows(self) -> bool:
        """Whether ``experts``, ``add_changes`` and ``recurrent`` are a few launches, and the host waits for none."""
        ...


class TorchSteps:
    """Plain torch: two launches per operation on a device."""

    def add_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        total = x + added
        return total, norm(total)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        return gate(gate_up, activation)

    def experts(self, x: Tensor, scores: Tensor, mixture: Mixture) -> Tensor:
        weights, chosen = mixture.route(scores, x.dtype)
        return run_experts(x, weights, chosen, mixture, lambda inner: between(self, inner, mixture))

    def add_changes(self, y: Tensor, x: Tensor, changes: LowRankChanges, adapters: Tensor) -> None:
        changes.add_to(y, x, adapters)

    def recurrent(
        self, mixer: RecurrentMixer, part: RowsPass, layer: int, projected: Tensor, gates: Tensor | None
    ) -> Tensor:
        inputs, kept = mixer.split(projected.float(), None if gates is None else gates.float())
        mixed = run_rows(part, layer, mixer, inputs.view(len(part.slots), part.nodes, -1))
        return mixer.finish(mixed.flatten(0, 1), kept).to(projected.dtype)

    @property
    def groups_rows(self) -> bool:
        return False


class TritonSteps:
    """Triton: one launch per operation.

    rounds: whether norms and gates are also rounded to float8, for products with float8 weights (``gpu.float8``).
    deterministic: whether a token's bits depend neither on the other tokens of a pass nor on how a prompt is divided.
    """

    def __init__(self, *, rounds: bool = False, deterministic: bool = False) -> None:
        self.rounds, self.deterministic = rounds, deterministic

    def add_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        from paceline.kernels.gpu.elementwise import add_norm

        return add_norm(x, added, norm, rounds=self.rounds)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        from paceline.kernels.gpu.elementwise import gate

        return gate(gate_up, activation, rounds=self.rounds)

    def experts(self, x: Tensor, scores: Tensor, mixture: Mixture) -> Tensor:
        plain = TritonSteps()  # grouped products read no rounded rows
        return self._experts(x, scores, mixture, lambda inner: between(plain, inner, mixture))

    @cached_property
    def _experts(self) -> GroupedProducts:
        from paceline.kernels.gpu.experts import GroupedProducts

        return GroupedProducts(deterministic=self.deterministic)

    def add_changes(self, y: Tensor, x: Tensor, changes: LowRankChanges, adapters: Tensor) -> None:
        from paceline.kernels.gpu.low_rank import add_changes

        add_changes(y, x, changes, adapters, deterministic=self.deterministic)

    def recurrent(
        self, mixer: RecurrentMixer, part: RowsPass, layer: int, projected: Tensor, gates: Tensor | None
    ) -> Tensor:
        if isinstance(mixer, DeltaNet):
            from paceline.kernels.gpu.delta_net import delta_net

            assert gates is not None, "a gated delta net has gates"
            return delta_net(mixer, part, layer, projected, gates, in_chunks=not self.deterministic)
        from paceline.kernels.gpu.mamba2 import mamba2, short_conv

        inputs, kept = mixer.split(projected.float(), None if gates is None else gates.float())
        if isinstance(mixer, Mamba2):
            mixed = mamba2(mixer, part, layer, inputs)
        else:
            assert isinstance(mixer, ShortConv), "there are three kinds"
            mixed = short_conv(mixer, part, layer, inputs)
        return mixer.finish(mixed, kept).to(projected.dtype)

    @property
    def groups_rows(self) -> bool:
        return True


def between(steps: LayerSteps, x: Tensor, mixture: Mixture) -> Tensor:
    """Return what lies between an expert's matrices: x [N, 2 I], gates first, or [N, I] -> [N, I]."""
    return steps.gate(x, mixture.activation) if mixture.gated else ACTIVATIONS[mixture.activation](x)


def steps_for(device: torch.device) -> LayerSteps:
    """Triton's kernels on a GPU that can run them, else plain torch (the interpreter is for tests that ask for it)."""
    return TritonSteps() if device.type == "cuda" and why_not(device) is None else TorchSteps()
