"""Only what pyproject.toml cannot say: the C++ extension is compiled during the build where a compiler is there."""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
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
    """Copies the package, then compiles the kernels into the copy (into the sources of an editable installation)."""

    def run(self):
        super().run()
        root = ROOT / "src" if self.editable_mode else Path(self.build_lib)
        try:
            KERNELS.build(root / "paceline" / "kernels")
        except KERNELS.BuildError as error:
            print(f"paceline: CPU kernels not built, the torch twin will run instead: {error}", file=sys.stderr)


class WithKernels(Distribution):
    """A wheel with a library in it fits one platform only."""

    def has_ext_modules(self):
        return KERNELS.compiler() is not None


setup(cmdclass={"build_py": BuildWithKernels}, distclass=WithKernels)
