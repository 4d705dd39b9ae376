"""Choice of what runs a model: packed weights on the CPU kernels if possible, else torch, Triton or transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.config import AttentionName, QuantizationName
from paceline.core.hardware import native_bfloat16
from paceline.errors import ParameterError
from paceline.kernels import native
from paceline.kernels.gpu.launch import has_fp8, require_triton
from paceline.kernels.gpu.steps import TritonSteps
from paceline.models.base import AnyModel, SharedModel
from paceline.models.description.checkpoint import Checkpoint
from paceline.models.description.spec import DecoderSpec
from paceline.models.files.boundary import ResolvedSource, Source, name_of, reads_model
from paceline.models.load.kept_matrices import unread_matrices
from paceline.models.load.loading import describe_source, in_torch, open_checkpoint
from paceline.models.load.packed_copy import PackedCopy
from paceline.models.load.packed_file import packed_file
from paceline.models.load.packed_matrices import packed_matrices, through_copy
from paceline.models.native.matrices import Outcome
from paceline.models.native.model import NativeModel
from paceline.models.native.spec import obstacle_of
from paceline.models.torch.linear import dense
from paceline.models.torch.transformer import Transformer

if TYPE_CHECKING:
    from paceline.kernels.gpu.linear import Format, Linears

log = logging.getLogger("paceline")

HEAD_FORMATS: dict[str, Format] = {"int8": "int8", "fp8": "fp8", "int4": "int8"}
"""Of the output head, by the format of the layers: 4 bits cost it too much, as on CPUs."""


@dataclass(frozen=True)
class ModelOptions:
    """How a model is to run: options of ``EngineConfig``, with dtype and device resolved."""

    dtype: torch.dtype
    device: torch.device
    attention: AttentionName = "auto"
    quantization: QuantizationName | None = None
    deterministic: bool = False

    @property
    def suit_kernels(self) -> bool:
        """Whether a model that the CPU kernels cover runs on them."""
        if self.device.type != "cpu" or self.attention not in ("auto", "native") or self.quantization == "fp8":
            return False
        return native.select() is not None and (self.quantization is not None or self.dtype == torch.bfloat16)


def would_run_natively(source: Source, device: torch.device, attention: AttentionName) -> bool:
    """Whether the native kernels would run a model in bfloat16, according to its configuration.

    Raises the errors of ``open_checkpoint``.
    """
    options = ModelOptions(torch.bfloat16, device, attention)
    if device.type != "cpu" or not (attention == "native" or options.suit_kernels):
        return False
    description = describe_source(source)
    return description is not None and obstacle_of(description) is None


def load(
    source: Source,
    options: ModelOptions,
    begin: Callable[[str], None] = lambda _stage: None,
    tell: Callable[[float], None] | None = None,
) -> AnyModel:
    """Load a model for what runs it. Packed weights are read from the disk cache, or written to it.

    begin: called with the description of each stage of loading. tell: called after each matrix with the share of them
        that is packed.
    Raises the errors of ``open_checkpoint``, and ParameterError if native kernels, a quantization or determinism were
    asked for and are not possible.
    """
    if not options.suit_kernels or options.quantization == "fp8":
        return _load(source, options, begin, tell)
    cached_file = packed_file(source, options.dtype, options.quantization)
    if cached_file is not None and cached_file.path.exists():
        begin(f"reading the packed weights of {name_of(source)}")
    if cached_file is not None and (packed := cached_file.load()) is not None:
        return packed
    model = _load(source, options, begin, tell)
    if cached_file is not None and isinstance(model, NativeModel):
        begin(f"writing the packed weights of {name_of(source)} to the cache")
        cached_file.save(model)
    return model


@reads_model
def _load(
    source: ResolvedSource,
    options: ModelOptions,
    begin: Callable[[str], None],
    tell: Callable[[float], None] | None,
) -> AnyModel:
    """Read the model's checkpoint. On CUDA, 8-bit weights and ``deterministic`` use Triton's matrix products."""
    checkpoint = open_checkpoint(source)
    obstacle = _obstacle(None if checkpoint is None else checkpoint.spec, name_of(source), options)
    obstacle = obstacle or (native.why_off() if native.select() is None else None)
    packs = obstacle is None and options.attention in ("auto", "native")
    begin(f"{'reading and packing' if packs else 'reading'} {name_of(source)}")
    if options.device.type == "cuda" and (options.quantization is not None or options.deterministic):
        copy = packed_matrices(source, options.quantization)
        if copy is not None and copy.path.exists():
            begin(f"reading the packed weights of {name_of(source)}")
        return _in_triton(checkpoint, name_of(source), options, tell, copy)
    if options.attention in ("padded", "split", "ragged"):
        if options.quantization is not None:
            allowed = f"None with attention={options.attention!r}; or attention='auto'"
            raise ParameterError("quantization", options.quantization, allowed)
        return in_torch(source, checkpoint, options.dtype, options.device)
    if obstacle is None:
        assert checkpoint is not None
        assert options.quantization != "fp8"
        return NativeModel.of(checkpoint, options.dtype, quantization=options.quantization, tell=tell)
    if options.attention == "native" or options.quantization is not None:
        by_quantization = options.quantization is not None
        field, value = ("quantization", options.quantization) if by_quantization else ("attention", options.attention)
        raise ParameterError(field, value, f"not possible here: {obstacle}")
    return in_torch(source, checkpoint, options.dtype, options.device)


def _in_triton(
    checkpoint: Checkpoint | None,
    name: str,
    options: ModelOptions,
    tell: Callable[[float], None] | None = None,
    copy: PackedCopy | None = None,
) -> Transformer:
    """Read a model for Triton's matrix products, with weights of 8 or 4 bits or its own.

    checkpoint: None for a model of transformers' own code. name: of the model, for messages. tell: see ``load``.
    copy: of its rounded matrices, which is read, or written.
    """
    device, quantization, deterministic = options.device, options.quantization, options.deterministic
    field, value = ("quantization", quantization) if quantization is not None else ("deterministic", deterministic)
    require_triton(device, field, value)
    if checkpoint is None:
        raise ParameterError(field, value, f"not possible here: {name} is not of a native family")
    _check_triton(checkpoint.spec, name, field, value, options)
    from paceline.kernels.gpu.linear import Linears

    if quantization is None:
        of_all = [Linears("same", deterministic=True)]
        weights = checkpoint.tensors_on_demand(options.dtype, device)
        model = Transformer(checkpoint.spec, weights, checkpoint.name, linear=of_all[0], experts=dense, exact=of_all[0])
    else:
        # torch's float8 kernels write bfloat16, and their bits depend on the number of rows
        rounds_rows = quantization == "fp8" and options.dtype == torch.bfloat16 and not deterministic
        formats = quantization, HEAD_FORMATS[quantization]
        of_all = [Linears(to, deterministic=deterministic, rounds_rows=rounds_rows) for to in formats]
        model = _quantised(checkpoint, options, of_all, tell, copy)
    if isinstance(model.steps, TritonSteps):
        model.steps = TritonSteps(rounds=of_all[0].rounds_rows, deterministic=deterministic)
    if device.type == "cuda":
        _tune(model, of_all)
    return model


def _quantised(
    checkpoint: Checkpoint,
    options: ModelOptions,
    of_all: Sequence[Linears],
    tell: Callable[[float], None] | None,
    copy: PackedCopy | None,
) -> Transformer:
    """Read a model whose matrices are kept in 8 or 4 bits, one after the other.

    Loading takes the finished model and one matrix. of_all: makes the layers' matrices, and the output head.
    copy: see ``_in_triton``.
    """
    from paceline.kernels.gpu.linear import Linears

    outcome = Outcome(tell)
    weights, matrices = unread_matrices(checkpoint, options.dtype, options.device, outcome)
    linear, head = of_all
    exact = Linears("same", deterministic=True) if options.deterministic else dense
    experts = Linears(linear.to)  # their activations are not rounded
    make = partial(Transformer, checkpoint.spec, weights, checkpoint.name, linear=linear, head=head)
    with through_copy(copy, matrices, outcome) as readers:
        model = make(experts=experts, exact=exact, readers=readers)
    rounded = "weights and activations" if linear.rounds_rows else "weights"
    model.precision = f"{options.quantization} {rounded}, {model.precision}"
    if text := str(outcome):
        log.info("weights of %s in %s: %s", Path(checkpoint.name).name, options.quantization, text)
    return model


def _check_triton(spec: DecoderSpec, name: str, field: str, value: object, options: ModelOptions) -> None:
    """Raise ParameterError for ``field`` or "deterministic" if Triton's matrix products cannot run the model."""
    device, quantization = options.device, options.quantization
    if options.deterministic and any(attention.latent is not None for attention in spec.attentions):
        raise ParameterError("deterministic", True, f"not possible yet: {name} has latent attention")
    if options.deterministic and spec.embed_width != spec.width:
        raise ParameterError("deterministic", True, f"not possible yet: {name} projects its embeddings")
    if quantization == "fp8" and not has_fp8(device):
        raise ParameterError(field, value, f"'int8': {device} has no float8; it needs an Ada, Hopper or later GPU")
    if quantization in ("int8", "int4") and options.dtype == torch.bfloat16 and not native_bfloat16(device):
        raise ParameterError(field, value, "possible on GPUs before Ampere with dtype='float16' only")


def _tune(model: Transformer, of_all: Sequence[Linears]) -> None:
    """Choose the tiles of the matrix products."""
    from paceline.kernels.gpu.linear import SmallRowLinear
    from paceline.models.load.kept_tiles import tune

    layers = [layer for layer in model.linears() if isinstance(layer, SmallRowLinear)]
    for linears in of_all:
        if own := [layer for layer in layers if layer.linears is linears]:
            tune(own, linears, model.dtype)


def _obstacle(spec: DecoderSpec | None, name: str, options: ModelOptions) -> str | None:
    """Return why the native kernels cannot run a model; None if no reason is known.

    spec: None for a model of transformers' own code. name: of the model, for messages.
    """
    if options.device.type != "cpu":
        return f"the native kernels run on the CPU, the model is on {options.device}"
    if spec is None:
        return f"{name} is not of a native family"
    if options.quantization == "fp8":
        return "fp8 weights need a CUDA device; on a CPU use 'int8' or 'int4'"
    if obstacle := obstacle_of(spec):
        return obstacle
    if options.quantization is None and options.dtype != torch.bfloat16:
        return "the native kernels run bfloat16 or quantized weights; set dtype='bfloat16'"
    return None


def why_not_on_kernels(spec: DecoderSpec, name: str, options: ModelOptions) -> str | None:
    """Return why a model of this description does not run on the native kernels with these options; None if it does."""
    if options.attention not in ("auto", "native"):
        return f"attention={options.attention!r} runs in torch"
    return _obstacle(spec, name, options) or (native.why_off() if native.select() is None else None)


def why_not_native(model: AnyModel, attention: AttentionName) -> str | None:
    """Return why a model that may run on the native kernels does not, for the start line; None if it does."""
    if isinstance(model, NativeModel) or attention != "auto":
        return None
    spec = model.spec if isinstance(model, Transformer) else None
    fits = spec is not None and obstacle_of(spec) is None
    if fits and model.device.type == "cpu" and native.select() is None:
        return native.why_off()
    if isinstance(model, SharedModel):
        return "the ranks' dtype is not bfloat16, or they are on several machines"
    obstacle = _obstacle(spec, model.name, ModelOptions(model.dtype, model.device))
    return obstacle or "the kernels do not cover this architecture"
