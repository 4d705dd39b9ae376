"""The journal of an evaluation, one line per problem. A kill at any moment loses at most the problem in progress."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, ParameterError
from paceline.tools.evaluation.curves import Answer

VERSION = 1
ProblemAnswers = dict[str, list[Answer]]
"""The answers to one problem, by the configuration's name, such as "plain, n=4"."""


class Journal:
    """A file with a line of settings, then a line for each problem, flushed to disk as soon as the problem is done.

    settings: everything that the answers depend on. resume: continue an existing file with the same settings.
    Raises ParameterError if the file exists and ``resume`` is False, or if its settings differ.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self._path = path
        self.problems: dict[str, ProblemAnswers] = {}
        head = json.dumps({"version": VERSION, **settings})
        if not path.exists():
            self._append(head)
            return
        if not resume:
            raise ParameterError("--output", str(path.parent), "a directory without a journal, or with --resume")
        lines = self._whole_lines()
        if not lines:
            self._append(head)
            return
        _check_settings(lines[0], json.loads(head))
        for line in lines[1:]:
            self._take(line)

    def _whole_lines(self) -> list[str]:
        """All complete lines. An incomplete last line is removed from the file."""
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._path, len(whole))
        return whole.decode().splitlines()

    def _take(self, line: str) -> None:
        try:
            entry = json.loads(line)
            configurations = {
                name: [Answer(**answer) for answer in answers] for name, answers in entry["sides"].items()
            }
            self.problems[entry["task_id"]] = configurations
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PacelineError(f"{self._path} is no journal of an evaluation: take another directory") from error

    def add(self, task_id: str, configurations: ProblemAnswers) -> None:
        """Write the answers to a problem to disk."""
        self.problems[task_id] = configurations
        answers = {name: [asdict(answer) for answer in configuration] for name, configuration in configurations.items()}
        self._append(json.dumps({"task_id": task_id, "sides": answers}))

    def _append(self, line: str) -> None:
        with self._path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _check_settings(line: str, wanted: Mapping[str, Any]) -> None:
    try:
        saved = dict(json.loads(line))
    except (ValueError, TypeError):
        saved = {}
    for name in dict.fromkeys((*wanted, *saved)):
        if saved.get(name) != wanted.get(name):
            allowed = f"{saved.get(name)!r}, with which the journal was begun; or take another directory"
            raise ParameterError(f"--resume: {name}", wanted.get(name), allowed)
