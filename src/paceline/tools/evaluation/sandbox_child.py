"""The process in which one program that a model wrote is run (sandbox.py is the evaluation's end of it).

    evaluation ── warden: reads the job, leaves everything behind, forks, waits
                     └── inmate: runs the program and then its check

The inmate is process 1 of a process namespace: it sees no other process, and with it ends whatever it began. Its file
system consists of what Python needs, read-only, and of a small empty directory in memory; its network namespace has no
interface; its rights are those of nobody. The limits are the kernel's (setrlimit). System calls that programs do not
need are not there for it (seccomp).

A program has passed if the inmate says a word that it was told in secret, which it reads only after the check ran. So
ending early, printing, or raising proves nothing. But the program and its check share a process, as they do in every
HumanEval harness: one that was written against this file could find the word, or make the check's comparisons true.

A program of its own, of the standard library alone: ``python -I cell.py SECRET VERDICT`` (two descriptors).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import site
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

NOBODY = 65534
SECRET_BYTES = 32
SAID_CHARACTERS = 300  # of what a program raised
WORK = "/tmp"  # within the cell: the empty directory

OPEN_FILES = 64
FILE_BYTES = 16 << 20
WORK_BYTES, WORK_FILES = 32 << 20, 1024

# linux/sched.h, linux/mount.h, linux/prctl.h
_NEW = {"NS": 0x20000, "CGROUP": 0x2000000, "UTS": 0x4000000, "IPC": 0x8000000, "USER": 0x10000000}
_NEW |= {"PID": 0x20000000, "NET": 0x40000000}
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR = 442  # on every architecture
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522

# seccomp.h (libseccomp), asm-generic/ioctls.h, linux/fcntl.h
_SECCOMP = "libseccomp.so.2"
_ALLOW, _NOT_THERE, _EQUAL = 0x7FFF0000, 0x50000 | errno.ENOSYS, 4
_ALLOWED = """
    read readv pread64 preadv write writev pwrite64 pwritev lseek close close_range dup dup2 dup3 pipe pipe2
    poll ppoll select pselect6 open openat stat lstat fstat newfstatat statx statfs fstatfs access faccessat faccessat2
    readlink readlinkat listxattr llistxattr getcwd chdir fchdir getdents64 mkdir mkdirat rmdir unlink unlinkat
    rename renameat renameat2 link linkat symlink symlinkat chmod fchmod fchmodat utimensat truncate ftruncate
    fsync fdatasync flock umask mmap munmap mprotect mremap madvise msync brk futex set_robust_list set_tid_address rseq
    rt_sigaction rt_sigprocmask rt_sigpending rt_sigreturn sigaltstack restart_syscall alarm setitimer getitimer
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times getrusage getrlimit getrandom
    getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid getsid
    uname sysinfo getcpu getpriority sched_getaffinity sched_yield exit exit_group
"""
_ALLOWED_IF = {  # the argument's number, and what it may be
    "fcntl": (1, (0, 1, 2, 3, 4, 5, 6, 7, 1030)),  # duplicates, flags, locks; no signals to others, no larger pipes
    "ioctl": (1, (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)),  # whether a terminal, its size, bytes to read, inheritance
    "prlimit64": (0, (0,)),  # of itself
}

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    """A call of the C library. Raises OSError, which names it."""
    if getattr(_libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


# The walls


def enclose() -> None:
    """Leave everything behind: other processes, the network, files. Raises OSError where the kernel forbids it."""
    with _mapped_by_a_helper():
        _call("unshare", sum(_NEW.values()))
    Path("/proc/sys/user/max_user_namespaces").write_text("0")  # of this namespace: none within it
    _make_root(list(_needed()))


@contextmanager
def _mapped_by_a_helper() -> Iterator[None]:
    """Who leaves its user namespace cannot say any more who it is in the new one: a child that stays behind does.

    Root keeps its name within, until it becomes nobody; anybody else is called nobody from the start.
    """
    user, group, myself = os.getuid(), os.getgid(), f"/proc/{os.getpid()}"
    heard, said = os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(said)
            if os.read(heard, 1):
                Path(f"{myself}/setgroups").write_text("deny")
                Path(f"{myself}/uid_map").write_text(_names(user))
                Path(f"{myself}/gid_map").write_text(_names(group))
                os._exit(0)
        finally:
            os._exit(1)
    try:
        yield
        os.write(said, b"+")
    finally:
        os.close(said)
        os.close(heard)
        _, status = os.waitpid(helper, 0)
    if status != 0:
        raise PermissionError(errno.EPERM, "the kernel allows no user namespace with a name in it")


def _names(number: int) -> str:
    return f"0 0 1\n{NOBODY} {NOBODY} 1" if number == 0 else f"{NOBODY} {number} 1"


def become_nobody() -> None:
    """For root, or somebody who has its name in a namespace."""
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _needed() -> Iterator[str]:
    """What Python reads while it runs: paths that exist, none within another.

    No whole prefix: it may be a directory of the user's.
    """
    paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *site.getsitepackages()}
    paths |= {str(sysconfig.get_config_var("LIBDIR"))}  # where libraries are that Python's own modules load
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"}
    paths |= {"/etc/ld.so.cache", "/dev/null", "/dev/urandom"}
    chosen: list[Path] = []
    for path in sorted(Path(path) for path in paths):
        if path.exists() and not any(path.is_relative_to(other) for other in chosen):
            chosen.append(path)
            yield str(path)


def _make_root(needed: list[str]) -> None:
    """A root directory in memory that has what is needed, read-only, and WORK."""
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    root = "/proc"  # what is mounted there hides nothing that is still needed
    _mount_memory(root, "size=1m,nr_inodes=4096,mode=755")
    for path in needed:
        place = Path(root + path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir() if Path(path).is_dir() else place.touch()
        _call("mount", path.encode(), bytes(place), None, _MS_BIND | _MS_REC, None)
        _make_read_only(bytes(place), _AT_RECURSIVE)
    Path(root + WORK).mkdir(exist_ok=True)
    _mount_memory(root + WORK, f"size={WORK_BYTES},nr_inodes={WORK_FILES},mode=700,uid={NOBODY},gid={NOBODY}")
    os.chdir(root)
    _call("syscall", _number_of("pivot_root"), b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    _make_read_only(b"/", 0)


def _mount_memory(where: str, options: str) -> None:
    _call("mount", b"none", where.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options.encode())


def _make_read_only(where: bytes, flags: int) -> None:
    wanted = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)  # struct mount_attr
    _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, where, flags, ctypes.byref(wanted), ctypes.sizeof(wanted))


def _number_of(name: str) -> int:
    """The number of a system call on this machine; -1 for a name that libseccomp does not know."""
    return int(ctypes.CDLL(_SECCOMP).seccomp_syscall_resolve_name(name.encode()))


class _Argument(ctypes.Structure):
    """struct scmp_arg_cmp."""

    _fields_ = (
        ("number", ctypes.c_uint),
        ("comparison", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


class SystemCalls:
    """The system calls that a program may make. The others are not there: they fail with ENOSYS.

    Names, not numbers, are given to libseccomp, so this is the same on every architecture that it knows; calls in the
    way of another architecture end the process. A name that it does not know is not allowed. Raises OSError.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_SECCOMP)
        self._library.seccomp_init.restype = ctypes.c_void_p
        self._filter = ctypes.c_void_p(self._library.seccomp_init(_NOT_THERE))
        for name in _ALLOWED.split():
            self._allow(name)
        for name, (argument, values) in _ALLOWED_IF.items():
            for value in values:
                self._allow(name, _Argument(argument, _EQUAL, value))

    def _allow(self, name: str, *conditions: _Argument) -> None:
        number = _number_of(name)
        array = (_Argument * len(conditions))(*conditions)
        if number != -1:
            self._check(self._library.seccomp_rule_add_array(self._filter, _ALLOW, number, len(conditions), array))

    def enforce(self) -> None:
        """From now on, for this process."""
        self._check(self._library.seccomp_load(self._filter))

    def _check(self, result: int) -> None:
        if result < 0:
            raise OSError(-result, f"the kernel filters no system calls: {os.strerror(-result)}")


# The inmate


def give_up_rights() -> None:
    """Nobody, without capabilities, now or by any program that it starts."""
    if os.geteuid() == 0:
        become_nobody()
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def limit(cpu_seconds: int, memory_bytes: int) -> None:
    """What the kernel enforces from now on; no process and no thread can be begun any more."""
    limits = {"AS": memory_bytes, "FSIZE": FILE_BYTES, "NOFILE": OPEN_FILES, "CORE": 0, "NPROC": 0}
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))  # a signal that says why; then the end


def serve_sentence(job: dict[str, Any], calls: SystemCalls, nothing: int, secret: int, verdict: int) -> NoReturn:
    """The inmate's whole life. Whatever happens, nothing but the secret says that the program passed."""
    try:
        os.setsid()
        for stream in range(3):
            os.dup2(nothing, stream)
        _close_others(secret, verdict)
        os.chdir(WORK if job["enclosed"] else job["directory"])
        give_up_rights()
        limit(job["cpu_seconds"], job["memory_bytes"])
        os.write(verdict, _tried(job, calls, secret))
    finally:
        os._exit(0)


def _close_others(*kept: int) -> None:
    first = 3
    for handle in sorted(kept):
        os.closerange(first, handle)
        first = handle + 1
    os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _tried(job: dict[str, Any], calls: SystemCalls, secret: int) -> bytes:
    """Run the program, then its check; the secret, or what went wrong in a few words."""
    names: dict[str, Any] = {}
    try:
        calls.enforce()
        exec(compile(job["program"], "<program>", "exec", dont_inherit=True), names)
        exec(compile(job["check"], "<check>", "exec", dont_inherit=True), names)
        names["check"](names[job["entry_point"]])
    except BaseException as error:  # noqa: BLE001 - SystemExit, too, is no proof
        return f"{type(error).__name__}: {error}"[:SAID_CHARACTERS].encode(errors="replace")
    return os.read(secret, SECRET_BYTES)


# The warden


def main() -> None:
    """Says on stdout, as JSON, how the inmate ended; "refused" or "lacking" if there could be none, and why."""
    secret, verdict = map(int, sys.argv[1:])
    job = json.loads(_read_job())
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        calls = SystemCalls()
    except OSError as error:
        _say({"lacking": str(error)})
        return
    try:
        if os.geteuid() == 0:
            os.setgroups([])
        if job["enclosed"]:
            enclose()
        inmate = os.fork()
    except OSError as error:
        _say({"refused": str(error)})
        return
    if inmate == 0:
        serve_sentence(job, calls, nothing, secret, verdict)
    _say(_watch(inmate, job["wall_seconds"]))


def _read_job() -> bytes:
    """A line that says how many bytes come after it."""
    size = int(sys.stdin.buffer.readline())
    return sys.stdin.buffer.read(size)


def _watch(inmate: int, wall_seconds: float) -> dict[str, Any]:
    """Until it ends, its time is over, or nobody waits for it any more; then it has ended. Seconds of the processor."""
    handle = os.pidfd_open(inmate)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    began = time.monotonic()
    poll.poll(1000 * wall_seconds)
    in_time = bool(select.select([handle], [], [], 0)[0])
    os.kill(inmate, signal.SIGKILL)  # it has not been waited for, so its number is nobody else's
    _, status, usage = os.wait4(inmate, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return {
        "in_time": in_time,
        "signal": ended_by,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "wall_seconds": time.monotonic() - began,
    }


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document))


if __name__ == "__main__":
    main()
