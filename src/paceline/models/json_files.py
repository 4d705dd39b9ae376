"""The JSON files of a model directory. Anybody may have written them: nothing in them may make us work without end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import ModelFormatError

FETCH_AGAIN = "fetch it again and compare its size"
LARGEST = 64 << 20  # bytes: the index of a model of some hundred thousand tensors has ten million

# Numbers of which libraries make lists and tensors before anybody compares them with the weights: key, the largest.
_LIMITS = (
    (re.compile(r"layers?$|depths?$|blocks$|stages$|cycles$|loops?$"), 4096),
    (re.compile(r"layer|head|expert|group|depth|codebook"), 1 << 16),
    (re.compile(r"size|dim|width|hidden|intermediate|ffn|n_embd|d_model|rank|n_inner|channels|num_labels"), 1 << 24),
)


def read_object(path: Path) -> dict[str, Any]:
    """The file's object; empty if there is no such file. Raises ModelFormatError."""
    if not path.is_file():
        return {}
    if path.stat().st_size > LARGEST:
        raise ModelFormatError(f"{path} has more than {LARGEST >> 20} MiB and cannot be what its name says")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ModelFormatError(f"{path} is nested too deeply; {FETCH_AGAIN}") from error
    except (ValueError, OSError) as error:
        raise ModelFormatError(f"{path} is broken ({error}); {FETCH_AGAIN}") from error
    if not isinstance(found, dict):
        raise ModelFormatError(f"{path} is broken (it holds no object); {FETCH_AGAIN}")
    return found


def read_configuration(path: Path) -> dict[str, Any]:
    """The configuration of a model, with no count or size that cannot be true. Raises ModelFormatError."""
    found = read_object(path)
    for key, value in _numbers(found):
        limit = next((limit for pattern, limit in _LIMITS if pattern.search(key)), None)
        if limit is not None and abs(value) > limit:
            raise ModelFormatError(f"{path}: {key}={value:.6g} cannot be true (at most {limit}); the file is broken")
    return found


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int | float]]:
    """Every number with the key that it stands under."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, key)
    elif isinstance(value, (int, float)):
        yield key, value
