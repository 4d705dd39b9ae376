"""The order of measurements: each configuration once per repeat, workers back and forth, within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.peers.contenders import Point, far_behind, hopeless
from benchmarks.peers.pool import WorkerError, WorkerLostError, WorkerSpec

MAX_LOSSES = 2  # a worker that was lost this often is not started again


@dataclass(frozen=True)
class Configuration:
    """One point of the plot: a peer in a mode at a batch size."""

    peer: str
    precision: str
    mode: str
    batch: int
    k: int | str
    worker: WorkerSpec


@dataclass
class Outcome:
    """A configuration's result: one sample per repeat, or the line that says why there is none."""

    configuration: Configuration
    samples: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    left_out: str | None = None  # the reason why it was skipped or not repeated
    seconds: float = 0.0  # of its last repeat, loading included


class Worker(Protocol):
    """The methods of a worker that the schedule uses."""

    info: dict[str, Any]

    def call(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]: ...


class Workers(Protocol):
    """The methods of the pool that the schedule uses."""

    def get(self, spec: WorkerSpec) -> tuple[Any, bool]: ...
    def drop(self, key: str) -> None: ...


@dataclass
class Measurement:
    """Runs the configurations. prompts: as many as the largest batch. saved: called after each result."""

    workers: Workers
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    call_seconds: float
    deadline: float  # time.monotonic()
    say: Callable[[str], None]
    saved: Callable[[list[Outcome]], None]
    infos: dict[str, dict[str, Any]] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)
    warm: set[tuple[str, str]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def run(self, configurations: Sequence[Configuration], repeats: int) -> list[Outcome]:
        """Run all configurations, repeat by repeat; after the first only those whose median matters (``contenders``).

        If time runs out, whole repeats are dropped, and ``notes`` says so.
        """
        outcomes = [Outcome(configuration) for configuration in configurations]
        for repeat in range(repeats):
            if repeat == 1:
                _leave_out(outcomes)
            alive = [outcome for outcome in outcomes if outcome.error is None and outcome.left_out is None]
            if repeat and not self._has_time_for(alive):
                self._note(f"dropped repeats {repeat + 1} to {repeats}: no time left in the budget")
                break
            for outcome in back_and_forth(alive, repeat):
                self._once(outcome, repeat)
                self.saved(outcomes)
        return outcomes

    def _has_time_for(self, outcomes: Sequence[Outcome]) -> bool:
        return time.monotonic() + sum(outcome.seconds for outcome in outcomes) <= self.deadline

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.say(text)

    def _once(self, outcome: Outcome, repeat: int) -> None:
        if time.monotonic() > self.deadline:
            if not outcome.samples:
                outcome.error = "not measured: no time left in the budget"
            return
        began = time.monotonic()
        try:
            sample = self._measure(outcome.configuration)
        except WorkerError as error:
            self._fail(outcome, error)
        else:
            outcome.samples.append({**sample, "repeat": repeat + 1})
            self.say(
                f"{repeat + 1}: {label(outcome.configuration)}: {sample['tokens'] / sample['total_s']:.1f} tokens/s"
            )
        outcome.seconds = time.monotonic() - began

    def _fail(self, outcome: Outcome, error: WorkerError) -> None:
        """Record an error, which is final for this configuration.

        A lost worker is restarted for the next configuration.
        """
        outcome.error = str(error)
        self.say(f"{label(outcome.configuration)}: failed: {error}")
        if isinstance(error, WorkerLostError):
            key = outcome.configuration.worker.key
            self.losses[key] = self.losses.get(key, 0) + 1
            self.workers.drop(key)

    def _measure(self, configuration: Configuration) -> dict[str, Any]:
        spec = configuration.worker
        if self.losses.get(spec.key, 0) >= MAX_LOSSES:
            raise WorkerError(f"its worker was lost {MAX_LOSSES} times before")
        worker, fresh = self.workers.get(spec)
        if fresh:
            self.infos[spec.key] = worker.info
            self.warm = {entry for entry in self.warm if entry[0] != spec.key}
        self._warm_up(worker, configuration)
        sample: dict[str, Any] = worker.call(
            self._request(configuration, configuration.batch, self.max_tokens), self.call_seconds
        )
        self._check(sample, configuration)
        return sample

    def _warm_up(self, worker: Worker, configuration: Configuration) -> None:
        """Warm up a new worker once per mode: few tokens, all rows, or a single row if the peer refuses that."""
        entry = (configuration.worker.key, configuration.mode)
        if entry in self.warm:
            return
        few = min(4, self.max_tokens)
        try:
            worker.call(self._request(configuration, len(self.prompts), few), self.call_seconds)
        except WorkerLostError:
            raise
        except WorkerError:
            worker.call(self._request(configuration, 1, few), self.call_seconds)
        self.warm.add(entry)

    def _request(self, configuration: Configuration, batch: int, max_tokens: int) -> dict[str, Any]:
        return {
            "cmd": "run",
            "batch": batch,
            "mode": configuration.mode,
            "prompts": [list(prompt) for prompt in self.prompts[:batch]],
            "max_tokens": max_tokens,
            "k": configuration.k,
        }

    def _check(self, sample: Mapping[str, Any], configuration: Configuration) -> None:
        """Raise WorkerError unless every row has exactly the requested number of tokens.

        Otherwise the figures would not be comparable.
        """
        lengths = sorted({len(row) for row in sample["output_ids"]})
        if lengths != [self.max_tokens] or len(sample["output_ids"]) != configuration.batch:
            raise WorkerError(f"answered {lengths} tokens per row instead of {self.max_tokens}")


def _leave_out(outcomes: Sequence[Outcome]) -> None:
    """Skip the points that the first repeat has shown to be far behind their peer's best, or behind all."""
    measured = {point(outcome.configuration): outcome for outcome in outcomes if outcome.samples}
    speeds = {at: outcome.samples[0]["tokens"] / outcome.samples[0]["total_s"] for at, outcome in measured.items()}
    for at, words in (far_behind(speeds) | hopeless(speeds)).items():
        measured[at].left_out = f"not repeated: {words}"


def point(configuration: Configuration) -> Point:
    """A configuration's place in the plot."""
    return configuration.peer, configuration.mode, configuration.batch


def back_and_forth(outcomes: Sequence[Outcome], repeat: int) -> Iterator[Outcome]:
    """Forwards, then backwards, and so on: drift affects all alike, and the last worker is still loaded."""
    return iter(outcomes) if repeat % 2 == 0 else reversed(outcomes)


def label(configuration: Configuration) -> str:
    """A configuration as a short text."""
    return f"{configuration.peer} {configuration.mode} b={configuration.batch}"
