"""The sandboxed side of the evaluation: the processes that run one program that a model wrote.

    evaluation (sandbox.py) ── supervisor: reads the job, enters new namespaces, forks, waits
                                  └── runner: runs the program and then its check

The runner is process 1 of its own process namespace: it sees no other process, and its end kills all its children. Its
file system has only what Python needs, read-only, and a small empty directory in memory. Its network namespace has no
interface, and it runs as the user nobody. The kernel enforces resource limits (setrlimit) and an allow-list of system
calls (seccomp).

A program has passed if the runner returns a secret, which it reads only after the check has succeeded. Exiting early,
printing or raising therefore prove nothing. But the program and its check share a process, as in every HumanEval
harness: a program written against this file could find the secret, or make the check's comparisons succeed.

This file is a program of its own that uses only the standard library: ``python -I sandbox_child.py SECRET VERDICT``,
where the arguments are two file descriptors.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import site
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

NOBODY = 65534
SECRET_BYTES = 32
MESSAGE_CHARACTERS = 300  # of an exception's message
WORK = "/empty"  # the directory that programs may write to; /tmp leads there, too

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
_PR_SET_PDEATHSIG = 1
_CAPABILITY_VERSION_3 = 0x20080522

# seccomp.h (libseccomp), asm-generic/ioctls.h, linux/fcntl.h
_SECCOMP = "libseccomp.so.2"
_ALLOW, _FAIL_WITH_ENOSYS, _EQUAL = 0x7FFF0000, 0x50000 | errno.ENOSYS, 4
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
_ALLOWED_IF = {  # index of the argument, and its allowed values
    "fcntl": (1, (0, 1, 2, 3, 4, 5, 6, 7, 1030)),  # duplicates, flags, locks; no signals to others, no larger pipes
    "ioctl": (1, (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)),  # TCGETS, TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX
    "prlimit64": (0, (0,)),  # its own limits only
}


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError with the function's name if it fails."""
    if getattr(_libc(), name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


# Isolation


def enclose() -> None:
    """Move this process into new namespaces with a root directory of its own.

    Raises OSError if the kernel does not allow it.
    """
    with _ids_mapped_by_helper():
        _call("unshare", sum(_NEW.values()))
    Path("/proc/sys/user/max_user_namespaces").write_text("0")  # no further user namespaces inside this one
    _make_root(list(_needed()))


@contextmanager
def _ids_mapped_by_helper() -> Iterator[None]:
    """Have a forked helper write the ID maps of the user namespace that the body enters.

    A process inside a new user namespace may not write these maps for itself; the helper stays outside. Root is mapped
    to root until ``become_nobody``, any other user to nobody.
    """
    user, group, process = os.getuid(), os.getgid(), f"/proc/{os.getpid()}"
    read_end, write_end = os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(write_end)
            if os.read(read_end, 1):
                Path(f"{process}/setgroups").write_text("deny")
                Path(f"{process}/uid_map").write_text(_id_map(user))
                Path(f"{process}/gid_map").write_text(_id_map(group))
                os._exit(0)
        finally:
            os._exit(1)
    try:
        yield
        os.write(write_end, b"+")
    finally:
        os.close(write_end)
        os.close(read_end)
        _, status = os.waitpid(helper, 0)
    if status != 0:
        raise PermissionError(errno.EPERM, "the kernel allows no user namespace with mapped IDs")


def _id_map(number: int) -> str:
    return f"0 0 1\n{NOBODY} {NOBODY} 1" if number == 0 else f"{NOBODY} {number} 1"


def become_nobody() -> None:
    """Switch from root, real or mapped, to the user and group nobody."""
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _needed() -> Iterator[str]:
    """Existing paths that Python reads at run time, none of them inside another.

    The whole prefix is left out, because it may be one of the user's directories.
    """
    paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *site.getsitepackages()}
    paths |= {str(sysconfig.get_config_var("LIBDIR"))}  # shared libraries that Python's own modules load
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"}
    paths |= {"/etc/ld.so.cache", "/dev/null", "/dev/urandom"}
    chosen: list[Path] = []
    for path in sorted(Path(path) for path in paths):
        if path.exists() and not any(path.is_relative_to(other) for other in chosen):
            chosen.append(path)
            yield str(path)


def _make_root(needed: list[str]) -> None:
    """Replace the root directory by one in memory, with the needed paths, read-only, and WORK."""
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    root = "/proc"  # a mount there hides nothing that is still needed
    _mount_memory(root, "size=1m,nr_inodes=4096,mode=755")
    for path in needed:
        mount_point = Path(root + path)
        mount_point.parent.mkdir(parents=True, exist_ok=True)
        mount_point.mkdir() if Path(path).is_dir() else mount_point.touch()
        _call("mount", path.encode(), bytes(mount_point), None, _MS_BIND | _MS_REC, None)
        _make_read_only(bytes(mount_point), _AT_RECURSIVE)
    Path(root + WORK).mkdir()
    _mount_memory(root + WORK, f"size={WORK_BYTES},nr_inodes={WORK_FILES},mode=700,uid={NOBODY},gid={NOBODY}")
    if not Path(root + "/tmp").exists():  # it does where this Python is installed below it
        Path(root + "/tmp").symlink_to(WORK)
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
    """A seccomp filter with the system calls that programs may make. All others fail with ENOSYS.

    libseccomp resolves names, so the filter is the same on every architecture. Names that it does not know are not
    allowed. Calls through another architecture's entry kill the process. Raises OSError if filtering is not possible.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL(_SECCOMP)
        self._library.seccomp_init.restype = ctypes.c_void_p
        self._filter = ctypes.c_void_p(self._library.seccomp_init(_FAIL_WITH_ENOSYS))
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
        """Install the filter in this process."""
        self._check(self._library.seccomp_load(self._filter))

    def _check(self, result: int) -> None:
        if result < 0:
            raise OSError(-result, f"the kernel filters no system calls: {os.strerror(-result)}")


# The runner


def give_up_rights() -> None:
    """Become the user nobody, without capabilities, for this process and all programs that it starts."""
    if os.geteuid() == 0:
        become_nobody()
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Set this process's resource limits. It cannot start processes or threads any more."""
    import resource  # not at the top: sandbox.py has this file's constants on every system

    limits = {"AS": memory_bytes, "FSIZE": FILE_BYTES, "NOFILE": OPEN_FILES, "CORE": 0, "NPROC": 0}
    for name, limit_value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit_value, limit_value))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))  # SIGXCPU first, then SIGKILL


def run_and_exit(job: dict[str, Any], calls: SystemCalls, null: int, secret: int, verdict: int) -> NoReturn:
    """Run the job in this process, write the secret or a message to ``verdict``, and exit.

    null, secret, verdict: file descriptors of /dev/null, and of the pipes to read the secret and to write the result.
    """
    try:
        os.setsid()
        for standard_stream in range(3):
            os.dup2(null, standard_stream)
        _close_all_but(secret, verdict)
        os.chdir(WORK if job["enclosed"] else job["directory"])
        give_up_rights()
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after the change of ids, which clears it
        limit(job["cpu_seconds"], job["memory_bytes"])
        os.write(verdict, _run_program(job, calls, secret))
    finally:
        os._exit(0)


def _close_all_but(*handles: int) -> None:
    import resource

    first = 3
    for handle in sorted(handles):
        os.closerange(first, handle)
        first = handle + 1
    os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _run_program(job: dict[str, Any], calls: SystemCalls, secret: int) -> bytes:
    """Run the program, then its check. Return the secret, or the message of the exception."""
    names: dict[str, Any] = {}
    try:
        calls.enforce()
        exec(compile(job["program"], "<program>", "exec", dont_inherit=True), names)
        exec(compile(job["check"], "<check>", "exec", dont_inherit=True), names)
        names["check"](names[job["entry_point"]])
    except BaseException as error:  # noqa: BLE001 - SystemExit must not count as success either
        return f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS].encode(errors="replace")
    return os.read(secret, SECRET_BYTES)


# The supervisor


def main() -> None:
    """Run a job from stdin, a line with its number of bytes, then the bytes; print how the runner ended as JSON.

    Without a runner the document has the reason: "lacking" if libseccomp is not usable, "refused" if the kernel does
    not allow the namespaces.
    """
    secret, verdict = map(int, sys.argv[1:])
    size = int(sys.stdin.buffer.readline())
    job = json.loads(sys.stdin.buffer.read(size))
    null = os.open(os.devnull, os.O_RDWR)
    try:
        calls = SystemCalls()
    except OSError as error:
        _print_json({"lacking": str(error)})
        return
    try:
        if os.geteuid() == 0:
            os.setgroups([])
        if job["enclosed"]:
            enclose()
        runner = os.fork()
    except OSError as error:
        _print_json({"refused": str(error)})
        return
    if runner == 0:
        run_and_exit(job, calls, null, secret, verdict)
    _print_json(_watch(runner, job["wall_seconds"]))


def _watch(runner: int, wall_seconds: float) -> dict[str, Any]:
    """Wait until the runner ends, its time is up, or the evaluation closes stdin; then kill it.

    Returns how it ended, and its CPU and wall-clock seconds.
    """
    handle = os.pidfd_open(runner)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    began = time.monotonic()
    poll.poll(1000 * wall_seconds)
    in_time = bool(select.select([handle], [], [], 0)[0])
    os.kill(runner, signal.SIGKILL)  # it has not been reaped yet, so its process ID cannot have been reused
    _, status, usage = os.wait4(runner, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    return {
        "in_time": in_time,
        "signal": ended_by,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "wall_seconds": time.monotonic() - began,
    }


def _print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document))


if __name__ == "__main__":
    main()
