"""A model's chat template. Anybody may have written it: it works in a process of its own, for so long and no longer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import RequestError
from paceline.models.boundary import brief

SECONDS = 5  # of the processor, for one conversation
WALL_SECONDS = 60.0  # a machine may be busy
MEMORY = 512 << 20  # bytes beyond the bare process
CHARACTERS = 16 << 20  # of the text of one conversation
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_PROGRAM = Path(__file__).parent / "template_process.py"


class ChatTemplate:
    """Makes prompts of conversations. variables: what every conversation's template may name (special tokens).

    Its process starts with the first conversation, and ends with this object. May be used by any thread.
    """

    def __init__(self, template: str, variables: Mapping[str, str]) -> None:
        self._settings = {"template": template, "seconds": SECONDS, "memory": MEMORY, "characters": CHARACTERS}
        self._variables = dict(variables)
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None) -> str:
        """The conversation as text, ready for the answer unless ``fields``, the template's others, say otherwise.

        Raises RequestError, also for fields that JSON cannot hold.
        """
        usual = {"tools": None, "documents": None, "add_generation_prompt": True, **self._variables}
        given = usual | dict(fields or {}) | {"messages": [_completed(message) for message in messages]}
        try:
            line = json.dumps(given)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"its fields have to be what JSON can hold: {brief(error)}") from error
        with self._turn:
            answer = self._ask(line)
        if "error" in answer:
            raise RequestError(brief(answer["error"]))
        return answer["text"]

    def _ask(self, line: str) -> dict[str, str]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(WALL_SECONDS, process.kill)
        watch.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:  # it has ended
            answer = ""
        finally:
            watch.cancel()
        if answer.endswith("\n"):
            return dict(json.loads(answer))
        self._process = None
        return {"error": _why_ended(process)}

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._settings) + "\n")
        return process


def _completed(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None, and what a model thought under all the names that templates know, as transformers does."""
    said = {name: value for name, value in message.items() if value is not None}
    thought = next((said[name] for name in _THOUGHTS if name in said), None)
    return said if thought is None else {"thinking": thought, **said, "reasoning_content": thought}


def _why_ended(process: subprocess.Popen[str]) -> str:
    try:
        status = process.wait(1)
    except subprocess.TimeoutExpired:
        status = 0
    _end(process)
    if -status in (signal.SIGXCPU, signal.SIGKILL):
        return f"it takes more than {SECONDS} seconds"
    return f"the process that renders it ended with status {status}"


def _end(process: subprocess.Popen[str]) -> None:
    """Whatever it is doing."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except OSError:  # what was still to be written
            continue
