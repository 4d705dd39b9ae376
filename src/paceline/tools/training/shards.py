"""The data on disk: files of conversations with what the target said about them, and what they were made with.

A shard is a function of the settings and its own number. It is written under another name and then renamed, so that a
file that is there is whole; a run that was killed makes the others again, bit for bit.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.config.files import write_text, written_whole
from paceline.errors import PacelineError, ParameterError
from paceline.tools.training.hidden_states import TargetOutputs

VERSION = 1
HELD_OUT = -1  # the number of the shard that nothing is learnt from
_NUMBERS_OF_A_TOKEN = 12  # bytes: the token, the likeliest next one, the distribution's norm


@dataclass(frozen=True)
class Conversation:
    """A conversation. prompt: how many of its tokens the answer stands behind. asked: what for, to tell texts apart."""

    tokens: list[int]
    prompt: int
    asked: str


def bytes_of_token(width: int, taps: int) -> int:
    """What a token takes on disk."""
    return 2 * width * (taps + 1) + _NUMBERS_OF_A_TOKEN


def path_of(directory: Path, number: int) -> Path:
    """Of a shard."""
    return directory / ("held-out.safetensors" if number == HELD_OUT else f"train-{number:05}.safetensors")


class Shards:
    """A directory of shards. settings: whatever they depend on.

    resume: go on with what is there; its settings must be the same. Raises ParameterError where something is there and
    ``resume`` is not wanted, or where it was made with other settings.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.directory = directory
        check_settings(directory / "settings.json", {"version": VERSION, **settings}, resume=resume)
        for part in directory.glob(".*.part.safetensors"):  # what a run left that was killed while it wrote
            part.unlink()

    def path(self, number: int) -> Path:
        """Of a shard."""
        return path_of(self.directory, number)

    def write(self, number: int, texts: Sequence[Conversation], readings: Sequence[TargetOutputs]) -> None:
        """The texts and what was read of them, in the same order; the file whole, or none."""
        tensors = {
            "tokens": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
            "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=torch.int32),
            "prompts": torch.tensor([text.prompt for text in texts], dtype=torch.int32),
            "features": torch.cat([reading.features for reading in readings]),
            "hidden": torch.cat([reading.hidden for reading in readings]),
            "best": torch.cat([reading.best for reading in readings]),
            "norm": torch.cat([reading.norm for reading in readings]),
        }
        asked = json.dumps([text.asked for text in texts])
        with written_whole(self.path(number)) as part:
            save_file(tensors, part, metadata={"asked": asked})

    def open(self, number: int) -> Shard | None:
        """None: it has not been made. Raises PacelineError for a broken file."""
        return Shard(self.path(number)) if self.path(number).exists() else None


class Shard:
    """A file, of which conversations are read one by one; the small tensors stay in memory."""

    def __init__(self, path: Path) -> None:
        try:
            opened: Any = safe_open(str(path), framework="pt")
            self._file = opened
            self.tokens, lengths, prompts, self.best, self.norm = (
                self._file.get_tensor(name) for name in ("tokens", "lengths", "prompts", "best", "norm")
            )
            self.asked: list[str] = json.loads(self._file.metadata()["asked"])
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise PacelineError(f"{path} is broken: remove it, and --resume makes it again ({error})") from error
        self.lengths: list[int] = lengths.tolist()
        self.prompts: list[int] = prompts.tolist()
        self._starts = (lengths.cumsum(0) - lengths).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def answer(self, index: int) -> Tensor:
        """The tokens of a conversation's answer."""
        start = self._starts[index]
        answer: Tensor = self.tokens[start + self.prompts[index] : start + self.lengths[index]]
        return answer

    def read(self, index: int) -> Example:
        """A conversation with all that is known of it."""
        start = self._starts[index]
        place = slice(start, start + self.lengths[index])
        features, hidden = (self._file.get_slice(name)[place] for name in ("features", "hidden"))
        prompt = self.prompts[index]
        return Example(self.tokens[place].long(), prompt, features, hidden, self.best[place].long(), self.norm[place])


@dataclass(frozen=True)
class Example:
    """A conversation of T tokens. The fields are those of ``Text`` and ``TargetOutputs``; tokens and best in int64."""

    tokens: Tensor
    prompt: int
    features: Tensor
    hidden: Tensor
    best: Tensor
    norm: Tensor


def check_settings(
    path: Path, wanted: Mapping[str, Any], *, resume: bool, before: Mapping[str, Any] | None = None
) -> None:
    """Write the settings down, or see that those written down are the same. Raises ParameterError.

    before: what holds in files that were written before there were such settings.
    """
    here = json.loads(json.dumps(wanted))
    if not path.exists():
        write_text(path, json.dumps(here, indent=1) + "\n")
        return
    if not resume:
        raise ParameterError("--output", str(path.parent), "a directory without an earlier run, or with --resume")
    try:
        kept = {**(before or {}), **json.loads(path.read_bytes())}
    except (ValueError, TypeError) as error:
        raise PacelineError(f"{path} is broken: take another directory ({error})") from error
    for name in dict.fromkeys((*here, *kept)):
        if kept.get(name) != here.get(name):
            begun = "without it" if kept.get(name) is None else f"with {kept[name]!r}"
            allowed = f"{path.parent} was begun {begun}: take that, or another directory"
            raise ParameterError(f"--resume: {name}", here.get(name), allowed)


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Nobody else works in a directory; a killed run holds it no more. Raises ParameterError."""
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ParameterError("--output", str(directory), "a directory that no other run works in") from error
        yield
