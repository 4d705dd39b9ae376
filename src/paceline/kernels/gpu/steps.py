"""The operations between a layer's matrix products, behind one protocol: Triton's kernels, or plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.recurrent_state import RowsPass
from paceline.kernels.delta import DeltaNet
from paceline.kernels.gpu.launch import why_not
from paceline.kernels.gpu.state import Norm
from paceline.kernels.recurrent import run_rows
from paceline.kernels.spec import RecurrentMixer


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


_CLAMPED_LIMIT, _CLAMPED_SLOPE = 7.0, 1.702  # gpt-oss


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """[N, 2 I], gates first -> activation(gate) * up, [N, I].

    "clamped_silu" (gpt-oss): gate * sigmoid(1.702 gate) * (up + 1), of parts at most 7; up is also at least -7.
    """
    gates, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_silu":
        gates, up = gates.clamp(max=_CLAMPED_LIMIT), up.clamp(-_CLAMPED_LIMIT, _CLAMPED_LIMIT)
        return gates * (gates * _CLAMPED_SLOPE).sigmoid() * (up + 1)
    return ACTIVATIONS[activation](gates).mul_(up)


class LayerSteps(Protocol):
    """Operations between matrix products. N tokens, W width, I inner width of the MLP."""

    def add_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """x, added [N, W] -> their sum, and its norm."""
        ...

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """[N, 2 I], gates first -> activation(gate) * up, [N, I]."""
        ...

    def recurrent(
        self, mixer: RecurrentMixer, part: RowsPass, layer: int, projected: Tensor, gates: Tensor | None
    ) -> Tensor:
        """Run a padded pass through a recurrent layer's states -> the input of its second matrix [N, ...].

        layer: of the states. projected, gates [N, ...]: outputs of the first matrix and of ``mixer.gates``.
        """
        ...

    def has_kernel(self, mixer: RecurrentMixer) -> bool:
        """Whether ``recurrent`` is a few launches, however many tokens there are."""
        ...


class TorchSteps:
    """Plain torch: two launches per operation on a device."""

    def add_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        total = x + added
        return total, norm(total)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        return gate(gate_up, activation)

    def recurrent(
        self, mixer: RecurrentMixer, part: RowsPass, layer: int, projected: Tensor, gates: Tensor | None
    ) -> Tensor:
        inputs, kept = mixer.split(projected.float(), None if gates is None else gates.float())
        mixed = run_rows(part, layer, mixer, inputs.view(len(part.slots), part.nodes, -1))
        return mixer.finish(mixed.flatten(0, 1), kept).to(projected.dtype)

    def has_kernel(self, mixer: RecurrentMixer) -> bool:
        return False


class TritonSteps:
    """Triton: one launch per operation.

    rounds: whether norms and gates are also rounded to float8, for products with float8 weights (``gpu.float8``).
    """

    def __init__(self, *, rounds: bool = False) -> None:
        self.rounds = rounds

    def add_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        from paceline.kernels.gpu.elementwise import add_norm

        return add_norm(x, added, norm, rounds=self.rounds)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        from paceline.kernels.gpu.elementwise import gate as by_triton

        if activation not in ACTIVATIONS:
            return gate(gate_up, activation)
        return by_triton(gate_up, activation, rounds=self.rounds)

    def recurrent(
        self, mixer: RecurrentMixer, part: RowsPass, layer: int, projected: Tensor, gates: Tensor | None
    ) -> Tensor:
        if not isinstance(mixer, DeltaNet):
            return TorchSteps().recurrent(mixer, part, layer, projected, gates)
        from paceline.kernels.gpu.recurrent import delta_net

        assert gates is not None, "a gated delta net has gates"
        return delta_net(mixer, part, layer, projected, gates)

    def has_kernel(self, mixer: RecurrentMixer) -> bool:
        return isinstance(mixer, DeltaNet)


def steps_for(device: torch.device) -> LayerSteps:
    """Triton's kernels on a GPU that can run them, else plain torch (the interpreter is for tests that ask for it)."""
    return TritonSteps() if device.type == "cuda" and why_not(device) is None else TorchSteps()
