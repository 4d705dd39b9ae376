"""A rank other than 0, as a process: ``python -m paceline.models.parallel.rank JSON``, started by rank 0.

It ends with rank 0, however that ends: its standard input is a pipe that the kernel closes then.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import threading
from pathlib import Path

_LOOK = 0.5  # seconds between two looks at who the parent is: somebody else may hold the pipe open


def end_with(parent: int, directory: Path) -> threading.Thread:
    """From now on this process ends when its parent does, and leaves nothing behind: in this thread."""

    def wait() -> None:
        while not select.select([sys.stdin], [], [], _LOOK)[0] and os.getppid() == parent:
            pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)

    watching = threading.Thread(target=wait, daemon=True)
    watching.start()
    return watching


def main() -> None:
    """The argument: store, rank, ranks, parent."""
    told = json.loads(sys.argv[1])
    path = Path(told["store"])
    watching = end_with(told["parent"], path.parent)

    from torch._C._distributed_c10d import FileStore

    from paceline.models.parallel.launch import serve
    from paceline.models.shares import Share

    try:
        serve(FileStore(str(path), told["ranks"]), Share(told["rank"], told["ranks"]))
    except RuntimeError:  # gloo's, where the connection broke: if rank 0 is gone there is nothing to complain of
        watching.join(_LOOK)
        raise


if __name__ == "__main__":
    main()
