"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds; it only ends what hangs: a loaded machine may take its time


def wait_until(fact: Callable[[], object], what: str = "it never came about", seconds: float = PATIENCE) -> None:
    """Returns as soon as ``fact`` holds. It is asked again and again: it may look at what others change meanwhile."""
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, what
        time.sleep(0.005)
