"""``sets.cpp``: the instruction sets without Python, on this machine and for 64-bit Arm under qemu."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.kernels import build

PROGRAM = Path(__file__).with_name("sets.cpp")
NEEDED = {"cpu.cpp", "model.cpp", "sets_arm.cpp", "sets_x86.cpp", "system.cpp"}
# Hashes of results that every instruction set gives to the bit. They change with sets.cpp only.
SAME_EVERYWHERE = {
    "int8": "25e6801008d8ea62",
    "int4": "ae08a251835a06fe",
    "norm": "df764f23a0d86451",
    "attention": "b5acf0aebb7a7d8f",
    "attention-int8": "c71c76903277e942",
    "recurrent": "d92334795afed7b7",
    "draw": "48ac90842efdba2f",
    "probabilities": "309a07509dbaea32",
}
ARM_COMPILER = "aarch64-linux-gnu-g++"
QEMU = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
WITHOUT = "apt-get install qemu-user-static g++-aarch64-linux-gnu"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # minutes of compilers on a busy machine


def compiled(cxx: str, machine: str, folder: Path) -> Path:
    newer = machine == "x86_64" and build._knows(cxx, build._NEWER)
    every = build.files_for(machine, newer)
    files = {path: flags for path, flags in every.items() if path.name in NEEDED or path.name.startswith("kernels_")}
    files[PROGRAM] = (f"-I{build.SOURCES}",)  # not for all: zig knows the files again that it compiled for a library
    objects = build.compile_files(cxx, files, folder, build.system_flags(cxx))
    program = folder / "sets.exe"  # Windows needs the ending
    subprocess.run([cxx, "-pthread", *build.system_flags(cxx), *objects, "-o", str(program)], check=True)
    return program


def results(*command: str) -> dict[str, dict[str, str]]:
    """Set -> function -> hash, of those that run. Fails with the output if a product is wrong."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, str]] = {}
    for line in done.stdout.splitlines():
        if ":" not in line:
            name, _, of_function = line.partition(" ")
            function, _, digest = of_function.rpartition(" ")
            found.setdefault(name, {})[function] = digest
    return found


def check(found: dict[str, dict[str, str]]) -> None:
    for functions in found.values():
        assert {name: functions[name] for name in SAME_EVERYWHERE} == SAME_EVERYWHERE


@pytest.mark.skipif(build.compiler() is None, reason=build.what_is_missing())
def test_all_sets_of_this_machine_give_the_same_bits(tmp_path: Path) -> None:
    cxx = build.compiler() or ""
    found = results(str(compiled(cxx, build.target(cxx), tmp_path)))
    check(found)
    of_fp32 = {functions["bf16"] for name, functions in found.items() if name in {"avx2", "avx512-bw", "avx512-vnni"}}
    assert len(of_fp32) <= 1


@pytest.mark.skipif(not (shutil.which(ARM_COMPILER) and QEMU), reason=WITHOUT)
def test_the_sets_of_arm_give_the_same_bits_as_those_of_x86(tmp_path: Path) -> None:
    program = str(compiled(ARM_COMPILER, "aarch64", tmp_path))
    sets = {
        "cortex-a72": set(),  # a Raspberry Pi 4: no dot products
        "neoverse-n1": {"neon-dotprod"},
        "max,sve=off": {"neon-i8mm-bf16", "neon-dotprod"},
        "max,sve=on": {"neon-i8mm-bf16", "neon-dotprod"},
    }
    for cpu, expected in sets.items():
        found = results(str(QEMU), "-L", "/usr/aarch64-linux-gnu", "-cpu", cpu, program)
        assert set(found) == expected
        check(found)


@pytest.mark.skipif(build.compiler() is None, reason=build.what_is_missing())
def test_only_the_c_interface_and_declared_functions_have_external_linkage(tmp_path: Path) -> None:
    """A function of one file that stands outside of an anonymous namespace may collide with another file's."""
    cxx = build.compiler() or ""
    files = build.files_for(build.target(cxx), build._knows(cxx, build._NEWER))
    for path, flags in files.items():
        command = [
            cxx,
            "-std=c++17",
            "-fsyntax-only",
            "-Wmissing-declarations",
            *flags,
            str(path),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        undeclared = [line for line in done.stderr.splitlines() if "no previous declaration" in line]
        assert [line for line in undeclared if "pl_" not in line and "std::" not in line] == []
