"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# A shared machine may stall any example for a while; pytest-timeout still ends what hangs.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
