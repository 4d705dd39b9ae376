"""``paceline train-draft``: a drafter for one's own target, trained on what the target itself writes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.console import note, working
from paceline.cli.document import command_line, end
from paceline.cli.options import DEFAULT_MODEL, EngineFlags, Model, Quiet
from paceline.config import DRAFT_KINDS, DraftData, DraftTraining, EngineOptions
from paceline.config.files import check_output, write_text
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.tools.training.learn import Trainer
    from paceline.tools.training.ranks import TrainingRanks
    from paceline.tools.training.run import TrainingCallbacks, TrainingRun

DATA, TRAINING = "Data", "Training"
WITHOUT = {
    "draft_model", "drafter", "num_speculative_tokens", "profile", "acceptance", "rounds", "draft_dtype",
    "draft_quantization", "deterministic", "reference_document", "max_batch_size", "max_model_len",
}  # fmt: skip
FILES = ("report.json", "report.md", "report.png", "model.safetensors", "config.json")


def _of_data(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=DATA)


def _of_training(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=TRAINING)


def train_draft(
    engine: EngineFlags,
    output: Annotated[Path, typer.Option("--output", help="A directory for data, checkpoints, head and report.")],
    model: Model = DEFAULT_MODEL,
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            help="feature: a head that guesses token by token (EAGLE-3); parallel: all in one pass (P-EAGLE); "
            "hidden_transfer: with the target's last layers, all in one pass; model: a draft model of some of the "
            "target's layers.",
        ),
    ] = DraftTraining.kind,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in --output ended.")] = False,
    prompts: Annotated[
        Path | None, _of_data("--prompts", text="Lines of text, or JSON lines (.jsonl). Default: the target's own.")
    ] = None,
    tokens: Annotated[int, _of_data("--tokens", text="Of prompts and answers, at least.")] = DraftData.tokens,
    prompt_tokens: Annotated[
        int, _of_data("--prompt-tokens", text="Most of a prompt that the target writes.")
    ] = DraftData.prompt_tokens,
    answer_tokens: Annotated[int, _of_data("--answer-tokens", text="Most of an answer.")] = DraftData.answer_tokens,
    held_out: Annotated[int, _of_data("--held-out", text="Conversations to look at only.")] = DraftData.held_out,
    shard: Annotated[int, _of_data("--shard", text="Conversations of a file.")] = DraftData.shard,
    disk_budget: Annotated[
        float, _of_data("--disk-budget", text="GiB that everything may take.")
    ] = DraftData.disk_budget,
    max_batch_size: Annotated[int, _of_data("--max-batch-size", text="Texts that are written at once.")] = 64,
    max_model_len: Annotated[int, _of_data("--max-model-len", text="Most tokens of prompt and answer.")] = 512,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same head.")] = DraftData.seed,
    epochs: Annotated[float, _of_training("--epochs", text="How often each text is seen.")] = DraftTraining.epochs,
    minutes: Annotated[
        float | None, _of_training("--minutes", text="Train for so long instead; data not counted.")
    ] = DraftTraining.minutes,
    layers: Annotated[
        int | None, _of_training("--layers", text="Of a draft model. Default: one for eight of the target's.")
    ] = DraftTraining.layers,
    vocab: Annotated[int, _of_training("--vocab", text="Tokens that the head can say.")] = DraftTraining.vocab,
    mlp_width: Annotated[
        int | None, _of_training("--mlp-width", text="Default: the target's.")
    ] = DraftTraining.mlp_width,
    learning_rate: Annotated[
        float, _of_training("--learning-rate", text="AdamW's highest.")
    ] = DraftTraining.learning_rate,
    batch_tokens: Annotated[int, _of_training("--batch-tokens", text="Of a step.")] = DraftTraining.batch_tokens,
    unroll: Annotated[int, _of_training("--unroll", text="Guesses of a draft that are learnt.")] = DraftTraining.unroll,
    evaluate_every: Annotated[
        float, _of_training("--evaluate-every", text="Minutes between two looks at the held-out texts.")
    ] = DraftTraining.evaluate_every,
    checkpoint_every: Annotated[
        float, _of_training("--checkpoint-every", text="Minutes between two checkpoints.")
    ] = DraftTraining.checkpoint_every,
    quiet: Quiet = False,
) -> None:
    """Train a head or a draft model for a target: it writes its own data, with the precision that it is run with here.

    A run that was killed goes on with --resume, and ends as if nothing had been. A head is a checkpoint of the
    speculators layout, a draft model one of transformers; the last line of stdout is the report as one JSON document.
    Processes that torchrun starts learn together, on CPUs.
    """
    _check_kind(kind)
    data = DraftData(
        tokens=tokens, seed=seed, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens, held_out=held_out,
        shard=shard, disk_budget=disk_budget,
    )  # fmt: skip
    training = DraftTraining(
        kind=kind, layers=layers, epochs=epochs, minutes=minutes, vocab=vocab, mlp_width=mlp_width,
        learning_rate=learning_rate, batch_tokens=batch_tokens, unroll=unroll, evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
    )  # fmt: skip
    check_output_directory(output)
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


def _check_kind(kind: str) -> None:
    kinds = " or ".join(map(repr, DRAFT_KINDS))
    if kind not in DRAFT_KINDS:
        raise ParameterError("--kind", kind, kinds)


def check_output_directory(output: Path) -> None:
    """Raise ParameterError unless everything can be written there."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError("--output", str(output), f"a directory that can be written ({error})") from error
    for name in FILES:
        check_output("--output", output / name)


def _options(engine: EngineFlags, rows: int, longest: int) -> EngineOptions:
    """Of an engine that writes data: plain decoding, prompts fed whatever the time."""
    plain: EngineOptions = {"drafter": None, "num_speculative_tokens": 0, "longest_pause": None}
    sizes: EngineOptions = {"max_batch_size": rows, "max_model_len": longest}
    return {**engine.options(), **plain, **sizes}


def _follow(plan: TrainingRun, model: str, options: EngineOptions, ranks: TrainingRanks) -> None:
    """What a process does that is not the first."""
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
        llm = LLM(model, use_tqdm=False, **options)
    engine, computer = llm.engine.describe(), machine(llm.engine.threads)
    if not quiet:
        note(engine)
    with Bars(plan, quiet) as bars:
        found = train(plan, llm, target, bars.callbacks, ranks)
    about = {"command": command_line(), "target": model, "engine": engine, "machine": computer, "versions": versions()}
    told = about | {"measure": measuring(plan, model, options)} | found
    if not draw(told, plan.output / FILES[2], f"A drafter for {model}. {engine}"):
        note('no plot: it needs matplotlib (pip install "paceline[bench]")')
    write_text(plan.output / FILES[1], as_markdown(told))
    end(told, plan.output / FILES[0])


def measuring(plan: TrainingRun, model: str, options: EngineOptions) -> str:
    """The command that measures what the drafter is worth, with the precision that it was trained for."""
    drafter = "--draft-model" if plan.training.kind == "model" else "--head"
    line = ["paceline", "bench", "drafters", model, drafter, str(plan.output)]
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
        self._data: Any = None
        self._training: Any = None

    def __enter__(self) -> Bars:
        self._data = self._bar("data", self._plan.data.tokens, unit=" tokens")
        return self

    def _bar(self, part: str, total: float, **options: Any) -> Any:
        from tqdm import tqdm

        return tqdm(desc=part, total=total, disable=self._quiet or self._lines is not None, **options)

    def __exit__(self, *_: object) -> None:
        for bar in (self._data, self._training):
            if bar is not None:
                bar.close()

    @property
    def callbacks(self) -> TrainingCallbacks:
        from paceline.tools.training.run import TrainingCallbacks

        return TrainingCallbacks(self._collected, self._learnt, note)

    def _collected(self, tokens: int) -> None:
        self._made += tokens
        self._data.update(tokens)
        if self._lines is not None:
            self._lines.tell("data", self._made / self._plan.data.tokens)

    def _learnt(self, trainer: Trainer) -> None:
        if self._training is None:
            self._data.close()
            self._training = self._bar("training", 100, unit="%", initial=100 * trainer.fraction_done)
        looks = trainer.progress.looks
        kept = f", kept {looks[-1]['conditional'][0]:.3f}" if looks else ""
        now = f"loss {trainer.progress.losses[-1]:.3f}{kept}"
        self._training.update(100 * trainer.fraction_done - self._training.n)
        self._training.set_postfix_str(now)
        if self._lines is not None:
            self._lines.tell("training", trainer.fraction_done, f", {now}")


class Tenths:
    """A line on stderr for each tenth of a part that is done: a log shows no bar."""

    def __init__(self) -> None:
        self._done: dict[str, int] = {}

    def tell(self, part: str, share: float, about: str = "") -> None:
        """share: of the part, from 0; beyond 1 it counts as 1."""
        tenths = min(10, int(10 * share))
        if tenths > self._done.get(part, 0):
            self._done[part] = tenths
            note(f"{part}: {10 * tenths} %{about}")
