"""Compilation of structured outputs outside of the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.config import SamplingParams, StructuredOutputs
from paceline.core.rows import Constraint
from paceline.engine.chat import ChatPrompt
from paceline.engine.engine import Request
from paceline.errors import PacelineError, StructureError
from paceline.server import errors
from paceline.server.protocol import AnsweredRequest

if TYPE_CHECKING:
    from paceline.llm import LLM

ConstraintFactory = Callable[[], Constraint]


@dataclass(frozen=True)
class AnswerForm:
    """Required form of answers.

    structure: form of their text. chat: the conversation, with tools and thoughts. field: the request's name for
    ``structure``.
    """

    structure: StructuredOutputs | None = None
    chat: ChatPrompt | None = None
    field: str = "structured_outputs"

    @property
    def is_free(self) -> bool:
        """Whether any answer is allowed, so that nothing has to be compiled."""
        options = None if self.chat is None else self.chat.options
        return self.structure is None and (
            options is None or (not options.offered and options.max_thinking_tokens is None)
        )

    def compile(self, llm: LLM, params: SamplingParams, stopped: Callable[[], bool]) -> ConstraintFactory | None:
        """Return a factory for the constraint of one answer. Raises what ``RequestMaker.chat_constraint`` raises."""
        factory = None if self.chat is None else llm.requests.chat_constraint(self.chat, params, stopped)
        if factory is None and self.structure is not None:
            return llm.requests.structure(self.structure, stopped)
        return factory


def checked_params(
    body: AnsweredRequest, base: SamplingParams, left: int
) -> tuple[SamplingParams, StructuredOutputs | None]:
    """Return the parameters of a request, and the form of its answers, which fit together. Raises ParameterError.

    base, left: as in ``AnsweredRequest.sampling``.
    """
    params = body.sampling(base, left)
    return params, replace(params, structured_outputs=body.structure).structured_outputs


async def structured(llm: LLM, requests: Sequence[Request], form: AnswerForm) -> Sequence[Request]:
    """Return the requests with a compiled constraint for their answers. Raises ApiError.

    requests: with the same parameters and arrival. If their time budget ends before the compilation, they are returned
    unchanged: they get no token anyway. A budget that begins with a row has not begun.
    """
    if form.is_free:
        return requests
    first = requests[0]
    budget = None if first.budget_from_row else first.params.time_budget
    arrival = time.monotonic() if first.arrival is None else first.arrival
    try:
        async with asyncio.timeout(None if budget is None else arrival + budget - time.monotonic()):
            factory = await _compile(llm, form, first.params)
    except TimeoutError:
        return requests
    if factory is None:
        return requests
    return [
        replace(each, params=replace(each.params, structured_outputs=form.structure), make_constraint=factory)
        for each in requests
    ]


async def _compile(llm: LLM, form: AnswerForm, params: SamplingParams) -> ConstraintFactory | None:
    """Compile the constraint. Raises ApiError.

    A daemon thread waits for the compiling process. Cancelling this call stops the compilation.
    """
    given_up, loop = threading.Event(), asyncio.get_running_loop()
    found: asyncio.Future[ConstraintFactory | None] = loop.create_future()

    def deliver(factory: ConstraintFactory | None, error: Exception | None) -> None:
        if found.cancelled():
            return
        if error is not None:
            found.set_exception(error)
        else:
            found.set_result(factory)

    def wait() -> None:
        factory, error = None, None
        try:
            factory = form.compile(llm, params, given_up.is_set)
        except Exception as caught:  # noqa: BLE001 (re-raised by the awaiting coroutine)
            error = caught
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(deliver, factory, error)

    threading.Thread(target=wait, name="structure", daemon=True).start()
    try:
        return await found
    except StructureError as error:
        field = error.field or form.field
        raise errors.invalid(f"{field}: {error}", field) from error
    except PacelineError as error:
        raise errors.from_paceline(error) from error
    finally:
        given_up.set()
