"""Hostile programs are contained, the evaluation continues, and only correct programs pass.

The programs here are also bounded by themselves: a few hundred processes and megabytes, and only the test's own files.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psutil
import pytest

from paceline.tools.evaluation import sandbox as module
from paceline.tools.evaluation.sandbox import ProgramResult, Sandbox, SandboxError, SandboxLimits

CHECK = "def check(f):\n    assert f(1) == 2\n"
GOOD = "def f(x):\n    return x + 1\n"
GENEROUS = SandboxLimits(cpu_seconds=30, wall_seconds=60, memory_bytes=256 << 20)
ONE_SECOND = SandboxLimits(cpu_seconds=1, wall_seconds=30)
A_MOMENT = SandboxLimits(cpu_seconds=30, wall_seconds=0.3)


@cache
def enclosed(limits: SandboxLimits | None = None) -> Sandbox:
    """A sandbox with namespaces. Skips the test where the machine does not allow them."""
    box = Sandbox.__new__(Sandbox)
    box.limits, box._enclosed = limits or SandboxLimits(), True
    if (why := box._refused()) is not None:
        pytest.skip(f"this machine does not allow namespaces: {why}")
    return box


@cache
def weak(limits: SandboxLimits | None = None) -> Sandbox:
    """A sandbox as on a machine without namespaces.

    Its check is skipped: root's programs run as the user nobody, who may not be able to read Python's library.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sandbox, "_refused", lambda _: "simulated by a test")
        patch.setattr(Sandbox, "_check", lambda _: None)
        return Sandbox(limits, weak=True)


EVERYWHERE = pytest.mark.parametrize("make", [enclosed, weak], ids=["enclosed", "weak"])


def body(*lines: str) -> str:
    """A program whose function f executes these lines, and then returns the correct result."""
    return "import ctypes, os, sys, time\n\ndef f(x):\n" + "".join(f"    {line}\n" for line in (*lines, "return 2"))


@EVERYWHERE
def test_a_correct_program_passes_and_a_wrong_one_gives_its_error(make: Callable[..., Sandbox]) -> None:
    box = make()
    assert box.run(GOOD, CHECK, "f") == ProgramResult(True, "passed")
    assert box.run(GOOD.replace("1", "2"), CHECK, "f") == ProgramResult(False, "AssertionError:")
    assert box.run("def f(x:", CHECK, "f").result.startswith("SyntaxError")
    assert box.run("", CHECK, "f").result == "KeyError: 'f'"


FORGED = {
    "exits at once": "import os\nos._exit(0)\n",
    "raises SystemExit": "import sys\nsys.exit(0)\n",
    "exits during the check": body("os._exit(0)"),
    "prints": "print('passed')\nimport os\nos._exit(0)\n",
    "writes to all descriptors": body(
        "for handle in range(4096):",
        "    try: os.write(handle, b'passed' + bytes(26))",
        "    except OSError: pass",
        "os._exit(0)",
    ),
    "defines a check of its own": "def f(x):\n    return 3\n\ndef check(f):\n    pass\n",
    "an exception without a message": "class E(Exception):\n    def __str__(self): raise self\n\ndef f(x): raise E\n",
    "half a character": "def f(x):\n    return '\ud800'\n",
    "nul": "def f(x):\n    return 2\n\0",
}


@pytest.mark.parametrize("program", FORGED.values(), ids=FORGED)
def test_only_a_completed_check_counts(program: str) -> None:
    assert not weak().run(program, CHECK, "f").passed


FORKS = body(
    "for number in range(300):",
    "    if os.fork() == 0:",
    "        os.setsid()",
    "        if os.fork() == 0: time.sleep(20)",
    "        os._exit(0)",
)
LIMITED = {
    "a fork bomb that leaves its group": (FORKS, "OSError: [Errno 38]"),
    "threads": (body("import _thread", "_thread.start_new_thread(time.sleep, (20,))"), "RuntimeError"),
    "memory": (body("kept = [bytearray(1 << 20) for number in range(600)]"), "MemoryError"),
    "10 GB at once": (body("kept = bytearray(10 << 30)"), "MemoryError"),
    "a large file": (body("open('large', 'wb').write(bytes(64 << 20))"), "OSError"),
    "a crash": (body("ctypes.string_at(0)"), "signal 11"),
    "higher limits": (
        body("import resource", "resource.setrlimit(resource.RLIMIT_NPROC, (50, 50))"),
        "ValueError: not allowed to raise maximum limit",
    ),
    "root": (body("os.setuid(0)"), "OSError: [Errno 38]"),
    "root's user IDs": (
        body("if 0 not in (*os.getresuid(), *os.getresgid()): raise Exception('not root')"),
        "Exception: not root",
    ),
}


@EVERYWHERE
@pytest.mark.parametrize(("program", "result"), LIMITED.values(), ids=LIMITED)
def test_resources_are_limited(make: Callable[..., Sandbox], program: str, result: str) -> None:
    if make is weak and "root" in program and os.geteuid() != 0:
        pytest.skip("only root could keep root's IDs")
    outcome = make(GENEROUS).run(program, CHECK, "f")
    assert not outcome.passed
    assert outcome.result.startswith(result)


FLOOD = body("for handle in range(4096):", "    try: os.write(handle, bytes(1 << 20))", "    except OSError: pass")
ENDLESS = {
    "a loop": (body("while True: pass"), ONE_SECOND),
    "sleep": (body("time.sleep(30)"), A_MOMENT),
    "a flood into every descriptor": (FLOOD, A_MOMENT),
}


@EVERYWHERE
@pytest.mark.parametrize(("program", "limits"), ENDLESS.values(), ids=ENDLESS)
def test_time_is_limited(make: Callable[..., Sandbox], program: str, limits: SandboxLimits) -> None:
    began = time.monotonic()
    assert make(limits).run(program, CHECK, "f") == ProgramResult(False, "time limit")
    assert time.monotonic() - began < 30


@EVERYWHERE
def test_output_is_discarded(make: Callable[..., Sandbox], capfd: pytest.CaptureFixture[str]) -> None:
    lines = ("for number in range(64):", "    os.write(1 + number % 2, b'x' * (1 << 20))", "print('end')")
    assert make().run(body(*lines), CHECK, "f").passed
    assert capfd.readouterr() == ("", "")


@EVERYWHERE
def test_nothing_is_inherited(make: Callable[..., Sandbox], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TEST_SECRET", "1")
    with open(os.devnull) as handle:  # noqa: PTH123
        os.set_inheritable(handle.fileno(), True)
        lines = (
            "open_ones = []",
            "for handle in range(3, 4096):",
            "    try: open_ones.append(os.fstat(handle))",
            "    except OSError: pass",
            "assert len(open_ones) == 2, len(open_ones)",  # the secret and the verdict
            "assert set(os.environ) <= {'OPENBLAS_NUM_THREADS', 'OMP_NUM_THREADS', 'LC_CTYPE'}, os.environ",
            "assert os.listdir('.') == []",
        )
        assert make().run(body(*lines), CHECK, "f") == ProgramResult(True, "passed")


def test_the_file_system_in_memory_is_limited() -> None:
    lines = ("for number in range(100):", "    open(str(number), 'wb').write(bytes(1 << 20))")
    assert "No space left" in enclosed().run(body(*lines), CHECK, "f").result


def test_other_files_are_neither_visible_nor_writable(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    box = enclosed()
    lines = ("import shutil", f"shutil.rmtree({str(tmp_path / 'home')!r})")
    assert box.run(body(*lines), CHECK, "f").result.startswith("FileNotFoundError")
    assert (tmp_path / "home" / "letter").read_text() == "dear"
    for path in (Path(os.__file__).parent / "new", "/new", "/usr/new"):
        assert "Read-only" in box.run(body(f"open({str(path)!r}, 'w')"), CHECK, "f").result
    assert "Read-only" in box.run(body(f"os.unlink({os.__file__!r})"), CHECK, "f").result


def test_no_other_process_can_be_killed() -> None:
    lines = (
        "if (os.getpid(), os.getppid()) != (1, 0): raise Exception('not enclosed, so nothing is killed')",
        "for number in (*range(2, 5000), -1):",
        "    try: os.kill(number, 9)",
        "    except OSError as error:",
        "        if error.errno == 38: continue",
        "    raise Exception('there was a process to kill')",
    )
    assert enclosed().run(body(*lines), CHECK, "f") == ProgramResult(True, "passed")


def test_environments_of_other_processes_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TEST_SECRET", "1")
    lines = (
        "import glob",
        f"for path in [*glob.glob('/proc/*/environ'), '/proc/{os.getpid()}/environ']:",
        "    try: text = open(path, 'rb').read()",
        "    except OSError: continue",
        "    raise Exception(path)",
    )
    assert enclosed().run(body(*lines), CHECK, "f") == ProgramResult(True, "passed")


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
        outcome = enclosed().run(body("import socket", f"socket.create_connection({where!r}, 5)"), CHECK, "f")
        assert outcome.result.startswith("OSError: [Errno 38]")  # there is no socket call
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_only_python_s_own_files_of_the_prefix_are_visible() -> None:
    """A prefix may be one of the user's directories, with other files in it."""
    lines = (
        f"for prefix in {[sys.prefix, sys.base_prefix]!r}:",
        "    for path in (os.path.join(prefix, 'bin'), os.path.join(prefix, 'pyvenv.cfg')):",
        "        if os.path.exists(path): raise Exception(path)",
        "import numpy, zoneinfo",
        "assert zoneinfo.ZoneInfo('Europe/Paris') and numpy.ones(3).sum() == 3",
    )
    assert enclosed().run(body(*lines), CHECK, "f") == ProgramResult(True, "passed")


ON_X86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are x86-64's")
CALLS = {
    "keyctl": 250, "add_key": 248, "request_key": 249, "io_uring_setup": 425, "userfaultfd": 323, "bpf": 321,
    "perf_event_open": 298, "mount": 165, "umount2": 166, "mount_setattr": 442, "fsopen": 430, "move_mount": 429,
    "pivot_root": 155, "chroot": 161, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "unshare": 272,
    "setns": 308, "open_by_handle_at": 304, "name_to_handle_at": 303, "kexec_load": 246, "init_module": 175,
    "finit_module": 313, "shmget": 29, "shmat": 30, "msgget": 68, "semget": 64, "mq_open": 240, "memfd_create": 319,
    "memfd_secret": 447, "socket": 41, "socketpair": 53, "fanotify_init": 300, "inotify_init1": 294, "pidfd_open": 434,
    "kill": 62, "tkill": 200, "tgkill": 234, "clone": 56, "clone3": 435, "fork": 57, "vfork": 58, "execve": 59,
    "execveat": 322, "personality": 135, "modify_ldt": 154, "prctl": 157, "seccomp": 317, "mlockall": 151,
    "timer_create": 222, "set_mempolicy": 238, "move_pages": 279, "sched_setaffinity": 203, "setpriority": 141,
    "acct": 163, "syslog": 103, "mknod": 133, "vmsplice": 278, "splice": 275, "io_setup": 206, "iopl": 172,
}  # fmt: skip


@ON_X86_64
@EVERYWHERE
def test_dangerous_system_calls_are_blocked(make: Callable[..., Sandbox]) -> None:
    """They reach other processes, other namespaces, memory outside the limit, or rarely audited parts of the kernel."""
    lines = (
        "library = ctypes.CDLL(None, use_errno=True)",
        "there = []",
        f"for name, number in {CALLS!r}.items():",
        "    ctypes.set_errno(0)",
        "    library.syscall(number, 0, 0, 0, 0, 0, 0)",
        "    if ctypes.get_errno() != 38: there.append(name)",
        "if there: raise Exception(there)",
    )
    assert make().run(body(*lines), CHECK, "f") == ProgramResult(True, "passed")


@ON_X86_64
@EVERYWHERE
def test_system_calls_of_another_architecture_are_blocked(make: Callable[..., Sandbox]) -> None:
    """64-bit programs can call the x32 interface, which has its own numbers."""
    lines = ("ctypes.CDLL(None).syscall(0x40000000 + 250, 0, 0, 0)", "time.sleep(0)")
    assert make().run(body(*lines), CHECK, "f").result == "signal 31"


@EVERYWHERE
def test_there_are_no_sockets(make: Callable[..., Sandbox]) -> None:
    """Sockets of virtual machines (40), netlink (16) and the kernel's ciphers (38) can bypass network namespaces."""
    lines = (
        "library = ctypes.CDLL(None, use_errno=True)",
        "for family in (1, 2, 10, 16, 17, 38, 40):",
        f"    made = library.socket(family, {socket.SOCK_DGRAM}, 0)",
        "    if made >= 0 or ctypes.get_errno() != 38: raise Exception(family)",
    )
    assert make().run(body(*lines), CHECK, "f") == ProgramResult(True, "passed")


UNCOUNTED = {
    "shared memory of System V": (
        "library = ctypes.CDLL(None, use_errno=True)",
        "library.shmat.restype = ctypes.c_void_p",
        "for number in range(6):",
        "    place = library.shmget(0, 64 << 20, 0o1600)",
        "    if place < 0: raise OSError(ctypes.get_errno(), 'shmget')",
        "    where = library.shmat(place, None, 0)",
        "    ctypes.memset(where, 1, 64 << 20)",
        "    library.shmdt(ctypes.c_void_p(where))",
    ),
    "files without a name": ("for number in range(24):", "    os.write(os.memfd_create('x'), bytes(16 << 20))"),
}


@EVERYWHERE
@pytest.mark.parametrize("lines", UNCOUNTED.values(), ids=UNCOUNTED)
def test_no_memory_can_be_allocated_outside_the_limit(make: Callable[..., Sandbox], lines: tuple[str, ...]) -> None:
    """Each program allocates 384 MB, with a limit of 256 MB."""
    assert make(GENEROUS).run(body(*lines), CHECK, "f").result.startswith("OSError: [Errno 38]")


KEYS = """
import ctypes, os, sys
from paceline.tools.evaluation.sandbox import Sandbox
library = ctypes.CDLL(None, use_errno=True)
if library.syscall(250, 1, None) < 0 or library.syscall(248, b"user", b"letter", b"dear", 4, -3) < 0:
    sys.exit(f"no keys: {os.strerror(ctypes.get_errno())}")
if sys.argv[1] == "weak":
    Sandbox._refused, Sandbox._check = lambda _: "simulated by a test", lambda _: None
print(Sandbox(weak=True).run(sys.argv[2], sys.argv[3], "f").result)
"""


@ON_X86_64
@EVERYWHERE
def test_keys_of_the_callers_session_cannot_be_read(make: Callable[..., Sandbox]) -> None:
    make()
    lines = (
        "library, said = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(9)",
        "key = library.syscall(250, 10, -3, b'user', b'letter', 0)",  # search in the session's keyring
        "if key < 0: raise OSError(ctypes.get_errno(), 'keyctl')",
        "library.syscall(250, 11, key, said, 9)",  # read
        "raise Exception(said.value)",
    )
    command = [sys.executable, "-c", KEYS, make.__name__, body(*lines), CHECK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "no keys" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.startswith("OSError: [Errno 38]"), done.stdout + done.stderr


ALONE = """
import ctypes, os, socket, sys
from paceline.tools.evaluation import sandbox_child
taken = ctypes.CDLL(None).shmget(77, 4096, 0o1600)
sandbox_child.enclose()
assert [name for _, name in socket.if_nameindex()] == ["lo"], socket.if_nameindex()
assert ctypes.CDLL(None).shmget(77, 0, 0) == -1, "a namespace of its own for shared memory"
ctypes.CDLL(None).shmctl(taken, 0, None)
if os.fork() == 0:
    assert (os.getpid(), os.getppid()) == (1, 0)
    sandbox_child.give_up_rights()
    sandbox_child.limit(3, 1 << 30)
    try:
        os.fork()
    except BlockingIOError:
        os._exit(0)
    os._exit(1)
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_namespaces_isolate_without_the_system_call_filter() -> None:
    """The other tests have both; this one shows that the namespaces do not depend on the filter."""
    enclosed()
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_system_call_filter_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "sandbox_child.py"
    program.write_text(module._CHILD_PROGRAM.read_text().replace('"libseccomp.so.2"', '"libnothing.so.2"'))
    monkeypatch.setattr(module, "_CHILD_PROGRAM", program)
    with pytest.raises(SandboxError, match=r"install the system's package libseccomp"):
        Sandbox(weak=True)


ORDINARY = """
import array, base64, bisect, calendar, collections, copy, csv, dataclasses, datetime, decimal, enum, fractions
import functools, hashlib, heapq, io, itertools, json, math, operator, os, pathlib, random, re, shutil, statistics
import string, struct, tempfile, textwrap, time, typing, unicodedata, uuid, zlib

def f(x):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "a", "b.txt")
        path.parent.mkdir()
        path.write_text("dear")
        path.rename(path.with_suffix(".md"))
        assert [each.name for each in path.parent.iterdir()] == ["b.md"]
    with tempfile.TemporaryFile() as file:
        file.write(b"x")
        file.truncate()
    read, write = os.pipe()
    os.write(write, b"x")
    assert os.read(read, 1) == b"x" and os.urandom(4) != os.urandom(4)
    time.sleep(0.001)
    assert datetime.datetime.now().year > 2000 and random.random() < 1 and uuid.uuid4() and os.getpid()
    assert len([bytearray(1 << 22) for _ in range(9)]) == 9
    return x + 1
"""


def test_ordinary_programs_work() -> None:
    assert enclosed().run(ORDINARY, CHECK, "f") == ProgramResult(True, "passed")


def test_programs_cannot_create_user_namespaces() -> None:
    lines = ("library = ctypes.CDLL(None, use_errno=True)", "assert library.unshare(0x10000000) != 0")
    assert enclosed().run(body(*lines), CHECK, "f").passed


@EVERYWHERE
def test_a_program_ends_when_the_evaluation_is_killed(make: Callable[..., Sandbox]) -> None:
    make()
    refused = None if make is enclosed else "simulated by a test"
    code = (
        "from paceline.tools.evaluation.sandbox import Sandbox, SandboxLimits\n"
        f"Sandbox._refused, Sandbox._check = lambda _: {refused!r}, lambda _: None\n"
        "Sandbox(SandboxLimits(wall_seconds=200), weak=True).run('import time; time.sleep(100)', '', '')"
    )
    evaluation = subprocess.Popen([sys.executable, "-c", code])
    parent = psutil.Process(evaluation.pid)

    def runners() -> list[psutil.Process]:
        """The processes that run the sleeping program: children of the supervisor that already have their limits."""
        supervisors = parent.children()
        children = [child for supervisor in supervisors for child in supervisor.children()]
        return [child for child in children if re.search(r"Max processes +0 ", limits_of(child))]

    def limits_of(process: psutil.Process) -> str:
        return Path(f"/proc/{process.pid}/limits").read_text()

    try:
        wait_until(lambda: len(runners()) == 1)
        (runner,) = runners()
    finally:
        evaluation.send_signal(signal.SIGKILL)
        evaluation.wait()
    wait_until(lambda: not runner.is_running())


def test_deep_directories_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that makes them ended the whole evaluation."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    nested = "import os\nfor _ in range(3000):\n    os.mkdir('a')\n    os.chdir('a')\ndef f(x): return x"
    weak().run(nested, CHECK, "f")
    assert list(tmp_path.iterdir()) == []


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except (psutil.NoSuchProcess, OSError):
            pass
        time.sleep(0.02)
    raise TimeoutError


def test_missing_isolation_is_refused_unless_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "_refused", lambda _: "unshare: Operation not permitted")
    with pytest.raises(SandboxError, match=r"unshare: Operation not permitted.*--weak-sandbox"):
        Sandbox()
    monkeypatch.setattr(Sandbox, "_check", lambda _: None)
    assert any(text.startswith("files") for text in Sandbox(weak=True).isolation.missing)


def test_a_sandbox_in_which_nothing_runs_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "sandbox_child.py"
    program.write_text(module._CHILD_PROGRAM.read_text().replace('exec(compile(job["program"]', "exec(compile(''"))
    monkeypatch.setattr(module, "_CHILD_PROGRAM", program)
    with pytest.raises(SandboxError, match="do not run correctly here"):
        Sandbox(weak=True)
