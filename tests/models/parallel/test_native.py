"""Ranks on the CPU kernels have the bits of one process. They are threads here; see test_launch.py."""

from __future__ import annotations

import errno
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from models.parallel import ranks
from models.parallel.ranks import WIDER, native_in_threads, params, prompts, toy, write
from paceline.core.nodes import Nodes
from paceline.errors import ParameterError, RankError
from paceline.kernels import native
from paceline.lengths import FixedLength
from paceline.models.base import cache_of
from paceline.models.description.shards import ModelShard
from paceline.models.load.loading import description_of, open_checkpoint
from paceline.models.native.division import division_of
from paceline.models.native.model import NativeModel, Quantization
from paceline.models.parallel import native as parallel
from paceline.models.parallel.follower import NativeFollower
from paceline.models.parallel.plan import Op
from toy import SHAPES, ScriptedTrees, always, answers, make_engine, run, truth_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}"),
]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make toys that have a panel for each of three ranks."""
    monkeypatch.setattr(ranks, "SHAPE", ranks.SHAPE | WIDER)


def whole_of(path: Path, quantization: Quantization | None) -> NativeModel:
    checkpoint = open_checkpoint(path)
    assert checkpoint is not None
    return NativeModel.of(checkpoint, torch.float32, quantization=quantization)


def passes(model: Any) -> list[torch.Tensor]:
    """Hidden states, features and logits: a long prompt, decoding rows, and a tree whose accepted path moves."""
    cache = model.new_cache(3, 320) if hasattr(model, "new_cache") else cache_of(model, 3, 320)
    tokens = torch.arange(300) * 7 % 50
    model.fill(Nodes(tokens, torch.zeros_like(tokens), torch.arange(300)), cache)
    cache.copy_row(0, 1, 70)
    rows = torch.tensor([0, 1, 1, 1, 1, 2])
    positions, slots = torch.tensor([300, 70, 71, 71, 72, 0]), torch.tensor([300, 70, 71, 72, 73, 0])
    tree = Nodes(tokens[:6], rows, positions, slots, torch.tensor([-1, -1, 1, 1, 3, -1]))
    first = model.forward(tree, cache, [0, 1])
    cache.keep(torch.tensor([1]), torch.tensor([71]), torch.tensor([[1, 2]]))
    cache.cut(0, 100)
    second = model.forward(Nodes(tokens[:2], torch.tensor([0, 1]), torch.tensor([100, 73])), cache).hidden
    return [*first, second, model.logits(second)]


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("name", "quantization", "count"),
    [("llama", "int8", 2), ("qwen2", "int4", 2), ("llama, one key head", None, 2), ("llama, biases", "int8", 3)],
)
def test_every_bit_is_one_process(tmp_path: Path, name: str, quantization: Quantization | None, count: int) -> None:
    path = write(toy(name), tmp_path)
    expected = passes(whole_of(path, quantization))
    with native_in_threads(path, quantization, count) as part:
        assert part.weight_bytes() < whole_of(path, quantization).weight_bytes()
        found = passes(part)
        cache = part.new_cache(1, 100)
        cache.cut(0, 0)
        assert part._pending[-1].op == Op.CUT_ROW, "the other ranks free the same pages"
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("trees", [False, True])
def test_answers_are_those_of_one_process(tmp_path: Path, trees: bool) -> None:
    """Prompts share prefixes, so pages are copied; trees move accepted tokens; one request has rounds of the host."""
    path, each = write(toy("llama"), tmp_path), params(24)
    draft = whole_of(path, "int8")
    options: dict[str, Any] = {"max_model_len": ranks.POSITIONS, "max_batch_size": 3, "prefill_chunk": 16}
    options |= {} if trees else {"drafter": "model"}
    expected = run(make_engine(whole_of(path, "int8"), None if trees else draft, **options), prompts(4), each)
    with native_in_threads(path, "int8") as part:
        engine = make_engine(part, None if trees else draft, **options)
        if trees:
            engine.use_policy(FixedLength(4))
            truth = truth_of(prompts(4), each, answers(expected))
            engine.parts.drafter = ScriptedTrees(truth, always, shape=SHAPES["random"])
        found = run(engine, prompts(4), each)
    assert answers(found) == answers(expected)
    assert any(answer.metrics.accepted > 3 for output in found for answer in output.candidates)


@pytest.mark.usefixtures("wide")
def test_a_rank_that_runs_no_pass_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "PATIENCE", timedelta(seconds=0.2))
    monkeypatch.setattr(NativeFollower, "forward", lambda *_: None)
    tokens = torch.arange(5)
    with native_in_threads(write(toy("llama"), tmp_path), "int8") as part:
        cache = part.new_cache(1, 32)
        for _ in range(2):
            with pytest.raises(RankError, match=r"did not answer for 0.2 seconds.*make a new LLM"):
                part.fill(Nodes(tokens, torch.zeros_like(tokens), tokens), cache)


@pytest.mark.usefixtures("wide")
def test_the_exchange_is_shared_has_no_name_and_says_when_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No name: nothing is left in memory if rank 0 is killed while the ranks load."""
    spec = description_of(write(toy("llama"), tmp_path))
    assert spec is not None
    before = set(parallel._MEMORY.iterdir())
    with parallel.new_exchange(spec, 2) as name:
        one, other = (parallel.open_exchange(name, parallel.exchange_bytes(spec, 2)) for _ in range(2))
        assert set(parallel._MEMORY.iterdir()) <= before
    one[5] = 7
    assert other.tolist() == [0, 0, 0, 0, 0, 7, *[0] * (len(other) - 6)]

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RankError, match=r"2 ranks exchange .* MiB .*No space left.*free some, or enlarge /dev/shm"):
        parallel.new_exchange(spec, 2).__enter__()


def test_more_ranks_than_panels_are_refused(tmp_path: Path) -> None:
    spec = description_of(write(toy("llama"), tmp_path))
    assert spec is not None
    with pytest.raises(ParameterError, match="tensor_parallel=2 is not allowed: at most 1 on the CPU kernels"):
        division_of(spec, ModelShard(0, 2))
