"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():  # before anything imports triton: its kernels then run on the CPU, slowly
    os.environ.setdefault("TRITON_INTERPRET", "1")

os.environ["PACELINE_PACKED_CACHE"] = "off"  # tests write nothing into the user's own cache

from paceline.kernels import drawing

# A shared machine may stall any example for a while; pytest-timeout still ends what hangs.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")


@pytest.fixture(autouse=True)
def _kernels_are_chosen_anew() -> Iterator[None]:
    """A process asks its environment once which kernels draw; a test that changes the environment means it."""
    drawing.chosen.cache_clear()
    yield
    drawing.chosen.cache_clear()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
