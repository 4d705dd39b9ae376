"""How a loaded model will run: on the CPU's own kernels where they can, else through torch."""

from __future__ import annotations

import torch

from paceline.errors import ModelFormatError, ParameterError
from paceline.kernels import native
from paceline.models.base import AnyModel, Model
from paceline.models.native import NativeModel
from paceline.models.transformer import Transformer
from paceline.params import AttentionName, QuantizationName


def prepare(model: Model, attention: AttentionName, quantization: QuantizationName | None) -> AnyModel:
    """Pack the model for the native kernels if ``attention`` allows it and they can run it.

    Raises ParameterError if native kernels or a quantization were asked for and are not possible, and says why.
    """
    if attention in ("padded", "split"):
        if quantization is not None:
            raise ParameterError(
                "quantization", quantization, f"None with attention={attention!r}; or attention='auto'"
            )
        return model
    demanded = attention == "native" or quantization is not None
    obstacle = _obstacle(model, quantization)
    if obstacle is None and (demanded or native.select() is not None):
        try:
            assert isinstance(model, Transformer)
            return NativeModel.from_transformer(model, quantization=quantization)
        except ModelFormatError as error:
            obstacle = str(error)
    if demanded and obstacle is not None:
        field, value = ("quantization", quantization) if quantization is not None else ("attention", attention)
        raise ParameterError(field, value, f"not possible here: {obstacle}")
    return model


def _obstacle(model: AnyModel, quantization: QuantizationName | None) -> str | None:
    """Why the native kernels cannot take the model; None if nothing is known against it."""
    if model.device.type != "cpu":
        return f"the native kernels run on the CPU, the model is on {model.device}"
    if not isinstance(model, Transformer):
        return f"{model.name} is not of a native family"
    if quantization is None and model.dtype != torch.bfloat16:
        return "the native kernels run bfloat16 or quantized weights; set dtype='bfloat16'"
    return None


def why_not_native(model: AnyModel, attention: AttentionName) -> str | None:
    """For the start line: why ``attention="auto"`` did not choose the native kernels; None if it did."""
    if attention != "auto" or isinstance(model, NativeModel):
        return None
    obstacle = _obstacle(model, None)
    return obstacle or (native.why_none() if native.select() is None else "the kernels do not cover this architecture")
