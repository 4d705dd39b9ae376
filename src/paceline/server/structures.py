"""Compilation of structured outputs outside of the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.config import StructuredOutputs
from paceline.core.rows import Constraint
from paceline.engine.engine import Request
from paceline.errors import PacelineError
from paceline.server import errors

if TYPE_CHECKING:
    from paceline.llm import LLM

ConstraintFactory = Callable[[], Constraint]


async def structured(
    llm: LLM, requests: Sequence[Request], structure: StructuredOutputs | None, arrival: float
) -> Sequence[Request]:
    """Return the requests with a compiled constraint for their answers. Raises ApiError.

    structure: the constraint, or None to return them unchanged. arrival: seconds on the clock of ``time.monotonic``.
    If the requests' time budget ends before the compilation, they are returned unchanged: they get no token anyway.
    """
    if structure is None:
        return requests
    budgets = [budget for each in requests if (budget := each.params.time_budget) is not None]
    try:
        async with asyncio.timeout(arrival + max(budgets) - time.monotonic() if budgets else None):
            factory = await _compile(llm, structure)
    except TimeoutError:
        return requests
    return [
        replace(each, params=replace(each.params, structured_outputs=structure), make_constraint=factory)
        for each in requests
    ]


async def _compile(llm: LLM, structure: StructuredOutputs) -> ConstraintFactory:
    """Compile the constraint. Raises ApiError.

    A daemon thread waits for the compiling process. Cancelling this call stops the compilation.
    """
    given_up, loop = threading.Event(), asyncio.get_running_loop()
    found: asyncio.Future[ConstraintFactory] = loop.create_future()

    def deliver(factory: ConstraintFactory | None, error: Exception | None) -> None:
        if found.cancelled():
            return
        if error is not None:
            found.set_exception(error)
        elif factory is not None:
            found.set_result(factory)

    def wait() -> None:
        factory, error = None, None
        try:
            factory = llm.structure(structure, given_up.is_set)
        except Exception as caught:  # noqa: BLE001 (re-raised by the awaiting coroutine)
            error = caught
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, factory, error)

    threading.Thread(target=wait, name="structure", daemon=True).start()
    try:
        return await found
    except PacelineError as error:
        raise errors.from_paceline(error) from error
    finally:
        given_up.set()
