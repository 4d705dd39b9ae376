"""Values that one process of a test run computes for all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

_folders: list[Path] = []  # the run's own


def use_folder_of(factory: pytest.TempPathFactory) -> None:
    """Keep values in the run's temporary folder, which is the parent of those of pytest-xdist's processes."""
    own = factory.getbasetemp()
    _folders[:] = [own.parent if "PYTEST_XDIST_WORKER" in os.environ else own]


def folder() -> Path:
    """The run's own folder, the same for all processes of pytest-xdist."""
    return _folders[0]


def once(name: str, compute: Callable[[], Any]) -> Any:
    """Value of a function without arguments, as JSON gives it back. name: of the value, and of its file."""
    path = _folders[0] / f"{name}.json"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            path.write_text(json.dumps(compute()))
        return json.loads(path.read_text())
