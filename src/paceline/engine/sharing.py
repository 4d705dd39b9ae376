"""Shares one engine between several callers.

A caller that holds the engine runs a round for all. Each caller gets the results of its own requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import Lock

from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Engine, Request


class SharedCall:
    """One caller's requests. Iterating yields changed results; leaving aborts unfinished requests.

    outputs: results of the requests, in their order.
    open: results that have not been yielded as finished, by request_id.
    final: whether the caller sends no more requests, and reads no results, before these have ended.
    """

    def __init__(self, shared: SharedEngine, final: bool) -> None:
        self._shared, self.final = shared, final
        self.outputs: list[RequestOutput] = []
        self.open: dict[str, RequestOutput] = {}
        self.news: dict[str, RequestOutput] = {}  # results that changed since they were last yielded

    def __enter__(self) -> SharedCall:
        return self

    def __exit__(self, *_: object) -> None:
        self._shared.leave(self)

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yield results that changed; each request's last item is finished."""
        while self.open:
            for output in self._shared.news(self):
                if output.request_id not in self.open:
                    continue  # it ended while its caller held this item
                if output.finished:
                    del self.open[output.request_id]
                yield output

    def tell(self, output: RequestOutput) -> None:
        """Record a changed result. Results are yielded in the order of their last change."""
        self.news.pop(output.request_id, None)
        self.news[output.request_id] = output

    def tell_ended(self) -> None:
        """Record results that ended between two rounds."""
        for output in self.open.values():
            if output.finished:
                self.tell(output)


class SharedEngine:
    """An engine for several threads, and for several open calls of one thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._queue, self._in_use = Lock(), Lock()
        self._calls: dict[int, SharedCall] = {}
        self._callers: dict[str, SharedCall] = {}  # by request_id
        self._order: dict[str, int] = {}  # by request_id, in the order of arrival
        self._numbers = count()
        self._left: deque[SharedCall] = deque()

    def begin(self, requests: Sequence[Request], final: bool = False) -> SharedCall:
        """Queue requests: all of them, or none if one is refused. Raises what ``Engine.add`` raises."""
        call = SharedCall(self, final)
        try:
            with self._turn():
                self._calls[id(call)] = call
                for request in requests:
                    self._take(call, self.engine.add(request))
        except BaseException:
            self.leave(call)
            raise
        return call

    def _take(self, call: SharedCall, output: RequestOutput) -> None:
        call.outputs.append(output)
        call.open[output.request_id] = output
        self._callers[output.request_id] = call
        self._order[output.request_id] = next(self._numbers)

    def news(self, call: SharedCall) -> list[RequestOutput]:
        """Return the call's changed results. Runs a round, unless rounds of other callers have changed some already."""
        with self._turn():
            if not call.news:
                self._step(call)
            if not call.news:
                call.tell_ended()
            news, call.news = list(call.news.values()), {}
        return news

    def leave(self, call: SharedCall) -> None:
        """Abort the call's unfinished requests. Never blocks, because the garbage collector may call it."""
        self._left.append(call)
        self._sweep_if_free()

    def close(self) -> None:
        """End all calls."""
        with self._turn():
            self.engine.clear()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Lock the engine. Two locks keep the order fair: a caller that waits comes before the last one to leave."""
        with self._queue:
            self._in_use.acquire()
        try:
            self._sweep()
            yield
        finally:
            self._in_use.release()
            self._sweep_if_free()

    def _sweep_if_free(self) -> None:
        """Abort requests of calls that were left, unless a caller holds the engine: it does so on release."""
        while self._left and self._in_use.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._in_use.release()

    def _sweep(self) -> None:
        """Abort the requests of calls that were left."""
        while self._left:
            call = self._left.popleft()
            self._calls.pop(id(call), None)
            for output in call.outputs:
                self._callers.pop(output.request_id, None)
                self._order.pop(output.request_id, None)
                self.engine.abort(output.request_id)

    def _step(self, caller: SharedCall) -> None:
        """Run one round for all callers, if the engine has requests."""
        if not self.engine.busy:
            return
        self.engine.scheduler.closed = caller.final and len(self._calls) == 1
        try:
            changed = self.engine.step()
        except BaseException as error:
            self._round_failed(caller, error)
            raise
        finally:
            self.engine.scheduler.closed = False
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
