"""Linear layers. Quantized layers implement the same protocol and are passed to ``Transformer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from paceline.kernels.experts import StackedWeights
from paceline.kernels.spec import LinearWeights


class Linear(Protocol):
    """A linear layer: x [..., in] -> [..., out], in the dtype of x."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that the layer keeps in memory, the weights first."""
        ...


class WeightedLinear(Linear, Protocol):
    """A linear layer whose weights others may read."""

    @property
    def weight(self) -> Tensor | StackedWeights: ...

    @property
    def bias(self) -> Tensor | None: ...


LinearFactory = Callable[[LinearWeights], WeightedLinear]
"""Makes a layer from its weights, which are read only then if they have a reader."""


class Dense:
    """An unquantized linear layer: weight [out, in], bias [out] or None."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def dense(weights: LinearWeights) -> Dense:
    """Return an unquantized layer."""
    return Dense(weights.weight, weights.bias)
