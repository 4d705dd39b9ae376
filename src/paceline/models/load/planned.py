"""Models without weights: the sizes that plans of memory read, from a configuration and the headers of files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline.errors import ModelFormatError
from paceline.kernels import native
from paceline.kernels.pack import INT4_GROUP
from paceline.kernels.spec import LinearWeights
from paceline.models.base import AnyModel
from paceline.models.description.checkpoint import Checkpoint
from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weights import shapes
from paceline.models.files.boundary import ResolvedSource, name_of, reads_model
from paceline.models.load.loading import open_checkpoint
from paceline.models.load.prepare import HEAD_FORMATS, ModelOptions
from paceline.models.native.matrices import are_ordered
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.native.spec import obstacle_of, spec_of
from paceline.models.torch.linear import LinearFactory, dense
from paceline.models.torch.transformer import Transformer

if TYPE_CHECKING:
    from paceline.kernels.gpu.four_bit import Grid


class PlannedNative(NativeModel):
    """A model of the CPU kernels without its weights: it cannot run."""

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization | None) -> None:
        self.kernels = native.required().name
        spec = spec_of(checkpoint.spec, shapes(checkpoint.spec))
        spec = replace(spec, ordered=are_ordered(checkpoint.placements))
        self._take_sizes(spec, checkpoint.name, quantization)


class PlannedTransformer(Transformer):
    """A model of torch on ``device`` without its weights: it cannot run. linear, head: see ``Transformer``."""

    def __init__(
        self,
        spec: DecoderSpec,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        linear: LinearFactory = dense,
        head: LinearFactory | None = None,
    ) -> None:
        weights = {key: tensor.to(dtype) for key, tensor in shapes(spec).items()}
        super().__init__(spec, weights, name, linear=linear, head=head)
        self.device = device

    def weight_bytes(self) -> int:
        tensors = [*self._kept, *(tensor for linear in self.linears() for tensor in linear.tensors())]
        return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())


@reads_model
def planned_model(source: ResolvedSource, options: ModelOptions) -> AnyModel:
    """Return the model that ``load`` would load, without its weights.

    Raises the errors of ``open_checkpoint``, and ModelFormatError for a model of transformers' own code.
    """
    checkpoint = open_checkpoint(source)
    if checkpoint is None:
        raise ModelFormatError(f"{name_of(source)} runs through transformers' own code, whose memory cannot be planned")
    spec, name = checkpoint.spec, checkpoint.name
    if options.suit_kernels and options.quantization != "fp8" and obstacle_of(spec) is None:
        return PlannedNative(checkpoint, options.quantization)
    if options.quantization is None:
        return PlannedTransformer(spec, name, options.dtype, options.device)
    from paceline.kernels.gpu.linear import Linears

    to = options.quantization
    linear = four_bit_layer("int4", INT4_GROUP, shifted=True) if to == "int4" else Linears(to)
    model = PlannedTransformer(spec, name, options.dtype, options.device, linear, Linears(HEAD_FORMATS[to]))
    model.precision = f"{to} weights, {model.precision}"
    return model


def four_bit_layer(grid: Grid, group: int, *, shifted: bool) -> LinearFactory:
    """Return what makes layers of 4 bits without numbers; see ``kernels.gpu.four_bit.empty``."""
    from paceline.kernels.gpu.four_bit import empty
    from paceline.kernels.gpu.linear import Linears, SmallRowLinear

    def layer(weights: LinearWeights) -> SmallRowLinear:
        kept = empty(tuple(weights.weight.shape), grid, group, shifted=shifted, device=torch.device("meta"))
        return SmallRowLinear(kept, weights.bias, Linears("int4"))

    return layer
