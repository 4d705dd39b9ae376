"""The engine's thread. Only it touches the engine; the event loop sends commands and gets updates after each round."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal

from paceline.config import SamplingParams, ServerConfig
from paceline.config.ranges import check
from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Request
from paceline.engine.scoring import PooledStates
from paceline.engine.utilisation import arithmetic_of
from paceline.errors import PacelineError, RankError
from paceline.models.base import SharedModel
from paceline.progress import steps_with_bar
from paceline.server import errors
from paceline.server.admission import AdmissionTicket
from paceline.server.delta import Mailbox, MailboxItem, OutputCursor, Update
from paceline.server.metrics import Meter, TokenTimes

if TYPE_CHECKING:
    from paceline.engine.engine import Engine
    from paceline.llm import LLM

log = logging.getLogger("paceline.server")

State = Literal["loading", "warming up", "ready", "stalled", "stopped"]
_WARM_UP_TOKENS = 8  # per sequence
_PEAK_SECONDS = 0.05  # time to measure the processor's peak; a benchmark takes longer


@dataclass
class Submission:
    """A prompt submitted to the engine, with its admission and the mailbox for its updates.

    ticket: None for a text that is admitted together with others.
    streaming: deliver updates after every round instead of once at the end.
    output: the engine's output object, once the engine has accepted the request.
    """

    number: int
    request: Request
    ticket: AdmissionTicket | None
    inbox: Mailbox
    streaming: bool
    output: RequestOutput | None = None

    @property
    def made(self) -> int:
        """Tokens generated so far, over all sequences."""
        return 0 if self.output is None else sum(len(answer.token_ids) for answer in self.output.candidates)


@dataclass
class _LiveRequest:
    submission: Submission
    cursor: OutputCursor
    times: TokenTimes
    ended: int = 0  # number of finished sequences


Command = Callable[[], None]


class EngineService:
    """Runs an ``LLM``'s engine in its own thread.

    load: builds the LLM, in that thread. on_end: called in that thread if it ends with an error, which ``failure``
    holds. stall_timeout: seconds after which an unfinished step makes ``health`` "stalled". capture_seconds: time limit
    in seconds for capturing CUDA graphs at the start, as in ``ServerConfig``. Call the public methods from the event
    loop that called ``start``.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        meter: Meter,
        on_end: Callable[[], None] = lambda: None,
        stall_timeout: float = ServerConfig.stall_timeout,
        capture_seconds: float = ServerConfig.capture_seconds,
    ) -> None:
        self.state: State = "loading"
        self.failure: BaseException | None = None
        self.meter = meter
        self._load, self._on_end, self._stall_timeout = load, on_end, stall_timeout
        self._capture_seconds = capture_seconds
        self._step_began: float | None = None  # seconds on the clock of time.monotonic; None while idle
        meter.watch_steps(self.step_seconds)
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._live: dict[str, _LiveRequest] = {}
        self._llm: LLM | None = None
        self._engine: Engine | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- called in the event loop ------------------------------------------------

    def start(self) -> None:
        """Start the thread: it loads the model, warms up and serves. ``state`` shows its progress."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def llm(self) -> LLM:
        """The loaded model. Raises ApiError (503) until it is ready."""
        llm = self._llm  # the engine's thread lets it go when it ends
        if llm is None or self.state != "ready":
            raise errors.unavailable(f"the server is {self.state}", "not_ready")
        return llm

    @property
    def engine(self) -> Engine:
        """The engine, for the thread that runs it."""
        assert self._engine is not None, "the model is loaded first"
        return self._engine

    @property
    def is_loading(self) -> bool:
        return self.state in ("loading", "warming up")

    def step_seconds(self) -> float:
        """Seconds since the engine's current step began; 0 while it is idle."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def health(self) -> State:
        """``state``, or "stalled" if the current step takes too long."""
        if self.state == "ready" and self.step_seconds() > self._stall_timeout:
            return "stalled"
        return self.state

    def submit(self, submission: Submission) -> None:
        """Queue a prompt. Its ``request_id`` must be unique."""
        self._inbox.put(lambda: self._add(submission))

    def abort(self, request_id: str) -> None:
        """Free a request's rows before the next round. No further updates are delivered."""
        self._inbox.put(lambda: self._abort(request_id))

    def fail_all(self, error: errors.ApiError) -> None:
        """Fail all unfinished requests with ``error``."""
        self._inbox.put(lambda: self._fail_all(error))

    async def stop(self) -> None:
        """End the thread after the current round. Unfinished requests fail."""
        self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    # --- called in the engine's thread -------------------------------------------

    def _run(self) -> None:
        try:
            self._prepare()
            while not self._stopping:
                self._turn()
            self.engine.close()
        except BaseException as error:
            self.failure = error
            if not isinstance(error, PacelineError):
                log.exception("the engine's thread ended")
            self._fail_all(errors.unavailable("the engine has stopped", "engine_stopped"))
            self._on_end()
        finally:
            self.state, self._step_began = "stopped", None
            self._llm = self._engine = None

    def _prepare(self) -> None:
        self._llm = self._load()
        self._engine = self._llm.engine
        self.state = "warming up"
        log.info("%s", self.engine.describe())
        target = self.engine.models.target
        if isinstance(target, SharedModel):
            target.when_a_rank_ends(lambda: self._inbox.put(target.check))
        self._warm_up()
        self._capture_ahead()
        arithmetic = arithmetic_of(target, self.engine.threads, _PEAK_SECONDS)
        log.info("utilisation is relative to %s", arithmetic.peak)
        self.meter.set_arithmetic(arithmetic)
        self.meter.update_gauges(self.engine)
        gc.collect()  # takes about 0.2 s after loading: not during the first requests
        self.state = "ready"
        log.info("ready")

    def _warm_up(self) -> None:
        """Decode a short batch of full width, half of it greedy. Lazy initialization happens now, not in a request."""
        engine = self.engine
        tokens = max(1, min(_WARM_UP_TOKENS, engine.max_model_len - 2))
        for row in range(engine.config.rows):
            params = SamplingParams(
                temperature=row % 2, max_tokens=tokens, seed=row, ignore_eos=True, keep_prefix=False
            )
            prompt = [0] * min(2, engine.max_model_len - 1)
            reading = PooledStates(prompt) if engine.models.embeds_only else None
            engine.add(Request(prompt, params, reading=reading, only_read=reading is not None))
        while engine.busy:
            engine.step()

    def _capture_ahead(self) -> None:
        """Capture CUDA graphs.

        Called after the warm-up, which has allocated the memory for prefill. Raises ParameterError.
        """
        seconds = self._capture_seconds
        ahead = self.engine.capture_ahead(seconds, partial(steps_with_bar, what="capturing graphs"))
        if ahead is not None:
            log.info("%s", ahead)
            return
        allowed = "its default, because this engine does not run rounds as CUDA graphs"
        check(seconds in (0, ServerConfig.capture_seconds), "capture_seconds", seconds, allowed)

    def _turn(self) -> None:
        """Run all queued commands, then one round. Sleep while there is neither a command nor a request."""
        engine = self.engine
        idle = not engine.busy
        if idle:
            self._step_began = None
        commands = [self._inbox.get()] if idle else []
        while not self._inbox.empty():
            commands.append(self._inbox.get())
        self._step_began = time.monotonic()
        for command in commands:
            command()
        if engine.busy:
            self._round(engine)
        self.meter.update_gauges(engine)

    def _round(self, engine: Engine) -> None:
        try:
            changed = engine.step()
        except RankError:  # the engine cannot continue
            raise
        except Exception:
            log.exception("a round failed")
            self._fail([output.request_id for output in engine.clear_begun()], errors.round_failed())
            self.meter.round_failed()
            return
        self.meter.record_round(engine)
        self._deliver_round(changed)

    def _deliver_round(self, changed: Sequence[RequestOutput]) -> None:
        """Deliver all updates of a round in one call to the event loop.

        Admissions are released without waiting for clients.
        """
        live = [(each, output) for output in changed if (each := self._live.get(output.request_id)) is not None]
        ended = [
            (ticket, count)
            for each, output in live
            if (count := _newly_finished(each, output)) and (ticket := each.submission.ticket) is not None
        ]
        updates = [
            (each.submission, item) for each, output in live if (item := self._update_for(each, output)) is not None
        ]
        if updates or ended:
            self._deliver(updates, ended)

    def _update_for(self, live: _LiveRequest, output: RequestOutput) -> MailboxItem | None:
        self.meter.record_output(live.times, output)
        if output.finished:
            del self._live[output.request_id]
        elif not live.submission.streaming:
            return None
        if output.error is not None:
            return errors.failed(output.error)
        deltas = live.cursor.take_new() if live.submission.streaming else []
        return Update(live.submission.number, deltas, output if output.finished else None)

    def _deliver(
        self, updates: list[tuple[Submission, MailboxItem]], ended: Sequence[tuple[AdmissionTicket, int]] = ()
    ) -> None:
        def put() -> None:
            for ticket, count in ended:
                ticket.end(count)
            for submission, item in updates:
                if isinstance(item, errors.ApiError) and submission.ticket is not None:
                    submission.ticket.close()
                submission.inbox.put(item)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(put)

    def _add(self, submission: Submission) -> None:
        try:
            output = self.engine.add(submission.request)
        except Exception as error:
            if not isinstance(error, PacelineError):
                log.exception("the engine refused request %s", submission.request.request_id)
            self._deliver([(submission, errors.failed(error))])
            return
        submission.output = output
        self._live[output.request_id] = _LiveRequest(submission, OutputCursor(output), TokenTimes.of(output))

    def _abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self.engine.abort(request_id)

    def _fail(self, request_ids: Sequence[str], error: errors.ApiError) -> None:
        failed = [live for name in request_ids if (live := self._live.pop(name, None)) is not None]
        self._deliver([(live.submission, error) for live in failed])

    def _fail_all(self, error: errors.ApiError) -> None:
        names = list(self._live)
        for name in names:
            self.engine.abort(name)
        self._fail(names, error)

    def _stop(self) -> None:
        self._fail_all(errors.unavailable("the server is shutting down", "shutting_down"))
        self._stopping = True


def _newly_finished(live: _LiveRequest, output: RequestOutput) -> int:
    """Return how many sequences have finished since the last call."""
    before, live.ended = live.ended, sum(answer.finished for answer in output.candidates)
    return live.ended - before
