"""``paceline batch --replicas``: the lines of a file, answered by engines in workers of Ray.

This process reads lines, checks names, sends each line to the worker with the fewest in flight, and writes answers.
A worker has the model only. Ray restarts a worker that dies and repeats its unfinished lines; a line has its own seed,
so its answer is the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO

from paceline.cli.console import note
from paceline.cli.plain_lines import LineReader
from paceline.cli.settings import running, settings_of
from paceline.config import EngineConfig, SamplingParams, ServerConfig
from paceline.core.hardware import default_threads
from paceline.errors import PacelineError
from paceline.integrations.ray.cluster import Recipe, joined, need_ray, shared
from paceline.progress import Bar
from paceline.server.batch.answers import BatchContext, RefusedLine, read_line, unanswered
from paceline.server.batch.lines import InputLine, lines_of
from paceline.server.batch.output import OutputFile
from paceline.server.batch.window import LINES_PER_ROW, LineResult, LineTask, LineWriter, run_all
from paceline.server.context import Context

_RESTARTS = 3  # of a worker and of a line


def _allowed() -> None:
    """Accept every line: the process that read the file has checked the command line."""


class Worker:
    """An engine in an actor of Ray. params, given: as in ``RayRun``."""

    def __init__(self, recipe: Recipe, config: ServerConfig, params: SamplingParams, given: Collection[str]) -> None:
        self._llm, self._config = recipe.load(), config
        self._params = self._llm.follow_recommendation(params, given)
        self._chat_params = self._llm.follow_recommendation(params, given, chat=True)
        self._settings = settings_of(self._llm, self._params, self._chat_params)
        self._life, self._turn = AsyncExitStack(), asyncio.Lock()
        self._context: Context | None = None

    async def settings(self) -> dict[str, Any]:
        """The settings that answers depend on, besides the lines and the seed."""
        return self._settings

    async def run(self, line: InputLine, seed: int, settings: dict[str, Any]) -> LineResult:
        """Answer a line. Raises PacelineError if this worker's settings differ from the job's."""
        if settings != self._settings:
            raise PacelineError(f"a worker's settings differ from the first one's: {self._settings}, not {settings}")
        async with self._turn:
            if self._context is None:
                self._context = await self._life.enter_async_context(running(self._llm, self._config))
        reader = LineReader(
            BatchContext(self._context, seed), self._params, self._chat_params, _allowed
        )  # names were checked when the file was read
        return await read_line(reader.read, line).run()


class WorkerPool:
    """The workers, as actors of Ray. seed, settings: the job's. lost: the error of an actor that died."""

    def __init__(self, actors: Sequence[Any], seed: int, settings: dict[str, Any], lost: type[Exception]) -> None:
        self._actors, self._seed, self._settings, self._lost = actors, seed, settings, lost
        self._busy = [0] * len(actors)

    async def run(self, line: InputLine) -> LineResult:
        """Answer a line by the worker with the fewest in flight. Raises PacelineError if no worker can."""
        place = min(range(len(self._busy)), key=self._busy.__getitem__)
        self._busy[place] += 1
        try:
            outcome: LineResult = await self._actors[place].run.remote(line, self._seed, self._settings)
        except self._lost as error:
            raise PacelineError(f"{line.where} cannot be answered: {error}") from error
        finally:
            self._busy[place] -= 1
        return outcome


@dataclass(frozen=True)
class SentLine:
    """A line that a worker answers."""

    pool: WorkerPool
    line: InputLine

    async def run(self) -> LineResult:
        return await self.pool.run(self.line)


@dataclass(frozen=True)
class RayRun:
    """One run over a file by workers.

    params: the defaults of plain lines; the model's files may recommend those that are not ``given``.
    begin: returns the job's seed for the settings that answers depend on.
    """

    config: ServerConfig
    params: SamplingParams
    given: Collection[str]
    refuse_params: Callable[[], None]
    begin: Callable[[dict[str, Any]], int]
    _: dataclasses.KW_ONLY
    in_order: bool
    quiet: bool

    def run(self, recipe: Recipe, replicas: int, address: str, file: BinaryIO, output: OutputFile) -> int:
        """Answer all lines; returns how many of this run could not be answered. Raises PacelineError."""
        need_ray()
        cores = max(default_threads(), replicas * (recipe.options.get("threads") or 0))
        with joined(address, cores) as ray:
            placed, share = shared(ray, recipe, replicas)
            window = LINES_PER_ROW * (placed.options["max_batch_size"] or EngineConfig.DEFAULT_ROWS)
            options = {"max_restarts": _RESTARTS, "max_task_retries": _RESTARTS, "max_concurrency": window + 1}
            kind = ray.remote(Worker).options(**options, **share.ray_options)
            actors = [kind.remote(placed, self.config, self.params, self.given) for _ in range(replicas)]
            if not self.quiet:
                note(f"{replicas} engines on Ray ({address}): {share}")
            try:
                settings = ray.get(actors[0].settings.remote())
            except ray.exceptions.RayError as error:
                raise PacelineError(f"a worker could not start: {error}") from error
            pool = WorkerPool(actors, self.begin(settings), settings, ray.exceptions.RayError)
            return asyncio.run(self._play(pool, file, output, window * replicas))

    async def _play(self, pool: WorkerPool, file: BinaryIO, output: OutputFile, window: int) -> int:
        no_batch: Any = None  # the reader only checks here; workers answer
        reader = LineReader(no_batch, self.params, self.params, self.refuse_params)

        def read(line: InputLine, data: object) -> LineTask:
            chore = reader.read(line, data)
            return chore if isinstance(chore, RefusedLine) else SentLine(pool, line)

        todo = unanswered(lines_of(file, self.config.max_body_bytes), read, output)
        began, answered, failed = time.monotonic(), 0, 0
        with Bar("lines", None, shown=not self.quiet, done=len(output.done)) as bar:

            def tell(outcome: LineResult) -> None:
                nonlocal answered, failed  # a bar that is not shown does not count
                answered += 1
                failed += outcome.failed
                bar.change(advance=1)

            await run_all(todo, LineWriter(output.append), window=window, in_order=self.in_order, on_result=tell)
        if not self.quiet:
            note(f"{answered} lines in {time.monotonic() - began:.1f} s; {failed} failed")
        return failed
