"""Fixtures for several test files."""

from __future__ import annotations

import atexit
import gc
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings

if not torch.cuda.is_available():  # set before triton is imported: its kernels then run on the CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ["PACELINE_PACKED_CACHE"] = "off"  # tests must not write to the user's caches
os.environ["PACELINE_COST_CACHE"] = "off"
os.environ["PACELINE_TILE_CACHE"] = "off"

import typer.testing
from typer.main import get_command

import shared
from paceline.engine import utilisation
from paceline.kernels import cpu
from paceline.lengths.calibration import Grid
from paceline.models.files import hub
from paceline.structured import grammars
from paceline.structured.limits import GrammarLimits
from paceline.structured.translation import translation
from paceline.structured.trial import TrialJob

torch.set_num_threads(1)  # tensors in tests are too small for several threads
gc.disable()  # until all tests are collected, because none of their objects is garbage


def _few_runs(capacity: int, coarse: Callable[..., Grid] = Grid.coarse, **options: bool) -> Grid:
    """The least and the most rows and 0 and 3 draft tokens, each twice: an eighth of the runs of an engine's start."""
    grid = coarse(capacity, **options)
    sizes, lengths = {grid.batch_sizes[0], grid.batch_sizes[-1]}, grid.lengths[::2]
    return replace(grid, batch_sizes=tuple(sorted(sizes)), lengths=lengths, seconds=0.0, repeats=2)


# Else every call of a command builds all of them anew, for 25 ms.
typer.testing._get_command = cache(get_command)  # type: ignore[attr-defined]

# Measurements of the machine are short, because no test depends on how exact they are.
utilisation.arithmetic_of.__defaults__ = (0.0,)  # seconds, for each bench
utilisation._WIDTH = 64  # a product of the usual width takes 40 ms
Grid.coarse = staticmethod(_few_runs)  # type: ignore[method-assign,assignment]


def _hasten_tritons_interpreter() -> None:
    """Patch Triton's language once a process for each function, keep numpy's types by Triton's, compute sums once.

    By itself the interpreter patches the language at every call of a function from a kernel, a third of its time. In
    another third it computes sums and products again in 64 bits, for assertions that are off without ``debug``. A fifth
    of the rest is for shapes of blocks, which it makes anew for every value.
    """
    from triton.language import core
    from triton.runtime import interpreter

    patch, numpy_type = cache(interpreter._patch_lang), cache(interpreter._get_np_dtype)

    def patched(function: Callable[..., object]) -> object:
        patch(function)
        return interpreter._LangPatchScope()  # nothing to restore

    def numpy_type_of(triton_type: Any) -> np.dtype[Any]:
        return np.dtype(np.uint64) if triton_type.scalar.is_ptr() else numpy_type(triton_type.scalar)

    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[object, dict[str, Any]] = {}  # attributes of types by element and shape
    shapes: dict[str, dict[str, Any]] = {}  # attributes of tensors by name of the type

    def new_block(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    def new_tensor(self: Any, handle: Any, kind: Any) -> None:
        if kind.name not in shapes:
            make_tensor(self, handle, kind)
            shapes[kind.name] = vars(self)
        self.__dict__ = shapes[kind.name] | {"handle": handle}

    core.block_type.__init__, core.tensor.__init__ = new_block, new_tensor
    interpreter._patch_lang, interpreter._get_np_dtype = patched, numpy_type_of
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)


with suppress(ImportError):  # triton is not on every platform
    _hasten_tritons_interpreter()

# No deadline, because a shared machine may stall any example; pytest-timeout ends tests that hang.
# Shrinking a slow example can take minutes, so failures show the original one; HYPOTHESIS_PROFILE=shrink shrinks it.
settings.register_profile("paceline", deadline=None, phases=[phase for phase in Phase if phase is not Phase.shrink])
settings.register_profile("shrink", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "paceline"))


def pytest_collection_finish() -> None:
    """Exempt tests and modules from garbage collection: a full one, as every server's start has, took a second."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # else extension modules report leaks


@pytest.fixture(scope="session", autouse=True)
def _values_are_shared(tmp_path_factory: pytest.TempPathFactory) -> None:
    shared.use_folder_of(tmp_path_factory)


@pytest.fixture(autouse=True)
def _kernels_are_chosen_anew() -> Iterator[None]:
    """Clear the cached choice of kernels, so that tests can change the environment variables for it."""
    cpu.chosen.cache_clear()
    yield
    cpu.chosen.cache_clear()


@pytest.fixture
def caches_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep packed weights, costs and tiles for later tests, as users do: loading SmolLM2 takes half of the time."""
    folder = shared.folder() / "caches"
    folder.mkdir(exist_ok=True)
    for model in hub.cache_directory().glob("*.gguf"):
        with suppress(FileExistsError):
            (folder / model.name).symlink_to(model)
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    for name in ("PACKED", "COST", "TILE"):
        monkeypatch.setenv(f"PACELINE_{name}_CACHE", "on")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run the test with one torch thread; its tensors are too small for several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Translate structures in this process, without the trial in another one, which takes 0.1 s and has own tests."""

    def translated(job: TrialJob, limits: GrammarLimits, _stopped: object) -> tuple[str, Sequence[str]]:
        found = translation(limits=asdict(limits), **asdict(job))
        return found.grammar, found.notes

    monkeypatch.setattr(grammars, "try_out", translated)


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make products in Triton's interpreter add in the order of the inner dimension, for tests that compare bits.

    Without it the interpreter calls numpy, whose order of summation depends on the CPU and on the tile's shape.
    """
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="triton is not installed")

    def create_dot(self: object, a: Any, b: Any, d: Any, *_: object) -> Any:
        sums = np.zeros((a.data.shape[0], b.data.shape[1]), d.data.dtype)
        for k in range(a.data.shape[1]):
            sums += a.data[:, k : k + 1].astype(d.data.dtype) * b.data[k].astype(d.data.dtype)
        return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def no_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse network connections, and fail the test if one was attempted."""
    attempts: list[str] = []

    def refuse(what: str) -> Callable[..., None]:
        def attempt(*to: object, **_: object) -> None:
            attempts.append(f"{what}{to}")
            raise OSError("there is no network in this test")

        return attempt

    for owner, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
        monkeypatch.setattr(owner, name, refuse(name))
    monkeypatch.setattr(socket, "create_connection", refuse("create_connection"))
    yield
    assert attempts == []
