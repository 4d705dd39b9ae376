"""Profiles: measured costs and best lengths, with the machine and models that they are valid for."""

from __future__ import annotations

import json
import operator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.config.files import write_text
from paceline.errors import ProfileError
from paceline.lengths.cost import CostTable

FORMAT = "paceline-profile-1"


@dataclass(frozen=True)
class Identity:
    """Everything that round times and acceptance depend on. A profile is valid for one identity only."""

    machine: str
    device: str
    threads: int
    target: str
    drafter: str
    precision: str
    attention: str
    acceptance: str

    def differences(self, other: Identity) -> list[str]:
        """Fields that differ, in words. self: this engine. other: the profile's."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name} is {mine[name]!r}, not {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]


@dataclass(frozen=True)
class Profile:
    """A measured profile.

    costs: round times, for ``auto``. best: from batch size to best length, for ``profiled``. source: its file.
    """

    identity: Identity
    costs: CostTable
    best: dict[int, int]
    source: str = "a profile"

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "identity": asdict(self.identity),
            "best": {str(size): k for size, k in self.best.items()},
            "costs": self.costs.as_json(),
        }

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(self.as_json(), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Profile:
        """Read a profile. Raises ProfileError if the file is missing, damaged or not a profile of this version."""
        try:
            document = json.loads(path.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ProfileError(f"cannot read the profile {path}: {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ProfileError(f"{path} is not a profile of this version ({FORMAT}); make one with: paceline profile")
        try:
            profile = Profile(
                identity=Identity(**document["identity"]),
                costs=CostTable.from_json(document["costs"]),
                best={int(size): operator.index(k) for size, k in document["best"].items()},
                source=str(path),
            )
            if not profile.best or min(profile.best) < 1:
                raise ValueError("'best' must map one batch size or more to lengths")
            if not all(0 <= k <= MAX_SPECULATION_LENGTH for k in profile.best.values()):
                raise ValueError(f"lengths are from 0 to {MAX_SPECULATION_LENGTH}")
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProfileError(
                f"the profile {path} is damaged: {error!r}; make a new one with: paceline profile"
            ) from error
        return profile

    def check(self, here: Identity) -> None:
        """Raise ProfileError unless the profile was measured for this identity."""
        if differences := here.differences(self.identity):
            raise ProfileError(
                f"{self.source} was not measured for this: {'; '.join(differences)}; run: paceline profile"
            )
