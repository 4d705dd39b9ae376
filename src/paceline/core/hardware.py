"""Properties of the machine: memory, threads, device names and number formats."""

from __future__ import annotations

import functools
import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from paceline.core import cgroups
from paceline.core.cpus import performance_cores
from paceline.errors import ParameterError

P = ParamSpec("P")
T = TypeVar("T")

_DEVICES = "'auto', 'cpu' or 'cuda'"


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device. On CPUs a container's limit counts."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    import psutil  # optional on machines that run on a GPU

    free = int(psutil.virtual_memory().available)
    limited = cgroups.free_memory()
    return free if limited is None else min(free, limited)


def return_cached_memory(device: torch.device) -> None:
    """Return memory that torch's allocator holds but does not use to the device, where ``available_memory`` counts it.

    Quantised weights leave gigabytes there. The next allocations ask the device again.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def total_memory(device: torch.device) -> int:
    """Bytes of the device's memory, used or not. On CPUs the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    import psutil

    return int(psutil.virtual_memory().total)


def default_threads() -> int:
    """Default number of CPU threads: one per core, at most torch's own choice and a container's CPU quota.

    With more threads than the quota allows, the kernel stops some of them and the others wait for these.
    """
    quota = cgroups.cpu_quota()
    threads = min(torch.get_num_threads(), performance_cores())
    return threads if quota is None else min(threads, max(1, math.ceil(quota)))


def threads_per_rank(ranks: int) -> int:
    """Default number of CPU threads per process if ``ranks`` processes share the machine."""
    return max(1, default_threads() // ranks)


def native_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware. Without that, torch is faster in other types."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere and later
    flags = _cpu_flags()
    return "avx512_bf16" in flags or "amx_bf16" in flags or "bf16" in flags


def _cpu_flags() -> set[str]:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split(":", 1)[1].split())
    return set()


def cpu_name() -> str:
    """Model name of the CPU, for reports."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine_name(device: torch.device) -> str:
    """Model name of the GPU or CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_signature() -> str:
    """Family, model, stepping and features of the CPU, which differ between CPUs of one name. "" if unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return ""
    first = cpuinfo.read_text().split("\n\n", 1)[0]
    fields = ("vendor_id", "cpu family", "model", "stepping", "cache size", "flags", "Features", "CPU part")
    return "; ".join(" ".join(line.split()) for line in first.splitlines() if line.split(":")[0].strip() in fields)


def resolve_device(name: str) -> torch.device:
    """Convert a name to a device. "auto" is the first CUDA device if there is one, else the CPU.

    Raises ParameterError if the name is unknown or the machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ParameterError("device", name, _DEVICES) from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ParameterError("device", name, _DEVICES)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ParameterError("device", name, f"this machine has {torch.cuda.device_count()} CUDA devices")
    if device.index:  # graphs, events and Triton's launches go to the thread's current device, which is the first
        allowed = "'cuda', in a process that sees this GPU only: set CUDA_VISIBLE_DEVICES before it starts"
        raise ParameterError("device", name, allowed)
    return device


def resolve_dtype(name: str, device: torch.device, field: str = "dtype") -> torch.dtype:
    """Convert a name to a dtype.

    "auto" is what torch multiplies fastest: bfloat16 where the device has instructions for it, else float16 on CUDA and
    float32 on CPUs. Raises ParameterError for ``field`` if float16 is requested on a CPU.
    """
    on_cuda = device.type == "cuda"
    if name == "auto" and native_bfloat16(device):
        return torch.bfloat16
    if name == "auto":
        return torch.float16 if on_cuda else torch.float32
    if name == "float16" and not on_cuda:
        raise ParameterError(field, name, "'auto', 'float32' or 'bfloat16' on a CPU: 'float16' is for CUDA devices")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


class Stopwatch:
    """Measures the time of work on a device, from construction to ``stop``, without synchronizing with the device."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._events = [_event(), _event()] if on_cuda else []
        self._times = [0.0, 0.0]
        self._mark(0)

    def stop(self) -> None:
        self._mark(1)

    def _mark(self, which: int) -> None:
        self._times[which] = time.perf_counter()
        if self._events:
            self._events[which].record()

    def seconds(self) -> float | None:
        """Elapsed seconds; None while the device has not finished the work."""
        if not self._events:
            return self._times[1] - self._times[0]
        first, last = self._events
        return first.elapsed_time(last) / 1000 if last.query() else None  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Context in which torch uses ``threads`` CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ignore_torch_context(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator that shields a function from the caller's ``torch.set_default_device`` and ``torch.autocast``.

    Inside the function, tensors without an explicit device are on the CPU and products keep their dtypes.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        overrides: list[AbstractContextManager[object]] = []
        if torch.get_default_device().type != "cpu":
            overrides.append(torch.device("cpu"))
        overrides += [
            torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        ]
        if not overrides:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for override in overrides:
                stack.enter_context(override)
            return function(*args, **kwargs)

    return called
