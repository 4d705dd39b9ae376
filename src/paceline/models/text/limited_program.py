"""What the subprocesses of limited_process.py share: their limits, and the loop that answers lines.

The first input line is JSON with the settings of the work and the limits. Each further line is answered by one line.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_USUAL_BYTES = 64 << 20  # address space of this process before the first line, with a margin
Answer = Callable[[str], dict[str, Any]]
"""Answers one line."""


def serve(make: Callable[[dict[str, Any]], Answer]) -> None:
    """Answer lines until the input ends, which a signal to the whole process group does not change.

    make: makes the work of the settings; called within the limits of the first line.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.stdin.readline())
    if settings["limits_itself"]:
        _limit_memory(settings["memory"])
    made: list[Answer] = []
    for line in sys.stdin:
        if settings["limits_itself"]:
            _limit_time(settings["seconds"])
        sys.stdout.write(json.dumps(_reply(make, made, settings, line)) + "\n")
        sys.stdout.flush()


def _reply(
    make: Callable[[dict[str, Any]], Answer], made: list[Answer], settings: dict[str, Any], line: str
) -> dict[str, Any]:
    """Answer a line. made: the work, empty before the first line."""
    try:
        if not made:
            made.append(make(settings))
        return made[0](line)
    except MemoryError:
        return {"error": f"it needs more than {settings['memory'] >> 20} MiB"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:  # noqa: BLE001  (the work is untrusted and may raise any exception)
        return {"error": f"{error}"[:1000] or type(error).__name__}


def _limit(kind: int, amount: int) -> None:
    """Set a soft limit, at most the hard limit of this process."""
    import resource  # Windows has none: there the parent has no limits set

    _, hard = resource.getrlimit(kind)
    amount = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(kind, (amount, hard))


def _limit_memory(additional_bytes: int) -> None:
    import resource

    usage = Path("/proc/self/statm")
    used = int(usage.read_text().split()[0]) * resource.getpagesize() if usage.exists() else _USUAL_BYTES
    _limit(resource.RLIMIT_AS, used + additional_bytes)
    _limit(resource.RLIMIT_CORE, 0)


def _limit_time(seconds: int) -> None:
    """Limit the CPU time from now on; the kernel kills the process when it is used up."""
    import resource

    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + seconds)
