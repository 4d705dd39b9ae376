"""Memory and CPU limits of containers, read from fake control groups; devices and dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core import cgroups, hardware
from paceline.core.cgroups import cpu_quota, free_memory
from paceline.errors import ParameterError

GIB = 2**30
LIMIT = 8 * GIB


def write(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


def stat(**fields: int) -> str:
    return "\n".join(f"{name} {value}" for name, value in {"anon": 1, **fields}.items())


class FakeCgroups:
    """Fake control groups of both versions, in which this process belongs to ``path``."""

    def __init__(self, root: Path, path: str) -> None:
        self.root, self.own = root / "cgroup", root / "own"
        self.root.mkdir()
        self.own.write_text(f"4:memory:{path}\n3:cpu,cpuacct:{path}\n0::{path}\n")

    def version_1(self, path: str, limit: object, usage: int, **fields: int) -> None:
        fields_text = stat(inactive_file=0, **{f"total_{name}": value for name, value in fields.items()})
        place = self.root / "memory" / path
        write(place, memory__limit_in_bytes=limit, memory__usage_in_bytes=usage, memory__stat=fields_text)

    def version_2(self, path: str, limit: object, usage: int, **fields: int) -> None:
        write(self.root / path, memory__max=limit, memory__current=usage, memory__stat=stat(**fields))

    def free(self) -> int | None:
        return free_memory(self.root, self.own)

    def cpus(self) -> float | None:
        return cpu_quota(self.root, self.own)


@pytest.fixture
def groups(tmp_path: Path) -> FakeCgroups:
    return FakeCgroups(tmp_path, "/box/inner")


@pytest.mark.parametrize("version", ["version_1", "version_2"])
@pytest.mark.parametrize("path", ["", "box/inner", "box"], ids=["as its root", "under its name", "above it"])
def test_free_memory_is_the_limit_minus_the_usage(version: str, path: str, groups: FakeCgroups) -> None:
    getattr(groups, version)(path, LIMIT, 3 * GIB)
    assert groups.free() == 5 * GIB


@pytest.mark.parametrize("version", ["version_1", "version_2"])
def test_the_cache_of_a_large_file_just_written_is_free(version: str, groups: FakeCgroups) -> None:
    getattr(groups, version)("", LIMIT, LIMIT - 1, inactive_file=6 * GIB)
    assert groups.free() == 6 * GIB + 1


@pytest.mark.parametrize("version", ["version_1", "version_2"])
def test_the_cache_of_a_file_read_twice_is_free_unless_it_is_mapped(version: str, groups: FakeCgroups) -> None:
    mapped = {"mapped_file" if version == "version_1" else "file_mapped": 2 * GIB}
    getattr(groups, version)("", LIMIT, LIMIT, inactive_file=GIB, active_file=4 * GIB, **mapped)
    assert groups.free() == 3 * GIB


def test_the_kernels_own_caches_are_free(groups: FakeCgroups) -> None:
    groups.version_2("", LIMIT, LIMIT, slab_reclaimable=GIB)
    assert groups.free() == GIB


@pytest.mark.parametrize("version", ["version_1", "version_2"])
def test_the_tightest_of_nested_limits_counts(version: str, groups: FakeCgroups) -> None:
    add = getattr(groups, version)
    add("box/inner", LIMIT, GIB)
    add("box", LIMIT, 7 * GIB, inactive_file=GIB)
    add("", 100 * GIB, 8 * GIB)
    assert groups.free() == 2 * GIB


def test_memory_high_counts_as_a_limit(groups: FakeCgroups) -> None:
    groups.version_2("box", LIMIT, GIB)
    write(groups.root / "box", memory__high=2 * GIB)
    assert groups.free() == GIB


def test_usage_above_the_limit_leaves_no_free_memory(groups: FakeCgroups) -> None:
    groups.version_2("", GIB, 2 * GIB)
    assert groups.free() == 0


@pytest.mark.parametrize("path", ["", "box/inner"])
def test_max_is_no_limit(path: str, groups: FakeCgroups) -> None:
    groups.version_2(path, "max", GIB)
    assert groups.free() is None
    assert groups.cpus() is None


def test_missing_and_broken_files_are_no_limit(groups: FakeCgroups) -> None:
    assert groups.free() is None
    write(groups.root, memory__max=LIMIT)
    assert groups.free() is None
    write(groups.root, memory__max="?", memory__current="\xff", cpu__max="100000")
    assert groups.free() is None
    assert groups.cpus() is None
    write(groups.root, memory__max=LIMIT, memory__current=GIB)
    assert groups.free() == LIMIT - GIB
    groups.own.unlink()
    assert groups.free() == LIMIT - GIB


def test_a_group_outside_of_the_containers_view_is_ignored(tmp_path: Path) -> None:
    groups = FakeCgroups(tmp_path, "/../other")
    write(tmp_path / "other", memory__max=1, memory__current=0)
    groups.version_2("", LIMIT, GIB)
    assert groups.free() == LIMIT - GIB


def test_the_tightest_quota_of_cpu_time_counts(groups: FakeCgroups) -> None:
    write(groups.root / "box", cpu__max="250000 100000")
    assert groups.cpus() == 2.5
    write(groups.root, cpu__max="max 100000")
    assert groups.cpus() == 2.5
    write(groups.root / "cpu" / "box" / "inner", cpu__cfs_quota_us=150000, cpu__cfs_period_us=100000)
    assert groups.cpus() == 1.5
    write(groups.root / "cpu" / "box" / "inner", cpu__cfs_quota_us=-1)
    assert groups.cpus() == 2.5


def test_a_limit_counts_where_it_is_tighter_than_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(cgroups, "free_memory", lambda: 1000)
    assert hardware.available_memory(cpu) == 1000
    monkeypatch.setattr(cgroups, "free_memory", lambda: None)
    assert hardware.available_memory(cpu) > 1000


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (2.5, 3), (0.2, 1), (16.0, 8)])
def test_default_threads_do_not_exceed_the_cpu_quota(
    quota: float | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(hardware, "performance_cores", lambda: 8)
    assert hardware.default_threads() == threads


@pytest.mark.parametrize(
    ("capability", "auto"),
    [((7, 0), torch.float16), ((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)],
)
def test_auto_is_float16_on_gpus_that_do_not_multiply_bfloat16(
    capability: tuple[int, int], auto: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dtype depends on the requested GPU, not on another one of the machine."""
    device, other = torch.device("cuda:1"), torch.device("cuda:0")
    capabilities = {device: capability, other: (8, 6)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda asked: capabilities[asked])
    assert hardware.resolve_dtype("auto", device) == auto
    assert hardware.resolve_dtype("auto", other) == torch.bfloat16
    for name in ("float32", "bfloat16", "float16"):
        assert hardware.resolve_dtype(name, device) == getattr(torch, name)


@pytest.mark.parametrize(("flag", "auto"), [("avx512_bf16", torch.bfloat16), ("avx2", torch.float32)])
def test_float16_is_refused_on_a_cpu(flag: str, auto: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(hardware, "_cpu_flags", lambda: {flag})
    assert hardware.resolve_dtype("auto", cpu) == auto
    with pytest.raises(ParameterError, match=r"draft_dtype='float16'.*'float32' or 'bfloat16' on a CPU"):
        hardware.resolve_dtype("float16", cpu, "draft_dtype")


def test_a_gpu_that_is_not_the_first_is_refused_with_the_way_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of Triton, graphs and events go to a thread's current device."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert hardware.resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ParameterError, match="set CUDA_VISIBLE_DEVICES"):
        hardware.resolve_device("cuda:1")
