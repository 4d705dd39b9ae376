"""Cores, kinds of cores and NUMA nodes, read from fake descriptions of machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core import cpus


class FakeMachine:
    """A machine of so many CPUs, all usable unless ``use`` names some."""

    def __init__(self, devices: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices, self._monkeypatch = devices, monkeypatch
        self.use(*range(count))

    def use(self, *usable: int) -> None:
        self._monkeypatch.setattr(cpus, "usable_cpus", lambda: usable)

    def write(self, name: str, text: str) -> None:
        path = self.devices / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def pair(self, first: int, second: int) -> None:
        """Make two CPUs one core."""
        for cpu in (first, second):
            self.write(f"system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{first},{second}")

    def cores(self) -> int:
        return cpus.performance_cores(self.devices)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine(tmp_path, 8, monkeypatch)


def test_two_cpus_of_a_core_count_once(machine: FakeMachine) -> None:
    assert machine.cores() == 8, "no description: every CPU is a core"
    for cpu in range(4):
        machine.pair(cpu, cpu + 4)
    assert machine.cores() == 4
    machine.use(0, 1, 5)
    assert machine.cores() == 2


def test_efficiency_cores_do_not_count_unless_there_are_no_others(machine: FakeMachine) -> None:
    machine.write("cpu_core/cpus", "0-3")
    machine.pair(0, 1)
    machine.pair(2, 3)
    assert machine.cores() == 2
    machine.use(4, 5, 6)
    assert machine.cores() == 3


def test_the_small_cores_of_arm_do_not_count(machine: FakeMachine) -> None:
    for cpu, capacity in enumerate((250, 250, 250, 250, 790, 790, 790, 1024)):
        machine.write(f"system/cpu/cpu{cpu}/cpu_capacity", str(capacity))
    assert machine.cores() == 4


def test_nodes_have_usable_cpus_only(machine: FakeMachine) -> None:
    assert cpus.nodes(machine.devices) == ()
    machine.write("system/node/node0/cpulist", "0-1,4-5")
    machine.write("system/node/node10/cpulist", "6-7")
    machine.write("system/node/node2/cpulist", "2-3")
    machine.write("system/node/node3/cpulist", "")  # memory alone
    machine.use(0, 1, 2, 3, 5, 6)
    assert cpus.nodes(machine.devices) == (cpus.Node(0, (0, 1, 5)), cpus.Node(2, (2, 3)), cpus.Node(10, (6,)))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_thread_is_pinned_to_nodes_for_a_while() -> None:
    before = os.sched_getaffinity(0)
    with cpus.pinned([cpus.Node(0, (max(before),))]):
        assert os.sched_getaffinity(0) == {max(before)}
        with cpus.pinned([]):
            assert os.sched_getaffinity(0) == {max(before)}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5, 7, 8), "0-2,5,7-8")])
def test_ranges_are_written_as_linux_does(numbers: tuple[int, ...], text: str, tmp_path: Path) -> None:
    assert cpus.ranges(numbers) == text
    (tmp_path / "list").write_text(text)
    assert cpus._list_in(tmp_path / "list") == numbers
