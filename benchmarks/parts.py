"""Runs that are made in parts: each part adds to the JSON document of those before."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
