"""Windows job objects: child processes that end with this one, within limits that the system enforces.

A child is started suspended, put into a job of its own, and resumed. It never runs outside of the job, nor do its
own children: python.exe of a virtual environment starts another one.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import weakref
from ctypes import POINTER, Structure, byref, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, c_wchar_p, sizeof
from typing import Any

Child = subprocess.Popen[str] | subprocess.Popen[bytes]

SUSPENDED = 4 if sys.platform == "win32" else 0  # creationflags of a child that is put into a job
TIME_EXCEEDED = 1816  # ERROR_NOT_ENOUGH_QUOTA: exit status of processes of a job that used up its time

_EXTENDED_LIMITS = 9  # JobObjectExtendedLimitInformation
_JOB_TIME, _JOB_MEMORY, _NO_ERROR_DIALOG, _KILL_ON_CLOSE = 0x4, 0x200, 0x400, 0x2000
_RIGHTS = 0x901  # to a process: SET_QUOTA and TERMINATE to put it into a job, SUSPEND_RESUME
_TICKS = 10_000_000  # a second, in units of 100 ns


class _BasicLimits(Structure):
    """JOBOBJECT_BASIC_LIMIT_INFORMATION of winnt.h."""

    _fields_ = (
        ("process_time", c_int64),
        ("job_time", c_int64),
        ("flags", c_uint32),
        ("smallest_working_set", c_size_t),
        ("largest_working_set", c_size_t),
        ("processes", c_uint32),
        ("affinity", c_size_t),
        ("priority", c_uint32),
        ("scheduling", c_uint32),
    )


class Limits(Structure):
    """JOBOBJECT_EXTENDED_LIMIT_INFORMATION of winnt.h."""

    _fields_ = (
        ("basic", _BasicLimits),
        ("transfers", c_uint64 * 6),  # IO_COUNTERS
        ("process_memory", c_size_t),
        ("job_memory", c_size_t),
        ("peak_process_memory", c_size_t),
        ("peak_job_memory", c_size_t),
    )


class JobObject:
    """The job of a child that was started with ``SUSPENDED``. The system ends it with this object and this process.

    memory_bytes: what the child may commit; an allocation beyond it fails. None: no limit.
    Raises OSError if the system refuses; the child is then killed.
    """

    def __init__(self, process: Child, memory_bytes: int | None = None) -> None:
        self._kernel, self._limits = _kernel32(), Limits()
        self._limits.basic.flags = _KILL_ON_CLOSE | _NO_ERROR_DIALOG
        if memory_bytes is not None:
            self._limits.basic.flags |= _JOB_MEMORY
            self._limits.job_memory = memory_bytes
        try:
            self._hold(process)
        except BaseException:
            process.kill()
            raise

    def limit_time(self, seconds: float) -> None:
        """Limit the CPU time of the job from now on: the system then ends its processes with ``TIME_EXCEEDED``."""
        self._limits.basic.flags |= _JOB_TIME
        self._limits.basic.job_time = round(seconds * _TICKS)  # the system adds what has been used
        self._set_limits()

    def _hold(self, process: Child) -> None:
        kernel = self._kernel
        self._job = _checked(kernel.CreateJobObjectW(None, None), "CreateJobObjectW")
        weakref.finalize(self, kernel.CloseHandle, self._job)
        self._set_limits()
        handle = _checked(kernel.OpenProcess(_RIGHTS, 0, process.pid), "OpenProcess")
        try:
            _checked(kernel.AssignProcessToJobObject(self._job, handle), "AssignProcessToJobObject")
            _resume(handle)
        finally:
            kernel.CloseHandle(handle)

    def _set_limits(self) -> None:
        limits = self._limits
        done = self._kernel.SetInformationJobObject(self._job, _EXTENDED_LIMITS, byref(limits), sizeof(limits))
        _checked(done, "SetInformationJobObject")


def _checked(result: int | None, function: str) -> int:
    if not result:
        windows: Any = ctypes  # get_last_error is only there
        raise OSError(f"{function} of Windows failed with error {windows.get_last_error()}")
    return result


def _resume(process: int) -> None:
    """Start a process that was created suspended; Popen keeps no handle of its thread, which kernel32 would need."""
    windows: Any = ctypes
    status = windows.WinDLL("ntdll").NtResumeProcess(c_void_p(process))
    if status != 0:
        raise OSError(f"NtResumeProcess of Windows failed with status {status & 0xFFFFFFFF:#x}")


def _kernel32() -> Any:
    windows: Any = ctypes  # WinDLL is only there
    kernel = windows.WinDLL("kernel32", use_last_error=True)
    handle, flag = c_void_p, c_int
    for function, result, arguments in (
        (kernel.CreateJobObjectW, handle, (c_void_p, c_wchar_p)),
        (kernel.SetInformationJobObject, flag, (handle, c_int, POINTER(Limits), c_uint32)),
        (kernel.OpenProcess, handle, (c_uint32, flag, c_uint32)),
        (kernel.AssignProcessToJobObject, flag, (handle, handle)),
        (kernel.CloseHandle, flag, (handle,)),
    ):
        function.restype, function.argtypes = result, arguments
    return kernel
