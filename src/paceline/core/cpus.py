"""The CPUs that this process may use: cores, kinds of cores and NUMA nodes, as Linux describes them.

Elsewhere every CPU counts as a core of its own, and there are no nodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DEVICES = Path("/sys/devices")
MOST_CPUS = 1024  # csrc: kMostCpus
_LEAST_CAPACITY = 0.6  # of the fastest core: the middle ones of three kinds have about 0.75, the smallest 0.2 to 0.4


@dataclass(frozen=True)
class Node:
    """A NUMA node: memory, and the usable CPUs that are near to it. number: the system's."""

    number: int
    cpus: tuple[int, ...]


def usable_cpus() -> tuple[int, ...]:
    """Numbers of the CPUs that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def performance_cores(devices: Path = DEVICES) -> int:
    """Number of usable physical cores, without those that are slow by design.

    Two CPUs of one core share its arithmetic and its way to memory, so a second thread there gains nothing. Efficiency
    cores are left out because memory, which they share with the others, is what decoding waits for.
    """
    fast = _fast(usable_cpus(), devices)
    siblings = {cpu: _list_in(devices / f"system/cpu/cpu{cpu}/topology/thread_siblings_list") or (cpu,) for cpu in fast}
    return len({min(cpus) for cpus in siblings.values()})


def _fast(cpus: tuple[int, ...], devices: Path) -> tuple[int, ...]:
    """The CPUs that are not efficiency cores; all of them if they are of one kind, or only slow ones are usable."""
    performance = _list_in(devices / "cpu_core/cpus")  # Intel's hybrid processors
    if fast := tuple(cpu for cpu in cpus if cpu in performance):
        return fast
    capacities = {cpu: _number_in(devices / f"system/cpu/cpu{cpu}/cpu_capacity") for cpu in cpus}  # Arm
    most = max(capacities.values())
    return tuple(cpu for cpu in cpus if capacities[cpu] >= _LEAST_CAPACITY * most)


def nodes(devices: Path = DEVICES) -> tuple[Node, ...]:
    """The NUMA nodes with usable CPUs, by number. Empty where the system names none."""
    usable = set(usable_cpus())
    found = sorted((int(path.name.removeprefix("node")), path) for path in (devices / "system/node").glob("node[0-9]*"))
    all_nodes = (
        Node(number, tuple(cpu for cpu in _list_in(path / "cpulist") if cpu in usable and cpu < MOST_CPUS))
        for number, path in found
    )
    return tuple(node for node in all_nodes if node.cpus)


@contextmanager
def pinned(to: Sequence[Node]) -> Iterator[None]:
    """Run this thread, and threads that it starts, on the CPUs of these nodes inside the context; none: anywhere."""
    if not to:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [cpu for node in to for cpu in node.cpus])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers, ascending, as Linux writes them: "0-3,8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _list_in(path: Path) -> tuple[int, ...]:
    """Parse a file with a list like "0-3,8"; empty if there is none."""
    bounds = [part.partition("-") for part in _text(path).split(",") if part]
    return tuple(cpu for first, _, last in bounds for cpu in range(int(first), int(last or first) + 1))


def _number_in(path: Path) -> int:
    return int(_text(path) or 1)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
