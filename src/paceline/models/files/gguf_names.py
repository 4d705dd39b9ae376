"""Names of GGUF files: the parts of a split model, and the model in a directory."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.errors import ModelFormatError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def parts(path: Path) -> list[Path]:
    """Return the files of the model that ``path`` belongs to, in order. A model in one file has one part.

    Raises ModelFormatError if the name has an impossible number, or a part is missing.
    """
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    number, count = int(named["number"]), int(named["count"])
    if not 1 <= number <= count:
        raise ModelFormatError(f"{path}: part {number} of {count} is impossible; the name is wrong")
    found = [path.with_name(f"{named['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if missing := [part.name for part in found if not part.is_file()]:
        raise ModelFormatError(f"{path} is one of {count} parts, and {_some(missing)} is missing; fetch it")
    return found


def _some(names: list[str]) -> str:
    """Return up to three of the names and the number of the others, for a message."""
    others = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    return ", ".join(names[:3]) + others


def gguf_in(directory: Path) -> Path | None:
    """Return the (first) file of the GGUF model in a directory; None if there is none.

    Raises ModelFormatError if there are several models, or a part of one is missing.
    """
    models = sorted({parts(path)[0] for path in directory.glob("*.gguf")})
    if len(models) > 1:
        names = _some([path.name for path in models])
        raise ModelFormatError(f"{directory} has {len(models)} GGUF models ({names}): name one of these files")
    return models[0] if models else None
