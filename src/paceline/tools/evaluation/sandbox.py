"""Runs hostile programs, each in its own process that the kernel isolates (sandbox_child.py)."""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.tools.evaluation.sandbox_child import MESSAGE_CHARACTERS, NOBODY, SECRET_BYTES, WORK_BYTES

_CHILD_PROGRAM = Path(__file__).parent / "sandbox_child.py"
_SUPERVISOR_SECONDS = 60.0  # added to the time limit for the supervisor's own work on a busy machine
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # programs cannot start threads
_EXIT_SECONDS = 10.0  # until a supervisor that does not exit is killed
_READ_BYTES = 4096

_LIMITED = (
    "processor time, memory, file size and open files are limited",
    "only the system calls that computing and files need",
    "no new processes, threads or sockets, no signals, no kernel keys, no memory outside the limit",
    "no environment, no inherited files, no way to gain privileges, output is discarded",
)
_ENCLOSED = (
    *_LIMITED,
    "no network: a network namespace without interfaces",
    "no other processes visible: a process namespace that ends with the program",
    f"no files except Python's, read-only, and an empty directory of {WORK_BYTES >> 20} MB in memory",
)
_OPEN = "files: programs can read all files that their user can, and fill the disk"
_OPEN_TO_OURSELVES = "files: programs run as this user, so they can change its files and see its processes in /proc"


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program.

    wall_seconds: larger than cpu_seconds, because the machine may be busy. memory_bytes: address space.
    """

    cpu_seconds: int = 3
    wall_seconds: float = 12.0
    memory_bytes: int = 1 << 30


@dataclass(frozen=True)
class ProgramResult:
    """The result of one program.

    result: "passed", "time limit", "signal 11", or an exception's message, which the program chooses: at most
    ``MESSAGE_CHARACTERS`` printable characters.
    """

    passed: bool
    result: str


@dataclass(frozen=True)
class Isolation:
    """The protections that are in force, and those that are missing on this machine, as text."""

    holds: tuple[str, ...]
    missing: tuple[str, ...] = ()


class SandboxError(PacelineError):
    """Programs cannot be run with the wanted isolation on this machine."""


class Sandbox:
    """Runs programs, one at a time. ``isolation`` describes the protections.

    weak: run programs even if the kernel allows no namespaces. Resource limits, the system call filter and the empty
    environment remain.
    Raises SandboxError on other systems than Linux, if namespaces are not allowed and ``weak`` is False, or if programs
    do not run at all.
    """

    def __init__(self, limits: SandboxLimits | None = None, *, weak: bool = False) -> None:
        if sys.platform != "linux":
            raise SandboxError("a model's programs run on Linux only, whose kernel can isolate them")
        self.limits = limits or SandboxLimits()
        self._enclosed = True
        refused = self._refused()
        if refused is not None and not weak:
            raise SandboxError(
                f"a model's programs cannot be isolated on this machine ({refused}): allow user namespaces "
                "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in a container its "
                "seccomp profile), or accept with --weak-sandbox that programs can read this machine's files"
            )
        self._enclosed = refused is None
        self.isolation = Isolation(_ENCLOSED) if self._enclosed else Isolation(_LIMITED, _missing(str(refused)))
        self._check()

    def _refused(self) -> str | None:
        """The reason why the kernel does not allow namespaces; None if it does."""
        try:
            self.run("", "def check(_): pass", "check")
        except _RefusedError as refused:
            return str(refused)
        return None

    def _check(self) -> None:
        """Check that a correct program passes and a wrong one fails. Raises SandboxError."""
        imports = "import collections, hashlib, heapq, itertools, math, random, re, string, typing\n"
        good = self.run(f"{imports}def two(): return 2\n", _CHECK, "two")
        bad = self.run("def two(): return 3\n", _CHECK, "two")
        if not good.passed or bad.passed:
            raise SandboxError(
                f"programs do not run correctly here: a good one ended with {good.result!r}, a bad one with "
                f"{bad.result!r} (when run by root, Python and its library must be readable by all users)"
            )

    def run(self, program: str, check: str, entry_point: str) -> ProgramResult:
        """Run a program, and then the check on its function ``entry_point``.

        check: source code that defines ``check(function)``. Raises SandboxError if the program could not be run.
        """
        secret = secrets.token_bytes(SECRET_BYTES)
        with _empty_directory() as directory:
            job = {
                "program": program,
                "check": check,
                "entry_point": entry_point,
                "cpu_seconds": self.limits.cpu_seconds,
                "wall_seconds": self.limits.wall_seconds,
                "memory_bytes": self.limits.memory_bytes,
                "enclosed": self._enclosed,
                "directory": str(directory),
            }
            seconds = self.limits.wall_seconds + _SUPERVISOR_SECONDS
            report, verdict = _supervise(json.dumps(job).encode(), secret, seconds)
        if "lacking" in report:
            raise SandboxError(
                f"the system calls of a model's programs cannot be limited here ({report['lacking']}): install the "
                "system's package libseccomp (libseccomp2 for Debian and Ubuntu)"
            )
        if "refused" in report:
            raise _RefusedError(report["refused"])
        return self._result(report, verdict, secret)

    def _result(self, report: dict[str, Any], verdict: bytes, secret: bytes) -> ProgramResult:
        if secrets.compare_digest(verdict, secret):
            return ProgramResult(True, "passed")
        # on a busy machine the kernel may count more CPU time than wait4 reports
        by_kernel = report["signal"] == signal.SIGXCPU
        if not report["in_time"] or by_kernel or report["cpu_seconds"] > self.limits.cpu_seconds - 0.1:
            return ProgramResult(False, "time limit")
        if report["signal"] is not None:
            return ProgramResult(False, f"signal {report['signal']}")
        message = verdict.decode(errors="replace")[:MESSAGE_CHARACTERS]
        return ProgramResult(False, "".join(c if c.isprintable() else " " for c in message).strip() or "ended early")


_CHECK = "def check(two):\n    assert two() == 2\n"


class _RefusedError(SandboxError):
    """The kernel does not allow the namespaces."""


def _missing(why: str) -> tuple[str, ...]:
    own_files = () if os.geteuid() == 0 else (_OPEN_TO_OURSELVES,)  # root's programs run as the user nobody
    return (_OPEN, *own_files, f"why: {why}")


@contextmanager
def _empty_directory() -> Iterator[Path]:
    """A temporary directory for programs that have none in memory. It is deleted with its content."""
    directory = Path(tempfile.mkdtemp(prefix="paceline-eval-"))
    try:
        if os.geteuid() == 0:
            os.chown(directory, NOBODY, NOBODY)
        yield directory
    finally:
        try:
            shutil.rmtree(directory, ignore_errors=True)
        except RecursionError:  # a program may nest thousands of directories
            subprocess.run(["rm", "-rf", "--", str(directory)], stderr=subprocess.DEVNULL, check=False)


def _supervise(job: bytes, secret: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
    """Start a supervisor and wait for it. Return its report, and what the runner wrote. Raises SandboxError."""
    secret_read, secret_write = os.pipe()
    verdict_read, verdict_write = os.pipe()
    try:
        os.write(secret_write, secret)
        supervisor = subprocess.Popen(
            [sys.executable, "-I", str(_CHILD_PROGRAM), str(secret_read), str(verdict_write)],
            pass_fds=[secret_read, verdict_write],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            start_new_session=True,  # Ctrl-C reaches only the evaluation, at whose end the supervisor kills its runner
        )
        report = _report_of(supervisor, job, seconds)
        os.set_blocking(verdict_read, False)
        return report, _read_available(verdict_read)
    finally:
        for handle in (secret_read, secret_write, verdict_read, verdict_write):
            os.close(handle)


def _report_of(supervisor: subprocess.Popen[bytes], job: bytes, seconds: float) -> dict[str, Any]:
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    with supervisor.stdout:
        try:
            with supervisor.stdin:  # the supervisor kills its runner when stdin is closed
                supervisor.stdin.write(b"%d\n" % len(job) + job)
                supervisor.stdin.flush()
                return dict(json.loads(_read_all(supervisor.stdout.fileno(), seconds)))
        except (OSError, ValueError) as error:
            raise SandboxError("the process that supervises a program died or hangs") from error
        finally:
            _wait_or_kill(supervisor)


def _wait_or_kill(supervisor: subprocess.Popen[bytes]) -> None:
    try:
        supervisor.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:  # it may have been stopped by a signal
        supervisor.kill()
        supervisor.wait()


def _read_all(handle: int, seconds: float) -> bytes:
    """Read until end of file. Raises TimeoutError if that takes longer than ``seconds``."""
    deadline, content = time.monotonic() + seconds, b""
    while select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(handle, _READ_BYTES)
        if not chunk:
            return content
        content += chunk
    raise TimeoutError


def _read_available(handle: int) -> bytes:
    try:
        return os.read(handle, _READ_BYTES)
    except BlockingIOError:
        return b""
