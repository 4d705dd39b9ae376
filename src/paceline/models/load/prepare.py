"""Choice of how a loaded model runs: on the native CPU kernels if possible, else through torch or Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.config import AttentionName, QuantizationName
from paceline.core.hardware import native_bfloat16
from paceline.errors import ModelFormatError, ParameterError
from paceline.kernels import native
from paceline.kernels.gpu.launch import has_fp8, require_triton
from paceline.models.base import AnyModel, Model, SharedModel
from paceline.models.native.model import NativeModel
from paceline.models.native.recurrent import RecurrentModel
from paceline.models.native.spec import obstacle_of
from paceline.models.torch.transformer import Transformer

if TYPE_CHECKING:
    from paceline.kernels.gpu.linear import Format, Linears


def prepare(
    model: Model | RecurrentModel,
    attention: AttentionName,
    quantization: QuantizationName | None,
    deterministic: bool = False,
) -> AnyModel:
    """Pack the model for the native kernels if ``attention`` allows it and they support it.

    On CUDA, 8-bit weights and ``deterministic`` use Triton's matrix products: the model's linear layers are replaced.
    Raises ParameterError if native kernels, a quantization or determinism were requested and are not possible.
    """
    if model.device.type == "cuda" and (quantization is not None or deterministic):
        return _with_triton(model, quantization, deterministic)
    if attention in ("padded", "split", "ragged"):
        if isinstance(model, RecurrentModel):
            raise ParameterError(
                "attention", attention, f"'native' or 'auto' with {model.name}: no other has its states, gates or sinks"
            )
        if quantization is not None:
            raise ParameterError(
                "quantization", quantization, f"None with attention={attention!r}; or attention='auto'"
            )
        return model
    demanded = attention == "native" or quantization is not None
    obstacle = _obstacle(model, quantization) or (native.why_off() if native.select() is None else None)
    if obstacle is None:
        try:
            assert quantization != "fp8"
            if isinstance(model, RecurrentModel):
                weights = model.spec, model.weights, model.name
                return NativeModel.from_weights(*weights, quantization=quantization)
            assert isinstance(model, Transformer)
            return NativeModel.from_transformer(model, quantization=quantization)
        except ModelFormatError as error:
            obstacle = str(error)
    if demanded and obstacle is not None:
        field, value = ("quantization", quantization) if quantization is not None else ("attention", attention)
        raise ParameterError(field, value, f"not possible here: {obstacle}")
    return model


def _with_triton(model: AnyModel, quantization: QuantizationName | None, deterministic: bool) -> Transformer:
    """Replace the model's linear layers by Triton's, with 8-bit weights or the model's own."""
    field, value = ("quantization", quantization) if quantization is not None else ("deterministic", deterministic)
    require_triton(model.device, field, value)
    if not isinstance(model, Transformer):
        raise ParameterError(field, value, f"not possible here: {model.name} is not of a native family")
    if model.has_experts:
        raise ParameterError(field, value, f"not possible yet: {model.name} is a mixture of experts")
    if deterministic and model.state_shape is not None:
        raise ParameterError("deterministic", deterministic, f"not possible yet: {model.name} has recurrent layers")
    if deterministic and model.spec.embed_width != model.spec.width:
        raise ParameterError("deterministic", deterministic, f"not possible yet: {model.name} projects its embeddings")
    if quantization == "int4":
        raise ParameterError(field, value, "'int8' or 'fp8' on CUDA devices")
    if quantization == "fp8" and not has_fp8(model.device):
        raise ParameterError(
            field, value, f"'int8': {model.device} has no float8; it needs an Ada, Hopper or later GPU"
        )
    if quantization == "int8" and model.dtype == torch.bfloat16 and not native_bfloat16(model.device):
        raise ParameterError(field, value, "possible on GPUs before Ampere with dtype='float16' only")
    from paceline.kernels.gpu.linear import Linears

    to: Format = "same" if quantization is None else quantization
    linears = Linears(to, deterministic=deterministic)
    model.replace_linears(linears)
    if model.device.type == "cuda" and not deterministic:  # deterministic products use the same tiles on every machine
        _tune(model, linears)
    if quantization is not None:
        model.precision = f"{quantization} weights, {model.precision}"
    return model


def _tune(model: Transformer, linears: Linears) -> None:
    """Choose the tiles of the matrix products."""
    from paceline.kernels.gpu.linear import SmallRowLinear
    from paceline.models.load.kept_tiles import tune

    tune([layer for layer in model.linears() if isinstance(layer, SmallRowLinear)], linears, model.dtype)


def _obstacle(model: AnyModel, quantization: QuantizationName | None) -> str | None:
    """Return why the native kernels cannot run the model; None if no reason is known."""
    if isinstance(model, SharedModel):
        return "the native kernels run whole models, and this one is split over ranks"
    if model.device.type != "cpu":
        return f"the native kernels run on the CPU, the model is on {model.device}"
    if not isinstance(model, Transformer | RecurrentModel):
        return f"{model.name} is not of a native family"
    if quantization == "fp8":
        return "fp8 weights need a CUDA device; on a CPU use 'int8' or 'int4'"
    if obstacle := obstacle_of(model.spec):
        return obstacle
    dtype = model.weights_dtype if isinstance(model, RecurrentModel) else model.dtype
    if quantization is None and dtype != torch.bfloat16:
        return "the native kernels run bfloat16 or quantized weights; set dtype='bfloat16'"
    return None


def why_not_native(model: AnyModel, attention: AttentionName) -> str | None:
    """Return why a model that may run on the native kernels does not, for the start line; None if it does."""
    if isinstance(model, NativeModel) or attention != "auto":
        return None
    fits = isinstance(model, Transformer | RecurrentModel) and obstacle_of(model.spec) is None
    if fits and model.device.type == "cpu" and native.select() is None:
        return native.why_off()
    return _obstacle(model, None) or "the kernels do not cover this architecture"
