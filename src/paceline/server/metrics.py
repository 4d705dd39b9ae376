"""What is measured while serving: Prometheus metrics, the figures of ``/stats`` and the line about throughput.

The names are the usual ones of this field, under the prefix ``paceline:``. Draft tokens are counted round by round,
those beyond an answer's end included; the figures of single answers leave these out.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel

from paceline.core.cache_budget import CacheUsage
from paceline.core.draft import HostVerdict
from paceline.core.outputs import CompletionOutput, Latency, RequestOutput
from paceline.engine.engine import Engine
from paceline.engine.utilisation import Arithmetic
from paceline.server.errors import ApiError
from paceline.server.logs import REFUSALS

log = logging.getLogger("paceline.server")
refusals = logging.getLogger(REFUSALS)

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
_GAPS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 5.0)
_RECENT_ROUNDS = 64
_RECENT_SECONDS = 10.0
_MOST_LETTERS = 200  # of a refusal's reason in the log: it may repeat what the client sent


class PlayedRound(NamedTuple):
    """at: seconds on the clock of time.monotonic. k: how far the draft tokens of any row reached.

    seconds: that it took. saved: rows, by a sibling.
    """

    at: float
    rows: int
    k: int
    drafted: int
    accepted: int
    seconds: float
    saved: int


class Stats(BaseModel):
    """``/stats``: how things stand now. Acceptance, lengths, tokens a second, utilisation: over the last rounds."""

    running: int
    waiting: int
    capacity: int
    cache_usage: float
    cache_bytes: int
    cache_limit_bytes: int
    num_speculative_tokens: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    saved_by_sibling: float | None
    tokens_per_second: float
    utilisation: float | None
    rounds: int


@dataclass
class Pace:
    """A request's answers: how many tokens each had, and when."""

    tokens: list[int]
    at: list[float]

    @staticmethod
    def of(output: RequestOutput) -> Pace:
        n = len(output.candidates)
        return Pace([0] * n, [0.0] * n)


class Meter:
    """Written by the engine's thread, read by the event loop. The registry is its own: nothing is global."""

    def __init__(self, log_interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._clock, self._log_interval = clock, log_interval
        self._lock = threading.Lock()
        self._recent: deque[PlayedRound] = deque(maxlen=_RECENT_ROUNDS)
        self._since_line: list[PlayedRound] = []
        self._line_at = 0.0
        self._rounds = self._running = self._waiting = self._capacity = 0
        self._filled = CacheUsage(0, 0, 0, 0)
        self._arithmetic: Arithmetic | None = None
        self._make_counters()
        self._make_gauges()
        self._make_histograms()

    def _make_counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline:{name}", text, labels, registry=self.registry)

        self._drafts = counter("spec_decode_num_drafts", "Drafts: rows of rounds that had guesses.")
        self._row_rounds = counter("decode_num_row_rounds", "Rounds, each counted once for every row that it decoded.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Guesses verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Guesses kept.")
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Guesses kept, by how deep in the draft.", "position"
        )
        self._trees = counter("spec_decode_num_tree_drafts", "Drafts whose guesses branched.")
        self._saved = counter(
            "spec_decode_num_saved_by_sibling", "Drafts of which a guess was kept that stood beside a better one."
        )
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts whose answer has begun.")
        self._asked_of_cache = counter("prefix_cache_queries", "Tokens of prompts, each answer's counted.")
        self._found_in_cache = counter("prefix_cache_hits", "Those of them that were copied from what was read before.")
        self._generation_tokens = counter("generation_tokens", "Tokens of answers.")
        self._decoding = counter("decode_seconds", "Seconds of rounds; reading prompts is not in it.")
        self._answers = counter("request_success", "Answers that ended, by reason.", "finished_reason")
        self._errors = counter("request_errors", "Requests answered with an error, by HTTP status.", "status")
        self._failures = counter("round_failures", "Rounds that ended with an exception.")

    def _make_gauges(self) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"paceline:{name}", text, registry=self.registry)

        self._running_gauge = gauge("num_requests_running", "Answers that have a row.")
        self._waiting_gauge = gauge("num_requests_waiting", "Answers that wait for a row.")
        self._usage_gauge = gauge("kv_cache_usage_perc", "Share of the caches' memory that rows in use fill; 1: all.")
        self._bytes_gauge = Gauge(
            "paceline:kv_cache_bytes",
            "Memory that caches hold: of rows in use, of prefixes kept for other prompts, of texts that were scored.",
            ("held_for",),
            registry=self.registry,
        )
        self._limit_gauge = gauge("kv_cache_limit_bytes", "What rows in use and prefixes may hold together.")
        self._batch_size = gauge("batch_size", "Rows decoded in the last round.")
        self._length = gauge("num_speculative_tokens", "How deep the last round's drafts were.")
        self._operations = gauge("token_operations", "Of the target's matrices for a token; NaN: not known.")
        self._peak = gauge("peak_operations_per_second", "What the machine can do; NaN: not known.")
        self._operations.set(math.nan)
        self._peak.set(math.nan)
        self._step = gauge("engine_step_seconds", "How long the engine has been at its present step; 0: nothing to do.")

    def know(self, arithmetic: Arithmetic) -> None:
        """Of the engine's target."""
        self._arithmetic = arithmetic
        operations, peak = arithmetic.operations, arithmetic.peak.operations_per_second
        self._operations.set(math.nan if operations is None else operations)
        self._peak.set(math.nan if peak is None else peak)

    def watch_steps(self, seconds: Callable[[], float]) -> None:
        """Ask this, whenever somebody asks for the metrics, how long the present step has taken."""
        self._step.set_function(seconds)

    def _make_histograms(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"paceline:{name}", text, buckets=buckets, registry=self.registry)

        self._ttft = histogram("time_to_first_token_seconds", "From a request's arrival to its answer's first token.")
        self._itl = histogram(
            "inter_token_latency_seconds", "Between tokens; those of one round share the time since the last.", _GAPS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "From a request's arrival to its answer's end.")
        self._tpot = Histogram(
            "paceline:request_time_per_output_token_seconds",
            "Per token after the first, of a request's first (fastest), last (slowest) and all (mean) answers.",
            ("sequence",),
            buckets=_GAPS,
            registry=self.registry,
        )
        self._queue = histogram("request_queue_time_seconds", "From a request's arrival to its answer's row.")

    # --- in the engine's thread --------------------------------------------------

    def queues(self, engine: Engine) -> None:
        """After every turn: how many run and wait."""
        scheduler = engine.scheduler
        rows = len(scheduler.running) + len(scheduler.prefilling)
        filled = engine.filled
        with self._lock:
            self._running, self._waiting = rows, len(scheduler.waiting)
            self._capacity = scheduler.capacity
            self._filled = filled
        self._running_gauge.set(rows)
        self._waiting_gauge.set(len(scheduler.waiting))
        self._usage_gauge.set(filled.fraction)
        self._limit_gauge.set(filled.limit_bytes)
        for held_for in ("rows", "prefixes", "scored"):
            self._bytes_gauge.labels(held_for).set(getattr(filled, held_for))

    def round(self, engine: Engine) -> None:
        """After every step; it may have played no round."""
        if engine.last_verdict is None:
            return
        verdict, now = engine.last_verdict.host, self._clock()
        kept, made, seconds = sum(verdict.accepted), sum(verdict.drafted), engine.chunks.rounds.last
        rows, deepest = len(verdict.accepted), max(verdict.depths)
        played = PlayedRound(now, rows, deepest, made, kept, seconds, verdict.rows_saved_by_sibling)
        with self._lock:
            self._recent.append(played)
            self._rounds += 1
        self._count(verdict, played)
        self._since_line.append(played)
        if now - self._line_at >= self._log_interval:
            self._write_line(engine, now)

    def _count(self, verdict: HostVerdict, played: PlayedRound) -> None:
        self._batch_size.set(played.rows)
        self._length.set(played.k)
        self._row_rounds.inc(played.rows)
        self._decoding.inc(played.seconds)
        if played.drafted:
            self._drafts.inc(sum(drafted > 0 for drafted in verdict.drafted))
            if verdict.trees is not None:
                self._trees.inc(sum(tree.branches for tree in verdict.trees))
                self._saved.inc(played.saved)
            self._draft_tokens.inc(played.drafted)
            self._accepted.inc(played.accepted)
        for place in range(max(verdict.accepted)):
            self._accepted_at.labels(place).inc(sum(accepted > place for accepted in verdict.accepted))

    def round_failed(self) -> None:
        """An exception ended a round."""
        self._failures.inc()

    def gained(self, pace: Pace, output: RequestOutput) -> None:
        """A request has news: times between tokens, and the end of answers."""
        now = self._clock()
        for answer in output.candidates:
            fresh = len(answer.token_ids) - pace.tokens[answer.index]
            if fresh > 0:
                self._observe_tokens(pace, answer, fresh, now)
            if answer.finished and pace.at[answer.index] >= 0:
                pace.at[answer.index] = -1.0  # counted
                self._observe_end(answer)
        latency = Latency.of(answer.metrics for answer in output.candidates) if output.finished else None
        if latency is not None:
            for sequence, ms in (("first", latency.first), ("last", latency.last), ("all", latency.all)):
                self._tpot.labels(sequence).observe(ms / 1000)

    def _observe_tokens(self, pace: Pace, answer: CompletionOutput, fresh: int, now: float) -> None:
        place, measured = answer.index, answer.metrics
        self._generation_tokens.inc(fresh)
        if pace.tokens[place] == 0:
            self._prompt_tokens.inc(measured.prompt_tokens if place == 0 else 0)
            self._asked_of_cache.inc(measured.prompt_tokens)
            self._found_in_cache.inc(measured.cached_tokens)
            self._ttft.observe(measured.time_to_first_token or 0.0)
            if measured.first_scheduled is not None:
                self._queue.observe(measured.first_scheduled - measured.arrival_time)
        else:
            for _ in range(fresh):
                self._itl.observe((now - pace.at[place]) / fresh)
        pace.tokens[place], pace.at[place] = len(answer.token_ids), now

    def _observe_end(self, answer: CompletionOutput) -> None:
        self._answers.labels(answer.finish_reason).inc()
        if answer.metrics.finished is not None:
            self._e2e.observe(answer.metrics.finished - answer.metrics.arrival_time)

    def _write_line(self, engine: Engine, now: float) -> None:
        """The throughput since the last line; the first round after a pause only starts the clock."""
        rounds, seconds = self._since_line, now - self._line_at
        busy_since = rounds[0].at
        self._since_line, self._line_at = [], now
        if len(rounds) < 2:
            return
        tokens = sum(played.rows + played.accepted for played in rounds[1:])
        acceptance, length = _acceptance(rounds)
        log.info(
            "%.1f tokens/s; %d running, %d waiting; k = %d, acceptance %s, mean acceptance length %s",
            tokens / min(seconds, now - busy_since),
            len(engine.scheduler.running),
            len(engine.scheduler.waiting),
            rounds[-1].k,
            "-" if acceptance is None else f"{acceptance:.0%}",
            "-" if length is None else f"{length:.2f}",
        )

    # --- for the event loop ------------------------------------------------------

    def refused(self, error: ApiError) -> None:
        """A request was answered with an error: a count and a line."""
        self._errors.labels(error.status).inc()
        fields = {"status": error.status, "code": error.code, "why": str(error)[:_MOST_LETTERS]}
        refusals.info("refused", extra={"fields": fields})

    def stats(self) -> Stats:
        """How things stand now."""
        with self._lock:
            recent = [played for played in self._recent if self._clock() - played.at < _RECENT_SECONDS]
            acceptance, length = _acceptance(recent)
            rows = sum(played.rows for played in recent)
            return Stats(
                running=self._running,
                waiting=self._waiting,
                capacity=self._capacity,
                cache_usage=self._filled.fraction,
                cache_bytes=self._filled.row_bytes + self._filled.prefix_bytes + self._filled.scoring_bytes,
                cache_limit_bytes=self._filled.limit_bytes,
                num_speculative_tokens=recent[-1].k if recent else 0,
                acceptance_rate=acceptance,
                mean_acceptance_length=length,
                saved_by_sibling=sum(played.saved for played in recent) / rows if rows else None,
                tokens_per_second=_pace(recent) if self._running else 0.0,
                utilisation=self._utilisation(recent),
                rounds=self._rounds,
            )

    def _utilisation(self, rounds: list[PlayedRound]) -> float | None:
        """None where nothing was played, or peak or model are not known."""
        tokens = sum(played.rows + played.accepted for played in rounds)
        seconds = sum(played.seconds for played in rounds)
        return None if self._arithmetic is None else self._arithmetic.utilisation(tokens, seconds)

    def totals(self) -> tuple[int, int, int]:
        """Tokens of answers, tokens drafted and draft tokens kept since the start."""
        names = ("generation_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
        made, drafted, accepted = (self.registry.get_sample_value(f"paceline:{name}_total") for name in names)
        return int(made or 0), int(drafted or 0), int(accepted or 0)

    def exposition(self) -> bytes:
        """For Prometheus, in its text format."""
        return generate_latest(self.registry)


def _acceptance(rounds: list[PlayedRound]) -> tuple[float | None, float | None]:
    """Acceptance rate and mean acceptance length, which is 1 + accepted / rounds of rows, as ``outputs.Metrics``."""
    drafted, accepted = sum(played.drafted for played in rounds), sum(played.accepted for played in rounds)
    rows = sum(played.rows for played in rounds)
    return accepted / drafted if drafted else None, 1 + accepted / rows if rows else None


def _pace(rounds: list[PlayedRound]) -> float:
    """Tokens a second."""
    if len(rounds) < 2:
        return 0.0
    tokens = sum(played.rows + played.accepted for played in rounds[1:])
    return tokens / max(rounds[-1].at - rounds[0].at, 1e-9)
