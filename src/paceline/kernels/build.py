"""Compiles ``csrc/*.cpp`` into the package: ``python -m paceline.kernels.build``.

Plain g++ (or $CXX), no torch headers, a few seconds. Imports only the standard library: setup.py loads this file.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIBRARY = "_native.so"  # on macOS and Windows, too: whatever its name, ctypes loads it by its path
PACKAGE = Path(__file__).resolve().parent
SOURCES = PACKAGE.parents[2] / "csrc"

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512_BW = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512 = (*_AVX512_BW, "-mavx512vnni")
_NEWER = ("-mamx-tile", "-mamx-int8", "-mamx-bf16", "-mavxvnni")
_NEWER_SOURCES = (
    "kernels_amx.cpp",
    "kernels_avxvnni.cpp",
)  # left out where the compiler does not know the instructions
# Each instruction set has its own file and flags; a kind of CPU has its own files, and the rest is for all.
_FLAGS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "sets_x86.cpp": (),
        "kernels_avx2.cpp": _AVX2,
        "kernels_avxvnni.cpp": (*_AVX2, "-mavxvnni"),
        "kernels_avxvnni_emulated.cpp": _AVX512,
        "kernels_avx512bw.cpp": _AVX512_BW,
        "kernels_avx512.cpp": _AVX512,
        "kernels_avx512bf16.cpp": (*_AVX512, "-mavx512bf16"),
        "kernels_amx.cpp": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        "kernels_amx_emulated.cpp": (*_AVX512, "-mavx512bf16"),
    },
    "aarch64": {
        "sets_arm.cpp": (),
        "kernels_dotprod.cpp": ("-march=armv8.2-a+dotprod",),
        "kernels_i8mm.cpp": ("-march=armv8.2-a+dotprod+i8mm+bf16",),
    },
}
# Systems, and their names for the kinds of CPU. macOS and Windows: cross compilers build the library, docs/install.md.
_MACHINES = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("win32", "AMD64")}
_INSTALL = {
    "linux": "install g++ (apt-get install g++, dnf install gcc-c++)",
    "darwin": "install Apple's command line tools (xcode-select --install)",
    "win32": "install clang++ of llvm-mingw (winget install MartinStorsjo.LLVM-MinGW.UCRT)",
}
# No -ffast-math and no contraction: bits must not depend on the optimiser. GCC 12 warns in its own headers.
_COMMON = (
    *("-std=c++17", "-O3", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"),
    *(
        "-Wall",
        "-Wextra",
        "-Wno-maybe-uninitialized",
        "-Wno-uninitialized",
        "-Wno-unused-function",
        "-Wno-ignored-attributes",
    ),
)


class BuildError(RuntimeError):
    """No compiler was found, or it failed; the message says which, and includes its output."""


def compiler() -> str | None:
    """Path of the C++ compiler: $CXX if set, else g++ or clang++; None if missing, or on an unsupported platform."""
    usual = ("clang++",) if sys.platform == "win32" else ("g++", "clang++")
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else usual
    return next(filter(None, map(shutil.which, wanted)), None) if _is_for_this_machine() else None


def target(cxx: str) -> str:
    """The kind of CPU that a compiler compiles for; a cross compiler's is another one. Raises BuildError if unknown."""
    triple = _triple(cxx)
    name = triple.partition("-")[0].replace("arm64", "aarch64")
    if name not in _FLAGS:
        raise BuildError(f"{cxx} compiles for {triple}, the kernels are for {' and '.join(_FLAGS)}")
    return name


def system_flags(cxx: str) -> tuple[str, ...]:
    """Flags by the system that a compiler compiles for. Raises BuildError for GCC on Windows.

    GCC leaves the stack of a Windows function aligned to 16 bytes, where vector registers may be stored with
    instructions that need more.
    """
    triple = _triple(cxx)
    if "mingw32" in triple:
        raise BuildError(f"{cxx} compiles for {triple}: GCC aligns no stack for AVX on Windows; {_INSTALL['win32']}")
    return ("-static",) if "windows" in triple else ("-fPIC",)


def _triple(cxx: str) -> str:
    return _run([cxx, "-dumpmachine"]).strip()


def what_is_missing() -> str:
    """Why ``compiler`` found none and what to do about it; empty if it found one."""
    if compiler() is not None:
        return ""
    if not _is_for_this_machine():
        supported = ", ".join(f"{system} on {machine}" for system, machine in sorted(_MACHINES))
        return f"the kernels are for {supported}; this is {sys.platform} on {platform.machine()}"
    if own := os.environ.get("CXX"):
        return f"there is no program CXX={own} (a name or a path, without flags)"
    return f"no C++ compiler found: {_INSTALL[sys.platform]} or set CXX"


def how_to_build() -> str:
    """Instructions for building or reinstalling the missing library."""
    obstacle = what_is_missing()
    if not _is_for_this_machine():
        return obstacle
    in_a_checkout = "python -m paceline.kernels.build"
    installed = "pip install --force-reinstall --no-deps --no-cache-dir --no-binary paceline paceline"
    command = in_a_checkout if source_hash() else installed
    return f"{obstacle}, then: {command}" if obstacle else command


def _is_for_this_machine() -> bool:
    return (sys.platform, platform.machine()) in _MACHINES


def directory() -> Path:
    """Where the library is; PACELINE_BUILD_DIR names another place than the package (a sanitised build)."""
    return Path(os.environ.get("PACELINE_BUILD_DIR") or PACKAGE)


def source_hash(sources: Path = SOURCES) -> str:
    """Digest of the C++ sources, to be compared with the one in a library; empty if there are no sources."""
    files = sorted(path for path in sources.glob("*") if path.suffix in (".cpp", ".h"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files))
    return digest.hexdigest()[:16] if files else ""


def files_for(machine: str, newer: bool, sources: Path = SOURCES) -> dict[Path, tuple[str, ...]]:
    """The C++ files for a kind of CPU, and the flags of each. Raises BuildError if there are none.

    machine: "x86_64" or "aarch64". newer: the compiler knows the instructions of AMX and AVX-VNNI.
    """
    flags = _FLAGS[machine]
    unwanted = {name for other in _FLAGS.values() for name in other} - flags.keys()
    unwanted.update(() if newer else _NEWER_SOURCES)
    files = sorted(path for path in sources.glob("*.cpp") if path.name not in unwanted)
    if not files:
        raise BuildError(f"no C++ sources in {sources}")
    # Definitions go to the files that use them, so that a compiler with a cache knows the others after an edit.
    defines = {"capi.cpp": (f'-DPL_SOURCE_HASH="{source_hash(sources)}"',)}
    defines |= {"sets_x86.cpp": ("-DPL_WITH_NEWER",)} if newer else {}
    return {path: (*flags.get(path.name, ()), *defines.get(path.name, ())) for path in files}


def compile_files(cxx: str, files: dict[Path, tuple[str, ...]], scratch: Path, extra: tuple[str, ...]) -> list[str]:
    """Compile the files with their flags and ``extra`` into ``scratch``; returns the objects. Raises BuildError."""

    def compile_one(source: Path) -> str:
        target = str(scratch / f"{source.stem}.o")
        _run([cxx, *_COMMON, *extra, *files[source], "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(compile_one, files))


def build(destination: Path = PACKAGE, sources: Path = SOURCES, extra: tuple[str, ...] = ()) -> Path:
    """Compile and link into ``destination``; returns the library's path. Raises BuildError."""
    cxx = compiler()
    if cxx is None:
        raise BuildError(what_is_missing())
    try:
        return _build(cxx, destination, sources, extra)
    except OSError as error:
        raise BuildError(f"{destination} cannot be written: {error}") from error


def _build(cxx: str, destination: Path, sources: Path, extra: tuple[str, ...]) -> Path:
    _run([sys.executable, str(sources / "bindings.py"), "--check"])
    machine = target(cxx)
    newer = machine == "x86_64" and _knows(cxx, _NEWER)
    files = files_for(machine, newer, sources)
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination, prefix=".build-") as scratch:
        extra = (*system_flags(cxx), *extra)
        objects = compile_files(cxx, files, Path(scratch), extra)
        made = Path(scratch, LIBRARY)
        # libstdc++ and libgcc are linked dynamically: torch brings them, and the static ones need a newer glibc.
        _run([cxx, "-shared", "-pthread", *extra, *objects, "-o", str(made)])
        return made.replace(destination / LIBRARY)  # atomic: a process that has loaded the old library keeps it


def _knows(cxx: str, flags: tuple[str, ...]) -> bool:
    """Whether the compiler and its assembler take these flags and their instructions."""
    program = (
        "#include <immintrin.h>\nvoid f() { _tile_dpbf16ps(0, 1, 2); _tile_dpbsud(0, 1, 2); }\n"
        "__m256i g(__m256i a) { return _mm256_dpbusd_avx_epi32(a, a, a); }"
    )
    command = [cxx, *flags, "-x", "c++", "-c", "-", "-o", os.devnull]
    with tempfile.TemporaryDirectory() as scratch:  # zig leaves a file there
        done = subprocess.run(command, input=program, cwd=scratch, capture_output=True, text=True, check=False)
    return done.returncode == 0


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)  # noqa: T201 (warnings of the compiler)
    return done.stdout


def main() -> None:
    """Build in place, after an update of what bindings.py writes; --sanitize builds for AddressSanitizer."""
    sanitize = "--sanitize" in sys.argv[1:]
    extra = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g", "-O1") if sanitize else ()
    try:
        _run([sys.executable, str(SOURCES / "bindings.py")])
        print(f"built {build(directory(), extra=extra)}")  # noqa: T201 (the command's answer)
    except BuildError as error:
        sys.exit(f"paceline's kernels were not built: {error}")


if __name__ == "__main__":
    main()
