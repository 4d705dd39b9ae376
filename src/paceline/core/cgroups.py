"""Memory and CPU limits of the control groups (version 1 and 2) that this process belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")  # the groups of this process, one line per hierarchy


@dataclass(frozen=True)
class _MemoryFiles:
    """File names of one version, and the fields of memory.stat that count reclaimable pages."""

    controller: str
    limits: tuple[str, ...]
    usage: str
    file_pages: tuple[str, str]  # cached file pages: inactive, active
    mapped: str  # file pages that a process has mapped
    slab: str | None


_VERSION_1 = _MemoryFiles(
    "memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "total_mapped_file",
    None,
)
_VERSION_2 = _MemoryFiles(
    "",
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file"),
    "file_mapped",
    "slab_reclaimable",
)


def free_memory(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Bytes that this process may still allocate before its group or a parent group reaches a limit.

    Returns None if there is no limit.
    """
    available = [
        _available(group, names) for names in (_VERSION_1, _VERSION_2) for group in _groups(root, own, names.controller)
    ]
    return min((size for size in available if size is not None), default=None)


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Number of CPUs whose time this process may use, as a fraction; None if there is no limit."""
    quotas = [_quota_1(group) for group in _groups(root, own, "cpu")] + [
        _quota_2(group) for group in _groups(root, own)
    ]
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups(root: Path, own: Path, controller: str = "") -> Iterator[Path]:
    """Yield the directories of this process's group and of its parents.

    controller: name of a version 1 controller; "" selects version 2. A container may see only its own group, which is
    then the root, whatever its name is.
    """
    base = root / controller
    inner = Path(_path_in(own, controller).lstrip("/"))
    steps = () if ".." in inner.parts else (inner, *inner.parents)
    yield from dict.fromkeys([*(base / step for step in steps), base])


def _path_in(own: Path, controller: str) -> str:
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "")
        if controller in controllers.split(","):
            return path
    return ""


def _available(group: Path, names: _MemoryFiles) -> int | None:
    limits = [limit for name in names.limits if (limit := _number(group / name)) is not None]
    usage = _number(group / names.usage)
    if not limits or usage is None:
        return None
    return max(0, min(limits) - max(0, usage - _reclaimable(group / "memory.stat", names)))


def _reclaimable(stat: Path, names: _MemoryFiles) -> int:
    """Bytes that the kernel frees under memory pressure: cached file pages and slab, without mapped files.

    The kernel's MemAvailable counts the same pages. Docker's figure subtracts only inactive pages, but a file that was
    read twice is active and is reclaimed as well. Mapped pages are left out because they may be weights in use.
    """
    fields = dict(line.split(" ", 1) for line in _read(stat).splitlines() if " " in line)
    inactive, active = (_whole(fields.get(name)) or 0 for name in names.file_pages)
    mapped, slab = (_whole(fields.get(name or "")) or 0 for name in (names.mapped, names.slab))
    return max(inactive, inactive + active - mapped) + slab


def _quota_1(group: Path) -> float | None:
    return _ratio(_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))


def _quota_2(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    return _ratio(quota, period)


def _ratio(quota: str, period: str) -> float | None:
    quota_us, period_us = _whole(quota), _whole(period)
    return quota_us / period_us if quota_us and period_us else None


def _number(path: Path) -> int | None:
    return _whole(_read(path))


def _whole(text: str | None) -> int | None:
    """Parse a whole number; None for "max", -1 and missing text, which all mean no limit."""
    stripped = (text or "").strip()
    return int(stripped) if stripped.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
