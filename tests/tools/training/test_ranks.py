"""Several training ranks together compute the same gradients as one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import paceline
from paceline.models.description.shards import ModelShard
from paceline.tools.training.batches import collate
from paceline.tools.training.learn import Trainer
from paceline.tools.training.objective import Objective, counted_positions, loss
from paceline.tools.training.ranks import TrainingRanks
from tools.training.conftest import SIZES
from tools.training.test_learn import OPTIONS, make_trainer

WEIGHTS = [1.0, 0.8, 0.64]
OFFSET = 1


def gradients(trainer: Trainer, part: list[int], step: list[int]) -> tuple[dict[str, Tensor], float]:
    """Gradients and first loss of a rank whose part of the step is ``part``."""
    trainer.head.zero_grad()
    batch = collate([trainer.dataset[index] for index in part])
    counts = trainer.dataset.counts(step, len(WEIGHTS), trainer.head.stride, OFFSET)
    total, first = loss(trainer.head, batch, trainer.scale, Objective(WEIGHTS, "kl", OFFSET), counts)
    total.backward()  # type: ignore[no-untyped-call]
    return {n: w.grad.clone() for n, w in trainer.head.named_parameters() if w.grad is not None}, first


@pytest.mark.parametrize("kind", ["feature", "dspark"])
def test_gradients_of_the_ranks_sum_to_those_of_the_whole_step(kind: str, whole: Path, target: str) -> None:
    trainer = make_trainer(whole, target, replace(OPTIONS, kind=kind))
    step = max(trainer.dataset.epoch(0, 0, 256), key=len)
    parts = [TrainingRanks(ModelShard(rank, 3)).part(step) for rank in range(3)]
    assert sorted(index for part in parts for index in part) == sorted(step)
    together, first = gradients(trainer, step, step)
    each = [gradients(trainer, part, step) for part in parts]
    assert sum(loss for _, loss in each) == pytest.approx(first)
    for name, wanted in together.items():
        torch.testing.assert_close(sum(found[name] for found, _ in each), wanted, rtol=1e-3, atol=1e-5)


def test_counts_need_no_hidden_states(whole: Path, target: str) -> None:
    dataset = make_trainer(whole, target, OPTIONS).dataset
    step = list(range(len(dataset)))
    batch = collate([dataset[index] for index in step])
    for stride, offset in ((1, 0), (3, 0), (3, 2)):
        wanted = [len(counted_positions(batch, draft_token, stride, offset)) for draft_token in range(5)]
        assert dataset.counts(step, 5, stride, offset) == wanted


@pytest.mark.slow
def test_two_ranks_started_by_torchrun_train_the_same_head_as_one(whole: Path, target: str, tmp_path: Path) -> None:
    shutil.copytree(whole / "data", tmp_path / "data")
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    line += ["paceline.cli.main", "train-draft", target, *SIZES, "--output", str(tmp_path), "--resume"]
    environment = {**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parent.parent)}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    ours, theirs = (json.loads((path / "report.json").read_text()) for path in (tmp_path, whole))
    assert done.stdout.count("\n") == 1, "only rank 0 reports"
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=0.02)
    assert ours["passes"] == theirs["passes"]
    one, other = (load_file(path / "model.safetensors") for path in (tmp_path, whole))
    for name, tensor in one.items():
        apart = float((tensor.float() - other[name].float()).norm())
        assert apart <= 0.1 * float(other[name].float().norm()), name
