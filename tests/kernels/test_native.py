import subprocess
import sys

import pytest

from paceline.errors import ParameterError
from paceline.kernels import build, native

needs_extension = pytest.mark.skipif(not native.available(), reason=native.why_none())


def test_off_means_the_twin(monkeypatch):
    monkeypatch.setenv(native.VARIABLE, "off")
    assert native.select() is None


def test_an_unknown_choice_is_refused():
    with pytest.raises(ParameterError, match="one of auto"):
        native.select("neon")


@needs_extension
def test_the_variable_forces_an_instruction_set(monkeypatch):
    for kernels in native.available():
        choice = next(name for name, names in native.CHOICES.items() if name != "auto" and kernels.name in names)
        monkeypatch.setenv(native.VARIABLE, choice)
        chosen = native.select()
        assert chosen is not None
        assert chosen.name in native.CHOICES[choice]


def test_an_instruction_set_that_is_not_here_is_refused_not_replaced(monkeypatch):
    monkeypatch.setattr(native, "available", lambda: ())
    with pytest.raises(ParameterError, match="not available here"):
        native.select("avx512")
    assert native.select("auto") is None


def test_a_missing_library_is_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_BUILD_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(build.PACKAGE.parents[1]))
    script = "from paceline.kernels import native; print(native.available(), native.why_none())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("() the C++ extension is not built")


def test_without_a_compiler_the_build_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.build(tmp_path)


@needs_extension
def test_no_threads_are_refused():
    with pytest.raises(ParameterError, match="threads"):
        native.pool(native.available()[0], 0)


@needs_extension
def test_an_arena_knows_its_end():
    arena = native.Arena(native.available()[0].library, 200)
    assert arena.take(100).numel() == 100
    with pytest.raises(MemoryError):
        arena.take(100)
