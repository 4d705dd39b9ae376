"""The operations between a layer's matrix products, behind one protocol: Triton's kernels, or plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from paceline.kernels.gpu.launch import why_not
from paceline.kernels.gpu.state import Norm


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "relu": functional.relu,
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


class TorchSteps:
    """Plain torch: two launches per operation on a device."""

    def add_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        total = x + added
        return total, norm(total)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        return gate(gate_up, activation)


class TritonSteps:
    """Triton: one launch per operation."""

    def add_norm(self, x: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        from paceline.kernels.gpu.elementwise import add_norm

        return add_norm(x, added, norm)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        from paceline.kernels.gpu.elementwise import gate as by_triton

        run = by_triton if activation in ACTIVATIONS else gate
        return run(gate_up, activation)


def steps_for(device: torch.device) -> LayerSteps:
    """Triton's kernels on a GPU that can run them, else plain torch (the interpreter is for tests that ask for it)."""
    return TritonSteps() if device.type == "cuda" and why_not(device) is None else TorchSteps()
