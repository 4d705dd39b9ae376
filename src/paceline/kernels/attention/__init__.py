"""Attention over ragged rows: one protocol, a dictionary of backends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.config import AttentionName
from paceline.errors import ParameterError
from paceline.kernels.attention.base import AttentionBackend, Plan
from paceline.kernels.attention.padded import PaddedAttention
from paceline.kernels.attention.split import SplitAttention
from paceline.kernels.gpu.launch import require_triton, why_not


def _ragged(*, deterministic: bool = False) -> AttentionBackend:
    from paceline.kernels.attention.ragged import RaggedAttention  # needs triton

    return RaggedAttention(deterministic=deterministic)


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "padded": PaddedAttention,
    "split": SplitAttention,
    "ragged": _ragged,
}


def chosen_backend(name: str, device: torch.device) -> str:
    """Name of the backend that ``make_backend`` makes, if it can run on the device."""
    if name in BACKENDS:
        return name
    return "ragged" if device.type == "cuda" and why_not(device) is None else "padded"


def make_backend(name: AttentionName, device: torch.device, *, deterministic: bool = False) -> AttentionBackend:
    """The attention backend ``name`` on a device; an unknown name, such as "auto", picks the best one.

    Raises ParameterError if the backend cannot run here, or if ``deterministic`` needs another one.
    """
    chosen = chosen_backend(name, device)
    if chosen == "ragged":
        require_triton(device, "attention", chosen)
        return _ragged(deterministic=deterministic)
    if deterministic:
        allowed = "with attention='ragged' (a CUDA device with Triton), or 'native' (a CPU); False otherwise"
        raise ParameterError("deterministic", True, allowed)
    return BACKENDS[chosen]()


__all__ = ["BACKENDS", "AttentionBackend", "Plan", "chosen_backend", "make_backend"]
