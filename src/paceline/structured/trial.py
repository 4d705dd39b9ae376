"""Translation and trial compilation of a structure in a separate, limited process (trial_program.py)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile

from paceline import errors
from paceline.core import child_limits
from paceline.core.child_limits import CREATION_FLAGS, was_ended_by, watch
from paceline.errors import StructureError
from paceline.structured import trial_program
from paceline.structured.limits import GrammarLimits
from paceline.structured.trial_program import OWN_MEMORY_BYTES

POLL_SECONDS = 0.05


class GrammarLimitError(StructureError):
    """The structure exceeds a limit of ``GrammarLimits``."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the requested structure is too much to follow: {reason}")


class UndecidedError(StructureError):
    """Nothing is known about the structure: its request has ended, or the machine is too busy."""


def compile_cancelled() -> UndecidedError:
    """The error that ends a compilation whose request has ended."""
    return UndecidedError("compilation cancelled: the request for this structure has ended")


@dataclass(frozen=True)
class TrialJob:
    """A structure to be translated, and what the model's vocabulary has for it. See ``schemas.grammar_of``.

    kind: also "calls", with the text of a ``CallsStructure``.
    """

    kind: str
    text: str
    unspelled: Sequence[int]
    special: Mapping[str, int]


def try_out(job: TrialJob, limits: GrammarLimits, stopped: Callable[[], bool]) -> tuple[str, list[str]]:
    """Translate a structure in a separate process, compile it there, and follow it for a few tokens.

    stopped: returns True once the request has ended. Returns the grammar for the engine and notes on what it does not
    enforce. Raises GrammarLimitError if the structure exceeds a limit, StructureError if it cannot be followed,
    UndecidedError if the request has ended, or if the machine is too busy to tell.
    """
    package = str(Path(errors.__file__).parent.parent)
    paths = [package, *filter(None, sys.path)]
    settings = json.dumps({"limits": asdict(limits), "paths": paths, "limits_itself": child_limits.BY_KERNEL})
    deadline = time.monotonic() + limits.compile_wall_seconds
    command = [sys.executable, "-I", "-S", trial_program.__file__, settings]
    with TemporaryFile() as job_file:
        job_file.write(json.dumps(asdict(job)).encode())
        job_file.seek(0)
        with subprocess.Popen(
            command, stdin=job_file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, creationflags=CREATION_FLAGS
        ) as process:
            limited = watch(process, OWN_MEMORY_BYTES + limits.compile_memory_bytes, limits.compile_cpu_seconds)
            try:
                with limited:
                    output = _output_of(process, deadline, stopped)
            finally:
                process.kill()
    was_killed = was_ended_by(process, "SIGKILL") and not limited.exceeded
    if output is None or was_killed:  # no fault of the structure: it may be tried again
        raise UndecidedError("the requested structure could not be compiled: the machine is too busy; try again")
    if limited.exceeded == "time" or was_ended_by(process, "SIGPROF"):
        raise GrammarLimitError(f"compiling it takes more than {limits.compile_cpu_seconds:g} s")
    if not output:
        raise GrammarLimitError("compiling it exceeds the memory limit, or crashes")
    answer = json.loads(output)
    if "refused" in answer:
        raise StructureError(answer["refused"], answer["field"])
    check_compiled(answer["compiling"])
    check_followed(answer["following"])
    return answer["grammar"], answer["notes"]


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
