"""Prometheus metrics, the figures of ``/stats`` and the periodic throughput log line.

Metric names follow vLLM's, with the prefix ``paceline:``. Draft tokens are counted per round, including those beyond
an answer's end; the metrics of single answers leave those out.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel

from paceline.core.cache_budget import CacheUsage
from paceline.core.draft import Verdict
from paceline.core.outputs import CompletionOutput, Latency, RequestOutput
from paceline.engine.engine import Engine
from paceline.engine.prefixes import FreeSlotPool, PrefixCounts
from paceline.engine.utilisation import Arithmetic
from paceline.server.errors import ApiError
from paceline.server.logs import REFUSALS

log = logging.getLogger("paceline.server")
refusals = logging.getLogger(REFUSALS)

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
_GAPS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 5.0)
_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)
_RECENT_ROUNDS = 64
_RECENT_SECONDS = 10.0
_MAX_CHARACTERS = 200  # of an error message in the log, which may repeat what the client sent


class RoundRecord(NamedTuple):
    """Figures of one round.

    at: seconds on the clock of ``time.monotonic``. k: depth of the deepest draft of any row. seconds: duration.
    saved: rows in which an accepted draft token had a likelier sibling.
    """

    at: float
    rows: int
    k: int
    drafted: int
    accepted: int
    seconds: float
    saved: int


class Stats(BaseModel):
    """``/stats``. Acceptance, lengths, tokens per second and utilisation cover the last rounds."""

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


class LiveStats(BaseModel):
    """An event of ``/stats/stream``. status: as in ``/health``."""

    status: str
    stats: Stats


@dataclass
class TokenTimes:
    """Delivered tokens of each answer of a request, and the time of the last delivery in seconds."""

    tokens: list[int]
    at: list[float]

    @staticmethod
    def of(output: RequestOutput) -> TokenTimes:
        n = len(output.candidates)
        return TokenTimes([0] * n, [0.0] * n)


class Meter:
    """Collects metrics: written by the engine's thread, read by the event loop.

    Each meter has a registry of its own, so that several servers can run in one process.
    """

    def __init__(self, log_interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._clock, self._log_interval = clock, log_interval
        self._lock = threading.Lock()
        self._recent: deque[RoundRecord] = deque(maxlen=_RECENT_ROUNDS)
        self._since_line: list[RoundRecord] = []
        self._line_at = 0.0
        self._rounds = self._running = self._waiting = self._capacity = 0
        self._filled = CacheUsage(0, 0, 0)
        self._prefix_counts = PrefixCounts()  # of the engine, as counted so far
        self._preemptions = self._recomputed = 0  # likewise
        self._arithmetic: Arithmetic | None = None
        self._make_counters()
        self._make_gauges()
        self._make_histograms()

    def _make_counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline:{name}", text, labels, registry=self.registry)

        self._drafts = counter("spec_decode_num_drafts", "Drafts verified: one per row and round with draft tokens.")
        self._rounds_by = counter(
            "decode_num_rounds", "Rounds, by where they ran: on the device, or on the host.", "runner"
        )
        self._row_rounds = counter("decode_num_row_rounds", "Rounds, counted once per row that they decoded.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position in the draft.", "position"
        )
        self._drafted_at = counter(
            "spec_decode_num_draft_tokens_per_pos",
            "Drafts that were verified, by position that they reached.",
            "position",
        )
        self._trees = counter("spec_decode_num_tree_drafts", "Drafts that were trees with branches.")
        self._saved = counter(
            "spec_decode_num_saved_by_sibling",
            "Drafts with an accepted token that was not the likeliest of its siblings.",
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that have begun to generate.")
        self._asked_of_cache = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._found_in_cache = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prefix_events = counter(
            "cached_prefix_events",
            "Cached prefixes by event: reused, dropped; their files: written, read, refused.",
            "event",
        )
        for event in PrefixCounts.EVENTS:  # 0 until it happens
            self._prefix_events.labels(event)
        self._prefix_tokens = counter("cached_prefix_tokens_reused", "Prompt tokens taken from cached prefixes.")
        self._preempted = counter(
            "num_preemptions", "Times that a row gave way to older ones, because memory was short."
        )
        self._tokens_again = counter("recomputed_tokens", "Tokens that rows read again after they gave way.")
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._decoding = counter("decode_seconds", "Seconds spent in decoding rounds, without prefill.")
        self._answers = counter("request_success", "Sequences finished, by reason.", "finished_reason")
        self._errors = counter("request_errors", "Error responses, by HTTP status.", "status")
        self._failures = counter("round_failures", "Rounds that raised an exception.")

    def _make_gauges(self) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"paceline:{name}", text, labels, registry=self.registry)

        self._running_gauge = gauge("num_requests_running", "Sequences running.")
        self._waiting_gauge = gauge("num_requests_waiting", "Sequences waiting for a row.")
        self._usage_gauge = gauge("kv_cache_usage_perc", "KV cache usage by running sequences; 1 is 100 percent.")
        self._bytes_gauge = gauge(
            "kv_cache_bytes", "KV cache memory in bytes: of running sequences, of cached prefixes.", "held_for"
        )
        self._prefixes_gauge = gauge("cached_prefixes", "Cached prefixes of ended sequences.")
        self._limit_gauge = gauge("kv_cache_limit_bytes", "Limit for running sequences and cached prefixes.")
        self._batch_size = gauge("batch_size", "Rows decoded in the last round.")
        self._length = gauge("num_speculative_tokens", "Draft length of the last round; for trees their depth.")
        self._operations = gauge("token_operations", "Operations per token of the target's matrices; NaN if unknown.")
        self._peak = gauge("peak_operations_per_second", "Peak of the machine; NaN if unknown.")
        self._operations.set(math.nan)
        self._peak.set(math.nan)
        self._step = gauge("engine_step_seconds", "Seconds since the engine's current step began; 0 if idle.")

    def set_arithmetic(self, arithmetic: Arithmetic) -> None:
        """Set the target's operation count and the machine's peak, for the utilisation."""
        self._arithmetic = arithmetic
        operations, peak = arithmetic.operations, arithmetic.peak.operations_per_second
        self._operations.set(math.nan if operations is None else operations)
        self._peak.set(math.nan if peak is None else peak)

    def watch_steps(self, seconds: Callable[[], float]) -> None:
        """Register the function that returns the seconds since the current engine step began."""
        self._step.set_function(seconds)

    def _make_histograms(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS, *labels: str) -> Histogram:
            return Histogram(f"paceline:{name}", text, labels, buckets=buckets, registry=self.registry)

        self._ttft = histogram("time_to_first_token_seconds", "From a request's arrival to a sequence's first token.")
        self._itl = histogram(
            "inter_token_latency_seconds",
            "Time between tokens; tokens of one round share the time since the last.",
            _GAPS,
        )
        self._e2e = histogram("e2e_request_latency_seconds", "From a request's arrival to a sequence's end.")
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "Per token after the first: a request's first (fastest), last (slowest) and all (mean) sequences.",
            _GAPS,
            "sequence",
        )
        self._first_difference = histogram(
            "prompt_first_difference_tokens",
            "Tokens before the first difference between a prompt and the most similar earlier one of its client.",
            _TOKENS,
        )
        self._queue = histogram("request_queue_time_seconds", "From a request's arrival until a sequence has a row.")

    # --- called in the engine's thread -------------------------------------------

    def update_gauges(self, engine: Engine) -> None:
        """Update the queue and cache gauges. Called after every engine step."""
        scheduler = engine.scheduler
        rows = len(scheduler.running) + len(scheduler.prefilling)
        filled = scheduler.filled
        with self._lock:
            self._running, self._waiting = rows, scheduler.num_waiting
            self._capacity = engine.batch.max_rows
            self._filled = filled
        self._running_gauge.set(rows)
        self._waiting_gauge.set(scheduler.num_waiting)
        self._usage_gauge.set(filled.fraction)
        self._limit_gauge.set(filled.limit_bytes)
        for kind, size in (("rows", filled.row_bytes), ("prefixes", filled.prefix_bytes)):
            self._bytes_gauge.labels(kind).set(size)
        self._update_prefixes(engine.slots.free)
        self._preempted.inc(scheduler.preemptions - self._preemptions)
        self._tokens_again.inc(scheduler.prefill.recomputed_tokens - self._recomputed)
        self._preemptions, self._recomputed = scheduler.preemptions, scheduler.prefill.recomputed_tokens

    def _update_prefixes(self, pool: FreeSlotPool) -> None:
        self._prefixes_gauge.set(len(pool.prefixes))
        if (now := pool.counts) == (before := self._prefix_counts):
            return
        for event in PrefixCounts.EVENTS:
            self._prefix_events.labels(event).inc(getattr(now, event) - getattr(before, event))
        self._prefix_tokens.inc(now.tokens - before.tokens)
        self._prefix_counts = replace(now)

    def engine_ended(self) -> None:
        """Set what an engine that was unloaded leaves behind to zero. Counters go on with the model's next load."""
        with self._lock:
            self._running = self._waiting = self._capacity = 0
            self._filled = CacheUsage(0, 0, 0)
        self._prefix_counts, self._preemptions, self._recomputed = PrefixCounts(), 0, 0
        for kind in ("rows", "prefixes"):
            self._bytes_gauge.labels(kind).set(0)
        for gauge in (
            self._running_gauge,
            self._waiting_gauge,
            self._usage_gauge,
            self._limit_gauge,
            self._batch_size,
            self._prefixes_gauge,
        ):
            gauge.set(0)

    def record_round(self, engine: Engine) -> None:
        """Record the last round. Called after every step; does nothing if the step ran no round."""
        if engine.last_verdict is None:
            return
        verdict, now = engine.last_verdict, self._clock()
        kept, made, seconds = sum(verdict.accepted), sum(verdict.drafted), engine.chunks.rounds.last
        rows, deepest = len(verdict.accepted), max(verdict.depths)
        round_ = RoundRecord(now, rows, deepest, made, kept, seconds, verdict.rows_saved_by_sibling)
        with self._lock:
            self._recent.append(round_)
            self._rounds += 1
        self._rounds_by.labels(engine.rounds.place.name).inc()
        self._count(verdict, round_)
        self._since_line.append(round_)
        if now - self._line_at >= self._log_interval:
            self._write_line(engine, now)

    def _count(self, verdict: Verdict, round_: RoundRecord) -> None:
        self._batch_size.set(round_.rows)
        self._length.set(round_.k)
        self._row_rounds.inc(round_.rows)
        self._decoding.inc(round_.seconds)
        if round_.drafted:
            self._drafts.inc(sum(drafted > 0 for drafted in verdict.drafted))
            if verdict.trees is not None:
                self._trees.inc(sum(tree.branches for tree in verdict.trees))
                self._saved.inc(round_.saved)
            self._draft_tokens.inc(round_.drafted)
            self._accepted.inc(round_.accepted)
            for place in range(round_.k):
                self._drafted_at.labels(place).inc(sum(depth > place for depth in verdict.depths))
        for place in range(max(verdict.accepted)):
            self._accepted_at.labels(place).inc(sum(accepted > place for accepted in verdict.accepted))

    def round_failed(self) -> None:
        """Count a round that raised an exception."""
        self._failures.inc()

    def record_output(self, times: TokenTimes, output: RequestOutput) -> None:
        """Record a request's new tokens and finished answers."""
        now = self._clock()
        for answer in output.candidates:
            fresh = len(answer.token_ids) - times.tokens[answer.index]
            if fresh > 0:
                self._observe_tokens(times, answer, fresh, now)
            if answer.finished and times.at[answer.index] >= 0:
                times.at[answer.index] = -1.0  # counted already
                self._observe_end(answer)
        latency = Latency.of(answer.metrics for answer in output.candidates) if output.finished else None
        if latency is not None:
            for sequence, ms in (("first", latency.first), ("last", latency.last), ("all", latency.all)):
                self._tpot.labels(sequence).observe(ms / 1000)

    def _observe_tokens(self, times: TokenTimes, answer: CompletionOutput, fresh: int, now: float) -> None:
        place, measured = answer.index, answer.metrics
        self._generation_tokens.inc(fresh)
        if times.tokens[place] == 0:
            self._prompt_tokens.inc(measured.prompt_tokens if place == 0 else 0)
            self._asked_of_cache.inc(measured.prompt_tokens)
            self._found_in_cache.inc(measured.cached_tokens)
            self._ttft.observe(measured.time_to_first_token or 0.0)
            if measured.first_scheduled is not None:
                self._queue.observe(measured.first_scheduled - measured.arrival_time)
        else:
            for _ in range(fresh):
                self._itl.observe((now - times.at[place]) / fresh)
        times.tokens[place], times.at[place] = len(answer.token_ids), now

    def _observe_end(self, answer: CompletionOutput) -> None:
        self._answers.labels(answer.finish_reason).inc()
        if answer.metrics.finished is not None:
            self._e2e.observe(answer.metrics.finished - answer.metrics.arrival_time)

    def _write_line(self, engine: Engine, now: float) -> None:
        """Log the throughput since the last line. The first round after a pause only sets the start."""
        rounds, seconds = self._since_line, now - self._line_at
        busy_since = rounds[0].at
        self._since_line, self._line_at = [], now
        if len(rounds) < 2:
            return
        tokens = sum(round_.rows + round_.accepted for round_ in rounds[1:])
        acceptance, length = _acceptance(rounds)
        log.info(
            "%.1f tokens/s; %d running, %d waiting; k = %d, acceptance %s, mean acceptance length %s",
            tokens / min(seconds, now - busy_since),
            len(engine.scheduler.running),
            engine.scheduler.num_waiting,
            rounds[-1].k,
            "-" if acceptance is None else f"{acceptance:.0%}",
            "-" if length is None else f"{length:.2f}",
        )

    # --- for the event loop ------------------------------------------------------

    def prompt_differed(self, tokens: int) -> None:
        """Record the number of tokens before a prompt's first difference from an earlier one."""
        self._first_difference.observe(tokens)

    def refused(self, error: ApiError) -> None:
        """Count and log an error response."""
        self._errors.labels(error.status).inc()
        fields = {"status": error.status, "code": error.code, "why": str(error)[:_MAX_CHARACTERS]}
        refusals.info("refused", extra={"fields": fields})

    def stats(self) -> Stats:
        """Current figures for ``/stats``."""
        with self._lock:
            recent = [round_ for round_ in self._recent if self._clock() - round_.at < _RECENT_SECONDS]
            acceptance, length = _acceptance(recent)
            rows = sum(round_.rows for round_ in recent)
            return Stats(
                running=self._running,
                waiting=self._waiting,
                capacity=self._capacity,
                cache_usage=self._filled.fraction,
                cache_bytes=self._filled.row_bytes + self._filled.prefix_bytes,
                cache_limit_bytes=self._filled.limit_bytes,
                num_speculative_tokens=recent[-1].k if recent else 0,
                acceptance_rate=acceptance,
                mean_acceptance_length=length,
                saved_by_sibling=sum(round_.saved for round_ in recent) / rows if rows else None,
                tokens_per_second=_tokens_per_second(recent) if self._running else 0.0,
                utilisation=self._utilisation(recent),
                rounds=self._rounds,
            )

    def _utilisation(self, rounds: list[RoundRecord]) -> float | None:
        """Utilisation over the rounds, or None if there were none or the peak or the model's operations are unknown."""
        tokens = sum(round_.rows + round_.accepted for round_ in rounds)
        seconds = sum(round_.seconds for round_ in rounds)
        return None if self._arithmetic is None else self._arithmetic.utilisation(tokens, seconds)

    def totals(self) -> tuple[int, int, int]:
        """Totals since the start: tokens generated, draft tokens verified, draft tokens accepted."""
        names = ("generation_tokens", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
        made, drafted, accepted = (self.registry.get_sample_value(f"paceline:{name}_total") for name in names)
        return int(made or 0), int(drafted or 0), int(accepted or 0)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _acceptance(rounds: list[RoundRecord]) -> tuple[float | None, float | None]:
    """Acceptance rate, and mean acceptance length (1 + accepted / row rounds, as in ``outputs.Metrics``)."""
    drafted, accepted = sum(round_.drafted for round_ in rounds), sum(round_.accepted for round_ in rounds)
    rows = sum(round_.rows for round_ in rounds)
    return accepted / drafted if drafted else None, 1 + accepted / rows if rows else None


def _tokens_per_second(rounds: list[RoundRecord]) -> float:
    """Tokens per second over the rounds."""
    if len(rounds) < 2:
        return 0.0
    tokens = sum(round_.rows + round_.accepted for round_ in rounds[1:])
    return tokens / max(rounds[-1].at - rounds[0].at, 1e-9)
