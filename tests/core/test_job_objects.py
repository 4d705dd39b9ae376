"""Job objects by a kernel32 that records its calls; ``test_platforms.py`` runs them under wine, which has no limits."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from ctypes import sizeof
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core import child_limits, job_objects
from paceline.core.job_objects import JobObject, Limits

JOB, PROCESS, PID = 11, 12, 4711
FLAGS = {"time": 0x4, "memory": 0x200, "no dialog": 0x400, "kill on close": 0x2000}  # winnt.h


class Kernel:
    """The functions of kernel32 and ntdll that job objects call. refused: the name of one that fails."""

    def __init__(self, refused: str = "") -> None:
        self.calls: list[str] = []
        self.limits: list[tuple[int, int, int]] = []  # flags, memory, time of each change
        self._refused = refused
        for name, result in (
            ("CreateJobObjectW", JOB),
            ("OpenProcess", PROCESS),
            ("AssignProcessToJobObject", 1),
            ("NtResumeProcess", 0),
            ("CloseHandle", 1),
        ):
            setattr(self, name, self._function(name, result))
        self.SetInformationJobObject = self._function("SetInformationJobObject", 1, self._note_limits)

    def _function(self, name: str, result: int, also: Callable[..., None] = lambda *_: None) -> Any:
        def call(*arguments: Any) -> int:
            numbers = [getattr(argument, "value", argument) for argument in arguments]
            self.calls.append(f"{name} {numbers[0]}" if name != "OpenProcess" else f"{name} {numbers[2]}")
            also(*arguments)
            failure = int(name == "NtResumeProcess")  # the others return 0
            return failure if name == self._refused else result

        return call

    def _note_limits(self, _job: int, kind: int, pointer: Any, size: int) -> None:
        limits: Limits = pointer._obj
        assert (kind, size) == (9, sizeof(Limits))
        self.limits.append((limits.basic.flags, limits.job_memory, limits.basic.job_time))


def child() -> Any:
    """A process of which only what job objects need is there."""
    killed: list[bool] = []
    return SimpleNamespace(pid=PID, kill=lambda: killed.append(True), killed=killed, poll=lambda: None)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Kernel]:
    def begin(refused: str = "") -> Kernel:
        kernel = Kernel(refused)
        monkeypatch.setattr(ctypes, "WinDLL", lambda _name, **_: kernel, raising=False)
        monkeypatch.setattr(ctypes, "get_last_error", lambda: 5, raising=False)
        return kernel

    return begin


STARTED = [f"{name} {number}" for name, number in (("CreateJobObjectW", None), ("SetInformationJobObject", JOB))]
STARTED += [f"OpenProcess {PID}", f"AssignProcessToJobObject {JOB}", f"NtResumeProcess {PROCESS}"]


def test_the_limits_have_the_layout_of_windows() -> None:
    """Of 64-bit Windows: C's rules for alignment are the same there."""
    offsets = {name: getattr(Limits, name).offset for name in ("transfers", "process_memory", "job_memory")}
    assert (offsets, sizeof(Limits)) == ({"transfers": 64, "process_memory": 112, "job_memory": 120}, 144)


def test_a_child_runs_within_its_job_which_ends_with_its_object(windows: Callable[[str], Kernel]) -> None:
    kernel, process = windows(""), child()
    job = JobObject(process, 1000)
    job.limit_time(2.5)
    held = FLAGS["kill on close"] | FLAGS["no dialog"] | FLAGS["memory"]
    assert kernel.limits == [(held, 1000, 0), (held | FLAGS["time"], 1000, 25_000_000)]
    closed = f"CloseHandle {PROCESS}"
    assert kernel.calls == [*STARTED, closed, f"SetInformationJobObject {JOB}"]
    del job
    assert kernel.calls[-1] == f"CloseHandle {JOB}"
    assert not process.killed


@pytest.mark.parametrize(
    "refused",
    ["CreateJobObjectW", "SetInformationJobObject", "OpenProcess", "AssignProcessToJobObject", "NtResumeProcess"],
)
def test_a_child_that_cannot_be_held_is_killed(refused: str, windows: Callable[[str], Kernel]) -> None:
    kernel, process = windows(refused), child()
    with pytest.raises(OSError, match=f"{refused} of Windows failed"):
        JobObject(process)
    assert process.killed
    handles = {"CreateJobObjectW", "OpenProcess"} - {refused}
    opened = sum(call.split()[0] in handles for call in kernel.calls)
    assert opened == sum(call.startswith("CloseHandle") for call in kernel.calls)


def test_a_job_that_used_up_its_time_is_told_apart(
    windows: Callable[[str], Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, process = windows(""), child()
    monkeypatch.setattr(sys, "platform", "win32")
    with child_limits.watch(process, 1 << 20, 3.0) as limited:
        assert kernel.limits[-1][1:] == ((64 << 20) + (1 << 20), 30_000_000)
        assert not limited.exceeded
    process.poll = lambda: 1816
    assert limited.exceeded == "time"


def test_other_systems_start_no_child_suspended() -> None:
    assert job_objects.SUSPENDED == 0
    assert subprocess.run([sys.executable, "-c", ""], creationflags=child_limits.CREATION_FLAGS, check=True)
