"""From a target to its head: data, training, a look at what it is worth. Every part goes on where a killed run was."""

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
_NO_MATTER = ("minutes", "evaluate_every", "checkpoint_every")  # what may be another when a run goes on


@dataclass(frozen=True)
class TrainingCallbacks:
    """Who is told how things go. collected: tokens of a shard. learnt: after every step of training."""

    collected: Callable[[int], None] = lambda _tokens: None
    learnt: Callable[[Trainer], None] = lambda _trainer: None
    note: Callable[[str], None] = lambda _text: None


@dataclass(frozen=True)
class TrainingRun:
    """What is to be made, and where. questions: of a file; None: the target writes its own."""

    output: Path
    data: DraftData
    training: DraftTraining
    questions: Sequence[Question] | None
    resume: bool

    @property
    def checkpoint(self) -> Path:
        return self.output / "training.safetensors"


def check_resources(plan: TrainingRun, target: Target, device: torch.device) -> None:
    """Raise ParameterError or CapacityError for what the disk or the memory will not hold; before any long work."""
    taps, training = taps_of(target.config.layers), plan.training
    head = target.meta_learner(training, taps)
    needed, free = training_bytes(head, training), available_memory(device)
    if needed > free:
        raise CapacityError(
            f"training takes {needed / _GIB:.2f} GiB and {free / _GIB:.2f} GiB are free: lower --batch-tokens, "
            "--vocab, --mlp-width or --layers"
        )
    check_disk(plan.output, plan.data, target.config.width, len(taps), checkpoint_bytes(head))


def collect(plan: TrainingRun, llm: LLM, callbacks: TrainingCallbacks) -> tuple[Shard, list[Shard]]:
    """The held-out shard, and those to learn from."""
    taps = taps_of(llm.engine.models.target.layers)
    directory = plan.output / "data"
    directory.mkdir(exist_ok=True)
    kept = Shards(directory, settings_of(llm, plan.data, taps, plan.questions), resume=plan.resume)
    collector = Collector(llm, plan.data, taps, plan.questions)
    if collector.left_out:
        callbacks.note(f"{collector.left_out} prompts leave an answer no room and are left out: see --max-model-len")
    held, *shards = collector.shards(kept, callbacks.collected)
    return held, shards


def train(
    plan: TrainingRun, llm: LLM, target: Target, callbacks: TrainingCallbacks, ranks: TrainingRanks
) -> dict[str, Any]:
    """All of it. Writes the head; gives what the report says. Closes ``llm``. Others of the ranks ``follow``."""
    settings = {name: value for name, value in asdict(plan.training).items() if name not in _NO_MATTER}
    wanted = {**settings, "timed": plan.training.minutes is not None, "tokens": plan.data.tokens}
    before = {"kind": DraftTraining.kind}  # the only one there was
    check_settings(plan.output / "training.json", wanted, resume=plan.resume, before=before)
    held, shards = collect(plan, llm, callbacks)
    device, threads = llm.engine.models.target.device, llm.engine.threads
    tokenizer = llm.tokenizer
    llm.close()
    del llm
    gc.collect()  # caches and weights: training needs the room
    ranks.total(len(shards))  # which the others wait for
    with torch_threads(max(1, threads // ranks.size)):
        trainer = _trainer(plan, target, held, shards, device, ranks)
        trainer.run(plan.checkpoint, lambda: callbacks.learnt(trainer))
    head = trainer.finished()
    if isinstance(head, Student):
        assert tokenizer is not None, "models that have a name have a tokenizer"
        tokenizer.huggingface.save_pretrained(plan.output)
        head.save(plan.output, target.rows)
    else:
        save_head(head, plan.output)
    return _told(plan, trainer, held, shards)


def join_training(plan: TrainingRun, target: Target, ranks: TrainingRanks, threads: int) -> None:
    """Learn with the first of the ranks, who makes, keeps and tells everything."""
    count = int(ranks.total(0))
    held, *shards = (Shard(path_of(plan.output / "data", number)) for number in range(HELD_OUT, count))
    with torch_threads(max(1, threads // ranks.size)):
        _trainer(plan, target, held, shards, torch.device("cpu"), ranks).run(plan.checkpoint)


def _trainer(
    plan: TrainingRun, target: Target, held: Shard, shards: Sequence[Shard], device: torch.device, ranks: TrainingRanks
) -> Trainer:
    vocabulary = target.config.vocab_size
    says = most_frequent(shards, vocabulary, min(plan.training.vocab, vocabulary))
    head = target.make_learner(plan.training, taps_of(target.config.layers), says, plan.data.seed).to(device)
    dataset = ExampleDataset(shards)
    scale = scale_for(head, dataset).to(device)
    return Trainer(head, dataset, ExampleDataset([held]), scale, plan.training, plan.data.seed, ranks)


def _told(plan: TrainingRun, trainer: Trainer, held: Shard, shards: Sequence[Shard]) -> dict[str, Any]:
    progress, head = trainer.progress, trainer.head
    return {
        "data": {
            **asdict(plan.data),
            "conversations": sum(map(len, shards)),
            "tokens_made": trainer.dataset.tokens,
            "tokens_of_answers": sum(len(shard.answer(i)) for shard in shards for i in range(len(shard))),
            "held_out": len(held),
        },
        "training": asdict(plan.training),
        "head": {
            "weights_trained": trained_weights(head),
            "vocabulary": len(head.targets),
            "coverage_of_held_out": coverage(held, head.targets.cpu()),
        },
        "seconds_of_training": progress.seconds,
        "passes": progress.passes,
        "losses": progress.losses,
        "acceptance": progress.looks,
    }


def draw(told: dict[str, Any], path: Path, title: str) -> bool:
    """Loss and acceptance against the tokens seen; False without matplotlib, which draws them."""
    from paceline.tools.bench.plots import new_figure, save

    try:
        figure, (loss, kept) = new_figure(columns=2)
    except MissingPackageError:
        return False
    losses = told["losses"]
    share = [told["passes"] * (step + 1) / len(losses) for step in range(len(losses))]
    loss.plot(share, losses, linewidth=0.7)
    loss.set(xlabel="tokens seen", ylabel="loss of the first guess (cross-entropy, then total variation)", yscale="log")
    passes = [look["passes"] for look in told["acceptance"]]
    for step in range(DRAFT_LENGTH):
        kept.plot(passes, [look["conditional"][step] for look in told["acceptance"]], "o-", label=f"guess {step + 1}")
    kept.set(xlabel="tokens seen", ylabel="conditional acceptance, held-out texts, greedy", ylim=(0, None))
    kept.legend(fontsize=8)
    save(figure, path, title)
    return True


def as_markdown(told: dict[str, Any]) -> str:
    """The report for people."""
    last, data, head = told["acceptance"][-1], told["data"], told["head"]
    rates = " | ".join("never came to it" if math.isnan(rate) else f"{rate:.3f}" for rate in last["conditional"])
    lengths = " | ".join(f"{length:.2f}" for length in last["length"])
    model = told["training"]["kind"] == "model"
    what, says = ("draft model", "was taught") if model else ("head", "can say")
    lines = [
        f"# A {what} for {told['target']}",
        "",
        f"`{told['command']}`",
        "",
        f"* data: {data['conversations']} conversations, {data['tokens_made']} tokens; seed {data['seed']}",
        f"* training: {told['passes']} tokens seen in {told['seconds_of_training'] / 60:.1f} minutes",
        f"* machine: {told['machine']['cpu']}, {told['machine']['threads']} threads",
        f"* {what}: {head['weights_trained'] / 1e6:.2f} M weights trained",
        f"* it {says} {head['vocabulary']} tokens: {head['coverage_of_held_out']:.1%} of the held-out answers",
        "",
        f"Greedy drafts on {data['held_out']} held-out answers ({last['places']} places):",
        "",
        "| guess | " + " | ".join(str(step + 1) for step in range(DRAFT_LENGTH)) + " |",
        "| --- |" + " --- |" * DRAFT_LENGTH,
        f"| kept, if those before it were | {rates} |",
        f"| tokens a round with so many guesses | {lengths} |",
        "",
        "These are tokens a round, not a speed: a round takes longer with draft tokens. This measures the speed:",
        "",
        f"`{told['measure']}`",
        "",
    ]
    return "\n".join(lines)
