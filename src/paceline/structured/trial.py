"""Trial compilation of a grammar in a separate process (trial_program.py)."""

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

POLL_SECONDS = 0.05


class GrammarLimitError(StructureError):
    """The structure exceeds a limit of ``GrammarLimits``."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the requested structure is too much to follow: {reason}")


def compile_cancelled() -> StructureError:
    """The error that ends a compilation whose request has ended."""
    return StructureError("compilation cancelled: the request for this structure has ended")


def try_out(grammar: str, limits: GrammarLimits, stopped: Callable[[], bool]) -> None:
    """Compile a grammar in a separate process, and follow it for a few tokens.

    stopped: returns True once the request has ended. Raises GrammarLimitError if the grammar exceeds a limit, and
    StructureError if it cannot be followed, if the request has ended, or if the machine is too busy to tell.
    """
    settings = json.dumps({**asdict(limits), "paths": [path for path in sys.path if path]})
    deadline = time.monotonic() + limits.compile_wall_seconds
    command = [sys.executable, "-I", "-S", trial_program.__file__, settings]
    with TemporaryFile() as grammar_file:
        grammar_file.write(grammar.encode())
        grammar_file.seek(0)
        with subprocess.Popen(
            command, stdin=grammar_file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            try:
                output = _output_of(process, deadline, stopped)
            finally:
                process.kill()
    if output is None or process.returncode == -signal.SIGKILL:  # no fault of the grammar: it may be tried again
        raise StructureError("the requested structure could not be compiled: the machine is too busy; try again")
    if process.returncode == -signal.SIGPROF:
        raise GrammarLimitError(f"compiling it takes more than {limits.compile_cpu_seconds:g} s")
    if not output:
        raise GrammarLimitError("compiling it exceeds the memory limit, or crashes")
    errors = json.loads(output)
    check_compiled(errors["compiling"])
    check_followed(errors["following"])


def _output_of(process: subprocess.Popen[bytes], deadline: float, stopped: Callable[[], bool]) -> bytes | None:
    """The output of a process; None if it does not end before the deadline."""
    while True:
        try:
            return process.communicate(timeout=POLL_SECONDS)[0]
        except subprocess.TimeoutExpired:
            if stopped():
                raise compile_cancelled() from None
            if time.monotonic() > deadline:
                return None


def check_compiled(error: str) -> None:
    """Raise StructureError for a compilation error of llguidance. An empty text is no error."""
    if error:
        reason = error.splitlines()[0].split("failed to compile JSON schema: ")[-1]
        raise StructureError(f"the requested structure cannot be followed: {reason[:300]}")


def check_followed(error: str) -> None:
    """Raise for an error of llguidance while it follows a grammar. An empty text is no error.

    Raises StructureError if no token may follow, GrammarLimitError for any other error.
    """
    if error == "NoExtensionBias":
        raise StructureError("the requested structure cannot be completed")
    if error:
        raise GrammarLimitError(error.splitlines()[0][:300])
