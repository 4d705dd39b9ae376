"""The dtype in which an engine keeps the keys and values of a model: ``EngineConfig.kv_cache_dtype``."""

from __future__ import annotations

import torch

from paceline.config import EngineConfig
from paceline.core.eight_bits import LARGEST
from paceline.drafters.heads.native import NativeHead
from paceline.errors import ParameterError
from paceline.kernels.gpu.launch import has_fp8
from paceline.models.base import AnyModel, kv_layers_of
from paceline.models.native.model import NativeModel

_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_SCALE_ALIGNMENT = 4  # bytes: a scale is a float32 behind its vector


def cache_dtype(model: AnyModel, config: EngineConfig) -> torch.dtype:
    """Return the dtype of a model's keys and values. Raises ParameterError if what runs the model cannot have it."""
    name = config.kv_cache_dtype
    if name == "auto":
        return model.dtype
    if (allowed := _allowed_instead(model, _DTYPES[name])) is not None:
        raise ParameterError("kv_cache_dtype", name, allowed)
    return _DTYPES[name]


def _allowed_instead(model: AnyModel, dtype: torch.dtype) -> str | None:
    """Return what is possible in place of this dtype, and why; None if it is possible."""
    if getattr(model, "whole_texts", None) is not None:
        return f"'auto' with {model.name}, whose cache holds tokens in place of keys and values"
    if dtype not in LARGEST:
        allowed = f"'auto' with {model.name} in float16, whose numbers bfloat16 would round"
        return allowed if model.dtype == torch.float16 else None
    if dtype == torch.float8_e4m3fn and isinstance(model, NativeModel | NativeHead):
        return "'int8' on the CPU kernels, which have no float8"
    if dtype == torch.float8_e4m3fn and not has_fp8(model.device):
        return f"'int8': {model.device} has no float8; it needs an Ada, Hopper or later GPU"
    odd = {width for shape in kv_layers_of(model) for width in shape.stored if width % _SCALE_ALIGNMENT}
    if odd:
        return f"'auto' with {model.name}: 8 bits need vectors of a multiple of 4 numbers, not of {min(odd)}"
    return None
