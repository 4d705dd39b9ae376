"""Fingerprint of a model: a hash of its shape and of its files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from paceline.models.base import AnyModel
from paceline.models.files.gguf_names import parts

_SAMPLE = 1 << 20  # bytes hashed at a file's start, in its middle and at its end
_WEIGHTS = ("*.safetensors", "*.gguf")


def model_hash(model: AnyModel) -> str:
    """Return a hash of the model's shape and, if its name is a path, of samples of its weight files.

    The hash has 16 hexadecimal digits.
    """
    shape = (model.vocab_size, model.layers, model.kv_heads, model.head_dim, str(model.dtype), model.weight_bytes())
    digest = hashlib.sha256(repr(shape).encode())
    _add_samples(digest, Path(model.name))
    return digest.hexdigest()[:16]


def hash_of_files(path: Path) -> str:
    """Return a hash of samples of the weight files in a directory, or of a GGUF file: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    _add_samples(digest, path)
    return digest.hexdigest()


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    for file in _weight_files(path):
        size = file.stat().st_size
        with file.open("rb") as opened:
            for offset in (0, size // 2, max(0, size - _SAMPLE)):
                opened.seek(offset)
                digest.update(opened.read(_SAMPLE))


def is_from_files(model: AnyModel) -> bool:
    """Whether the model's name is the path of its weight files, so that ``model_hash`` covers them."""
    return bool(_weight_files(Path(model.name)))


def _weight_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for pattern in _WEIGHTS for file in path.glob(pattern))
    return parts(path) if path.is_file() else []
