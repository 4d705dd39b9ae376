"""Training: the objective at each position, measured acceptance, and resuming a killed run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from block_support import BlockReading
from paceline.config import DraftTraining
from paceline.config.training import DRAFT_KINDS, HEAD_KINDS
from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.checkpoint import load_head
from paceline.drafters.heads.chimera import ChimeraHead
from paceline.drafters.heads.feature import FeatureHead
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.tools.training.acceptance import DRAFT_LENGTH, _correct, _rounds_through
from paceline.tools.training.batches import ExampleDataset, TrainingBatch, collate
from paceline.tools.training.hidden_states import HiddenStateReader
from paceline.tools.training.learn import Trainer, scale_for, schedule
from paceline.tools.training.objective import (
    Objective,
    Teacher,
    counted_positions,
    draft_logits,
    features_of,
    loss,
    token_index,
)
from paceline.tools.training.shards import Example, Shard
from paceline.tools.training.target import Target, coverage, most_frequent

TAPS = (2, 4, 5)
OPTIONS = DraftTraining(epochs=2, vocab=64, batch_tokens=256, evaluate_every=1e4, checkpoint_every=1e4)


def shards_of(whole: Path) -> tuple[list[Shard], Shard]:
    data = whole / "data"
    return [Shard(path) for path in sorted(data.glob("train-*"))], Shard(data / "held-out.safetensors")


@pytest.fixture
def trainer(whole: Path, target: str) -> Trainer:
    return make_trainer(whole, target, OPTIONS)


def make_trainer(whole: Path, target: str, options: DraftTraining) -> Trainer:
    shards, held = shards_of(whole)
    source = Target.load(target, options.kind, options.layers)
    vocabulary = most_frequent(shards, source.spec.vocab_size, options.vocab)
    head = source.make_learner(options, TAPS, vocabulary, seed=0)
    dataset = ExampleDataset(shards)
    return Trainer(head, dataset, ExampleDataset([held]), scale_for(head, dataset), options, seed=0)


def test_every_conversation_is_in_each_epoch_once(trainer: Trainer) -> None:
    dataset = trainer.dataset
    first, second = (dataset.epoch(number, 0, 256) for number in (0, 1))
    for steps in (first, second):
        assert sorted(index for step in steps for index in step) == list(range(len(dataset)))
        assert all(len(step) * max(dataset.lengths[index] for index in step) <= 256 for step in steps)
    assert first != second
    assert first == dataset.epoch(0, 0, 256)


def test_positions_that_count_and_the_tokens_they_draft() -> None:
    dataset = [example(length=7, prompt=3), example(length=5, prompt=4)]
    batch = collate(dataset)
    assert counted_positions(batch, 0).tolist() == [2, 3, 4], (
        "the second answer has one token: nothing is drafted there"
    )
    assert counted_positions(batch, 1).tolist() == [2, 3]
    assert token_index(batch, counted_positions(batch, 0), 2).tolist() == [4, 5, 6]
    both = collate([dataset[0], example(length=7, prompt=2)])
    assert counted_positions(both, 2).tolist() == [2, 6 + 1, 6 + 2]
    assert token_index(both, counted_positions(both, 2), 4).tolist() == [6, 7 + 5, 7 + 6]


def example(length: int, prompt: int) -> Example:
    tokens = torch.arange(length)
    return Example(tokens, prompt, torch.zeros(length, 3, 4), torch.zeros(length, 4), tokens, torch.zeros(length))


def test_the_teacher_has_the_targets_distributions(trainer: Trainer) -> None:
    """At every step and position: the softmax of the target's logits, restricted to the head's vocabulary."""
    batch, target_rows = first_batch(trainer), trainer.head.lm_head.weight
    teacher = Teacher(trainer.head, batch)
    width = batch.tokens.shape[1]
    for step, drafted in enumerate(draft_logits(trainer.head, batch, trainer.scale, 3)):
        distribution = teacher.distribution(drafted.positions, step)
        assert distribution.sum(-1).max() <= 1.02
        for line, position in enumerate(drafted.positions.tolist()):
            row, at = divmod(position, width - 1)
            state = batch.hidden[row, at + 1 + step].float()
            wanted = (target_rows @ state - batch.norm[row, at + 1 + step]).exp()
            assert torch.allclose(distribution[line], wanted, atol=1e-3)


def test_the_loss_is_the_weighted_mean_of_the_steps(trainer: Trainer) -> None:
    batch, head = first_batch(trainer), trainer.head
    one, first = loss(head, batch, trainer.scale, Objective([1.0], "kl"))
    assert float(one.detach()) == pytest.approx(first)
    two, _ = loss(head, batch, trainer.scale, Objective([1.0, 0.5], "kl"))
    second = 1.5 * float(two.detach()) - 1.0 * first
    alone, _ = loss(head, batch, trainer.scale, Objective([0.0, 1.0], "kl"))
    assert second / 0.5 == pytest.approx(float(alone.detach()), rel=1e-4)
    variation, _ = loss(head, batch, trainer.scale, Objective([1.0], "total_variation"))
    assert 0 < float(variation.detach()) <= 1


def test_a_dspark_drafter_also_learns_how_probable_acceptance_is(whole: Path, target: str) -> None:
    """Its loss is the divergence plus the cross-entropy of the predicted acceptance with the true one."""
    trainer = make_trainer(whole, target, replace(OPTIONS, kind="dspark"))
    batch, objective = first_batch(trainer), Objective([0.0, 1.0], "total_variation", offset=2)
    total, _ = loss(trainer.head, batch, trainer.scale, objective)
    *_, drafted = draft_logits(trainer.head, batch, trainer.scale, 2, offset=2)
    wanted = Teacher(trainer.head, batch).distribution(drafted.positions, 1)
    accepted = torch.minimum(wanted, drafted.logits.softmax(-1)).sum(-1).detach()
    assert drafted.confidence is not None
    believed = drafted.confidence.sigmoid()
    doubt = -(accepted * believed.log() + (1 - accepted) * (1 - believed).log())
    assert float(total.detach()) == pytest.approx(float((1 - accepted + doubt).mean().detach()), rel=1e-4)
    total.backward()  # type: ignore[no-untyped-call]
    unmoved = [name for name, weight in trainer.head.named_parameters() if weight.requires_grad and weight.grad is None]
    assert unmoved == []


def test_a_chimera_head_is_trained_on_what_it_reads_in_decoding(whole: Path, target: str, llm: LLM) -> None:
    trainer = make_trainer(whole, target, replace(OPTIONS, kind="chimera"))
    batch, head = first_batch(trainer), trainer.head
    assert isinstance(head, ChimeraHead)
    tokens = batch.tokens[0, : batch.lengths[0]]
    reader = HiddenStateReader(llm.engine.models.target, head.config.taps or (), len(tokens), threads=1)
    (outputs,) = reader.read([tokens.tolist()])
    embedding, last = features_of(head, batch, trainer.scale)[0, : len(tokens)].unbind(1)
    assert torch.equal(last, outputs.features[:, 1].float())
    assert torch.allclose(embedding, outputs.features[:, 0].float(), atol=0.02 * float(embedding.abs().max()))


def first_batch(trainer: Trainer) -> TrainingBatch:
    return next(trainer.dataset.batches(trainer.dataset.epoch(0, 0, 256)))


@torch.inference_mode()
def check_measured_acceptance(trained: Trainer) -> None:
    """It is that of drafting token by token.

    At each position the head continues from its own draft tokens until one differs from the target's answer.
    """
    head, scale = trained.head, trained.scale
    batch = next(trained.held_out.batches([[0, 1, 2]]))
    correct = _correct(head, batch, scale)
    accepted = 0
    for row in range(3):
        length, prompt = int(batch.lengths[row]), int(batch.prompts[row])
        for place in range(prompt - 1, length - 2):
            flags = correct[row, place].tolist()
            wanted = next((n for n, flag in enumerate(flags) if flag != 1), DRAFT_LENGTH)
            most = min(DRAFT_LENGTH, length - 2 - place)
            count = drafted_in_blocks if isinstance(head, BlockHead) else drafted
            assert count(head, batch, row, place, scale, most) == wanted
            accepted += wanted
    assert accepted > 0


def drafted(head: FeatureHead, batch: TrainingBatch, row: int, place: int, scale: Tensor, most: int) -> int:
    """Number of draft tokens, at most ``most``, that match the text after ``place``."""
    text, features = batch.tokens[row], features_of(head, batch, scale)[row]
    known = text[1 : place + 2].tolist()
    for step in range(most):
        padding = [0] * 3  # unroll's last positions are meaningless
        tokens = torch.tensor([[*known, *padding]])
        read = torch.cat((features[: place + 1], torch.zeros(tokens.shape[1] - place - 1, *features.shape[1:])))
        passes = list(head.states(tokens, read[None], step + 1))
        if len(passes) <= step:  # some heads draft no more tokens than they have passes
            return step
        normed = passes[-1]
        draft_token = int(head.targets[head.logits(normed[0, place]).argmax()])
        if draft_token != int(text[place + 2 + step]):
            return step
        known.append(draft_token)
    return most


def drafted_in_blocks(head: BlockHead, batch: TrainingBatch, row: int, place: int, scale: Tensor, most: int) -> int:
    """The same by the slow reference of block drafters."""
    text, features = batch.tokens[row].tolist(), features_of(head, batch, scale)[row]
    reference = BlockReading(head.config, head.state_dict())
    made = reference.draft(text[: place + 2], list(features[: place + 1]), min(most, head.spec.most_drafted))
    wrong = (n for n, token in enumerate(made) if token != text[place + 2 + n])
    return next(wrong, len(made))


def test_rounds_that_lead_through_an_answer() -> None:
    right = [[1, 1], [1, 0], [0, 1], [1, -1], [-1, -1]]
    assert _rounds_through(right, 0, 6) == (5, 2), "two accepted at 0, then one accepted at 3"
    assert _rounds_through(right, 2, 6) == (3, 2)
    assert _rounds_through([[0]] * 4, 0, 6) == (4, 4)


def test_training_reduces_the_loss(whole: Path) -> None:
    report = json.loads((whole / "report.json").read_text())
    losses = report["losses"]
    assert min(losses[: len(losses) * 3 // 4][-5:]) < 0.95 * losses[0]


def rejected(trainer: Trainer, steps: int) -> list[float]:
    """The probability that each draft token is rejected on the held-out conversations, given those before it."""
    batch = collate([trainer.held_out[i] for i in range(len(trainer.held_out))])
    step_weights = ([float(step == draft_token) for step in range(draft_token + 1)] for draft_token in range(steps))
    objectives = [Objective(weights, "total_variation") for weights in step_weights]
    return [float(loss(trainer.head, batch, trainer.scale, objective)[0]) for objective in objectives]


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_every_draft_token_is_trained_and_acceptance_measured(
    kind: str, whole: Path, target: str, tmp_path: Path
) -> None:
    epochs = 10 if kind == "dspark" else 4  # which begins a draft at one position in three
    trainer = make_trainer(whole, target, replace(OPTIONS, kind=kind, epochs=epochs, learning_rate=0.005))
    with torch.no_grad():
        before, look = rejected(trainer, 3), trainer.evaluate()
        with torch.enable_grad():
            trainer.run(tmp_path / "checkpoint.safetensors")
        after = rejected(trainer, 3)
    least = 0.003 if kind == "hidden_transfer" else 0.03  # whose first probabilities are higher
    assert all(late < early - least for late, early in zip(after, before, strict=True))
    assert trainer.progress.looks[-1]["length"][-1] > look.length[-1] + 0.1
    if kind in HEAD_KINDS:  # test_student.py has the draft model
        check_measured_acceptance(trainer)


def test_a_killed_training_resumes_exactly(whole: Path, target: str, tmp_path: Path) -> None:
    unbroken = make_trainer(whole, target, OPTIONS)
    unbroken.run(tmp_path / "unbroken.safetensors")
    steps, at = len(unbroken.progress.losses), tmp_path / "broken.safetensors"

    class KilledError(Exception):
        pass

    for last in (steps // 4, steps // 2 + 1, steps - 1):
        broken = make_trainer(whole, target, OPTIONS)

        def kill(broken: Trainer = broken, last: int = last) -> None:
            if len(broken.progress.losses) == last - 1:
                broken.save(at)
            if len(broken.progress.losses) == last:
                raise KilledError

        with pytest.raises(KilledError):
            broken.run(at, kill)
    last_of_all = make_trainer(whole, target, OPTIONS)
    last_of_all.run(at)
    assert last_of_all.progress.losses == pytest.approx(unbroken.progress.losses, rel=1e-3)
    ours, theirs = (load_file(path) for path in (at, tmp_path / "unbroken.safetensors"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_of_another_head_is_refused(trainer: Trainer, whole: Path, target: str, tmp_path: Path) -> None:
    at = tmp_path / "checkpoint.safetensors"
    make_trainer(whole, target, DraftTraining(**{**vars(OPTIONS), "mlp_width": 32})).save(at)
    with pytest.raises(PacelineError, match="no checkpoint of this head"):
        trainer.load(at)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_the_finished_head_takes_unscaled_hidden_states(kind: str, target: str, whole: Path) -> None:
    trainer = make_trainer(whole, target, replace(OPTIONS, kind=kind))
    batch = first_batch(trainer)
    finished = trainer.finished().float()
    all_ours = draft_logits(trainer.head, batch, trainer.scale, 3)
    all_theirs = draft_logits(finished, batch, torch.ones(3), 3)
    for ours, theirs in zip(all_ours, all_theirs, strict=True):
        assert torch.allclose(ours.logits, theirs.logits, atol=0.05 * float(ours.logits.detach().abs().max()))
    loaded = load_head(whole, dtype=torch.float32, embedding=Target.load(target).embedding)
    assert loaded.config.taps == TAPS
    rows = Target.load(target).output[loaded.targets]
    assert torch.equal(loaded.lm_head.weight, rows.float())


def test_the_vocabulary_has_the_most_frequent_tokens_of_answers(whole: Path) -> None:
    shards, held = shards_of(whole)
    vocabulary = most_frequent(shards, 257, 20)
    assert vocabulary.tolist() == sorted(set(vocabulary.tolist()))
    answers = torch.cat([shard.answer(i) for shard in shards for i in range(len(shard))])
    counts = answers.long().bincount(minlength=257)
    left = torch.ones(257, dtype=torch.bool).index_fill_(0, vocabulary, False)
    assert counts[vocabulary].min() >= counts[left].max()
    assert 0 < coverage(held, vocabulary) < coverage(held, torch.arange(257)) == 1


def test_the_learning_rate_schedule() -> None:
    assert schedule(0.0, 0.1) > 0
    assert schedule(0.1, 0.1) == pytest.approx(1)
    assert schedule(1.0, 0.1) == pytest.approx(0)
    assert schedule(0.0, 0.0) == pytest.approx(1)


def test_unrolling_starts_later_and_total_variation_comes_last(trainer: Trainer) -> None:
    objectives: dict[float, Any] = {}
    for share in (0.0, 0.34, 0.76):
        trainer.progress.passes = int(share * OPTIONS.epochs * trainer.dataset.tokens) + 1
        objectives[share] = trainer._objective()
    assert objectives == {
        0.0: ([1.0], "kl", 0),
        0.34: (pytest.approx([1.0, 0.8, 0.64]), "kl", 0),
        0.76: (pytest.approx([1.0, 0.8, 0.64]), "total_variation", 0),
    }


def test_a_block_drafter_begins_its_blocks_elsewhere_in_every_epoch(whole: Path, target: str) -> None:
    """In as many epochs as a block has tokens, each position begins a block once."""
    trainer = make_trainer(whole, target, replace(OPTIONS, kind="dspark"))
    batch = first_batch(trainer)
    begins: list[set[int]] = []
    for epoch in range(4):
        trainer.progress.epoch = epoch
        weights, divergence, offset = trainer._objective()
        assert (len(weights), divergence) == (3, "kl"), "the whole block from the beginning"
        begins.append(set(counted_positions(batch, 0, trainer.head.stride, offset).tolist()))
    assert begins[3] == begins[0]
    everywhere = set(counted_positions(batch, 0).tolist())
    assert set.union(*begins) == everywhere
    assert sum(map(len, begins[:3])) == len(everywhere)
