"""Whether Triton's kernels can run here."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from paceline.errors import MissingPackageError, ParameterError

INTERPRET = "TRITON_INTERPRET"
_FIRST_WITH_FP8 = 8, 9  # compute capability
_SPARE_PROGRAMS, _SPARE_SHARED = 132, 227 << 10  # taken where there is no GPU to ask: an H100's


def interpreted() -> bool:
    """Whether kernels run on the CPU, one operation at a time: for tests. It must be set before triton is imported."""
    return os.environ.get(INTERPRET, "0") == "1"


def why_not(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on a device; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return str(MissingPackageError("triton", "gpu"))
    if device.type != "cuda" and not interpreted():
        return f"Triton's kernels need a CUDA device, and the model is on {device} (for tests: {INTERPRET}=1)"
    return None


def require_triton(device: torch.device, field: str, value: object) -> None:
    """Raise ParameterError for ``field`` if Triton's kernels cannot run on the device."""
    obstacle = why_not(device)
    if obstacle is not None:
        raise ParameterError(field, value, f"not possible here: {obstacle}")


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether the device converts float8: Ada, Hopper and later ones; always where there is no GPU to ask."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FIRST_WITH_FP8


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once, at least."""
    if device.type != "cuda":
        return _SPARE_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> int:
    """Most bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return _SPARE_SHARED
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])
