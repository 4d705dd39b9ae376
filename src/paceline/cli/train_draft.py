"""``paceline train-draft``: a drafter for a target, trained on text that the target writes."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import note, stage_notes, working
from paceline.cli.document import command_line, end
from paceline.cli.options import DEFAULT_MODEL, EngineFlags, Model, Quiet
from paceline.config import DraftData, DraftTraining, EngineOptions
from paceline.config.files import check_directory, write_text
from paceline.errors import ParameterError
from paceline.progress import Bar

if TYPE_CHECKING:
    from paceline.tools.training.learn import Trainer
    from paceline.tools.training.ranks import TrainingRanks
    from paceline.tools.training.run import TrainingCallbacks, TrainingRun

WITHOUT = {
    "draft_model", "drafter", "num_speculative_tokens", "speculation_width", "profile", "acceptance", "rounds",
    "draft_dtype", "draft_quantization", "draft_vocab_size", "deterministic", "reference_document", "longest_pause",
    "max_batch_size", "max_model_len",
}  # fmt: skip
FILES = ("report.json", "report.md", "report.png", "model.safetensors", "config.json")


def train_draft(
    engine: EngineFlags,
    data: DraftData,
    training: DraftTraining,
    output: Annotated[Path, typer.Option("--output", help="A directory for data, checkpoints, head and report.")],
    model: Model = DEFAULT_MODEL,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --output.")] = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            help="Lines of text, or JSON lines (.jsonl). Default: the target writes its own.",
            rich_help_panel="Data",
        ),
    ] = None,
    max_batch_size: Annotated[
        int, typer.Option("--max-batch-size", help="Texts written at once.", rich_help_panel="Data")
    ] = 64,
    max_model_len: Annotated[
        int, typer.Option("--max-model-len", help="Maximum tokens of prompt and answer.", rich_help_panel="Data")
    ] = 512,
    quiet: Quiet = False,
) -> None:
    """Train a head or a draft model for a target, on data that the target writes in this precision.

    A run that was killed continues with --resume, with the same result. A head is saved in the speculators layout, a
    draft model in that of transformers. The last line of stdout is the report as one JSON document. Processes that
    torchrun starts train together, on CPUs.
    """
    check_directory("--output", output, FILES)
    options = _options(engine, max_batch_size, max_model_len)
    with working("reading the prompts"):
        from paceline.tools.training.prompts import read_questions
        from paceline.tools.training.ranks import training_ranks
        from paceline.tools.training.run import TrainingRun
        from paceline.tools.training.shards import directory_lock

        questions = None if prompts is None else read_questions(prompts)
    plan = TrainingRun(output, data, training, questions, resume)
    with training_ranks() as ranks:
        if ranks.size > 1:
            _check_device(options["device"])
        if ranks.first:
            with directory_lock(output):
                _run(plan, model, options, ranks, quiet)
        else:
            _follow(plan, model, options, ranks)


def _check_device(device: str) -> None:
    from paceline.core.hardware import resolve_device

    if resolve_device(device).type != "cpu":
        raise ParameterError("--device", device, "cpu where several processes learn together; on a GPU start one")


def _options(engine: EngineFlags, rows: int, longest: int) -> EngineOptions:
    """Options of the engine that writes data: plain decoding, full prefill chunks."""
    plain: EngineOptions = {"drafter": None, "num_speculative_tokens": 0, "longest_pause": None}
    sizes: EngineOptions = {"max_batch_size": rows, "max_model_len": longest}
    return {**engine.options(), **plain, **sizes}


def _follow(plan: TrainingRun, model: str, options: EngineOptions, ranks: TrainingRanks) -> None:
    """Train in a process other than the first."""
    from paceline.core.hardware import default_threads
    from paceline.tools.training.run import join_training
    from paceline.tools.training.target import Target

    training = plan.training
    join_training(
        plan, Target.load(model, training.kind, training.layers), ranks, options["threads"] or default_threads()
    )


def _run(plan: TrainingRun, model: str, options: EngineOptions, ranks: TrainingRanks, quiet: bool) -> None:
    from paceline.core.hardware import resolve_device
    from paceline.llm import LLM
    from paceline.tools.bench.offline import machine, versions
    from paceline.tools.training.run import as_markdown, check_resources, draw, train
    from paceline.tools.training.target import Target

    with working(f"loading {model}"):
        target = Target.load(model, plan.training.kind, plan.training.layers)
        check_resources(plan, target, resolve_device(options["device"]))
    with stage_notes(quiet):
        llm = LLM(model, use_tqdm=not quiet, **options)
    engine, computer = llm.engine.describe(), machine(llm.engine.threads)
    if not quiet:
        note(engine)
    with Bars(plan, quiet) as bars:
        found = train(plan, llm, target, bars.callbacks, ranks)
    about = {"command": command_line(), "target": model, "engine": engine, "machine": computer, "versions": versions()}
    report = about | {"measure": measuring(plan, model, options)} | found
    if not draw(report, plan.output / FILES[2], f"A drafter for {model}. {engine}"):
        note('no plot: it needs matplotlib (pip install "paceline[bench]")')
    write_text(plan.output / FILES[1], as_markdown(report))
    end(report, plan.output / FILES[0])


def measuring(plan: TrainingRun, model: str, options: EngineOptions) -> str:
    """The command that measures the trained drafter, in the precision of its training."""
    line = ["paceline", "bench", "offline", model, "--draft-model", str(plan.output)]
    line += ["--dtype", options["dtype"], "--device", options["device"]]
    if options["quantization"] is not None:
        line += ["--quantization", options["quantization"]]
    return shlex.join(line)


class Bars:
    """Progress of data and of training: two bars on a terminal, else a line for every tenth of each."""

    def __init__(self, plan: TrainingRun, quiet: bool) -> None:
        self._plan, self._quiet = plan, quiet
        self._lines = Tenths() if not (quiet or sys.stderr.isatty()) else None
        self._made = 0  # tokens
        self._learns, self._percent = False, 0.0  # whether training has begun, and how far it is
        self._bars = ExitStack()  # with one bar at a time
        self._bar: Bar

    def __enter__(self) -> Bars:
        self._begin(Bar("data", self._plan.data.tokens, unit="tokens", shown=not self._quiet))
        return self

    def _begin(self, bar: Bar) -> None:
        self._bars.close()
        self._bar = self._bars.enter_context(bar)

    def __exit__(self, *_: object) -> None:
        self._bars.close()

    @property
    def callbacks(self) -> TrainingCallbacks:
        from paceline.tools.training.run import TrainingCallbacks

        return TrainingCallbacks(self._collected, self._learnt, note)

    def _collected(self, tokens: int) -> None:
        self._made += tokens
        self._bar.change(advance=tokens)
        if self._lines is not None:
            self._lines.tell("data", self._made / self._plan.data.tokens)

    def _learnt(self, trainer: Trainer) -> None:
        percent = 100 * trainer.fraction_done
        if not self._learns:
            self._learns, self._percent = True, percent
            self._begin(Bar("training", 100, unit="%", shown=not self._quiet, done=percent))
        looks = trainer.progress.looks
        kept = f", kept {looks[-1]['conditional'][0]:.3f}" if looks else ""
        now = f"loss {trainer.progress.losses[-1]:.3f}{kept}"
        self._bar.change(advance=percent - self._percent, note=now)
        self._percent = percent
        if self._lines is not None:
            self._lines.tell("training", trainer.fraction_done, f", {now}")


class Tenths:
    """Progress in a log: a line on stderr for each tenth of a part."""

    def __init__(self) -> None:
        self._done: dict[str, int] = {}

    def tell(self, part: str, share: float, about: str = "") -> None:
        """Report progress. share: fraction of the part that is done, from 0; above 1 counts as 1."""
        tenths = min(10, int(10 * share))
        if tenths > self._done.get(part, 0):
            self._done[part] = tenths
            note(f"{part}: {10 * tenths} %{about}")
