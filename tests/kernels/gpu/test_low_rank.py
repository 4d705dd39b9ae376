"""Low-rank changes by row in the kernels against torch, row by row; whole rounds with adapters, without a wait."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from adapter_support import write_adapter
from engine.test_device_round import NoHostReads
from kernels.gpu.test_elementwise import counted
from kernels.gpu.test_linear import CLOSE, DTYPES
from model_support import NATIVE, tiny
from paceline import LLM, SamplingParams
from paceline.core.rows import StepFeatures
from paceline.kernels.gpu import low_rank
from paceline.kernels.gpu.launch import interpreted
from paceline.kernels.gpu.linear import Linears
from paceline.kernels.gpu.low_rank import TOKEN_TILES
from paceline.kernels.gpu.steps import TorchSteps, TritonSteps
from paceline.kernels.low_rank import LowRankChanges
from paceline.kernels.spec import LinearWeights
from paceline.models.load.adapters import AdaptedLinear, AdapterRows
from paceline.models.torch.transformer import Transformer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 5, 17])
def test_the_kernels_equal_the_reference(length: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of several ranks, one of none here; rows without; x and y may be parts of wider tables."""
    torch.manual_seed(length)
    ranks, inputs, outputs = [3, 0, 32], 150, 70
    changes = LowRankChanges(
        random(3, 32, inputs, dtype=dtype) / inputs**0.5,
        random(3, outputs, 32, dtype=dtype),
        torch.tensor(ranks, dtype=torch.int32, device=DEVICE),
    )
    for adapter, rank in enumerate(ranks):
        changes.down[adapter, rank:], changes.up[adapter, :, rank:] = 0, 0
    adapters = torch.tensor([3, 0, 1, 2, 0, 1], dtype=torch.int32, device=DEVICE)
    x = random(6 * length, inputs + 8, dtype=dtype)[:, :inputs]
    before = random(6 * length, outputs + 8, dtype=dtype)[:, :outputs]
    found, expected = before.clone(), before.clone()
    TritonSteps().add_changes(found, x, changes, adapters)
    TorchSteps().add_changes(expected, x, changes, adapters)
    torch.testing.assert_close(found, expected, atol=10 * CLOSE[dtype], rtol=10 * CLOSE[dtype])
    fixed = before.clone()
    monkeypatch.setattr(low_rank, "TOKEN_TILES", (TOKEN_TILES[0], None))  # the other one is not used
    TritonSteps(deterministic=True).add_changes(fixed, x, changes, adapters)
    torch.testing.assert_close(fixed, found, atol=CLOSE[dtype], rtol=CLOSE[dtype])
    unchanged = (adapters == 0).repeat_interleave(length)
    assert torch.equal(found[unchanged], before[unchanged])
    assert not torch.equal(found[:length], before[:length])


@pytest.mark.parametrize("to", ["int8", "fp8"])
def test_changes_are_added_beside_8_bit_weights(to: Any) -> None:
    rows, x, ranks = AdapterRows(), random(4, 32, dtype=torch.float32), torch.tensor([2], dtype=torch.int32)
    base = Linears(to)(LinearWeights(random(24, 32, dtype=torch.float32)))
    matrices = random(1, 16, 32, dtype=torch.float32), random(1, 24, 16, dtype=torch.float32)
    matrices[0][:, 2:] = 0
    changes = LowRankChanges(*matrices, ranks.to(DEVICE))
    model = SimpleNamespace(steps=TritonSteps())
    layer = AdaptedLinear(base, changes, rows, model)  # type: ignore[arg-type]
    assert torch.equal(layer(x), base(x))
    rows.numbers = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    expected = base(x)
    changes.add_to(expected, x, rows.numbers)
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)


PROMPTS = [[1, 2, 1, 2], [7, 8, 9, 7], [5, 4, 5]]
NAMES = ["red", None, "blue"]


def engine_with_adapters(path: Path) -> LLM:
    """A model with two adapters, whose rounds are those of a device."""
    theirs = tiny(*NATIVE["llama"])
    adapters = {"red": path / "red", "blue": path / "blue"}
    write_adapter(adapters["red"], theirs, seed=1)
    write_adapter(adapters["blue"], theirs, seed=2, rank=2, modules=("q_proj", "up_proj"), use_rslora=True)
    return LLM(
        theirs, adapters=adapters, drafter="ngram", num_speculative_tokens=2, rounds="device", attention="padded",
        dtype="float32", max_batch_size=3, max_model_len=32, use_tqdm=False,
    )  # fmt: skip


def answers(llm: LLM, names: list[str | None]) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, adapter=name) for name in names]
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.skipif(DEVICE == "cuda", reason="the tiny model is on the CPU")
def test_rounds_of_a_device_give_the_answers_of_torch(tmp_path: Path) -> None:
    """Rounds without adapters are other programs, and none reads anything on the host."""
    llm = engine_with_adapters(tmp_path)
    model = llm.engine.parts.target.model
    assert isinstance(model, Transformer)
    expected = answers(llm, NAMES)
    assert expected != answers(llm, [None] * 3)
    model.steps = TritonSteps()
    rounds = llm.engine._device_round
    assert rounds is not None
    keys = set()
    run = rounds.graphs.run

    def watched(key: Any, program: Any) -> Tensor:
        keys.add(key[3].adapters)
        return run(key, program)

    rounds.graphs.run = watched  # type: ignore[method-assign]
    assert answers(llm, NAMES) == expected
    assert answers(llm, [None] * 3) != expected
    assert keys == {True, False}
    with torch.inference_mode(), NoHostReads():
        rounds.program.run(3, 2, 32, StepFeatures(adapters=True))


@pytest.mark.skipif(not interpreted(), reason="counted in the interpreter, without a device")
def test_an_adapted_layer_takes_two_more_launches_and_none_without_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine_with_adapters(tmp_path)
    model, rounds = llm.engine.parts.target.model, llm.engine._device_round
    assert isinstance(model, Transformer)
    assert rounds is not None
    model.steps = TritonSteps()
    adapted = sum(isinstance(linear, AdaptedLinear) for linear in model.linears())
    found = {}
    for asked in (False, True):
        with torch.inference_mode(), counted(monkeypatch) as names:
            rounds.program.run(3, 2, 32, StepFeatures(adapters=asked))
        found[asked] = names
    more = found[True] - found[False]
    assert more == {"triton.shrink_kernel": adapted, "triton.expand_kernel": adapted, "aten.index_select": 1}
