"""A GPU's products of float8 weights and activations, emulated on CPUs to measure what their rounding costs.

N outputs, K inputs. Weights and activations are rounded as ``paceline.kernels.gpu.float8`` rounds them, and sums are of
float32; the order of summation is torch's, not a GPU's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from paceline.errors import ParameterError
from paceline.kernels import pack
from paceline.kernels.pack import Float8Weight
from paceline.kernels.spec import LinearWeights
from paceline.models.description.spec import ExpertsSpec
from paceline.models.load.kept_matrices import unread_matrices
from paceline.models.load.loading import open_checkpoint
from paceline.models.native.matrices import Outcome
from paceline.models.torch.transformer import Transformer


@dataclass(frozen=True)
class EmulatedFloat8:
    """A linear layer of float8 weights; implements ``models.torch.linear.WeightedLinear``.

    stored: the weights [N, K]. numbers: theirs, in float32. bias: bfloat16 [N] or None.
    rounds_rows: whether activations are float8, too.
    """

    stored: Float8Weight
    numbers: Tensor
    bias: Tensor | None
    rounds_rows: bool

    @classmethod
    def of(cls, weights: LinearWeights, *, rounds_rows: bool) -> EmulatedFloat8:
        """Return a layer; its activations are only rounded if torch's kernels on a GPU could multiply its weights."""
        stored = weights.rounded("fp8")
        assert isinstance(stored, Float8Weight)
        fits = stored.scales.dim() == 1 and all(size % 16 == 0 for size in stored.values.shape)
        return cls(stored, pack.dequantise(stored, weights.weight.shape[1]), weights.bias, rounds_rows and fits)

    @property
    def weight(self) -> Tensor:
        return self.stored.values

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        if self.rounds_rows:
            rows = pack.dequantise(pack.quantise(rows, "fp8"), rows.shape[1])
        bias = None if self.bias is None else self.bias.float()
        sums = functional.linear(rows, self.numbers, bias)
        return sums.to(x.dtype).view(*x.shape[:-1], -1)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what a GPU would keep."""
        return self.stored.values, self.stored.scales, *(() if self.bias is None else (self.bias,))


def load_emulated(source: str, *, rounds_rows: bool) -> Transformer:
    """Read a model in float8, its other tensors in bfloat16. rounds_rows: whether activations are float8, too.

    Raises the errors of ``open_checkpoint``, and ParameterError for a model that is not covered.
    """
    checkpoint = open_checkpoint(source)
    if checkpoint is None or any(isinstance(layer.mlp, ExpertsSpec) for layer in checkpoint.spec.layers):
        raise ParameterError("--precisions", "fp8", f"not with {source}: only native families without experts")
    weights, readers = unread_matrices(checkpoint, torch.bfloat16, torch.device("cpu"), Outcome())
    linear = partial(EmulatedFloat8.of, rounds_rows=rounds_rows)
    return Transformer(checkpoint.spec, weights, checkpoint.name, linear=linear, readers=readers)
