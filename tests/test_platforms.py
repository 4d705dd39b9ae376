"""Other systems, as far as Linux can show them: a Python without what Windows lacks, and cross compilers."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import real_models
from kernels.test_sets import check, compiled, results
from paceline.kernels import build
from paceline.kernels.abi import SIGNATURES

ROOT = Path(__file__).resolve().parents[1]

# What Python has on Linux and not on Windows, as far as anything here asks for it.
WINDOWS = """
import asyncio, multiprocessing, subprocess, socket, mmap, os, signal, sys, sysconfig, tempfile
sys.modules["triton"] = None
# Packages of others come first: what they do on Windows is theirs.
import torch, transformers.generation, prompt_toolkit, psutil, httpx, uvicorn.main
import fastapi, typer.main, click, rich.console, rich.progress
from transformers import PreTrainedModel
sysconfig.get_config_vars()
modules = {"fcntl", "resource", "termios", "pwd", "grp", "pty"}
sys.modules |= dict.fromkeys(modules)
missing = {
    os: ("register_at_fork", "fork", "preadv", "pread", "pwrite", "geteuid", "getuid", "sched_getaffinity", "killpg",
         "O_NONBLOCK", "O_DIRECTORY", "O_NOFOLLOW", "set_blocking"),
    signal: ("setitimer", "ITIMER_REAL", "ITIMER_PROF", "SIGXCPU", "SIGPROF", "SIGALRM", "SIGHUP"),
    mmap: ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_NORESERVE", "MADV_DONTNEED", "MADV_NOHUGEPAGE"),
    socket: ("AF_UNIX", "TCP_USER_TIMEOUT"),
}
for module, names in missing.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
socket.SO_EXCLUSIVEADDRUSE = 15  # SO_REUSEPORT of Linux: some option that exists
# Job objects by a kernel32 and ntdll that do nothing, so children begin at once.
import ctypes
class System:
    def __init__(self, *_, **__):
        for name in ("CreateJobObjectW", "SetInformationJobObject", "OpenProcess", "AssignProcessToJobObject",
                     "CloseHandle", "NtResumeProcess"):
            setattr(self, name, lambda *_, done=int(name != "NtResumeProcess"): done)
ctypes.WinDLL = System
popen = subprocess.Popen.__init__
subprocess.Popen.__init__ = lambda self, *given, **named: popen(self, *given, **named | {"creationflags": 0})
sys.platform = "win32"
"""
USE = """
OPTIONAL = ("triton", "ray", "lm_eval", "llm")  # packages that may not be installed
import importlib, pkgutil, paceline
failed = []
for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
    if module.name.rpartition(".")[2] not in ("__main__", "_native"):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            if (getattr(error, "name", "") or "").partition(".")[0] not in OPTIONAL:
                failed.append(f"{module.name}: {error!r}")
assert not failed, failed

from pathlib import Path
from types import SimpleNamespace
from paceline.config import ServerConfig
from paceline.config.files import lock
from paceline.core import row_tables
from paceline.models.text.chat_template import ChatTemplate
from paceline.server.sockets import listen
from paceline.tools.evaluation.sandbox import Sandbox, SandboxError
from toy import make_engine, tiny_native, run
from paceline import SamplingParams

assert not row_tables.GROWS
assert ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": "hello"}]) == "hello"
for opened in listen(ServerConfig(port=0)):
    opened.close()
try:
    Sandbox()
except SandboxError as error:
    assert "Linux only" in str(error)
locked, place = [], lambda file: os.lseek(file, 0, os.SEEK_CUR)
sys.modules["msvcrt"] = SimpleNamespace(LK_NBLCK=2, locking=lambda file, *how: locked.append((place(file), *how)))
with tempfile.TemporaryFile() as file:
    lock(file, "output", Path("x"), "another file")
    assert locked == [(2**31 - 2, 2, 1)]
    assert file.tell() == 0
engine = make_engine(tiny_native(0))
[answer] = run(engine, [[1, 2, 3]], [SamplingParams(temperature=0, max_tokens=8)])
print(*answer.outputs[0].token_ids)
"""


# Names of POSIX or Linux, and the files that may have them: behind a check, within a function, or for Linux only.
POSIX = {
    r"^import (fcntl|resource|termios|pwd|grp|pty)": (),
    r"os\.(register_at_fork|sched_\w+|getuid|geteuid)": (
        "kernels/native.py",
        "core/cpus.py",
        "engine/private_files.py",
    ),
    r"os\.(fork|preadv?|pwritev?|killpg|O_NONBLOCK|O_DIRECTORY|O_NOFOLLOW)\b": (),
    r"signal\.(SIGKILL|SIGXCPU|SIGPROF|SIGALRM|SIGHUP|SIGUSR\d|setitimer)": (
        "server/ending.py",
        "structured/trial_program.py",
    ),
    r"mmap\.(MAP_|MADV_)": ("core/row_tables.py",),
    r"socket\.(AF_UNIX|TCP_USER_TIMEOUT)": ("server/sockets.py",),
    r"/proc/": ("core/cgroups.py", "core/hardware.py", "models/parallel/native.py", "models/text/limited_program.py"),
}


def test_names_that_only_some_systems_have_are_where_they_are_expected() -> None:
    package = ROOT / "src" / "paceline"
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if not name.startswith("tools/evaluation/sandbox"):  # Linux only, as it says
            text = path.read_text(encoding="utf-8")
            names = [p for p, files in POSIX.items() if name not in files and re.search(p, text, re.MULTILINE)]
            assert not names, f"{name}: not on every system"


@pytest.mark.slow  # it imports every module and the packages of others
def test_everything_imports_and_an_engine_decodes_without_what_windows_lacks() -> None:
    """An engine with kernels, a chat template and a server's sockets, too; what is refused says why."""
    tests = Path(__file__).parent
    program = f"{WINDOWS}\nsys.path.append({str(tests)!r})\n{USE}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 8


# Macs: what their processors have, by macOS's names, and the instruction sets that are chosen, best first.
MACS = {
    "M1": ({"DotProd"}, ["neon-dotprod"]),
    "M2": ({"DotProd", "I8MM", "BF16"}, ["neon-i8mm-bf16", "neon-dotprod"]),
    "without names for them": (set(), []),
}


@pytest.mark.skipif(build.compiler() is None, reason=build.what_is_missing())
def test_macs_use_the_instructions_that_their_processors_have(tmp_path: Path) -> None:
    """By the code for macOS, built for this machine beside a sysctl of its own."""
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys" / "sysctl.h").touch()
    program = tmp_path / "sysctl"
    flags = ["-std=c++17", "-U__linux__", "-D__APPLE__", f"-I{tmp_path}", f"-I{build.SOURCES}"]
    source = ROOT / "tests" / "kernels" / "sysctl.cpp"
    subprocess.run([build.compiler() or "", *flags, source, "-o", program], check=True)
    for features, sets in MACS.values():
        names = [f"hw.optional.arm.FEAT_{name}" for name in features]
        assert subprocess.run([program, *names], capture_output=True, text=True, check=True).stdout.split() == sets


# --- cross compilers ---

ZIG = importlib.util.find_spec("ziglang")
WINE = shutil.which("wine") or shutil.which("wine64")
needs_zig = pytest.mark.skipif(ZIG is None, reason="no cross compiler: pip install ziglang")
# Zig names processors instead of extensions of the instruction set. It takes -static with -shared for an archive, and
# links its libraries statically anyway.
PROCESSORS = {"-march=armv8.2-a+dotprod": "-mcpu=apple_m1", "-march=armv8.2-a+dotprod+i8mm+bf16": "-mcpu=apple_m2"}
BFMMLA, USMMLA = 0x6E40EC00, 0x4E80AC00  # Arm's manual, C7.2: vectors of registers numbered 0


def cross_compiler(folder: Path, triple: str) -> str:
    """A program that compiles for another system with the flags of ``build``, without zig's notes for debuggers."""
    program = folder / "c++"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"flags = [{PROCESSORS!r}.get(flag, flag) for flag in sys.argv[1:] if flag != '-static']\n"
        f"os.execv(sys.executable, [sys.executable, '-m', 'ziglang', 'c++', '-target', {triple!r}, '-g0', *flags])\n"
    )
    program.chmod(0o755)
    return str(program)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first time, zig compiles its C++ library, too
@needs_zig
def test_the_library_for_macos_has_its_processor_version_and_functions(tmp_path: Path) -> None:
    library = build._build(cross_compiler(tmp_path, "aarch64-macos.11.0"), tmp_path, build.SOURCES, ()).read_bytes()
    magic, processor, _, kind, commands = struct.unpack_from("<5I", library)
    assert (magic, processor, kind) == (0xFEEDFACF, 0x0100000C, 6)  # mach-o/loader.h: 64 bit, Arm, MH_DYLIB
    place, version = 32, None
    for _ in range(commands):
        command, size = struct.unpack_from("<2I", library, place)
        if command == 0x32:  # LC_BUILD_VERSION: platform, oldest version
            version = struct.unpack_from("<2I", library, place + 8)
        place += size
    assert version == (1, 11 << 16)
    assert [name for name in SIGNATURES if f"\0_{name}\0".encode() not in library] == []
    # M2 and later: products of matrices in bfloat16 and in bytes.
    words = struct.unpack(f"<{len(library) // 4}I", library[: len(library) // 4 * 4])
    instructions = Counter(word & 0xFFE0FC00 for word in words)  # without the numbers of registers
    assert min(instructions[BFMMLA], instructions[USMMLA]) > 100


needs_wine = pytest.mark.skipif(WINE is None, reason="nothing runs programs of Windows: apt-get install wine")


@pytest.fixture(scope="module")
def wine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The program that runs programs of Windows, as an empty Windows of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINEPREFIX", str(tmp_path_factory.mktemp("wine")))
        patch.setenv("WINEDEBUG", "-all")
        subprocess.run([str(WINE), "wineboot"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield str(WINE)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first time, zig compiles its C++ library, too
@needs_zig
@needs_wine
def test_windows_gives_the_bits_of_linux(tmp_path: Path, wine: str) -> None:
    """All sets of this machine's processor."""
    cxx = cross_compiler(tmp_path, "x86_64-windows-gnu")
    found = results(wine, str(compiled(cxx, "x86_64", tmp_path)))
    assert {"avx2", "amx-emulated", "avx-vnni-emulated"} & found.keys()
    check(found)


LAUNCHER = """
#include <windows.h>
int wmain(int count, wchar_t **arguments) {
  HMODULE python = LoadLibraryW(L"python3%d.dll");
  return python ? ((int (*)(int, wchar_t **))(void *)GetProcAddress(python, "Py_Main"))(count, arguments) : 99;
}
"""


@pytest.fixture(scope="module")
def windows_python(tmp_path_factory: pytest.TempPathFactory, wine: str) -> list[str]:
    """The command of Windows' Python: its libraries from a wheel that brings them, its modules from this Python.

    It finds packages in ``site`` beside the program, and this checkout's modules.
    """
    minor, tmp_path = sys.version_info.minor, tmp_path_factory.mktemp("windows")
    folder = tmp_path / "python"
    pip(minor, "download", "--dest", str(tmp_path), "panda3d")
    with zipfile.ZipFile(next(tmp_path.glob("panda3d*.whl"))) as wheel:
        for name in wheel.namelist():
            if name.startswith("deploy_libs/"):
                wheel.extract(name, tmp_path)
    (tmp_path / "deploy_libs").rename(folder)
    modules = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(modules, folder / "Lib", ignore=shutil.ignore_patterns("site-packages", "lib-dynload", "test"))
    places = ["Lib", ".", "site", f"Z:{ROOT / 'src'}", f"Z:{ROOT / 'tests'}"]
    (folder / f"python3{minor}._pth").write_text("\n".join(places))
    (folder / "launcher.c").write_text(LAUNCHER % minor)
    # Extension modules for any Python 3 call python3.dll, which forwards to the library of this one.
    names = set(re.findall(rb"\0(_?Py\w+)(?=\0)", (folder / f"python3{minor}.dll").read_bytes()))
    exports = "".join(f"{name}=python3{minor}.{name}\n" for name in sorted(map(bytes.decode, names)))
    (folder / "python3.def").write_text(f"LIBRARY python3.dll\nEXPORTS\n{exports}")
    (folder / "python3.c").touch()
    (folder / "random.c").write_text(RANDOM)
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu"]
    for command in (
        "-municode launcher.c -o python.exe",
        "-shared python3.c python3.def -o python3.dll",
        "-shared random.c -ladvapi32 -o bcryptprimitives.dll",
    ):
        subprocess.run([*compiler, *command.split()], cwd=folder, check=True)
    return [wine, str(folder / "python.exe")]


def begin(command: list[str], program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program in Windows' Python, which wine gives no standard streams that are files or /dev/null."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, "-c", program, *arguments], stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def pip(minor: int, command: str, *arguments: str) -> None:
    """Run a command of pip for Windows' Python, without dependencies."""
    flags = ["--quiet", "--no-deps", "--only-binary=:all:", "--platform", "win_amd64", "--python-version", f"3.{minor}"]
    subprocess.run([sys.executable, "-m", "pip", command, *flags, *arguments], check=True)


# Rust's libraries draw from it, and wine 8 does not have it.
RANDOM = """
#include <windows.h>
BOOLEAN NTAPI SystemFunction036(void *, ULONG);
__declspec(dllexport) BOOL ProcessPrng(void *bytes, size_t count) { return SystemFunction036(bytes, (ULONG)count); }
"""


# Run by Windows' Python without torch, so modules are loaded by their files.
OF_WINDOWS = """
import ctypes, importlib.util, subprocess, sys

def module(name, path):
    specification = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = loaded = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(loaded)
    return loaded

package, library, task = sys.argv[1:]
if task == "library":
    abi = module("abi", package + "/kernels/abi.py")
    loaded = ctypes.CDLL(library)
    for name, (result, arguments) in abi.SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    assert loaded.pl_interface().decode() == abi.INTERFACE
    expected = []
    for struct in abi.STRUCTS:
        names = sorted(field[0] for field in struct._fields_)
        expected += [ctypes.sizeof(struct), *(getattr(struct, name).offset for name in names)]
    assert expected == list((ctypes.c_int32 * len(expected)).from_address(loaded.pl_layout()))
    assert loaded.pl_exchange_bytes(2, 100) == 3 * 64 + 2 * 2 * 100 * 4
    nothing = (ctypes.c_int32 * 1)()
    for threads in (1, 4):
        pool = loaded.pl_pool_new(threads, 0, *[ctypes.addressof(nothing)] * 3)
        loaded.pl_pool_free(pool)
    print("loaded")
else:
    jobs = module("job_objects", package + "/core/job_objects.py")
    child = "print('child', flush=True); import time; time.sleep(600)"
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    processes = [
        subprocess.Popen([sys.executable, "-c", child], **pipes, text=True, creationflags=flags)
        for flags in (jobs.SUSPENDED, jobs.SUSPENDED, 0)
    ]
    first, second = (jobs.JobObject(process, 1 << 30) for process in processes[:2])
    first.limit_time(100)
    print(*[process.stdout.readline().strip() for process in processes])
    del second
    processes[1].wait(60)
    print([process.poll() is None for process in processes])
    with open(library, "w") as file:
        file.write(" ".join(str(process.pid) for process in (processes[0], processes[2])))
    import os
    os._exit(3)  # without any clean-up
"""
LEFT = """
import ctypes, sys, time
still_active, pids = 259, [int(pid) for pid in open(sys.argv[1]).read().split()]
kernel, status = ctypes.windll.kernel32, ctypes.c_uint32()
def runs(pid):
    process = kernel.OpenProcess(0x1000, 0, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
    return bool(process and kernel.GetExitCodeProcess(process, ctypes.byref(status))) and status.value == still_active
time.sleep(1)
print([runs(pid) for pid in pids])
kernel.TerminateProcess(kernel.OpenProcess(1, 0, pids[1]), 0)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first time, zig compiles its C++ library, too
@needs_zig
@needs_wine
def test_python_for_windows_loads_the_library_and_ends_its_children(tmp_path: Path, windows_python: list[str]) -> None:
    """The child in a job ends with its parent, which is ended without a clean-up; the one beside it does not."""
    package, note = f"Z:{ROOT / 'src' / 'paceline'}", f"Z:{tmp_path / 'pids'}"
    with begin(windows_python, OF_WINDOWS, package, note, "jobs") as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline().strip() for _ in range(2)] == ["child child child", "[True, False, True]"]
        assert parent.wait(60) == 3
        with begin(windows_python, LEFT, note) as looking:  # and ends the other child, which holds the parent's pipe
            assert looking.communicate()[0].strip() == "[False, True]"
    build._build(cross_compiler(tmp_path, "x86_64-windows-gnu"), tmp_path, build.SOURCES, ())
    with begin(windows_python, OF_WINDOWS, package, f"Z:{tmp_path / build.LIBRARY}", "library") as loading:
        assert loading.communicate()[0].strip() == "loaded"


ENGINE = """
import sys
sys.modules["triton"] = None
from paceline import SamplingParams
from toy import make_engine, run, tiny_native
each = [SamplingParams(temperature=0, max_tokens=24), SamplingParams(temperature=1.0, seed=3, max_tokens=24)]
for draft in (None, tiny_native(1)):
    engine = make_engine(tiny_native(0), draft, drafter=draft and "model")
    print("kernels", "on the CPU kernels" in engine.describe())
    for answer in run(engine, [[1, 2, 3], [4, 5, 6]], each):
        print("tokens", *answer.outputs[0].token_ids)
"""


def requirements_of_windows() -> list[str]:
    """What paceline needs on Windows, in the versions that are installed here."""
    environment = {"sys_platform": "win32", "platform_system": "Windows", "os_name": "nt", "extra": ""}
    waiting = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = {
        "numpy": "numpy<2",  # wine 8 lacks a function that later ones call
        "msvc-runtime": "msvc-runtime",
    }
    while waiting:
        needed = Requirement(waiting.pop())
        name = canonicalize_name(needed.name)
        if name in found or (needed.marker is not None and not needed.marker.evaluate(environment)):
            continue
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # a package for Windows only
            found[name] = name
        else:
            found[name] = f"{name}=={installed.version.partition('+')[0]}"  # without torch's name of a build
            waiting += installed.requires or []
    return list(found.values())


@pytest.fixture(scope="module")
def windows_paceline(tmp_path_factory: pytest.TempPathFactory, windows_python: list[str]) -> list[str]:
    """The command of Windows' Python with the kernels and the packages that paceline needs."""
    folder, built = Path(windows_python[1]).parent, tmp_path_factory.mktemp("built")
    pip(sys.version_info.minor, "install", "--no-compile", "--target", str(folder / "site"), *requirements_of_windows())
    for library in (folder / "site").glob("*.dll"):  # Windows looks for them beside the program
        library.rename(folder / library.name)
    build._build(cross_compiler(built, "x86_64-windows-gnu"), built, build.SOURCES, ())
    environment = {
        "PACELINE_BUILD_DIR": f"Z:{built}",
        "PACELINE_CACHE": f"Z:{built / 'cache'}",
        "KMP_TOPOLOGY_METHOD": "flat",  # of torch's OpenMP: wine does not describe the processor's parts
    }
    return ["env", *(f"{name}={value}" for name, value in environment.items()), *windows_python]


def lines_of(process: subprocess.Popen[str], *beginnings: str) -> list[str]:
    """What a program says, in the lines that begin so. Fails with all of it if there are none."""
    with process:
        said = process.communicate()[0]
    lines = [line.strip() for line in said.splitlines() if line.startswith(beginnings)]
    assert lines, said
    return lines


def said_here(program: str, *arguments: str) -> list[str]:
    """The lines that a program prints in this Python."""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{program}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it downloads torch for Windows, which wine loads in a minute or more
@needs_zig
@needs_wine
def test_an_engine_on_windows_gives_the_tokens_of_linux(windows_paceline: list[str]) -> None:
    """With torch for Windows and the kernels: greedy and drawn tokens, without and with a draft model."""
    here = said_here(ENGINE)
    assert here[0] == here[3] == "kernels True"
    assert lines_of(begin(windows_paceline, ENGINE), "kernels", "tokens") == here


COMMAND = "generate --chat --json --quiet --temperature 0 --max-tokens 64 --quantization int8 --threads 2"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_zig
@needs_wine
def test_the_command_line_on_windows_answers_like_linux(windows_paceline: list[str]) -> None:
    """A GGUF file, which is packed; its tokenizer; its chat template, in a job object; n-gram lookup."""
    path = real_models.find("smollm2-135m")
    arguments = [*COMMAND.split(), "--prompt=Write a fable twice.", "--prompt=Why is the sky blue?"]
    program = "import sys; from paceline.cli.main import app; app(sys.argv[1:])"

    def answers(lines: list[str]) -> list[Any]:
        return [[answer["token_ids"] for answer in json.loads(line)["outputs"]] for line in lines]

    here = answers(said_here(program, *arguments, str(path)))
    assert [len(tokens) for [tokens] in here] == [64, 64]
    assert answers(lines_of(begin(windows_paceline, program, *arguments, f"Z:{path}"), "{")) == here
