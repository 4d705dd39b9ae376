"""What benches write into their JSON documents: runs made in parts, the engine's line, and sums over answers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import LLM
from paceline.core.outputs import CompletionOutput


def engine_line(llm: LLM) -> str:
    """What runs, with the names of files in place of this machine's paths."""
    return re.sub(r"(?<!\S)/\S*/", "", llm.engine.describe())


def sums(answers: Sequence[CompletionOutput]) -> dict[str, int]:
    """Tokens, rounds of a row, and draft tokens (verified, accepted) of all answers."""
    return {
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "rounds": sum(answer.metrics.rounds for answer in answers),
        "drafted": sum(answer.metrics.drafted for answer in answers),
        "accepted": sum(answer.metrics.accepted for answer in answers),
    }


class Parts:
    """The results by name in a JSON document, which is written anew whenever one is added.

    path: None keeps nothing. settings: what all parts have in common. Exits if earlier parts had other settings.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self._path, self._head = path, {"settings": dict(settings), **about}
        self.results: dict[str, Any] = {}
        if path is not None and path.exists():
            before = json.loads(path.read_text())
            if before["settings"] != self._head["settings"]:
                sys.exit(f"{path} was made with other settings: {before['settings']}")
            self.results = before["results"]

    def add(self, name: str, result: Mapping[str, Any]) -> None:
        """Add a result, or replace the one of this name."""
        self.results[name] = dict(result)
        if self._path is not None:
            self._path.write_text(json.dumps(self._head | {"results": self.results}) + "\n")
