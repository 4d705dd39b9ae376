"""What was measured here once is kept in paceline's cache: small JSON files, each named by all that it depends on.

A file that cannot be read is measured and written anew. An environment variable turns each kind off.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from paceline.config.files import write_text
from paceline.errors import ParameterError
from paceline.models.hub import cache_directory

log = logging.getLogger("paceline")
T = TypeVar("T")


def is_on(variable: str) -> bool:
    """Whether this environment variable is "on", as it is unless somebody says otherwise. Raises ParameterError."""
    choice = os.environ.get(variable) or "on"
    if choice not in ("on", "off"):
        raise ParameterError(variable, choice, "'on' or 'off'")
    return choice == "on"


@dataclass(frozen=True)
class Kept(Generic[T]):
    """A document of a kind ("costs"), on disk (perhaps not yet).

    variable: the environment variable that turns such documents off. depends_on: all that it holds for, as JSON;
    another version has another name and is never read. read: what makes of it what is meant; it may raise KeyError,
    TypeError or ValueError.
    """

    kind: str
    variable: str
    depends_on: Any
    read: Callable[[Any], T]

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(self.depends_on).encode()).hexdigest()[:16]
        return cache_directory() / self.kind / f"{digest}.json"

    def load(self) -> T | None:
        """None if there is none that can be used."""
        if not is_on(self.variable):
            return None
        try:
            found = self.read(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            log.warning("the %s kept in %s cannot be used (%r): measuring anew", self.kind, self.path, error)
            return None
        log.info("%s read from %s", self.kind, self.path)
        return found

    def save(self, document: Any) -> None:
        """Keep it; warns if that is not possible."""
        if not is_on(self.variable):
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(document) + "\n")
        except OSError as error:
            log.warning("the %s are not kept in %s: %s", self.kind, self.path, error)
