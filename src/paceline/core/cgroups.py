"""What a container may use: the limits of the control groups that this process is in, version 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")  # the groups of this process, a line a hierarchy


@dataclass(frozen=True)
class _Memory:
    """What one version calls its files, and in memory.stat the pages that the kernel takes back before memory ends."""

    controller: str
    limits: tuple[str, ...]
    usage: str
    files: tuple[str, str]  # cached pages of files: long unused, lately used
    mapped: str  # pages of files that somebody has mapped
    slab: str | None


_VERSION_1 = _Memory(
    "memory",
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "total_mapped_file",
    None,
)
_VERSION_2 = _Memory(
    "",
    ("memory.max", "memory.high"),
    "memory.current",
    ("inactive_file", "active_file"),
    "file_mapped",
    "slab_reclaimable",
)


def free_memory(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Bytes that this process may still take before a limit of its group or of one above it; None without a limit."""
    rooms = [
        _room(group, names) for names in (_VERSION_1, _VERSION_2) for group in _groups(root, own, names.controller)
    ]
    return min((room for room in rooms if room is not None), default=None)


def cpu_quota(root: Path = ROOT, own: Path = OWN) -> float | None:
    """CPUs' worth of time that this process may use; None without a limit."""
    quotas = [_quota_1(group) for group in _groups(root, own, "cpu")] + [
        _quota_2(group) for group in _groups(root, own)
    ]
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups(root: Path, own: Path, controller: str = "") -> Iterator[Path]:
    """The directories of this process's group and of those above it. controller: of version 1; "" is version 2.

    In a container they may be cut: its own group is then the root of what it sees, whatever its name is.
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


def _room(group: Path, names: _Memory) -> int | None:
    limits = [limit for name in names.limits if (limit := _number(group / name)) is not None]
    usage = _number(group / names.usage)
    if not limits or usage is None:
        return None
    return max(0, min(limits) - max(0, usage - _reclaimable(group / "memory.stat", names)))


def _reclaimable(stat: Path, names: _Memory) -> int:
    """As the kernel's MemAvailable has it, all cached pages of files and its caches; but not files that are mapped.

    A file just written or read is cached until the memory is needed. Docker's figure leaves out the inactive ones
    alone, but what was read twice is active and goes as well. Mapped pages may be weights in
    use: they would be read again.
    """
    fields = dict(line.split(" ", 1) for line in _read(stat).splitlines() if " " in line)
    inactive, active = (_whole(fields.get(name)) or 0 for name in names.files)
    mapped, slab = (_whole(fields.get(name or "")) or 0 for name in (names.mapped, names.slab))
    return max(inactive, inactive + active - mapped) + slab


def _quota_1(group: Path) -> float | None:
    return _share(_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))


def _quota_2(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    return _share(quota, period)


def _share(quota: str, period: str) -> float | None:
    time, of = _whole(quota), _whole(period)
    return time / of if time and of else None


def _number(path: Path) -> int | None:
    return _whole(_read(path))


def _whole(text: str | None) -> int | None:
    """The number; None for "max", for -1 and for what is not there: no limit."""
    found = (text or "").strip()
    return int(found) if found.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
