"""Several callers of one engine: whoever has it plays a round for all, and each gets the news of his own requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from threading import Lock

from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Engine, Request


class SharedCall:
    """A caller's requests. Iterating gives each whenever it gained tokens or ended; leaving it aborts the others.

    outputs: of the requests, in their order. final: whether its caller asks for nothing more, and looks at no answer,
    before these have ended.
    """

    def __init__(self, shared: SharedEngine, final: bool) -> None:
        self._shared, self.final = shared, final
        self.outputs: list[RequestOutput] = []
        self.open: dict[str, RequestOutput] = {}
        self.news: dict[str, RequestOutput] = {}  # since they were last read

    def __enter__(self) -> SharedCall:
        return self

    def __exit__(self, *_: object) -> None:
        self._shared.leave(self)

    def __iter__(self) -> Iterator[RequestOutput]:
        """The last time that a request comes it is finished."""
        while self.open:
            for output in self._shared.news(self):
                if output.request_id not in self.open:
                    continue  # it ended while its caller looked at it
                if output.finished:
                    del self.open[output.request_id]
                yield output

    def tell(self, output: RequestOutput) -> None:
        """In the order in which they ended."""
        self.news.pop(output.request_id, None)
        self.news[output.request_id] = output

    def tell_ended(self) -> None:
        """What ended between two rounds."""
        for output in self.open.values():
            if output.finished:
                self.tell(output)


class SharedEngine:
    """An engine for several threads, and for several calls of one thread that are open at the same time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._next, self._held = Lock(), Lock()
        self._calls: dict[int, SharedCall] = {}
        self._callers: dict[str, SharedCall] = {}  # by request
        self._order: dict[str, int] = {}  # in which they were taken
        self._numbers = count()
        self._left: deque[SharedCall] = deque()

    def begin(self, requests: Sequence[Request], final: bool = False) -> SharedCall:
        """Queue requests: all of them, or none if one is refused, as ``Engine.add`` says."""
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
        """What gained tokens or ended; plays a round unless other callers' rounds have brought some already."""
        with self._turn():
            if not call.news:
                self._step(call)
            if not call.news:
                call.tell_ended()
            news, call.news = list(call.news.values()), {}
        return news

    def leave(self, call: SharedCall) -> None:
        """Its caller wants no more: abort what has not ended. Never waits, for the garbage collector may call it."""
        self._left.append(call)
        self._sweep_if_free()

    @contextmanager
    def turn(self) -> Iterator[Engine]:
        """The engine, alone, for something short: others' rounds wait."""
        with self._turn():
            yield self.engine

    def close(self) -> None:
        """End all calls."""
        with self._turn():
            self.engine.clear()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The engine, alone. Who waits for it gets it before who had it last: the one cannot keep the other out."""
        with self._next:
            self._held.acquire()
        try:
            self._sweep()
            yield
        finally:
            self._held.release()
            self._sweep_if_free()

    def _sweep_if_free(self) -> None:
        """Whoever has the engine sweeps when he gives it back."""
        while self._left and self._held.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._held.release()

    def _sweep(self) -> None:
        """Abort what nobody waits for."""
        while self._left:
            call = self._left.popleft()
            self._calls.pop(id(call), None)
            for output in call.outputs:
                self._callers.pop(output.request_id, None)
                self._order.pop(output.request_id, None)
                self.engine.abort(output.request_id)

    def _step(self, caller: SharedCall) -> None:
        """One round for all, if anybody needs one."""
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
        known = [output for output in changed if output.request_id in self._callers]
        for output in sorted(known, key=lambda output: self._order[output.request_id]):
            self._callers[output.request_id].tell(output)

    def _round_failed(self, caller: SharedCall, error: BaseException) -> None:
        """Its rows are lost. The exception is the caller's who played it; others read of it in their results."""
        reason = RuntimeError(f"a round that was played for several callers failed: {type(error).__name__}: {error}")
        for output in self.engine.clear_begun():
            if self._callers.get(output.request_id) is not caller:
                for answer in output.candidates:
                    if answer.finish_reason == "abort":
                        answer.finish_reason, answer.error = "error", reason
