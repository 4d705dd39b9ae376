"""The answers that n-gram lookup copies from, in a file: they survive a restart.

A file has tokens and hashes of scopes, and is read by engines of the same model files and tokenizer. Whatever it has,
it changes the speed of answers only: its tokens become draft tokens, which the target verifies.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.files import try_lock
from paceline.drafters.answers import AnswerTexts
from paceline.engine.private_files import UNFINISHED, check_directory, content_of, remove, store
from paceline.engine.tensor_file import MAX_HEADER, DamagedFileError, decoded, encoded
from paceline.errors import ParameterError

log = logging.getLogger("paceline")

_OPTION = "lookup_dir"
_VERSION = 1  # of the tensors' names and meaning
_SUFFIX, _LOCK = ".answers", ".lock"
_INTERVAL = 300.0  # seconds between two writes while answers end: what a crash loses
_HASH_BYTES = 32  # of a scope
_BYTES_PER_TOKEN = 4 + 8 + 8 + _HASH_BYTES  # at most, where each token is an answer of a scope of its own
_TENSORS = {  # dtype and number of dimensions
    "tokens": (torch.int32, 1),  # [T], answers end to end, those of a scope together, the oldest first
    "sizes": (torch.int64, 1),  # [N], tokens of each answer
    "scopes": (torch.uint8, 2),  # [S, 32], SHA-256 of each scope; the latest used is last
    "answers": (torch.int64, 1),  # [S], number of answers of each scope
}


class AnswerFile:
    """The file of one engine's answers. It is read at once, and written by ``close`` and every few minutes.

    directory: is made if there is none, for the owner alone. Engines that run at a time have a file each.
    fingerprint: the model and the tokenizer that the tokens are of. vocab_size: the model's.

    Raises ParameterError if the directory cannot be used, or others may write to it.
    """

    def __init__(self, directory: Path, fingerprint: str, answers: AnswerTexts, vocab_size: int) -> None:
        check_directory(_OPTION, directory)
        self._fingerprint = hashlib.sha256(f"{_VERSION} {fingerprint}".encode()).hexdigest()
        self._answers, self._vocab_size = answers, vocab_size
        self._path, lock = self._unused(directory)
        self._unlock = weakref.finalize(self, lock.close)  # also where an engine is not closed
        remove(self._path.with_name(self._path.name + UNFINISHED))  # of an engine that was killed
        self._writer = ThreadPoolExecutor(1, "answer writer")
        self._changed, self._written_at = False, time.monotonic()
        self._read()

    def _unused(self, directory: Path) -> tuple[Path, IO[bytes]]:
        """Return the first file that no other engine uses, and the open file that locks it."""
        for number in count():
            path = directory / f"{self._fingerprint[:32]}-{number}{_SUFFIX}"
            lock = _open_lock(path.with_name(path.name + _LOCK))
            if try_lock(lock, _OPTION, directory):
                return path, lock
            lock.close()
        raise AssertionError("unreachable")

    def _read(self) -> None:
        """Add the file's answers to those in memory, the latest ones as far as they fit."""
        limit = MAX_HEADER + _BYTES_PER_TOKEN * self._answers.most
        try:
            header, tensors = decoded(content_of(self._path, limit))
            if header.metadata.get("fingerprint") != self._fingerprint:
                raise DamagedFileError("it is another file")
            added = list(_latest(tensors, self._answers.most, self._vocab_size))
        except FileNotFoundError:
            return
        except Exception as error:  # noqa: BLE001 (a hostile file may fail in any way)
            log.warning("the answers in %s are not used, and will be replaced: %s", self._path, error)
            return
        for scope, answers in added:
            self._answers.add(scope, answers)
        log.info("read %d tokens of earlier answers from %s", self._answers.held, self._path)

    def answer_ended(self) -> None:
        """Note that there is a new answer. Every few minutes all are written, in another thread."""
        self._changed = True
        if time.monotonic() - self._written_at >= _INTERVAL:
            self._begin_write()

    def _begin_write(self) -> None:
        self._changed, self._written_at = False, time.monotonic()
        self._writer.submit(self._write, _tensors(self._answers))

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the file. An error of the system is logged."""
        try:
            parts = encoded(tensors, {"fingerprint": self._fingerprint})
            store(self._path.parent, self._path.name, parts, time.time())
        except OSError as error:
            log.warning("answers could not be written to %s: %s", self._path, error)

    def clear(self) -> None:
        """Remove the file. Answers that are held in memory are written again."""
        self._changed = False
        self._writer.submit(remove, self._path).result()

    def close(self) -> None:
        """Write what has changed, and leave the file to other engines."""
        if self._changed:
            self._begin_write()
        self._writer.shutdown()
        self._unlock()


def _open_lock(path: Path) -> IO[bytes]:
    """Open a file to lock, and no link; it is made for the owner alone. Raises ParameterError."""
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600), "r+b")
    except OSError as error:
        raise ParameterError(_OPTION, str(path.parent), f"a directory that can be written to ({error})") from error


def _tensors(answers: AnswerTexts) -> dict[str, Tensor]:
    """A copy of all answers that requests share, as ``_TENSORS`` says."""
    contents = {scope: texts for scope, texts in answers.shared().items() if len(texts.tokens) > 0}
    sizes = [texts.sizes[texts.sizes > 0] for texts in contents.values()]
    scopes = np.frombuffer(b"".join(contents), np.uint8).reshape(-1, _HASH_BYTES)
    arrays: dict[str, NDArray[np.generic]] = {
        "tokens": np.concatenate([np.empty(0, np.int32), *(texts.tokens for texts in contents.values())]),
        "sizes": np.concatenate([np.empty(0, np.int64), *sizes]),
        "scopes": scopes.copy(),
        "answers": np.array([len(each) for each in sizes], np.int64),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _latest(tensors: Mapping[str, Tensor], most: int, vocab_size: int) -> Iterator[tuple[bytes, list[list[int]]]]:
    """Yield each scope's answers, of all together the latest with at most ``most`` tokens.

    Raises DamagedFileError unless the tensors are what ``_tensors`` returns.
    """
    for name, (dtype, dimensions) in _TENSORS.items():
        if name not in tensors or tensors[name].dtype != dtype or tensors[name].dim() != dimensions:
            raise DamagedFileError(f"it has no {name}")
    tokens, sizes, scopes, answers = (tensors[name].numpy() for name in _TENSORS)
    if not (_divides(sizes, len(tokens)) and _divides(answers, len(sizes)) and scopes.shape == (len(answers), 32)):
        raise DamagedFileError("its sizes are wrong")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise DamagedFileError("its tokens are outside the vocabulary")
    stops, ends = sizes.cumsum(), answers.cumsum()
    first = np.count_nonzero(len(tokens) - (stops - sizes) > most)  # earlier answers do not fit
    for scope, end, number in zip(scopes, ends, answers, strict=True):
        kept = range(max(first, end - number), end)
        if kept:
            yield scope.tobytes(), [tokens[stops[at] - sizes[at] : stops[at]].tolist() for at in kept]


def _divides(sizes: NDArray[np.int64], total: int) -> bool:
    """Whether sizes above 0 add up to ``total``. None exceeds it, so that their sum does not overflow."""
    return len(sizes) == 0 == total or bool(0 < sizes.min() <= sizes.max() <= total == sizes.sum())
