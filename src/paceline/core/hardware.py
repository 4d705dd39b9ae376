"""What the machine has: memory and number formats."""

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
from paceline.errors import ParameterError

P = ParamSpec("P")
T = TypeVar("T")

_DEVICES = "'auto', 'cpu', 'cuda' or 'cuda:N'"


def available_memory(device: torch.device) -> int:
    """Bytes that can still be taken on the device; inside a container, its limit counts."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    import psutil  # which a machine that runs on its GPU need not have

    free = int(psutil.virtual_memory().available)
    limited = cgroups.free_memory()
    return free if limited is None else min(free, limited)


def default_threads() -> int:
    """CPU threads where nobody asked for a number: torch's own choice, and no more than a container's quota can run.

    Threads beyond the quota would wait for those that the kernel stopped until its next period.
    """
    quota = cgroups.cpu_quota()
    threads = torch.get_num_threads()
    return threads if quota is None else min(threads, max(1, math.ceil(quota)))


def threads_per_rank(ranks: int) -> int:
    """The same where so many processes share the machine."""
    return max(1, default_threads() // ranks)


def native_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 itself (where it does not, other types are faster)."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)  # from Ampere on
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
    """The processor's own name, for reports."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def machine_name(device: torch.device) -> str:
    """The processor's or the GPU's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_signature() -> str:
    """What tells processors of one name apart: family, model, stepping and features. Empty where nothing says so."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return ""
    first = cpuinfo.read_text().split("\n\n", 1)[0]
    told = ("vendor_id", "cpu family", "model", "stepping", "cache size", "flags", "Features", "CPU part")
    return "; ".join(" ".join(line.split()) for line in first.splitlines() if line.split(":")[0].strip() in told)


def resolve_device(name: str) -> torch.device:
    """Name to device; "auto" is the first CUDA device if there is one, else the CPU."""
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
    return device


def resolve_dtype(name: str, device: torch.device, field: str = "dtype") -> torch.dtype:
    """Name to dtype; "auto" is bfloat16 where the device multiplies it natively, else float16 on CUDA, float32 on CPUs.

    Raises ParameterError, of ``field``, for float16 on a CPU: its kernels and torch's fast products know bfloat16.
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
    """Times work on a device, from its making to ``stop``, without waiting for a device that runs behind the host."""

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
        """None: the device has not come so far."""
        if not self._events:
            return self._times[1] - self._times[0]
        first, last = self._events
        return first.elapsed_time(last) / 1000 if last.query() else None  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Let torch use so many CPU threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ignore_torch_context(function: Callable[P, T]) -> Callable[P, T]:
    """Within it, tensors lie on the CPU unless somebody says where, and products are what they are said to be: whatever
    a caller told torch.set_default_device, and in a caller's torch.autocast.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        told: list[AbstractContextManager[object]] = []
        if torch.get_default_device().type != "cpu":
            told.append(torch.device("cpu"))
        told += [torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if not told:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for each in told:
                stack.enter_context(each)
            return function(*args, **kwargs)

    return called
