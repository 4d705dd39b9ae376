"""The data on disk: shards of conversations with the target's outputs, and the settings that they depend on.

A shard's content depends only on the settings and its number. It is written under a temporary name and then renamed,
so an existing file is complete. A run that was killed makes the missing shards again, bit for bit.
"""

from __future__ import annotations

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

from paceline.config.files import lock, write_text, written_whole
from paceline.errors import PacelineError, ParameterError
from paceline.tools.training.hidden_states import TargetOutputs

VERSION = 1
HELD_OUT = -1  # number of the shard that is used for evaluation only
_SCALAR_BYTES_PER_TOKEN = 12  # the token, the most likely next token, and the log-sum-exp: 4 bytes each


@dataclass(frozen=True)
class TrainingConversation:
    """A prompt with its answer.

    prompt: number of tokens before the answer. prompt_key: identifies the prompt, so that training does not use
    held-out ones.
    """

    tokens: list[int]
    prompt: int
    prompt_key: str


def bytes_of_token(width: int, taps: int) -> int:
    """Bytes of one token on disk. width: of the hidden states. taps: their number."""
    return 2 * width * (taps + 1) + _SCALAR_BYTES_PER_TOKEN


def path_of(directory: Path, number: int) -> Path:
    """The file of a shard."""
    return directory / ("held-out.safetensors" if number == HELD_OUT else f"train-{number:05}.safetensors")


class Shards:
    """A directory of shards.

    settings: everything that the shards depend on. resume: keep existing shards, whose settings have to be the same.
    Raises ParameterError if the directory has shards and ``resume`` is False, or if their settings differ.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.directory = directory
        check_settings(directory / "settings.json", {"version": VERSION, **settings}, resume=resume)
        for part in directory.glob(".*.part.safetensors"):  # left by a run that was killed while writing
            part.unlink()

    def path(self, number: int) -> Path:
        """The file of a shard."""
        return path_of(self.directory, number)

    def write(self, number: int, texts: Sequence[TrainingConversation], outputs: Sequence[TargetOutputs]) -> None:
        """Write a shard atomically: the texts, and the target's outputs for them in the same order."""
        tensors = {
            "tokens": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
            "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=torch.int32),
            "prompts": torch.tensor([text.prompt for text in texts], dtype=torch.int32),
            "features": torch.cat([output.features for output in outputs]),
            "hidden": torch.cat([output.hidden for output in outputs]),
            "best": torch.cat([output.best for output in outputs]),
            "norm": torch.cat([output.norm for output in outputs]),
        }
        prompt_keys = json.dumps([text.prompt_key for text in texts])
        with written_whole(self.path(number)) as part:
            save_file(tensors, part, metadata={"asked": prompt_keys})

    def open(self, number: int) -> Shard | None:
        """Open a shard; None if it has not been made yet. Raises PacelineError for a broken file."""
        return Shard(self.path(number)) if self.path(number).exists() else None


class Shard:
    """One shard. Hidden states are read from disk per conversation; the small tensors stay in memory.

    lengths, prompts: tokens of each conversation and of its prompt. prompt_keys: identifies each prompt.
    """

    def __init__(self, path: Path) -> None:
        try:
            opened: Any = safe_open(str(path), framework="pt")
            self._file = opened
            self.tokens, lengths, prompts, self.best, self.norm = (
                self._file.get_tensor(name) for name in ("tokens", "lengths", "prompts", "best", "norm")
            )
            self.prompt_keys: list[str] = json.loads(self._file.metadata()["asked"])
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
        """Read a conversation with the target's outputs."""
        start = self._starts[index]
        span = slice(start, start + self.lengths[index])
        features, hidden = (self._file.get_slice(name)[span] for name in ("features", "hidden"))
        prompt = self.prompts[index]
        return Example(self.tokens[span].long(), prompt, features, hidden, self.best[span].long(), self.norm[span])


@dataclass(frozen=True)
class Example:
    """A conversation of T tokens with the target's outputs.

    tokens, best [T] int64. prompt: number of tokens before the answer. features, hidden, norm: see ``TargetOutputs``.
    """

    tokens: Tensor
    prompt: int
    features: Tensor
    hidden: Tensor
    best: Tensor
    norm: Tensor


def check_settings(
    path: Path, wanted: Mapping[str, Any], *, resume: bool, before: Mapping[str, Any] | None = None
) -> None:
    """Write the settings to ``path``, or compare them with those of an earlier run.

    before: settings to assume for files that lack them because an older version wrote them.
    Raises ParameterError if the file exists and ``resume`` is False, or if a setting differs.
    """
    current = json.loads(json.dumps(wanted))
    if not path.exists():
        write_text(path, json.dumps(current, indent=1) + "\n")
        return
    if not resume:
        raise ParameterError("--output", str(path.parent), "a directory without an earlier run, or with --resume")
    try:
        saved = {**(before or {}), **json.loads(path.read_bytes())}
    except (ValueError, TypeError) as error:
        raise PacelineError(f"{path} is broken: take another directory ({error})") from error
    for name in dict.fromkeys((*current, *saved)):
        if saved.get(name) != current.get(name):
            begun = "without it" if saved.get(name) is None else f"with {saved[name]!r}"
            allowed = f"{path.parent} was begun {begun}: take that, or another directory"
            raise ParameterError(f"--resume: {name}", current.get(name), allowed)


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Lock a directory against other runs. The kernel releases the lock of a killed run.

    Raises ParameterError if another run has the lock.
    """
    with (directory / ".lock").open("w") as file:
        lock(file, "--output", directory, "a directory that no other run works in")
        yield
