"""Rounds on a GPU compared with their floors, the most important cells first, within a time budget.

Acceptance is SYNTHETIC throughout: the models have random weights, each draft token is accepted with a given
    probability, and the text is meaningless. Only time is measured. A cell that fails is reported with its error, and
    the others continue.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from benchmarks.gpu import attention
from benchmarks.gpu.auto import auto_over_plain
from benchmarks.gpu.cells import RATE, Axes, Cell, Setting, plan, traces
from benchmarks.gpu.floors import Ceiling, Weights, measure_ceiling, pass_work, round_floor
from benchmarks.gpu.models import PAIRS, Pair, WeightFormat, random_model, tiny
from benchmarks.gpu.rehearsal import Place, in_parallel, tasks_for
from benchmarks.gpu.results import Automatic, Measured, Result, Results, Traced
from benchmarks.gpu.show import Line, show
from benchmarks.gpu.stage import ROOM, Effort, Stage

from paceline.core.cache import KVCache
from paceline.errors import CapacityError, ParameterError
from paceline.models.description.spec import DecoderSpec
from paceline.models.torch.transformer import Transformer

NOTE = (
    "synthetic acceptance: random weights, draft tokens are accepted at random; times are real, texts are meaningless. "
    "A round's time does not depend on acceptance: each is timed once, at 0.8 (some at 0.9), and a "
    "speed-up at acceptance a counts (1 - a^(k+1)) / (1 - a) tokens per round; the measured one is reported, too."
)
_EXPECTED_SECONDS = {"round": 2.0, "verify": 2.0, "auto": 30.0, "trace": 5.0}  # seconds, including models and capture
_WORKSPACE = 3 << 30  # bytes for logits, activations and graphs
_ATTENTION_SHARE, _REHEARSAL_SHARE = 0.05, 0.12  # fractions of the budget; the second per pair of models


@dataclass(frozen=True)
class Options:
    """budget: seconds in total. auto_tokens: tokens that auto decodes per row. tiny: a quick functional test."""

    device: torch.device
    axes: Axes
    budget: float = 480.0
    effort: Effort = field(default_factory=Effort)
    auto_tokens: int = 384
    tiny: bool = False

    @staticmethod
    def tiny_on(device: torch.device, budget: float) -> Options:
        """Options for every kind of cell on models of a few thousand weights."""
        return Options(device, Axes.tiny(), budget, Effort(2, 1, 0.0, 1), auto_tokens=24, tiny=True)

    @property
    def rehearses(self) -> bool:
        """Whether there are kernels whose compilation takes time."""
        return self.device.type == "cuda" and not self.tiny

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations and caches."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


@dataclass
class Report:
    """The results so far."""

    device: str
    command: str
    ceiling: Ceiling
    results: Results = field(default_factory=Results)
    attention: list[attention.Timed] = field(default_factory=list)
    failed: list[tuple[Cell, str]] = field(default_factory=list)
    dropped: list[Cell] = field(default_factory=list)
    seconds: float = 0.0

    def as_json(self, lines: Sequence[Line]) -> dict[str, Any]:
        return {
            "command": self.command,
            "acceptance": "synthetic",
            "note": NOTE,
            "device": self.device,
            "copy_gb_s": self.ceiling.copy_bytes / 1e9,
            "tflops": self.ceiling.flops / 1e12,
            "seconds": self.seconds,
            "show": [line.as_json() for line in lines],
            "speedups": self.results.speedups_as_json(),
            "cells": self.results.as_json(),
            "attention": [timed.as_json() for timed in self.attention],
            "failed": [{**cell.as_json(), "error": error} for cell, error in self.failed],
            "dropped": _grouped(self.dropped),
            "versions": versions(),
        }


def _grouped(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Cells grouped by setting, as there may be thousands."""
    settings: dict[Setting, list[str]] = {}
    for cell in cells:
        settings.setdefault(cell.setting, []).append(f"{cell.kind} k={cell.k}")
    return [{**asdict(setting), "cells": names} for setting, names in settings.items()]


def versions() -> dict[str, str]:
    """Versions of everything that affects the times."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    try:
        import triton
    except ImportError:
        return found
    return {**found, "triton": triton.__version__}


def device_name(device: torch.device) -> str:
    """The device's product name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _sized(name: str, options: Options) -> Pair:
    return tiny(PAIRS[name]) if options.tiny else PAIRS[name]


def random_pair(name: str, to: WeightFormat, options: Options) -> tuple[Transformer, Transformer]:
    """A pair's target and draft model with random weights."""
    pair = _sized(name, options)
    target = random_model(pair.target, pair.name, to, options.dtype, options.device)
    return target, random_model(pair.draft, f"{pair.name} draft", to, options.dtype, options.device)


class FreeSlotPool:
    """The models built so far, as many as fit in memory beside the measured setting."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._models: dict[tuple[str, WeightFormat], tuple[Transformer, Transformer]] = {}

    def pair(self, name: str) -> Pair:
        return _sized(name, self._options)

    def get(self, name: str, to: WeightFormat, room: int) -> tuple[Transformer, Transformer]:
        """Target and draft model, with ``room`` bytes left free on the device. Raises CapacityError if that fails."""
        if (name, to) not in self._models:
            self._make_room(room + _model_bytes(self.pair(name), to), ())
            self._models[name, to] = random_pair(name, to, self._options)
        self._make_room(room, (name, to))
        return self._models[name, to]

    def clear(self) -> None:
        """Free the device's memory for other processes."""
        self._models.clear()
        empty_caches()

    def _make_room(self, wanted: int, keep: tuple[str, ...]) -> None:
        if self._options.device.type != "cuda":
            return
        empty_caches()
        while (free := torch.cuda.mem_get_info(self._options.device)[0]) < wanted:
            others = [key for key in self._models if key != keep]
            if not others:
                raise CapacityError(f"needs {wanted / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")
            del self._models[others[0]]
            empty_caches()


def empty_caches() -> None:
    """Return unused cached memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _model_bytes(pair: Pair, to: WeightFormat) -> int:
    """Bytes of both models, plus one full-width matrix while they are built."""
    both = sum(pass_work(Weights(config, to), 1, 1, 0).bytes for config in (pair.target, pair.draft))
    tables = 2 * sum(config.vocab_size * config.width * 3 for config in (pair.target, pair.draft))
    return int(both) + tables + (1 << 30)


def cache_bytes(config: DecoderSpec, setting: Setting, dtype: torch.dtype) -> int:
    """Bytes of the caches for the setting's rows."""
    positions = setting.context + ROOM
    return KVCache.bytes_for(config.kv_layers, setting.rows, positions, dtype)


class Bench:
    """Measures cell after cell. say: receives lines of progress. save: receives the results after every cell."""

    def __init__(
        self, options: Options, command: str, say: Callable[[str], None], save: Callable[[dict[str, Any]], None]
    ) -> None:
        self.options, self._say, self._save = options, say, save
        self._began = time.perf_counter()
        self._shelf = FreeSlotPool(options)
        self._stage: Stage | None = None
        self._hopeless: dict[Setting, str] = {}
        self._rehearsed: set[str] = set()
        ceiling = measure_ceiling(options.device, options.dtype, small=options.tiny)
        self.report = Report(device_name(options.device), command, ceiling)
        say(f"{self.report.device}: copies {ceiling.copy_bytes / 1e9:.0f} GB/s, {ceiling.flops / 1e12:.0f} TFLOP/s")

    @torch.inference_mode()
    def run(self) -> Report:
        """Measure everything that the budget allows."""
        axes = self.options.axes
        cells, last = plan(axes), traces(axes)
        kept = sum(_EXPECTED_SECONDS[cell.kind] for cell in last)
        for cell in cells:
            if not self.report.attention and _model(cell) != _model(cells[0]):
                self._attend()
            self._rehearse(cell.setting.pair, cells)
            self._attempt(cell, kept)
        if not self.report.attention:
            self._attend()
        for cell in last:
            self._attempt(cell, 0.0)
        if self.report.dropped:
            self._say(f"dropped for lack of time: {len(self.report.dropped)} cells, named in the document")
        self._store()
        return self.report

    def _rehearse(self, pair: str, cells: Sequence[Cell]) -> None:
        """Compile the kernels that a pair needs, once, before its first cell."""
        if pair in self._rehearsed or not self.options.rehearses:
            return
        self._rehearsed.add(pair)
        self._stage = None
        self._shelf.clear()
        began, seconds = time.perf_counter(), min(self._left, self.options.budget * _REHEARSAL_SHARE)
        place = Place(self.options.device, self.options.dtype)
        tasks = tasks_for(self._shelf.pair(pair), cells, place)
        errors = in_parallel(tasks, seconds)
        took = time.perf_counter() - began
        self._say(f"{pair}: {len(tasks)} rehearsals took {took:.0f} s{''.join(f'; {error}' for error in errors)}")

    @property
    def _left(self) -> float:
        """Seconds left in the budget."""
        return self.options.budget - (time.perf_counter() - self._began)

    def _lost(self) -> bool:
        """Whether an error has made the device unusable for this process."""
        try:
            return self.options.device.type == "cuda" and bool(torch.zeros(1, device=self.options.device).item())
        except RuntimeError:
            return True

    def _attempt(self, cell: Cell, kept: float) -> None:
        """Measure the cell, if that leaves ``kept`` seconds of the budget."""
        if self._left - kept < _EXPECTED_SECONDS[cell.kind] or self._lost():
            self.report.dropped.append(cell)
            return
        try:
            result = self._measure(cell)
        except Exception as error:  # noqa: BLE001 (of whatever kind: one cell must not end the others)
            self._fail(cell, error)
        else:
            self.report.results.add(result)
            self._say(describe(result))
        self._store()

    def _fail(self, cell: Cell, error: Exception) -> None:
        """Record the error. If memory was exhausted, skip the setting's other cells, too."""
        self._stage = None
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        if isinstance(error, (CapacityError, ParameterError)):
            self._hopeless.setdefault(cell.setting, str(error))
        self.report.failed.append((cell, reason))
        self._say(f"{cell.name}: FAILED: {reason}")
        error.__traceback__ = None  # the traceback holds tensors
        empty_caches()

    def _measure(self, cell: Cell) -> Result:
        if cell.setting in self._hopeless:
            raise CapacityError(self._hopeless[cell.setting])
        if cell.kind == "auto":
            return self._automatic(cell)
        stage, effort = self._staged(cell.setting), self.options.effort
        if cell.kind == "verify":
            ms = stage.verify_ms(cell.k, effort.repeats)
            return Measured(cell, ms, self._floor_ms(cell, cell.setting.context))
        timed = stage.run(cell.k, effort)
        if cell.kind == "trace":
            return Traced(cell, timed.round_ms, stage.trace(cell.k))
        floor_ms = self._floor_ms(cell, timed.context)
        return Measured(cell, timed.round_ms, floor_ms, timed, stage.queued_ms(cell.k, effort.rounds))

    def _automatic(self, cell: Cell) -> Automatic:
        self._stage = None
        target, draft = self._models(cell.setting)
        best = self.report.results.best(cell.setting, cell.setting.rate) if cell.setting.rate == RATE else None
        length = None if best is None else best[1]
        return Automatic(cell, auto_over_plain(target, draft, cell.setting, self.options.auto_tokens, length))

    def _staged(self, setting: Setting) -> Stage:
        """The last cell's stage, if the setting is the same; else a new one."""
        if self._stage is None or self._stage.setting != setting:
            self._stage = None
            self._stage = Stage(*self._models(setting), setting)
        return self._stage

    def _models(self, setting: Setting) -> tuple[Transformer, Transformer]:
        """The models, leaving room for the setting's rows."""
        pair, dtype = self._shelf.pair(setting.pair), self.options.dtype
        caches = sum(cache_bytes(config, setting, dtype) for config in (pair.target, pair.draft))
        return self._shelf.get(setting.pair, setting.format, caches + _WORKSPACE)

    def _floor_ms(self, cell: Cell, context: float) -> float:
        setting, pair = cell.setting, self._shelf.pair(cell.setting.pair)
        size, ceiling = self.options.dtype.itemsize, self.report.ceiling
        target, draft = (Weights(config, setting.format, size) for config in (pair.target, pair.draft))
        if cell.kind == "verify":
            return 1e3 * pass_work(target, setting.rows, cell.k + 1, context).seconds(ceiling)
        return 1e3 * round_floor(target, draft, setting.rows, cell.k, context, ceiling, setting.width)

    def _attend(self) -> None:
        """Measure attention alone, the most important cases."""
        self._stage = None
        options, tiny_ones = self.options, self.options.tiny
        seconds = min(options.budget * _ATTENTION_SHARE, self._left)
        wanted = attention.cases(tiny=tiny_ones)
        copied = self.report.ceiling.copy_bytes
        for timed in attention.sweep(wanted, options.device, options.dtype, copied, seconds, options.effort.repeats):
            self.report.attention.append(timed)
            self._say(attention.describe(timed))
        self._store()

    def _store(self) -> None:
        report = self.report
        report.seconds = time.perf_counter() - self._began
        self._save(report.as_json(self.lines()))

    def lines(self) -> list[Line]:
        """The requested figures, as far as they are known."""
        return show(self.report.results, self.report.attention, self.options.axes)


def _model(cell: Cell) -> tuple[str, WeightFormat]:
    return cell.setting.pair, cell.setting.format


def describe(result: Result) -> str:
    """One line of progress."""
    name = result.cell.name
    match result:
        case Automatic():
            run = result.run
            times = f"{run.over_plain:.2f}x plain, {run.first_over_plain:.2f}x in a fresh engine"
            if run.fixed is not None:
                times += f", {run.fixed / run.plain:.2f}x with k={run.fixed_length}"
            ahead = "" if run.captured is None else f"; {run.captured}"
            return f"{name}: {run.auto:.0f} tokens/s, {times}{ahead}"
        case Traced():
            return f"{name}: {result.ms:.3f} ms, idle {result.idle:.1%}"
    queued = "" if result.queued_ms is None else f", {result.queued_ms:.3f} without waiting for the host"
    return f"{name}: {result.ms:.3f} ms{queued}, floor {result.floor_ms:.3f} ({result.of_floor:.0%})"
