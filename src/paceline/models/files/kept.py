"""Measurements cached on disk: small JSON files, each named by a hash of everything it depends on.

A file that cannot be read is measured again and replaced. Each kind is turned off by an environment variable.
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
from paceline.models.files.hub import cache_directory

log = logging.getLogger("paceline")
T = TypeVar("T")


def is_on(variable: str) -> bool:
    """Whether this environment variable is "on" (the default) rather than "off". Raises ParameterError."""
    choice = os.environ.get(variable) or "on"
    if choice not in ("on", "off"):
        raise ParameterError(variable, choice, "'on' or 'off'")
    return choice == "on"


@dataclass(frozen=True)
class CachedDocument(Generic[T]):
    """A JSON document in paceline's cache directory, which may not exist yet.

    kind: folder name and noun in messages, such as "costs".
    variable: environment variable that turns documents of this kind off.
    depends_on: JSON value of everything the measurement depends on. The file name is its hash.
    read: converts the parsed JSON. It may raise KeyError, TypeError or ValueError for a damaged document.
    """

    kind: str
    variable: str
    depends_on: Any
    read: Callable[[Any], T]

    @property
    def path(self) -> Path:
        """The path of the file, which may not exist."""
        digest = hashlib.sha256(json.dumps(self.depends_on).encode()).hexdigest()[:16]
        return cache_directory() / self.kind / f"{digest}.json"

    def load(self) -> T | None:
        """Read the document; None if there is no usable one. Warns if the file is damaged."""
        if not is_on(self.variable):
            return None
        try:
            found = self.read(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            log.warning("the cached %s in %s cannot be used (%r): measuring again", self.kind, self.path, error)
            return None
        log.info("%s read from %s", self.kind, self.path)
        return found

    def save(self, document: Any) -> None:
        """Write the document; warns if that is not possible."""
        if not is_on(self.variable):
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, json.dumps(document) + "\n")
        except OSError as error:
            log.warning("the %s could not be cached in %s: %s", self.kind, self.path, error)
