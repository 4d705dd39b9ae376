"""``paceline batch``: a file of requests in, a file of answers out; a job that was ended can continue."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from paceline.cli.console import note
from paceline.cli.flags import flags_of
from paceline.cli.options import (
    DEFAULT_MODEL,
    EngineFlags,
    Model,
    Quiet,
    follow_recommendation,
    given_fields,
    refuse_given,
)
from paceline.config import SamplingParams, ServerConfig
from paceline.config.files import read_text, write_text
from paceline.config.limits import MAX_COUNT
from paceline.errors import MissingPackageError, ParameterError
from paceline.progress import Bar

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.server.batch.output import OutputFile
    from paceline.server.batch.window import LineResult
    from paceline.server.context import Context

EXIT_FAILED = 2
_TICK = 0.5  # seconds between two updates of the speed


def batch(
    context: typer.Context,
    engine: EngineFlags,
    sampling: SamplingParams,
    input_file: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            help="JSON lines: OpenAI's batch requests (custom_id, method, url, body), or those of paceline generate.",
        ),
    ],
    output_file: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The file of answers and errors, one a line.")],
    model: Model = DEFAULT_MODEL,
    resume: Annotated[bool, typer.Option("--resume", help="Continue where OUTPUT ends.")] = False,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Write answers in the order of INPUT. Default: as they finish.")
    ] = False,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="Model name in requests. Default: MODEL.")
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas", min=1, help="Number of engines on Ray that answer the file. Default: one, without Ray."
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", help="Address of Ray: HOST:PORT, or auto. Default: Ray is started here."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Answer a file of requests. A line without a seed gets one that depends on --seed and its custom_id (or index).

    Exit code 2 if a line could not be answered, in this run or an earlier one; OUTPUT has the reason.
    """
    _need_server()
    from paceline.server.batch.output import OutputFile

    engine.check()
    params = dataclasses.replace(sampling, seed=None)  # the seed is the job's
    names = [flag.name for flag in flags_of(SamplingParams) if flag.name != "seed"]
    allowed = "left out for lines in OpenAI's form, whose body has the parameters"
    refuse_params = functools.partial(refuse_given, context, allowed, *names)
    if ray_address is not None and replicas is None:
        raise ParameterError("--ray-address", ray_address, "left out without --replicas")
    _check_paths(input_file, output_file, resume)
    name = served_model_name or model
    config = ServerConfig(served_model_name=name, max_waiting=MAX_COUNT)
    with (
        _opened(input_file) as lines,
        OutputFile("OUTPUT", output_file) as output,
        _telling_how_to_go_on(output_file, output),
    ):

        def begin(settings: dict[str, Any]) -> int:
            return _begun(output_file, settings, sampling.seed, done=bool(output.done))

        if replicas is None:
            from paceline.cli.settings import settings_of

            llm = engine.load(model, quiet)
            chat_params = follow_recommendation(context, llm, params, quiet, chat=True)
            params = follow_recommendation(context, llm, params, quiet=True)
            seed = begin(settings_of(llm, params, chat_params))
            job = _LocalRun(llm, config, seed, params, chat_params, refuse_params, in_order=in_order, quiet=quiet)
            failed = asyncio.run(job.run(lines, output))
        else:
            from paceline.cli.workers import RayRun
            from paceline.integrations.ray.cluster import LOCAL

            given_names = given_fields(context)
            on_ray = RayRun(config, params, given_names, refuse_params, begin, in_order=in_order, quiet=quiet)
            failed = on_ray.run(engine.recipe(model), replicas, ray_address or LOCAL, lines, output)
    failed += output.failed
    if failed:
        note(f"{failed} lines could not be answered; {output_file} has the reasons")
        raise typer.Exit(EXIT_FAILED)


def _need_server() -> None:
    """Raise MissingPackageError unless the server's packages are installed."""
    try:
        import paceline.server.context  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingPackageError(error.name, "serve") from error


# Files


def _check_paths(source: Path, output: Path, resume: bool) -> None:
    """Raise ParameterError unless OUTPUT is a new file, or with ``resume`` one to continue, and not INPUT."""
    if output.exists():
        if not output.is_file() or (source.exists() and output.samefile(source)):
            raise ParameterError("OUTPUT", str(output), "a file of its own: it is appended to")
        if output.stat().st_size and not resume:
            allowed = "a new file; or go on where it ends, with --resume"
            raise ParameterError("OUTPUT", str(output), allowed)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if str(path) == "-":  # a buffer of its own, because a thread may still wait for a line when the process ends
        yield open(sys.stdin.fileno(), "rb", closefd=False)  # noqa: SIM115  (closing it would wait for that line)
        return
    try:
        file = path.open("rb")
    except (OSError, ValueError) as error:
        raise ParameterError("INPUT", str(path), f"a file that can be read, or - for stdin ({error})") from error
    with file:
        yield file


@contextmanager
def _telling_how_to_go_on(path: Path, output: OutputFile) -> Iterator[None]:
    """Report after Ctrl-C how many lines are done and which option continues the job."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"interrupted: {output.lines} lines are in {path}; the same command with --resume continues after them")
        raise


def _begun(output: Path, settings: dict[str, Any], seed_option: int | None, *, done: bool) -> int:
    """The job's seed, written beside the answers with the settings before there are any.

    Raises ParameterError if the answers that are there were made with others.
    """
    beside = output.with_name(output.name + ".job")
    if not done:
        seed = secrets.randbits(63) if seed_option is None else seed_option
        write_text(beside, json.dumps(settings | {"seed": seed}) + "\n")
        return seed
    stored = _flat(_kept(beside))
    wanted = _flat(settings) | {"seed": stored.get("seed") if seed_option is None else seed_option}
    for name in dict.fromkeys((*wanted, *stored)):
        if stored.get(name) != wanted.get(name):
            allowed = f"{stored.get(name)!r}, with which {output.name} was begun; or take another file"
            raise ParameterError(f"--resume: {name}", wanted.get(name), allowed)
    return int(stored["seed"])


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with each sampling parameter under its own name, so that an error names the one that differs."""
    params = settings.get("params")
    return {**params, **settings, "params": None} if isinstance(params, dict) else settings


def _kept(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(read_text("--resume", path))
    except ValueError as error:  # ParameterError is one
        allowed = "the file with the seed and settings that was written beside OUTPUT"
        raise ParameterError("--resume", str(path), allowed) from error
    return stored if isinstance(stored, dict) else {}


# The work


@dataclass(frozen=True)
class _LocalRun:
    """One run over a file."""

    llm: LLM
    config: ServerConfig
    seed: int
    params: SamplingParams
    chat_params: SamplingParams
    refuse_params: Callable[[], None]
    _: dataclasses.KW_ONLY
    in_order: bool
    quiet: bool

    async def run(self, file: BinaryIO, output: OutputFile) -> int:
        """Answer all lines; returns how many of this run could not be answered."""
        from paceline.cli.plain_lines import LineReader
        from paceline.cli.settings import running
        from paceline.server.batch.answers import BatchContext, unanswered
        from paceline.server.batch.lines import lines_of
        from paceline.server.batch.window import LINES_PER_ROW, LineWriter, run_all

        async with running(self.llm, self.config) as context:
            reader = LineReader(BatchContext(context, self.seed), self.params, self.chat_params, self.refuse_params)
            todo = unanswered(lines_of(file, self.config.max_body_bytes), reader.read, output)
            async with _progress(context, file, len(output.done), shown=not self.quiet) as progress:
                await run_all(
                    todo,
                    LineWriter(output.append),
                    window=LINES_PER_ROW * self.llm.config.rows,
                    in_order=self.in_order,
                    on_result=progress.tell,
                )
        return progress.failed


class _ProgressBar:
    """A bar on a terminal: lines, tokens a second, acceptance, time left."""

    def __init__(self, context: Context, bar: Bar) -> None:
        self.failed = self.answered = 0
        self._context, self._bar = context, bar

    def tell(self, outcome: LineResult) -> None:
        """Count one more line that is on disk."""
        self.answered += 1
        self.failed += outcome.failed
        self._bar.change(advance=1)

    async def watch(self) -> None:
        """Show the speed until cancelled."""
        while True:
            now = self._context.meter.stats()
            rate = "" if now.acceptance_rate is None else f", acceptance {now.acceptance_rate:.0%}"
            self._bar.change(note=f"{now.tokens_per_second:.0f} tokens/s{rate}")
            await asyncio.sleep(_TICK)

    def summary(self, seconds: float) -> str:
        """The figures of the run, in one line."""
        tokens, drafted, accepted = self._context.meter.totals()
        rate = f", acceptance {accepted / drafted:.0%}" if drafted else ""
        pace = f"{tokens} tokens, {tokens / max(seconds, 1e-9):.1f} a second{rate}"
        return f"{self.answered} lines in {seconds:.1f} s: {pace}; {self.failed} failed"


@asynccontextmanager
async def _progress(context: Context, file: BinaryIO, done: int, *, shown: bool) -> AsyncIterator[_ProgressBar]:
    total = _total(file) if shown and sys.stderr.isatty() else None
    began = time.monotonic()
    with Bar("lines", total, shown=shown, done=done) as bar:
        progress = _ProgressBar(context, bar)
        watch = asyncio.create_task(progress.watch())
        try:
            yield progress
        finally:
            watch.cancel()
    if shown:
        note(progress.summary(time.monotonic() - began))


def _total(file: BinaryIO) -> int | None:
    from paceline.server.batch.lines import count_lines

    return count_lines(file) if file.seekable() else None
