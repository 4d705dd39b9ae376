"""Waiting for conditions that other threads or processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds after which a wait fails; long, because the machine may be loaded


def wait_until(fact: Callable[[], object], what: str = "it never came about", seconds: float = PATIENCE) -> None:
    """Call ``fact`` repeatedly until it returns true. Fail with the message ``what`` after ``seconds``."""
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, what
        time.sleep(0.005)
