"""Which model this is, by its shape and its files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from paceline.models.base import AnyModel

_SAMPLE = 1 << 20  # bytes hashed at a file's start, in its middle and at its end
_WEIGHTS = ("*.safetensors", "*.gguf")


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
