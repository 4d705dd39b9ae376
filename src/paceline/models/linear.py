"""How a linear layer is applied. Other precisions implement the same protocol and are handed to ``Transformer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """x [..., in] -> [..., out], in x's dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def tensors(self) -> tuple[Tensor, ...]:
        """What it keeps in memory, the weights first."""
        ...


LinearFactory = Callable[[Tensor, Tensor | None], Linear]
"""(weight [out, in], bias [out] or None) -> the layer."""


class Dense:
    """A matrix as it is: float32 or bfloat16."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)
