"""A profile: what ``paceline profile`` measured, for which machine and which models it holds, and why it may not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ProfileError
from paceline.files import write_text
from paceline.hardware import cpu_name
from paceline.lengths.cost import CostTable
from paceline.models.base import AnyModel
from paceline.params import MAX_SPECULATION_LENGTH

FORMAT = "paceline-profile-1"
_SAMPLE = 1 << 20  # bytes hashed at a file's start, in its middle and at its end
_WEIGHTS = ("*.safetensors", "*.gguf")


@dataclass(frozen=True)
class Identity:
    """All that decides what a round costs and how many guesses are kept. Two that differ need two profiles."""

    machine: str
    device: str
    threads: int
    target: str
    drafter: str
    precision: str
    attention: str
    acceptance: str

    def differences(self, other: Identity) -> list[str]:
        """In words, profile (other) against here (self)."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name} is {mine[name]!r}, not {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]


def machine_name(device: torch.device) -> str:
    """The processor's or the GPU's own name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def model_hash(model: AnyModel) -> str:
    """Of the model's shape and, where its name is that of files, of samples of their bytes: 16 hexadecimal digits."""
    shape = (model.vocab_size, model.layers, model.kv_heads, model.head_dim, str(model.dtype), model.weight_bytes())
    digest = hashlib.sha256(repr(shape).encode())
    for file in _weight_files(Path(model.name)):
        size = file.stat().st_size
        with file.open("rb") as opened:
            for place in (0, size // 2, max(0, size - _SAMPLE)):
                opened.seek(place)
                digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()[:16]


def is_from_files(model: AnyModel) -> bool:
    """Whether the model's name is that of the files its weights came from, so that ``model_hash`` knows them."""
    return bool(_weight_files(Path(model.name)))


def _weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))
    return [path] if path.is_file() else []


@dataclass(frozen=True)
class SweepPoint:
    """One fixed length at one batch size, with real prompts; medians. ms_per_token: of a sequence.

    first_ms_per_token, last_ms_per_token: of the fastest and the slowest one; None in profiles that lack them.
    """

    batch_size: int
    k: int
    ms_per_token: float
    ms_per_round: float
    tokens_per_second: float
    mean_acceptance_length: float
    first_ms_per_token: float | None = None
    last_ms_per_token: float | None = None


@dataclass(frozen=True)
class Profile:
    """costs: for ``auto``. best: batch size to length, for ``profiled``. acceptance[j]: of guess j + 1, if asked."""

    identity: Identity
    costs: CostTable
    best: dict[int, int]
    acceptance: tuple[float, ...] = ()
    sweep: tuple[SweepPoint, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    source: str = "a profile"

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "identity": asdict(self.identity),
            "versions": self.versions,
            "best": {str(size): k for size, k in self.best.items()},
            "acceptance": list(self.acceptance),
            "sweep": [asdict(point) for point in self.sweep],
            "fit": self.fit,
            "costs": self.costs.as_json(),
        }

    def save(self, path: Path) -> None:
        write_text(path, json.dumps(self.as_json(), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Profile:
        """Raises ProfileError if there is no such file or it is no profile."""
        try:
            document = json.loads(path.read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ProfileError(f"cannot read the profile {path}: {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ProfileError(f"{path} is no profile of this version ({FORMAT}); make one with: paceline profile")
        try:
            profile = Profile(
                identity=Identity(**document["identity"]),
                costs=CostTable.from_json(document["costs"]),
                best={int(size): int(k) for size, k in document["best"].items()},
                acceptance=tuple(document["acceptance"]),
                sweep=tuple(SweepPoint(**point) for point in document["sweep"]),
                versions=document["versions"],
                fit=document["fit"],
                source=str(path),
            )
            _check_lengths(profile.best)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProfileError(f"the profile {path} is damaged: {error!r}; make it again: paceline profile") from error
        return profile

    def check(self, here: Identity) -> None:
        """Raise ProfileError unless the profile was measured on this machine with these models."""
        if differences := here.differences(self.identity):
            raise ProfileError(
                f"{self.source} was not measured for this: {'; '.join(differences)}; run: paceline profile"
            )


def _check_lengths(best: Mapping[int, int]) -> None:
    if not best or min(best) < 1 or not all(0 <= k <= MAX_SPECULATION_LENGTH for k in best.values()):
        raise ValueError(f"'best' needs a length from 0 to {MAX_SPECULATION_LENGTH} for one batch size or more")
