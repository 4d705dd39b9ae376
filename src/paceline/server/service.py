"""The engine's thread. It alone touches the engine; the event loop sends commands and gets its news once a round."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from tqdm import tqdm

from paceline.config import SamplingParams, ServerConfig
from paceline.config.ranges import check
from paceline.core.outputs import RequestOutput, TokenLogprob
from paceline.engine.engine import Request
from paceline.engine.scoring import ScoredText
from paceline.engine.utilisation import arithmetic_of
from paceline.errors import PacelineError, RankError
from paceline.models.base import SharedModel
from paceline.server import errors
from paceline.server.admission import Place
from paceline.server.delta import Growth, Update
from paceline.server.mailbox import Mailbox, News
from paceline.server.metrics import Meter, Pace

if TYPE_CHECKING:
    from paceline.llm import LLM

log = logging.getLogger("paceline.server")

State = Literal["loading", "warming up", "ready", "stalled", "stopped"]
_WARM_UP_TOKENS = 8
_PEAK_SECONDS = 0.05  # of measuring what the processor can do: a shorter look than a benchmark's


@dataclass
class Ticket:
    """A prompt to continue, its place in the queue and where its news go. streaming: every round's, else the end.

    output: what there is so far, once the engine has taken it.
    """

    number: int
    request: Request
    place: Place
    inbox: Mailbox
    streaming: bool
    output: RequestOutput | None = None

    @property
    def made(self) -> int:
        """Tokens of its answers so far."""
        return 0 if self.output is None else sum(len(answer.token_ids) for answer in self.output.candidates)


@dataclass
class _Live:
    ticket: Ticket
    growth: Growth
    pace: Pace
    ended: int = 0  # answers


Command = Callable[[], None]


@dataclass
class _Inbox:
    """Commands for the engine's thread, which sleeps while there are none and nothing is to be decoded."""

    commands: deque[Command] = field(default_factory=deque)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def put(self, command: Command) -> None:
        with self.arrived:
            self.commands.append(command)
            self.arrived.notify()

    def take(self, wait: bool) -> list[Command]:
        """All there are; ``wait`` for one if there is none."""
        with self.arrived:
            while wait and not self.commands:
                self.arrived.wait()
            commands = list(self.commands)
            self.commands.clear()
        return commands


class EngineService:
    """Runs an ``LLM``'s engine in a thread of its own.

    load: makes the LLM, in that thread. on_end: called there when the thread ends by itself, ``failure`` being set.
    stall_timeout: seconds after which a step that has not ended makes ``health`` "stalled".
    capture_seconds: what the start may take to capture rounds, as in ``ServerConfig``.
    The other methods are for the event loop that called ``start``.
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
        self._step_began: float | None = None  # on the clock of time.monotonic; None: nothing is to be done
        meter.watch_steps(self.step_seconds)
        self._inbox = _Inbox()
        self._live: dict[str, _Live] = {}
        self._scorings: dict[ScoredText, asyncio.Future[list[TokenLogprob]]] = {}
        self._llm: LLM | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- for the event loop ------------------------------------------------------

    def start(self) -> None:
        """Load, warm up, then serve; ``state`` says how far it is."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def llm(self) -> LLM:
        """Raises ApiError (503) until it is ready."""
        if self._llm is None or self.state != "ready":
            raise errors.unavailable(f"the server is {self.state}", "not_ready")
        return self._llm

    @property
    def is_loading(self) -> bool:
        return self.state in ("loading", "warming up")

    def step_seconds(self) -> float:
        """How long the engine has been at its present step; 0 while it has nothing to do."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def health(self) -> State:
        """``state``, but "stalled" while a step takes too long."""
        if self.state == "ready" and self.step_seconds() > self._stall_timeout:
            return "stalled"
        return self.state

    def submit(self, ticket: Ticket) -> None:
        """Queue a prompt. Its ``request_id`` must be new."""
        self._inbox.put(lambda: self._add(ticket))

    def abort(self, request_id: str) -> None:
        """Free a request's rows before the next round; there will be no news of it."""
        self._inbox.put(lambda: self._abort(request_id))

    def fail_all(self, error: errors.ApiError) -> None:
        """Give up everything that is not finished."""
        self._inbox.put(lambda: self._fail_all(error))

    async def score(self, request: Request, top: int) -> list[TokenLogprob]:
        """Log-probabilities of a prompt's tokens but the first, worked out between rounds, several prompts in a pass.

        Clients take turns for the places in it.
        """
        if len(request.prompt_token_ids) < 2:
            return []
        result: asyncio.Future[list[TokenLogprob]] = self._loop.create_future()
        text = ScoredText(
            request.prompt_token_ids,
            top,
            self.engine.scope_of(request.params),
            request_id=str(request.request_id),
            client=request.client,
            priority=request.priority,
        )
        self._inbox.put(lambda: self._add_scoring(text, result))
        return await result

    async def stop(self) -> None:
        """End the thread after the round being played; what is not finished is given up."""
        self._inbox.put(self._stop)
        await asyncio.to_thread(self._thread.join)

    # --- in the engine's thread --------------------------------------------------

    def _run(self) -> None:
        try:
            self._prepare()
            while not self._stopping:
                self._turn()
        except BaseException as error:
            self.failure = error
            if not isinstance(error, PacelineError):
                log.exception("the engine's thread ended")
            self._fail_all(errors.unavailable("the engine has stopped", "engine_stopped"))
            self._on_end()
        finally:
            self.state, self._step_began = "stopped", None

    def _prepare(self) -> None:
        self._llm = self._load()
        self.engine = self._llm.engine
        self.state = "warming up"
        log.info("%s", self.engine.describe())
        target = self.engine.models.target
        if isinstance(target, SharedModel):
            target.when_a_rank_ends(lambda: self._inbox.put(target.check))
        self._warm_up()
        self._capture_ahead()
        arithmetic = arithmetic_of(target, self.engine.threads, _PEAK_SECONDS)
        log.info("utilisation is a share of %s", arithmetic.peak)
        self.meter.know(arithmetic)
        self.meter.queues(self.engine)
        gc.collect()  # what was loaded takes it a fifth of a second: now, not in the middle of the first requests
        self.state = "ready"
        log.info("ready")

    def _warm_up(self) -> None:
        """A short batch as wide as the engine's, half of it greedy: what is made on first use is made now."""
        tokens = max(1, min(_WARM_UP_TOKENS, self.engine.max_model_len - 2))
        for row in range(self.engine.config.max_batch_size):
            params = SamplingParams(
                temperature=row % 2, max_tokens=tokens, seed=row, ignore_eos=True, keep_prefix=False
            )
            self.engine.add(Request([0, 0], params))
        while self.engine.busy:
            self.engine.step()

    def _capture_ahead(self) -> None:
        """After the warm-up, which has taken the memory that prompts need. Raises ParameterError."""
        seconds = self._capture_seconds
        ahead = self.engine.capture_ahead(seconds, partial(tqdm, desc="capturing", unit=" graphs", disable=None))
        if ahead is not None:
            log.info("%s", ahead)
            return
        allowed = "left out here; it needs rounds that a GPU plays as CUDA graphs"
        check(seconds in (0, ServerConfig.capture_seconds), "capture_seconds", seconds, allowed)

    def _turn(self) -> None:
        """Commands first; then one round, and one pass over prompts to score."""
        idle = not self.engine.busy and not self._scorings
        if idle:
            self._step_began = None
        commands = self._inbox.take(wait=idle)
        self._step_began = time.monotonic()
        for command in commands:
            command()
        if self.engine.busy:
            self._round()
        if self._scorings:
            self._score_some()
        self.meter.queues(self.engine)

    def _round(self) -> None:
        try:
            changed = self.engine.step()
        except RankError:  # nothing can be run any more
            raise
        except Exception:
            log.exception("a round failed")
            self._fail([output.request_id for output in self.engine.clear_begun()], errors.round_failed())
            self.meter.round_failed()
            return
        self.meter.round(self.engine)
        self._pass_on(changed)

    def _pass_on(self, changed: Sequence[RequestOutput]) -> None:
        """All news of a round in one call to the event loop; places first, which need no client."""
        live = [(each, output) for output in changed if (each := self._live.get(output.request_id)) is not None]
        ended = [(each.ticket.place, count) for each, output in live if (count := _newly_ended(each, output))]
        news = [(each.ticket, item) for each, output in live if (item := self._news(each, output)) is not None]
        if news or ended:
            self._deliver(news, ended)

    def _news(self, live: _Live, output: RequestOutput) -> News | None:
        self.meter.gained(live.pace, output)
        if output.finished:
            del self._live[output.request_id]
        elif not live.ticket.streaming:
            return None
        if output.error is not None:
            return errors.failed(output.error)
        deltas = live.growth.news() if live.ticket.streaming else []
        return Update(live.ticket.number, deltas, output if output.finished else None)

    def _deliver(self, news: list[tuple[Ticket, News]], ended: Sequence[tuple[Place, int]] = ()) -> None:
        def put() -> None:
            for place, count in ended:
                place.end(count)
            for ticket, item in news:
                if isinstance(item, errors.ApiError):
                    ticket.place.close()
                ticket.inbox.put(item)

        self._call(put)

    def _call(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _add(self, ticket: Ticket) -> None:
        try:
            output = self.engine.add(ticket.request)
        except Exception as error:
            if not isinstance(error, PacelineError):
                log.exception("request %s could not be taken", ticket.request.request_id)
            self._deliver([(ticket, errors.failed(error))])
            return
        ticket.output = output
        self._live[output.request_id] = _Live(ticket, Growth(output), Pace.of(output))

    def _abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self.engine.abort(request_id)

    def _fail(self, request_ids: Sequence[str], error: errors.ApiError) -> None:
        failed = [live for name in request_ids if (live := self._live.pop(name, None)) is not None]
        self._deliver([(live.ticket, error) for live in failed])

    def _fail_all(self, error: errors.ApiError) -> None:
        names = list(self._live)
        for name in names:
            self.engine.abort(name)
        self._fail(names, error)
        self._fail_scorings(list(self._scorings), error)

    def _stop(self) -> None:
        self._fail_all(errors.unavailable("the server is shutting down", "shutting_down"))
        self._stopping = True

    def _add_scoring(self, text: ScoredText, result: asyncio.Future[list[TokenLogprob]]) -> None:
        self._scorings[text] = result
        try:
            self.engine.scorer.add([text])
        except Exception as error:  # noqa: BLE001 (it is logged)
            self._scoring_failed(error)

    def _score_some(self) -> None:
        """One pass; nobody waits any more for those that were cancelled."""
        self._forget_scorings([text for text, result in self._scorings.items() if result.cancelled()])
        try:
            ended = self.engine.score_some(awaited=self.engine.scheduler.watched)
        except RankError:
            raise
        except Exception as error:  # noqa: BLE001 (it is logged)
            self._scoring_failed(error)
            return
        for text in ended:
            self._settle(text, text.logprobs)

    def _scoring_failed(self, error: Exception) -> None:
        """Those that it was about end; where they had not begun, all, for what failed would fail again."""
        log.error("log-probabilities of prompts failed", exc_info=error)
        waiting = set(self.engine.scorer.waiting)
        begun = [text for text in self._scorings if text not in waiting]
        self._fail_scorings(begun or list(self._scorings), errors.failed(error))

    def _fail_scorings(self, texts: Sequence[ScoredText], error: errors.ApiError) -> None:
        for text in texts:
            self._settle(text, error)
        self._forget_scorings(texts)

    def _forget_scorings(self, texts: Sequence[ScoredText]) -> None:
        if texts:
            self.engine.scorer.drop(texts)
        for text in texts:
            self._scorings.pop(text, None)

    def _settle(self, text: ScoredText, outcome: list[TokenLogprob] | errors.ApiError) -> None:
        result = self._scorings.pop(text)

        def settle() -> None:
            if result.done():
                return
            if isinstance(outcome, errors.ApiError):
                result.set_exception(outcome)
            else:
                result.set_result(outcome)

        self._call(settle)


def _newly_ended(live: _Live, output: RequestOutput) -> int:
    """Answers that have ended since the last call."""
    before, live.ended = live.ended, sum(answer.finished for answer in output.candidates)
    return live.ended - before
