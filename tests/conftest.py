"""Fixtures that several test files share."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings

if not torch.cuda.is_available():  # before anything imports triton: its kernels then run on the CPU, slowly
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ["PACELINE_PACKED_CACHE"] = "off"  # tests write nothing into the user's own cache
os.environ["PACELINE_COST_CACHE"] = "off"
os.environ["PACELINE_TILE_CACHE"] = "off"

from paceline.kernels import cpu

torch.set_num_threads(1)  # the tensors of tests are tiny: more threads only wait for each other

# A shared machine may stall any example for a while; pytest-timeout still ends what hangs.
# Reducing a slow example can take minutes: a failure shows the example as it was found; HYPOTHESIS_PROFILE=shrink
# reduces it.
settings.register_profile("paceline", deadline=None, phases=[phase for phase in Phase if phase is not Phase.shrink])
settings.register_profile("shrink", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "paceline"))


@pytest.fixture(autouse=True)
def _kernels_are_chosen_anew() -> Iterator[None]:
    """A process asks its environment once which kernels draw; a test that changes the environment means it."""
    cpu.chosen.cache_clear()
    yield
    cpu.chosen.cache_clear()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies by numpy, whose order of sums depends on the processor and on the tile's shape.

    With this it is that of the inner dimension, one product after the other: what tests that ask for equal bits need.
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
    """Nobody may speak to anybody, and nobody may have tried."""
    wanted: list[str] = []

    def refuse(what: str) -> Callable[..., None]:
        def attempt(*to: object, **_: object) -> None:
            wanted.append(f"{what}{to}")
            raise OSError("there is no network in this test")

        return attempt

    for owner, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
        monkeypatch.setattr(owner, name, refuse(name))
    monkeypatch.setattr(socket, "create_connection", refuse("create_connection"))
    yield
    assert wanted == []
