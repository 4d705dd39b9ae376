"""Load damaged models one after the other: ``python -m hostile FOLDER PARTS LOADS [ONLY]``.

Prints one JSON line per load: how it ended, its message, and KiB of memory at its peak. ``PARTS`` are names with commas
between them. ``LOADS`` is "all", or "some": every fourth damage in one of its loads, which its name decides. ``ONLY``
is a part of the name of a case.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hostile import at_random, gguf_files, heads, stored
from hostile.cases import Case, Load
from paceline.errors import PacelineError

SECONDS = 60  # limit of one load on a busy machine; on an idle one it takes at most 6
MEMORY = 1 << 30  # bytes that a load may add to the address space

UNLIKE_OTHERS = ("masked_embedding.token_ordering: outside", "attention.head_count_kv=[2]")  # checks of their own

PARTS: dict[str, tuple[Callable[[], Iterator[Case]], ...]] = {
    "heads and adapters": (heads.apart, heads.stored, heads.adapters),
    "quantised safetensors": (stored.quantised,),
    "safetensors and configurations": (stored.shards, stored.plain, stored.configurations, stored.large),
    "GGUF": (gguf_files.keys_and_tensors, gguf_files.types, gguf_files.splits, gguf_files.large),
    "at random": (at_random.cases,),
}


def _status(field: str) -> int:
    """Return a field of the process's status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def outcome(load: Load, path: Path) -> dict[str, Any]:
    """Load within limits. Returns the end "loaded", "refused" or the name of another exception."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    resource.setrlimit(resource.RLIMIT_AS, ((_status("VmSize") << 10) + MEMORY, resource.RLIM_INFINITY))
    signal.alarm(SECONDS)
    found: dict[str, Any] = {"end": "loaded", "message": ""}
    try:
        load(path)
    except PacelineError as error:
        found = {"end": "refused", "error": type(error).__name__, "message": str(error)}
    except BaseException as error:  # noqa: BLE001  (any other exception is what the test looks for)
        found = {"end": type(error).__name__, "message": traceback.format_exc()[-1500:]}
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return found | {"kib": _status("VmHWM") - before}


def _hung(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main(folder: Path, parts: str, loads: str, only: str = "") -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _hung)
    cases = [case for part in parts.split(",") for some in PARTS[part] for case in some()]
    for number, case in enumerate(cases):
        name = f"{case.kind}: {case.what}"
        if only not in name or not (loads == "all" or number % 4 == 0 or case.what in UNLIKE_OTHERS):
            continue
        whole, place = folder / "whole" / case.kind, folder / "damaged" / case.kind
        if not whole.is_dir():
            whole.mkdir(parents=True)
            case.build(whole)
            for load in case.load:
                load(whole)  # also warms up the allocator
        shutil.rmtree(place.parent, ignore_errors=True)
        shutil.copytree(whole, place, symlinks=True)
        case.damage(place)
        size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file() and not file.is_symlink())
        told = {"case": name, "pattern": case.pattern, "place": str(place), "bytes": size}
        for load in case.load if loads == "all" else [random.Random(name).choice(case.load)]:
            print(json.dumps(told | {"by": load.__name__} | outcome(load, place)), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
