"""pip builds the sources with and without a compiler; an error names the extra of a missing package."""

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kernels.test_sets import ARM_COMPILER, QEMU, WITHOUT
from paceline.kernels import build, native
from paceline.kernels.abi import INTERFACE

EM_AARCH64 = 183  # the machine in the header of an ELF file
ROOT = Path(__file__).parent.parent
NEEDED = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
WITHOUT_LIBRARIES = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", ".build-*")


def wheel(tmp_path: Path, **environment: str) -> Path:
    """The wheel that setuptools makes of a copy of the sources, with this environment."""
    sources = tmp_path / "sources"
    for folder in ("src", "csrc"):
        shutil.copytree(ROOT / folder, sources / folder, ignore=WITHOUT_LIBRARIES)
    for name in NEEDED:
        shutil.copy(ROOT / name, sources / name)
    (sources / "src/paceline/kernels" / build.LIBRARY).write_bytes(b"built long ago, for another machine")
    script = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    command, variables = [sys.executable, "-c", script], os.environ | environment
    done = subprocess.run(command, cwd=sources, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (made,) = tmp_path.glob("*.whl")
    return made


def library_in(made: Path) -> bytes | None:
    with zipfile.ZipFile(made) as archive:
        inside = f"paceline/kernels/{build.LIBRARY}"
        return archive.read(inside) if inside in archive.namelist() else None


DATA = {
    str(file.relative_to(ROOT / "src"))
    for pattern in ("shipped/*/*", "**/data/*", "server/static/**/*", "py.typed")
    for file in (ROOT / "src/paceline").glob(pattern)
    if file.is_file()
}


def newest(symbols: str, library: bytes) -> tuple[int, ...]:
    """The newest version of GLIBC or GLIBCXX that a library asks for."""
    found = re.findall(rb"\0" + symbols.encode() + rb"_([\d.]+)(?=\0)", library)
    return max(tuple(map(int, version.decode().split("."))) for version in found)


def test_without_a_compiler_the_wheel_is_for_every_machine_and_holds_no_library(tmp_path: Path) -> None:
    made = wheel(tmp_path, CXX="no-such-compiler")
    assert made.name.endswith("-py3-none-any.whl")
    assert library_in(made) is None
    with zipfile.ZipFile(made) as archive:
        missing = DATA - set(archive.namelist())
    assert missing == set()
    assert {Path(name).suffix for name in DATA} >= {".safetensors", ".jsonl", ".html"}, "heads, prompts, the playground"


@pytest.mark.slow
@pytest.mark.skipif(build.compiler() is None, reason=f"no compiler: {build.what_is_missing()}")
def test_with_a_compiler_the_wheel_is_for_every_python_and_holds_the_library(tmp_path: Path) -> None:
    made = wheel(tmp_path)
    assert made.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    library = library_in(made)
    assert library is not None
    assert build.source_hash().encode() in library


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which(ARM_COMPILER) and QEMU), reason=WITHOUT)
def test_a_cross_compiler_makes_a_wheel_for_arm_whose_library_runs_in_an_emulator(tmp_path: Path) -> None:
    made = wheel(tmp_path, CXX=ARM_COMPILER)
    assert made.name.endswith("-py3-none-linux_aarch64.whl")
    with zipfile.ZipFile(made) as archive:
        (of_wheel,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Tag: py3-none-linux_aarch64" in archive.read(of_wheel).decode().splitlines()
        assert set(archive.namelist()) >= DATA
    library = library_in(made)
    assert library is not None
    assert int.from_bytes(library[18:20], "little") == EM_AARCH64
    assert newest("GLIBC", library) <= (2, 28)
    assert newest("GLIBCXX", library) <= (3, 4, 25)
    (tmp_path / build.LIBRARY).write_bytes(library)
    program = tmp_path / "loads"
    subprocess.run([ARM_COMPILER, str(ROOT / "tests/kernels/library.cpp"), "-ldl", "-o", str(program)], check=True)
    command = [str(QEMU), "-L", "/usr/aarch64-linux-gnu", "-cpu", "max", str(program), str(tmp_path / build.LIBRARY)]
    sets = ("neon-dotprod", "neon-i8mm-bf16")
    done = subprocess.run([*command, *sets], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [build.source_hash(), INTERFACE, *sets]


@pytest.mark.skipif(not native.available(), reason=f"no kernels: {native.why_none()}")
def test_the_library_loads_on_systems_as_old_as_manylinux_2_28() -> None:
    library = native.library_path().read_bytes()
    assert newest("GLIBC", library) <= (2, 28)
    assert newest("GLIBCXX", library) <= (3, 4, 25)


def test_what_is_missing_for_the_kernels_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.sys, "platform", "linux")  # type: ignore[attr-defined]
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")  # type: ignore[attr-defined]
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.what_is_missing().startswith("there is no program CXX=no-such-compiler")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "install g++" in build.what_is_missing()
    assert build.how_to_build() == f"{build.what_is_missing()}, then: python -m paceline.kernels.build"
    monkeypatch.setattr(build, "source_hash", lambda: "")  # installed by pip: there are no sources
    assert "--no-binary paceline" in build.how_to_build()
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")  # type: ignore[attr-defined]
    supported = "darwin on arm64, linux on aarch64, linux on x86_64, win32 on AMD64"
    assert build.how_to_build() == f"the kernels are for {supported}; this is linux on riscv64"


@pytest.mark.parametrize(
    ("system", "machine", "hint"), [("darwin", "arm64", "xcode-select"), ("win32", "AMD64", "clang++")]
)
def test_the_compiler_of_another_system_is_named(
    system: str, machine: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build.sys, "platform", system)  # type: ignore[attr-defined]
    monkeypatch.setattr(build.platform, "machine", lambda: machine)  # type: ignore[attr-defined]
    assert hint in build.what_is_missing()


SERVE = "from paceline.cli.main import app; app(['serve', 'smollm2-135m'])"
PLOT = "from paceline.tools.bench.plots import new_figure; new_figure()"
TRITON = (
    "import torch; from paceline.kernels.gpu.launch import require_triton; require_triton(torch.device('cuda'), '', '')"
)


MISSING = [
    ("fastapi", "serve", SERVE),
    ("uvicorn", "serve", SERVE),
    ("matplotlib", "bench", PLOT),
    ("triton", "gpu", TRITON),
]
START = """
import paceline.llm, paceline.server.run
from paceline.kernels import pack
assert pack.interleave_gate_up(torch.empty(40, 8, device="meta")).shape == (64, 8)  # the sizes of packed weights
print(*{"transformers.modeling_utils", "torch._dynamo"} & sys.modules.keys(), "absent")
"""
EACH_IN_A_PROCESS = """
import os, sys, traceback
import torch, paceline.cli.main  # what takes long, once for all
for package, code in CASES:
    child = os.fork()
    if not child:
        sys.modules[package] = None  # what Python takes for absent
        try:
            exec(code)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    print(package, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_start_imports_little_and_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    """In a process for each, because modules that are loaded stay.

    transformers' models take as long to import as torch, so a refused command would wait for them; torch's compiler
    takes 1 s.
    """
    cases = [("no_such_package", START), *((package, code) for package, _, code in MISSING)]
    command = [sys.executable, "-c", f"CASES = {cases!r}\n{EACH_IN_A_PROCESS}"]
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    said = ["absent", "no_such_package 0", *(f"{package} 1" for package, _, _ in MISSING)]
    assert done.stdout.splitlines() == said, done.stderr
    for package, extra, _ in MISSING:
        assert f'the package {package} is not installed: pip install "paceline[{extra}]"' in done.stderr
