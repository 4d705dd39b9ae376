"""Whether Triton's kernels can run on a device, and the device's properties."""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from paceline.errors import MissingPackageError, ParameterError

INTERPRET = "TRITON_INTERPRET"
_FIRST_WITH_FP8 = 8, 9  # compute capability
_SPARE_PROGRAMS, _SPARE_SHARED = 132, 227 << 10  # an H100's, assumed where there is no GPU to ask


def interpreted() -> bool:
    """Whether kernels run on the CPU in Triton's interpreter, for tests. The variable must be set before triton is
    imported.
    """
    return os.environ.get(INTERPRET, "0") == "1"


def why_not(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on a device; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return str(MissingPackageError("triton", "gpu"))
    if device.type != "cuda" and not interpreted():
        return f"Triton's kernels need a CUDA device, and the model is on {device} (for tests: {INTERPRET}=1)"
    if device.type == "cuda" and torch.version.hip is not None:
        return "Triton's kernels here are for NVIDIA's GPUs, and this is torch for AMD's"
    return None


def require_triton(device: torch.device, field: str, value: object) -> None:
    """Raise ParameterError for ``field`` if Triton's kernels cannot run on the device."""
    obstacle = why_not(device)
    if obstacle is not None:
        raise ParameterError(field, value, f"not possible here: {obstacle}")


def has_fp8(device: torch.device) -> bool:
    """Whether the device converts float8 (Ada, Hopper and later); True where there is no GPU to ask."""
    return device.type != "cuda" or capability(device) >= _FIRST_WITH_FP8


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; (0, 0) where there is no GPU to ask."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors: a lower bound on the programs that run at once."""
    if device.type != "cuda":
        return _SPARE_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> int:
    """Shared memory limit of a program, in bytes."""
    if device.type != "cuda":
        return _SPARE_SHARED
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])
