"""A whole training run: data, training, report. A run that was killed can be resumed at any point."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.config import DraftData, DraftTraining
from paceline.core.hardware import available_memory, torch_threads
from paceline.drafters.heads.checkpoint import save_head
from paceline.errors import CapacityError, MissingPackageError
from paceline.tools.training.acceptance import DRAFT_LENGTH
from paceline.tools.training.batches import ExampleDataset
from paceline.tools.training.collect import Collector, check_disk, settings_of
from paceline.tools.training.hidden_states import taps_of
from paceline.tools.training.learn import Trainer, checkpoint_bytes, scale_for, trained_weights, training_bytes
from paceline.tools.training.prompts import Question
from paceline.tools.training.ranks import TrainingRanks
from paceline.tools.training.shards import HELD_OUT, Shard, Shards, check_settings, path_of
from paceline.tools.training.student import Student
from paceline.tools.training.target import Target, coverage, most_frequent

if TYPE_CHECKING:
    from paceline.llm import LLM

_GIB = 2**30
_RESUMABLE = ("minutes", "evaluate_every", "checkpoint_every")  # settings that may change when a run is resumed


@dataclass(frozen=True)
class TrainingCallbacks:
    """Functions that are called as a run proceeds.

    on_shard: with the tokens of each training shard. on_step: after every training step. note: with messages.
    """

    on_shard: Callable[[int], None] = lambda _tokens: None
    on_step: Callable[[Trainer], None] = lambda _trainer: None
    note: Callable[[str], None] = lambda _text: None


@dataclass(frozen=True)
class TrainingRun:
    """The settings of a run. questions: from a file; if None, the target writes its own."""

    output: Path
    data: DraftData
    training: DraftTraining
    questions: Sequence[Question] | None
    resume: bool

    @property
    def checkpoint(self) -> Path:
        return self.output / "training.safetensors"


def check_resources(plan: TrainingRun, target: Target, device: torch.device) -> None:
    """Check memory and disk space before any long work.

    Raises CapacityError if the memory is too small, ParameterError if the disk is.
    """
    taps, training = taps_of(len(target.spec.layers)), plan.training
    head = target.meta_learner(training, taps)
    needed, free = training_bytes(head, training), available_memory(device)
    if needed > free:
        raise CapacityError(
            f"training takes {needed / _GIB:.2f} GiB and {free / _GIB:.2f} GiB are free: lower --batch-tokens, "
            "--vocab, --mlp-width or --layers"
        )
    check_disk(plan.output, plan.data, target.spec.width, len(taps), checkpoint_bytes(head))


def collect(plan: TrainingRun, llm: LLM, callbacks: TrainingCallbacks) -> tuple[Shard, list[Shard]]:
    """Make the data, and return the held-out shard and the training shards."""
    taps = taps_of(llm.engine.models.target.layers)
    directory = plan.output / "data"
    directory.mkdir(exist_ok=True)
    collector = Collector(llm, plan.data, taps, plan.questions)  # before the settings: it may refuse them
    stored = Shards(directory, settings_of(llm, plan.data, taps, plan.questions), resume=plan.resume)
    if collector.left_out:
        callbacks.note(
            f"{collector.left_out} prompts are skipped, too long to leave room for an answer: --max-model-len"
        )
    held_out, *shards = collector.shards(stored, callbacks.on_shard)
    return held_out, shards


def train(
    plan: TrainingRun, llm: LLM, target: Target, callbacks: TrainingCallbacks, ranks: TrainingRanks
) -> dict[str, Any]:
    """Make the data, train on rank 0, and write the head. Returns the report.

    ``llm`` is closed before training. The other ranks call ``join_training``.
    """
    settings = {name: value for name, value in asdict(plan.training).items() if name not in _RESUMABLE}
    wanted = {**settings, "timed": plan.training.minutes is not None, "tokens": plan.data.tokens}
    before = {"kind": DraftTraining.kind}  # older versions had only this kind and did not write it
    file = plan.output / "training.json"
    goes_on = plan.checkpoint.exists()
    if goes_on:
        check_settings(file, wanted, resume=plan.resume, before=before)
    held_out, shards = collect(plan, llm, callbacks)
    if not goes_on:  # the last attempt may have had other settings, and the data does not depend on them
        file.unlink(missing_ok=True)
        check_settings(file, wanted, resume=plan.resume, before=before)
    device, threads = llm.engine.models.target.device, llm.engine.threads
    tokenizer = llm.requests.tokenizer
    llm.close()
    del llm
    gc.collect()  # training needs the memory of the engine's caches and weights
    ranks.total(len(shards))  # tells the other ranks, waiting in ``join_training``, that the data is complete
    with torch_threads(max(1, threads // ranks.size)):
        trainer = _trainer(plan, target, held_out, shards, device, ranks)
        trainer.run(plan.checkpoint, lambda: callbacks.on_step(trainer))
    head = trainer.finished()
    if isinstance(head, Student):
        tokenizer.huggingface.save_pretrained(plan.output)
        head.save(plan.output, target.output)
    else:
        save_head(head, plan.output)
    return _report(plan, trainer, held_out, shards)


def join_training(plan: TrainingRun, target: Target, ranks: TrainingRanks, threads: int) -> None:
    """Train on a rank other than 0, once rank 0 has made the data. threads: of all ranks together."""
    count = int(ranks.total(0))
    held_out, *shards = (Shard(path_of(plan.output / "data", number)) for number in range(HELD_OUT, count))
    with torch_threads(max(1, threads // ranks.size)):
        _trainer(plan, target, held_out, shards, torch.device("cpu"), ranks).run(plan.checkpoint)


def _trainer(
    plan: TrainingRun,
    target: Target,
    held_out: Shard,
    shards: Sequence[Shard],
    device: torch.device,
    ranks: TrainingRanks,
) -> Trainer:
    vocab_size = target.spec.vocab_size
    vocabulary = most_frequent(shards, vocab_size, min(plan.training.vocab, vocab_size))
    head = target.make_learner(plan.training, taps_of(len(target.spec.layers)), vocabulary, plan.data.seed).to(device)
    dataset = ExampleDataset(shards)
    scale = scale_for(head, dataset).to(device)
    return Trainer(head, dataset, ExampleDataset([held_out]), scale, plan.training, plan.data.seed, ranks)


def _report(plan: TrainingRun, trainer: Trainer, held_out: Shard, shards: Sequence[Shard]) -> dict[str, Any]:
    progress, head = trainer.progress, trainer.head
    return {
        "data": {
            **asdict(plan.data),
            "conversations": sum(map(len, shards)),
            "tokens_made": trainer.dataset.tokens,
            "tokens_of_answers": sum(len(shard.answer(i)) for shard in shards for i in range(len(shard))),
            "held_out": len(held_out),
        },
        "training": asdict(plan.training),
        "head": {
            "weights_trained": trained_weights(head),
            "vocabulary": len(head.targets),
            "coverage_of_held_out": coverage(held_out, head.targets.cpu()),
        },
        "seconds_of_training": progress.seconds,
        "cpu_seconds_of_training": progress.cpu_seconds,
        "passes": progress.passes,
        "losses": progress.losses,
        "acceptance": progress.looks,
    }


def draw(report: dict[str, Any], path: Path, title: str) -> bool:
    """Plot loss and acceptance over the tokens seen. Returns False if matplotlib is not installed."""
    from paceline.tools.bench.plots import new_figure, save

    try:
        figure, (loss, acceptance) = new_figure(columns=2)
    except MissingPackageError:
        return False
    losses, looks = report["losses"], report["acceptance"]
    seen = [report["passes"] * (step + 1) / len(losses) for step in range(len(losses))]
    loss.plot(seen, losses, linewidth=0.7)
    loss.set(xlabel="tokens seen", ylabel="loss of draft token 1 (cross-entropy, then total variation)", yscale="log")
    passes = [look["passes"] for look in looks]
    for step in range(DRAFT_LENGTH):
        acceptance.plot(passes, [look["conditional"][step] for look in looks], "o-", label=f"draft token {step + 1}")
    acceptance.set(xlabel="tokens seen", ylabel="conditional acceptance, held-out texts, greedy", ylim=(0, None))
    acceptance.legend(fontsize=8)
    save(figure, path, title)
    return True


def as_markdown(report: dict[str, Any]) -> str:
    """The report as a Markdown page."""
    last, data, head = report["acceptance"][-1], report["data"], report["head"]
    rates = " | ".join("never reached" if math.isnan(rate) else f"{rate:.3f}" for rate in last["conditional"])
    lengths = " | ".join(f"{length:.2f}" for length in last["length"])
    kind, vocabulary = "head", "vocabulary"
    if report["training"]["kind"] == "model":
        kind, vocabulary = ("draft model", "vocabulary in training")
    lines = [
        f"# A {kind} for {report['target']}",
        "",
        f"`{report['command']}`",
        "",
        f"* data: {data['conversations']} conversations, {data['tokens_made']} tokens; seed {data['seed']}",
        f"* training: {report['passes']} tokens seen in {report['seconds_of_training'] / 60:.1f} minutes",
        f"* machine: {report['machine']['cpu']}, {report['machine']['threads']} threads",
        f"* {kind}: {head['weights_trained'] / 1e6:.2f} M weights trained",
        f"* {vocabulary}: {head['vocabulary']} tokens, {head['coverage_of_held_out']:.1%} of the held-out answers",
        "",
        f"Greedy drafts on {data['held_out']} held-out answers ({last['places']} positions):",
        "",
        "| draft token | " + " | ".join(str(step + 1) for step in range(DRAFT_LENGTH)) + " |",
        "| --- |" + " --- |" * DRAFT_LENGTH,
        f"| acceptance rate, if all before it were accepted | {rates} |",
        f"| tokens per round with this many draft tokens | {lengths} |",
        "",
        "These are tokens per round, not a speed: a round takes longer with draft tokens. This measures the speed:",
        "",
        f"`{report['measure']}`",
        "",
    ]
    return "\n".join(lines)
