"""Worker threads for slow work, which keep the event loop responsive."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from paceline.errors import PacelineError
from paceline.server import errors

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThread:
    """One thread that does work in the order in which it comes."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``work(*args, **kwargs)``. Errors that paceline raises become ApiError."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, functools.partial(work, *args, **kwargs))
        except PacelineError as error:
            raise errors.from_paceline(error) from error

    def close(self) -> None:
        """Stop the thread. Work that has not begun is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
