"""A rank other than 0, as a process: ``python -m paceline.models.parallel.rank JSON``, started by rank 0.

It ends when rank 0 does, for any reason: its standard input is a pipe that the kernel then closes.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import threading
from pathlib import Path

_LOOK = 0.5  # seconds between two checks of the parent: another process may hold the pipe open


def end_with(parent: int, directory: Path) -> threading.Thread:
    """Start a thread that ends this process when its parent ends, and removes the directory."""

    def wait() -> None:
        if sys.platform == "win32":  # where select takes only sockets, and a job object ends this process, too
            sys.stdin.read()
        else:
            while not select.select([sys.stdin], [], [], _LOOK)[0] and os.getppid() == parent:
                pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)

    watching = threading.Thread(target=wait, daemon=True)
    watching.start()
    return watching


def main() -> None:
    """Run a rank. The argument: store, rank, ranks, parent."""
    instructions = json.loads(sys.argv[1])
    path = Path(instructions["store"])
    watching = end_with(instructions["parent"], path.parent)

    from torch._C._distributed_c10d import FileStore

    from paceline.models.description.shards import ModelShard
    from paceline.models.parallel.launch import serve

    try:
        serve(FileStore(str(path), instructions["ranks"]), ModelShard(instructions["rank"], instructions["ranks"]))
    except RuntimeError:  # gloo's broken connection: no error if rank 0 is gone
        watching.join(_LOOK)
        raise


if __name__ == "__main__":
    main()
