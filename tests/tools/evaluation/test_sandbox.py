"""Hostile programs are contained, the evaluation goes on, and what passed is right.

Every program here is bounded by itself, too: a few hundred processes, a few hundred megabytes, files of the test alone.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psutil
import pytest

from paceline.tools.evaluation import sandbox as module
from paceline.tools.evaluation.sandbox import Limits, Outcome, Sandbox, SandboxError

CHECK = "def check(f):\n    assert f(1) == 2\n"
GOOD = "def f(x):\n    return x + 1\n"
PATIENT = Limits(cpu_seconds=30, wall_seconds=60, memory_bytes=256 << 20)
ONE_SECOND = Limits(cpu_seconds=1, wall_seconds=30)
A_MOMENT = Limits(cpu_seconds=30, wall_seconds=0.3)


@cache
def enclosed(limits: Limits | None = None) -> Sandbox:
    """The machine's own walls; skips the test where there are none."""
    box = Sandbox.__new__(Sandbox)
    box.limits, box._enclosed = limits or Limits(), True
    if (why := box._refused()) is not None:
        pytest.skip(f"this machine does not enclose programs: {why}")
    return box


@cache
def weak(limits: Limits | None = None) -> Sandbox:
    """As on a machine without namespaces. Root's programs are nobody's, who perhaps cannot read Python's library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sandbox, "_refused", lambda _: "a test wants it so")
        patch.setattr(Sandbox, "_check", lambda _: None)
        return Sandbox(limits, weak=True)


EVERYWHERE = pytest.mark.parametrize("make", [enclosed, weak], ids=["enclosed", "weak"])


def body(*lines: str) -> str:
    """A program whose function f does this, and would then be right."""
    return "import ctypes, os, sys, time\n\ndef f(x):\n" + "".join(f"    {line}\n" for line in (*lines, "return 2"))


@EVERYWHERE
def test_a_good_program_passes_and_a_bad_one_says_why_not(make: Callable[..., Sandbox]) -> None:
    box = make()
    assert box.run(GOOD, CHECK, "f") == Outcome(True, "passed")
    assert box.run(GOOD.replace("1", "2"), CHECK, "f") == Outcome(False, "AssertionError:")
    assert box.run("def f(x:", CHECK, "f").result.startswith("SyntaxError")
    assert box.run("", CHECK, "f").result == "KeyError: 'f'"


FORGED = {
    "leaves at once": "import os\nos._exit(0)\n",
    "leaves politely": "import sys\nsys.exit(0)\n",
    "leaves during the check": body("os._exit(0)"),
    "prints": "print('passed')\nimport os\nos._exit(0)\n",
    "writes everywhere": body(
        "for handle in range(64):",
        "    try: os.write(handle, b'passed' + bytes(26))",
        "    except OSError: pass",
        "os._exit(0)",
    ),
    "brings a check": "def f(x):\n    return 3\n\ndef check(f):\n    pass\n",
    "an exception that cannot be told": "class E(Exception):\n    def __str__(self): raise self\n\ndef f(x): raise E\n",
    "half a character": "def f(x):\n    return '\ud800'\n",
    "nul": "def f(x):\n    return 2\n\0",
}


@pytest.mark.parametrize("program", FORGED.values(), ids=FORGED)
def test_only_a_check_that_ran_to_its_end_counts(program: str) -> None:
    assert not weak().run(program, CHECK, "f").passed


FORKS = body(
    "for number in range(300):",
    "    if os.fork() == 0:",
    "        os.setsid()",
    "        if os.fork() == 0: time.sleep(20)",
    "        os._exit(0)",
)
LIMITED = {
    "a fork bomb that leaves its group": (FORKS, "BlockingIOError"),
    "threads": (body("import _thread", "_thread.start_new_thread(time.sleep, (20,))"), "RuntimeError"),
    "memory": (body("kept = [bytearray(1 << 20) for number in range(600)]"), "MemoryError"),
    "10 GB at once": (body("kept = bytearray(10 << 30)"), "MemoryError"),
    "a large file": (body("open('large', 'wb').write(bytes(64 << 20))"), "OSError"),
    "a crash": (body("ctypes.string_at(0)"), "signal 11"),
    "more rights": (
        body("import resource", "resource.setrlimit(resource.RLIMIT_NPROC, (50, 50))"),
        "ValueError: not allowed to raise maximum limit",
    ),
    "root": (body("os.setuid(0)"), "PermissionError"),
}


@EVERYWHERE
@pytest.mark.parametrize(("program", "result"), LIMITED.values(), ids=LIMITED)
def test_what_a_program_may_take_is_limited(make: Callable[..., Sandbox], program: str, result: str) -> None:
    if make is weak and "root" in program and os.geteuid() != 0:
        pytest.skip("who is not root cannot become it anyway")
    outcome = make(PATIENT).run(program, CHECK, "f")
    assert not outcome.passed
    assert outcome.result.startswith(result)


FLOOD = body("for handle in range(64):", "    try: os.write(handle, bytes(1 << 20))", "    except OSError: pass")
ENDLESS = {
    "a loop": (body("while True: pass"), ONE_SECOND),
    "sleep": (body("time.sleep(30)"), A_MOMENT),
    "a flood into every descriptor": (FLOOD, A_MOMENT),
}


@EVERYWHERE
@pytest.mark.parametrize(("program", "limits"), ENDLESS.values(), ids=ENDLESS)
def test_time_is_limited(make: Callable[..., Sandbox], program: str, limits: Limits) -> None:
    began = time.monotonic()
    assert make(limits).run(program, CHECK, "f") == Outcome(False, "time limit")
    assert time.monotonic() - began < 30


@EVERYWHERE
def test_output_goes_nowhere(make: Callable[..., Sandbox], capfd: pytest.CaptureFixture[str]) -> None:
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
            "for handle in range(3, 64):",
            "    try: open_ones.append(os.fstat(handle))",
            "    except OSError: pass",
            "assert len(open_ones) == 2, len(open_ones)",  # the secret and the verdict
            "assert set(os.environ) <= {'OPENBLAS_NUM_THREADS', 'OMP_NUM_THREADS', 'LC_CTYPE'}, os.environ",
            "assert os.listdir('.') == []",
        )
        assert make().run(body(*lines), CHECK, "f") == Outcome(True, "passed")


def test_files_in_memory_have_an_end() -> None:
    lines = ("for number in range(100):", "    open(str(number), 'wb').write(bytes(1 << 20))")
    assert "No space left" in enclosed().run(body(*lines), CHECK, "f").result


def test_nobody_elses_files_can_be_seen_or_deleted(tmp_path: Path) -> None:
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
        "if os.getpid() != 1: raise Exception('not enclosed, so nothing is tried')",
        "for number in (os.getppid(), *range(2, 5000), -1):",
        "    try: os.kill(number, 9)",
        "    except ProcessLookupError: continue",
        "    if number: raise Exception('there was somebody')",
    )
    assert enclosed().run(body(*lines), CHECK, "f") == Outcome(True, "passed")


def test_no_environment_of_others_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TEST_SECRET", "1")
    lines = (
        "import glob",
        f"for path in [*glob.glob('/proc/*/environ'), '/proc/{os.getpid()}/environ']:",
        "    try: text = open(path, 'rb').read()",
        "    except OSError: continue",
        "    raise Exception(path)",
    )
    assert enclosed().run(body(*lines), CHECK, "f") == Outcome(True, "passed")


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
        outcome = enclosed().run(body("import socket", f"socket.create_connection({where!r}, 5)"), CHECK, "f")
        assert outcome.result.startswith("OSError: [Errno 101]")  # the network is unreachable
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_there_is_no_namespace_to_be_root_in() -> None:
    lines = ("library = ctypes.CDLL(None, use_errno=True)", "assert library.unshare(0x10000000) != 0")
    assert enclosed().run(body(*lines), CHECK, "f").passed


@EVERYWHERE
def test_a_program_ends_with_the_evaluation_that_was_killed(make: Callable[..., Sandbox]) -> None:
    make()
    refused = None if make is enclosed else "a test wants it so"
    code = (
        "from paceline.tools.evaluation.sandbox import Sandbox, Limits\n"
        f"Sandbox._refused, Sandbox._check = lambda _: {refused!r}, lambda _: None\n"
        "Sandbox(Limits(wall_seconds=200), weak=True).run('import time; time.sleep(100)', '', '')"
    )
    evaluation = subprocess.Popen([sys.executable, "-c", code])
    ourselves = psutil.Process(evaluation.pid)

    def inmates() -> list[psutil.Process]:
        """Of the program that sleeps: the warden's child, when it has its limits."""
        wardens = ourselves.children()
        children = [child for warden in wardens for child in warden.children()]
        return [child for child in children if re.search(r"Max processes +0 ", limits_of(child))]

    def limits_of(process: psutil.Process) -> str:
        return Path(f"/proc/{process.pid}/limits").read_text()

    try:
        wait_until(lambda: len(inmates()) == 1)
        (inmate,) = inmates()
    finally:
        evaluation.send_signal(signal.SIGKILL)
        evaluation.wait()
    wait_until(lambda: not inmate.is_running())


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if true():
                return
        except (psutil.NoSuchProcess, OSError):
            pass
        time.sleep(0.02)
    raise TimeoutError


def test_what_the_kernel_does_not_allow_is_refused_by_name_unless_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "_refused", lambda _: "unshare: Operation not permitted")
    with pytest.raises(SandboxError, match=r"unshare: Operation not permitted.*--weak-sandbox"):
        Sandbox()
    monkeypatch.setattr(Sandbox, "_check", lambda _: None)
    assert any(text.startswith("network") for text in Sandbox(weak=True).isolation.missing)


def test_a_sandbox_in_which_nothing_runs_is_noticed_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cell = tmp_path / "cell.py"
    cell.write_text(module._CELL.read_text().replace('exec(compile(job["program"]', "exec(compile(''"))
    monkeypatch.setattr(module, "_CELL", cell)
    with pytest.raises(SandboxError, match="do not run here as they should"):
        Sandbox(weak=True)
