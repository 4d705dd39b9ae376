"""Rendering of a model's chat template, which is untrusted code: it runs in a subprocess with limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.core import child_limits
from paceline.core.child_limits import Watch, was_ended_by
from paceline.errors import RequestError
from paceline.models.files.boundary import brief

SECONDS = 5  # CPU time for one conversation
WALL_SECONDS = 60.0  # elapsed time for one conversation; more than SECONDS because the machine may be busy
MEMORY = 512 << 20  # bytes in addition to those of the idle process
CHARACTERS = 16 << 20  # length of the text of one conversation
_ROLES = ("system", "developer", "user", "assistant", "tool")  # which templates may leave out, as they choose
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_PROGRAM = Path(__file__).parent / "template_process.py"


class ChatTemplate:
    """Renders conversations as prompts.

    variables: variables that are set for every conversation (the special tokens).
    The subprocess starts with the first conversation and ends with this object. Thread-safe.
    """

    def __init__(self, template: str, variables: Mapping[str, str]) -> None:
        self._settings = {"template": template, "seconds": SECONDS, "memory": MEMORY, "characters": CHARACTERS}
        self._settings["limits_itself"] = child_limits.BY_KERNEL
        self._variables = dict(variables)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None) -> str:
        """Return the conversation as text, with the generation prompt appended.

        fields: further template variables; they override the defaults, such as ``add_generation_prompt``.
        Raises RequestError if the template fails or leaves out a message of a role that it does not know, or if
        ``fields`` cannot be encoded as JSON.
        """
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True, **self._variables}
        given = [self._with_known_role(_completed(message)) for message in messages]
        variables = defaults | dict(fields or {}) | {"messages": given}
        try:
            line = json.dumps(variables)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"its fields cannot be encoded as JSON: {brief(error)}") from error
        with self._lock:
            reply = self._exchange(line)
        if "error" in reply:
            raise RequestError(brief(reply["error"]))
        _check_roles(given, reply["text"])
        return reply["text"]

    def _with_known_role(self, message: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's role "developer" is its later name of "system", which most templates do not know."""
        later_name = message.get("role") == "developer" and "developer" not in str(self._settings["template"])
        return {**message, "role": "system"} if later_name else message

    def _exchange(self, line: str) -> dict[str, str]:
        known = self._process
        process = self._process = known if known is not None and known.poll() is None else self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(WALL_SECONDS, process.kill)
        timer.start()
        watch = Watch(process, MEMORY, SECONDS)
        try:
            with watch:
                process.stdin.write(line + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
        except OSError:  # the process has exited
            reply = ""
        except BaseException:  # an interrupt: the next conversation must not get this one's text
            self._process = None
            _end(process)
            raise
        finally:
            timer.cancel()
        if reply.endswith("\n"):
            return dict(json.loads(reply))
        self._process = None
        return {"error": _exit_reason(process, watch)}

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
    """Drop the fields that are None, and repeat the reasoning under each name that templates use, as transformers."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _THOUGHTS if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _check_roles(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise RequestError if the text lacks a message whose role is not among the usual ones."""
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES and isinstance(content, str) and content.strip() not in text:
            raise RequestError(f"it leaves out messages of the role {role!r}; use {', '.join(_ROLES)}")


def _exit_reason(process: subprocess.Popen[str], watch: Watch) -> str:
    with suppress(subprocess.TimeoutExpired):
        process.wait(1)
    _end(process)
    if watch.exceeded == "memory":
        return f"it needs more than {MEMORY >> 20} MiB"
    if watch.exceeded == "time" or was_ended_by(process, "SIGXCPU", "SIGKILL"):
        return f"it takes more than {SECONDS} seconds"
    return f"the process that renders it ended with status {process.returncode}"


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except OSError:  # buffered input can no longer be written
            continue
