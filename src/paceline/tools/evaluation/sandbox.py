"""Programs that a model wrote are hostile: each is run in a process of its own, enclosed by the kernel (cell.py)."""

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
from paceline.tools.evaluation.sandbox_child import NOBODY, SAID_CHARACTERS, SECRET_BYTES, WORK_BYTES

_CHILD_PROGRAM = Path(__file__).parent / "sandbox_child.py"
_PATIENCE = 60.0  # seconds beyond the time limit for what the warden has to do; a machine may be busy
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # for threads are not allowed
_LAST_WAIT = 10.0
_SAID_BYTES = 4096

_LIMITED = (
    "processor time, memory, file size and open files are limited",
    "no system calls but those that computing and files need",
    "no process, thread or socket can be begun, no signal sent, no key read, no memory had beside the limit",
    "no environment, no open files, no privileges to gain, output goes nowhere",
)
_ENCLOSED = (
    *_LIMITED,
    "no network: a namespace of its own without any interface",
    "no other process in sight: a namespace of its own, which ends with the program",
    f"no files but Python's, read-only, and an empty directory of {WORK_BYTES >> 20} MB in memory",
)
_OPEN = "files: programs can read whatever their user can, and fill the disk"
_OPEN_TO_OURSELVES = "files: programs run as this user, so they can change its files and look at its processes in /proc"


@dataclass(frozen=True)
class SandboxLimits:
    """cpu_seconds: of the processor. wall_seconds: by the clock, more of them, for a machine may be busy.

    memory_bytes: of address space.
    """

    cpu_seconds: int = 3
    wall_seconds: float = 12.0
    memory_bytes: int = 1 << 30


@dataclass(frozen=True)
class ProgramResult:
    """Whether a program passed its check, and what became of it: "passed", "time limit", "signal 11", or its own words.

    Its own words are what an exception says: anything, at most a few hundred printable characters.
    """

    passed: bool
    result: str


@dataclass(frozen=True)
class Isolation:
    """What holds for the programs, and what is missing on this machine, in words."""

    holds: tuple[str, ...]
    missing: tuple[str, ...] = ()


class SandboxError(PacelineError):
    """Programs cannot be run on this machine as they should."""


class Sandbox:
    """Runs programs, one at a time. ``isolation`` says what it keeps them from.

    weak: run programs even where the kernel allows no namespaces; there are limits, a filter of system calls and an
    empty environment then.
    Raises SandboxError where that is so and ``weak`` was not asked for, and where programs do not run at all.
    """

    def __init__(self, limits: SandboxLimits | None = None, *, weak: bool = False) -> None:
        self.limits = limits or SandboxLimits()
        self._enclosed = True
        refused = self._refused()
        if refused is not None and not weak:
            raise SandboxError(
                f"the programs of a model cannot be kept from harm here ({refused}): allow user namespaces "
                "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in a container its "
                "seccomp profile), or accept that they see this machine's files with --weak-sandbox"
            )
        self._enclosed = refused is None
        self.isolation = Isolation(_ENCLOSED) if self._enclosed else Isolation(_LIMITED, _missing(str(refused)))
        self._check()

    def _refused(self) -> str | None:
        """Why the kernel does not enclose programs; None if it does."""
        try:
            self.run("", "def check(_): pass", "check")
        except _RefusedError as refused:
            return str(refused)
        return None

    def _check(self) -> None:
        """Programs must be able to run, and to fail. Raises SandboxError."""
        imports = "import collections, hashlib, heapq, itertools, math, random, re, string, typing\n"
        good = self.run(f"{imports}def two(): return 2\n", _CHECK, "two")
        bad = self.run("def two(): return 3\n", _CHECK, "two")
        if not good.passed or bad.passed:
            raise SandboxError(
                f"programs do not run here as they should: a good one ended with {good.result!r}, a bad one with "
                f"{bad.result!r} (as root, Python and its library must be readable by everybody)"
            )

    def run(self, program: str, check: str, entry_point: str) -> ProgramResult:
        """Run a program, then ``check``, which defines ``check(function)``, on the function called ``entry_point``.

        Raises SandboxError if it could not be run.
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
            report, said = _supervise(json.dumps(job).encode(), secret, self.limits.wall_seconds + _PATIENCE)
        if "lacking" in report:
            raise SandboxError(
                f"the system calls of a model's programs cannot be limited here ({report['lacking']}): install the "
                "system's package libseccomp (libseccomp2 for Debian and Ubuntu)"
            )
        if "refused" in report:
            raise _RefusedError(report["refused"])
        return self._judge(report, said, secret)

    def _judge(self, report: dict[str, Any], said: bytes, secret: bytes) -> ProgramResult:
        if secrets.compare_digest(said, secret):
            return ProgramResult(True, "passed")
        told = report["signal"] == signal.SIGXCPU  # the kernel's own count, which on a busy machine runs ahead of ours
        if not report["in_time"] or told or report["cpu_seconds"] > self.limits.cpu_seconds - 0.1:
            return ProgramResult(False, "time limit")
        if report["signal"] is not None:
            return ProgramResult(False, f"signal {report['signal']}")
        words = said.decode(errors="replace")[:SAID_CHARACTERS]
        return ProgramResult(False, "".join(c if c.isprintable() else " " for c in words).strip() or "ended early")


_CHECK = "def check(two):\n    assert two() == 2\n"


class _RefusedError(SandboxError):
    """The kernel does not allow to enclose a program."""


def _missing(why: str) -> tuple[str, ...]:
    ours = () if os.geteuid() == 0 else (_OPEN_TO_OURSELVES,)  # root's programs run as nobody
    return (_OPEN, *ours, f"why: {why}")


@contextmanager
def _empty_directory() -> Iterator[Path]:
    """For programs that have no directory in memory. Whatever they leave in it goes."""
    directory = Path(tempfile.mkdtemp(prefix="paceline-eval-"))
    try:
        if os.geteuid() == 0:
            os.chown(directory, NOBODY, NOBODY)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _supervise(job: bytes, secret: bytes, patience: float) -> tuple[dict[str, Any], bytes]:
    """Start a warden, wait for it; its report, and what the program's process said. Raises SandboxError."""
    told, telling = os.pipe()
    heard, hearing = os.pipe()
    try:
        os.write(telling, secret)
        warden = subprocess.Popen(
            [sys.executable, "-I", str(_CHILD_PROGRAM), str(told), str(hearing)],
            pass_fds=[told, hearing],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
            start_new_session=True,  # a Ctrl-C is for us; the warden ends its inmate when we end
        )
        report = _report_of(warden, job, patience)
        os.set_blocking(heard, False)
        return report, _read_what_is_there(heard)
    finally:
        for handle in (told, telling, heard, hearing):
            os.close(handle)


def _report_of(warden: subprocess.Popen[bytes], job: bytes, patience: float) -> dict[str, Any]:
    assert warden.stdin is not None
    assert warden.stdout is not None
    with warden.stdout:
        try:
            with warden.stdin:  # once it is closed, the warden ends its inmate
                warden.stdin.write(b"%d\n" % len(job) + job)
                warden.stdin.flush()
                return dict(json.loads(_read_to_the_end(warden.stdout.fileno(), patience)))
        except (OSError, ValueError) as error:
            raise SandboxError("the process that watches over a program ended before it, or hangs") from error
        finally:
            _end(warden)


def _end(warden: subprocess.Popen[bytes]) -> None:
    try:
        warden.wait(_LAST_WAIT)
    except subprocess.TimeoutExpired:  # somebody stopped it
        warden.kill()
        warden.wait()


def _read_to_the_end(handle: int, seconds: float) -> bytes:
    """Raises TimeoutError."""
    deadline, read = time.monotonic() + seconds, b""
    while select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(handle, _SAID_BYTES)
        if not part:
            return read
        read += part
    raise TimeoutError


def _read_what_is_there(handle: int) -> bytes:
    try:
        return os.read(handle, _SAID_BYTES)
    except BlockingIOError:
        return b""
