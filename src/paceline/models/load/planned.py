"""Models without weights: the sizes that plans of memory read, from a configuration and the headers of files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.errors import ModelFormatError
from paceline.models.base import AnyModel
from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weights import shapes
from paceline.models.files.boundary import ResolvedSource, name_of, reads_model
from paceline.models.load.loading import open_checkpoint
from paceline.models.load.prepare import ModelOptions
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.native.spec import obstacle_of, spec_of
from paceline.models.torch.linear import Dense, LinearFactory
from paceline.models.torch.transformer import Transformer

if TYPE_CHECKING:
    from paceline.kernels.gpu.linear import Format


class PlannedNative(NativeModel):
    """A model of the CPU kernels without its weights: it cannot run."""

    def __init__(self, spec: DecoderSpec, name: str, quantization: Quantization | None) -> None:
        self._take_sizes(spec_of(spec, shapes(spec)), name, quantization)


class PlannedTransformer(Transformer):
    """A model of torch on ``device`` without its weights: it cannot run."""

    def __init__(
        self,
        spec: DecoderSpec,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        linear: LinearFactory = Dense,
    ) -> None:
        weights = {key: tensor.to(dtype) for key, tensor in shapes(spec).items()}
        super().__init__(spec, weights, name, linear=linear)
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
        return PlannedNative(spec, name, options.quantization)
    if options.quantization is None:
        return PlannedTransformer(spec, name, options.dtype, options.device)
    from paceline.kernels.gpu.linear import Linears

    assert options.quantization != "int4"
    to: Format = options.quantization
    return PlannedTransformer(spec, name, options.dtype, options.device, Linears(to))
