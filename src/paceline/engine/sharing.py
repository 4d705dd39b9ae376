"""Shares one engine between several callers.

A caller that holds the engine runs a round for all. Each caller gets the results of its own requests.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from threading import RLock, get_ident

from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Engine, Request
from paceline.errors import PacelineError

log = logging.getLogger("paceline")

_CAPTURE_SECONDS = 10.0  # limit of captures before a call: all likely rounds of 16 rows take 6.5 (0.06 each)
_CAPTURE_SHARE = 0.001  # seconds of captures for each round that a call may need: a fifth of a fast round


class SharedCall:
    """One caller's requests. Entering queues them, iterating yields changed results, leaving aborts unfinished ones.

    Entering raises what ``Engine.add`` raises; then no request is queued.

    outputs: results of the requests, in their order.
    open: results that have not been yielded as finished, by request_id.
    final: whether the caller sends no more requests, and reads no results, before these have ended.
    """

    def __init__(self, shared: SharedEngine, requests: Sequence[Request], final: bool) -> None:
        self._shared, self.requests, self.final = shared, requests, final
        self.outputs: list[RequestOutput] = []
        self.open: dict[str, RequestOutput] = {}
        self.changed: dict[str, RequestOutput] = {}  # results that changed since they were last yielded

    def __enter__(self) -> SharedCall:
        try:
            self._shared.begin(self)
        except BaseException:
            self._shared.leave(self)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._shared.leave(self)

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yield results that changed; each request's last item is finished."""
        while self.open:
            for output in self._shared.poll(self):
                if output.request_id not in self.open:
                    continue  # it ended while its caller held this item
                if output.finished:
                    del self.open[output.request_id]
                yield output

    def tell(self, output: RequestOutput) -> None:
        """Record a changed result. Results are yielded in the order of their last change."""
        self.changed.pop(output.request_id, None)
        self.changed[output.request_id] = output

    def tell_ended(self) -> None:
        """Record results that ended between two rounds."""
        for output in self.open.values():
            if output.finished:
                self.tell(output)


class Turns:
    """A fair lock: a thread that waits comes before the last one to leave. No interrupt leaves it held.

    Ctrl-C may raise after any call and on entering any function, so also between taking a lock and a ``try`` behind it.
    Locks are therefore taken within the ``try``. An RLock knows its owner: releasing it gives back exactly what this
    thread has, and that call comes first in each ``finally``.
    """

    def __init__(self) -> None:
        self._queue, self._in_use = RLock(), RLock()
        self._holder: int | None = None  # thread whose work runs

    def run(self, work: Callable[[], None], wait: bool = True) -> bool:
        """Run ``work`` while no other thread's runs. Return whether it ran: never within other work of this thread.

        wait: whether to wait until no other thread's work runs; otherwise ``work`` does not run beside it.
        """
        thread = get_ident()
        if self._holder == thread:
            return False
        try:
            try:
                self._queue.acquire(wait)
                if not self._in_use.acquire(wait):
                    return False
            finally:
                try:  # noqa: SIM105 (entering contextlib's function would come before the release)
                    self._queue.release()
                except RuntimeError:  # this thread does not have it
                    pass
            self._holder = thread
            work()
        finally:
            if self._holder == thread:
                self._holder = None
            try:  # noqa: SIM105
                self._in_use.release()
            except RuntimeError:  # this thread does not have it
                pass
        return True


class SharedEngine:
    """An engine for several threads, and for several open calls of one thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._turns = Turns()
        self._calls: dict[int, SharedCall] = {}
        self._callers: dict[str, SharedCall] = {}  # by request_id
        self._order: dict[str, int] = {}  # by request_id, in the order of arrival
        self._numbers = count()
        self._left: deque[SharedCall] = deque()

    def call(self, requests: Sequence[Request], final: bool = False) -> SharedCall:
        """Return a call for ``with``, which queues the requests: all of them, or none if one is refused."""
        return SharedCall(self, requests, final)

    def begin(self, call: SharedCall) -> None:
        """Queue a call's requests. Raises what ``Engine.add`` raises; then those queued so far end when it is left."""

        def queue() -> None:
            if not self.engine.busy:
                self._capture_ahead(call.requests)
            self._calls[id(call)] = call
            for request in call.requests:
                call.outputs.append(self.engine.add(request))  # no interrupt comes between the two
            for output in call.outputs:
                call.open[output.request_id] = output
                self._callers[output.request_id] = call
                self._order[output.request_id] = next(self._numbers)

        self._turn(queue)

    def _capture_ahead(self, requests: Sequence[Request]) -> None:
        """Capture the rounds that the requests will need as CUDA graphs, for a part of the time that they will take."""
        rows = sum(request.params.n for request in requests)
        tokens = sum(request.params.n * request.params.max_tokens for request in requests)
        capacity = min(rows, self.engine.config.rows)
        if capacity:
            seconds = min(_CAPTURE_SECONDS, _CAPTURE_SHARE * tokens / capacity)
            if (ahead := self.engine.capture_ahead(seconds, rows=capacity)) is not None and ahead.captured:
                log.info("%s", ahead)

    def poll(self, call: SharedCall) -> list[RequestOutput]:
        """Return the results that changed since the last poll; run a round if there are none."""
        changed: list[RequestOutput] = []

        def take() -> None:
            if not call.changed:
                self._step(call)
            if not call.changed:
                call.tell_ended()
            changed.extend(call.changed.values())
            call.changed = {}

        self._turn(take)
        return changed

    def leave(self, call: SharedCall) -> None:
        """Abort the call's unfinished requests. Never blocks, because the garbage collector may call it."""
        self._left.append(call)
        self._sweep_if_free()

    def clear_answers(self) -> None:
        """See ``LLM.clear_answers``."""
        self._turn(self.engine.clear_answers)

    def close(self) -> None:
        """End all calls, and the engine."""
        self._turn(self.engine.close)

    def _turn(self, work: Callable[[], None]) -> None:
        """Run ``work`` while no other caller holds the engine. Raises PacelineError within a turn of this thread."""

        def sweep_and_work() -> None:
            self._sweep()
            work()

        try:
            ran = self._turns.run(sweep_and_work)
        finally:
            self._sweep_if_free()
        if not ran:
            raise PacelineError(
                "an LLM cannot be used by a function that its own rounds call, such as a logits processor: "
                "use it outside of that function, or use another LLM there"
            )

    def _sweep_if_free(self) -> None:
        """Abort requests of calls that were left, unless a caller holds the engine: it does so on release."""
        while self._left and self._turns.run(self._sweep, wait=False):
            pass

    def _sweep(self) -> None:
        """Abort the requests of calls that were left. A call is forgotten last, so that an interrupt loses none."""
        while self._left:
            call = self._left[0]
            self._calls.pop(id(call), None)
            for output in call.outputs:
                self._callers.pop(output.request_id, None)
                self._order.pop(output.request_id, None)
                self.engine.abort(output.request_id)
            self._left.popleft()

    def _step(self, caller: SharedCall) -> None:
        """Run one round for all callers, if the engine has requests."""
        if not self.engine.busy:
            return
        self.engine.expect(final=caller.final and len(self._calls) == 1)
        try:
            changed = self.engine.step()
        except BaseException as error:
            self._round_failed(caller, error)
            raise
        finally:
            self.engine.expect(final=False)
        owned = [output for output in changed if output.request_id in self._callers]
        for output in sorted(owned, key=lambda output: self._order[output.request_id]):
            self._callers[output.request_id].tell(output)

    def _round_failed(self, caller: SharedCall, error: BaseException) -> None:
        """End the requests that have a row. The caller that ran the round raises; others get the error as a result."""
        reason = RuntimeError(f"a round shared by several callers failed: {type(error).__name__}: {error}")
        for output in self.engine.clear_begun():
            if self._callers.get(output.request_id) is not caller:
                for answer in output.candidates:
                    if answer.finish_reason == "abort":
                        answer.finish_reason, answer.error = "error", reason
