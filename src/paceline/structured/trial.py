"""The engine's end of the process that tries out a grammar (trial_program.py)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from tempfile import TemporaryFile

from paceline.errors import StructureError
from paceline.structured import trial_program
from paceline.structured.limits import GrammarLimits

POLL = 0.05  # seconds


class GrammarLimitError(StructureError):
    """Following the structure takes more time or memory than it may."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the structure asked for is too much to follow: {why}")


def compile_cancelled() -> StructureError:
    """What ends the work on a structure whose request is over."""
    return StructureError("nobody waits for this structure any more")


def try_out(grammar: str, limits: GrammarLimits, stopped: Callable[[], bool]) -> None:
    """Raise StructureError if a grammar cannot be followed, GrammarLimitError if that takes too much."""
    told = json.dumps({**asdict(limits), "paths": [path for path in sys.path if path]})
    deadline = time.monotonic() + limits.compile_wall_seconds
    command = [sys.executable, "-I", "-S", trial_program.__file__, told]
    with TemporaryFile() as given:
        given.write(grammar.encode())
        given.seek(0)
        with subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            try:
                said = _said(process, deadline, stopped)
            finally:
                process.kill()
    if said is None or process.returncode == -signal.SIGPROF:
        raise GrammarLimitError(f"it takes more than the {limits.compile_cpu_seconds:g} s that are allowed")
    if not said:
        raise GrammarLimitError("it needs more memory than is allowed, or crashes")
    found = json.loads(said)
    check_compiled(found["compiling"])
    check_followed(found["following"])


def _said(process: subprocess.Popen[bytes], deadline: float, stopped: Callable[[], bool]) -> bytes | None:
    """All that a process writes; None if it does not end in time."""
    while True:
        try:
            return process.communicate(timeout=POLL)[0]
        except subprocess.TimeoutExpired:
            if stopped():
                raise compile_cancelled() from None
            if time.monotonic() > deadline:
                return None


def check_compiled(error: str) -> None:
    """Raise what llguidance says of a grammar that it does not compile, if it says anything."""
    if error:
        why = error.splitlines()[0].split("failed to compile JSON schema: ")[-1]
        raise StructureError(f"the structure asked for cannot be followed: {why[:300]}")


def check_followed(error: str) -> None:
    """Raise what llguidance says on its way through a grammar, if it says anything."""
    if error == "NoExtensionBias":
        raise StructureError("the structure asked for cannot be completed")
    if error:
        raise GrammarLimitError(error.splitlines()[0][:300])
