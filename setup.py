"""Only what pyproject.toml cannot say: the C++ kernels are compiled during the build where a compiler is there."""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def _load_build():
    """paceline.kernels.build without its package (torch may not be there yet)."""
    path = ROOT / "src" / "paceline" / "kernels" / "build.py"
    spec = importlib.util.spec_from_file_location("paceline_kernels_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KERNELS = _load_build()


class BuildWithKernels(build_py):
    """Copies the package, then compiles the kernels into the copy (of an editable installation: into the sources).

    Without a compiler the package is complete all the same: models run in torch, and the start line of every run
    says what is missing. A compiler that fails ends the installation on Linux: a mistake, not
    a choice. macOS and Windows are experimental: the package is installed without them.
    """

    def run(self):
        super().run()
        if obstacle := KERNELS.what_is_missing():
            print(f"paceline: CPU kernels not built, models will run in torch: {obstacle}", file=sys.stderr)
            return
        root = ROOT / "src" if self.editable_mode else Path(self.build_lib)
        try:
            KERNELS.build(root / "paceline" / "kernels")
        except KERNELS.BuildError as error:
            reason = f"paceline: the CPU kernels cannot be built (CXX= names another compiler):\n{error}"
            if sys.platform == "linux":
                sys.exit(reason)
            print(reason, file=sys.stderr)


class WithKernels(Distribution):
    """A wheel with a library in it fits one platform only."""

    def has_ext_modules(self):
        return KERNELS.compiler() is not None


class WheelForEveryPython(bdist_wheel):
    """ctypes loads the library, so it knows nothing of Python's own interface: one wheel serves them all.

    On Linux the wheel is for the kind of CPU that the compiler compiles for: CXX may name a cross compiler.
    """

    def get_tag(self):
        cxx = KERNELS.compiler() if sys.platform == "linux" else None
        return ("py3", "none", f"linux_{KERNELS.target(cxx)}" if cxx else super().get_tag()[2])


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForEveryPython},
    distclass=WithKernels,
)
