"""Mixtures of experts in the kernels against torch, expert by expert; their launches, for none of which one waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.test_device_round import NoHostReads
from gemma4_support import SIZES as GEMMA4
from gemma4_support import tiny_gemma4
from kernels.gpu.test_elementwise import counted
from kernels.gpu.test_linear import CLOSE, DTYPES
from model_support import NATIVE, tiny
from models.test_sinks_and_shared_experts import MODELS as SHARED
from models.test_sinks_and_shared_experts import write_mxfp4
from paceline.errors import ModelError
from paceline.kernels.experts import ExpertMatrices, Mixture, Routing
from paceline.kernels.gpu import experts as module
from paceline.kernels.gpu.experts import GroupedProducts, first_right, ordered, pairs_of_tile
from paceline.kernels.gpu.four_bit import FourBitWeight
from paceline.kernels.gpu.launch import interpreted
from paceline.kernels.gpu.linear import LinearTile, quantise
from paceline.kernels.gpu.steps import TorchSteps, TritonSteps
from paceline.models.load import prepare
from paceline.models.load.loading import open_checkpoint
from paceline.models.load.prepare import ModelOptions
from paceline.models.torch.experts import Experts
from recurrent_support import in_torch, tiny_lfm2_moe, tiny_nemotron

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:overflow")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ["same", "int8", "fp8", "int4"]
TILE = LinearTile(outputs=32, inputs=64)  # of two steps and programs for the sizes here
TILES = dict.fromkeys(FORMATS, TILE) | {"int4": LinearTile(outputs=32)}  # whose steps are runs
ROUTINGS = {
    "softmax": Routing(3, normalised=False),
    "normalised": Routing(3, normalised=True),
    "sigmoid": Routing(2, normalised=False, sigmoid=True),
    "sigmoid in groups": Routing(4, normalised=True, sigmoid=True, groups=3, used_groups=2),
    "groups by their best": Routing(3, normalised=False, groups=6, used_groups=3, group_best=1),
    "one of all": Routing(1, normalised=True, groups=12, used_groups=12),
    "margin": Routing(2, normalised=False, margin=0.2),
}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_the_choice_equals_torchs(name: str, corrected: bool) -> None:
    """Of equal scores the first; scores far below the best ones do not vanish from the weights."""
    routing = ROUTINGS[name]
    correction = torch.randn(12, device=DEVICE) if corrected and not routing.margin else None
    mixture = replace(random_mixture("same"), routing=routing, correction=correction, scores_scale=0.7)
    if corrected:
        mixture = replace(mixture, factors=torch.rand(12, device=DEVICE), output_scale=1.7)
    scores = torch.randn(9, 12, device=DEVICE)
    scores[0] = scores[1].round()
    scores[2] *= 200
    expected, order = mixture.route(scores, torch.float32)
    weights, chosen = module.route(scores, mixture, torch.float32)
    assert torch.equal(chosen.long(), order)
    torch.testing.assert_close(weights, expected)


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, in the interpreter
def test_scores_that_are_no_numbers_give_weights_that_are_none() -> None:
    scores = torch.full((2, 12), torch.nan, device=DEVICE)
    scores[1, 3] = 0.0
    weights, chosen = module.route(scores, random_mixture("same"), torch.float32)
    assert weights.isnan().all()
    assert ((chosen >= 0) & (chosen < 12)).all()


CHOICES = {
    "random": lambda tokens: torch.stack([torch.randperm(5)[:2] for _ in range(tokens)]),
    "all tokens in one pair of experts": lambda tokens: torch.tensor([[4, 1]]).expand(tokens, 2),
    "one expert each": lambda tokens: torch.arange(2 * tokens).view(-1, 2) % 5,
}


@pytest.mark.parametrize("tokens", [1, 3, 37])
@pytest.mark.parametrize("name", CHOICES)
def test_pairs_are_ordered_by_expert_and_each_is_in_one_tile(name: str, tokens: int) -> None:
    chosen = CHOICES[name](tokens).to(torch.int32).contiguous().to(DEVICE)
    found = ordered(chosen, 5, 16)
    owners = chosen.flatten().tolist()
    assert found.order.tolist() == sorted(range(2 * tokens), key=lambda pair: owners[pair])
    in_tiles = []
    for expert, first, behind in found.tiles.tolist():
        assert 0 <= behind - first <= 16
        pairs = found.order[first:behind].tolist()
        assert [owners[pair] for pair in pairs] == [expert] * len(pairs)
        in_tiles += pairs
    assert in_tiles == found.order.tolist()


def random_mixture(
    to: Any, dtype: torch.dtype = torch.float32, *, width: int = 24, inner: int = 19, gated: bool = True,
    activation: str = "silu", biased: bool = False, count: int = 12, used: int = 3,
) -> Mixture:  # fmt: skip
    def matrices(inputs: int, outputs: int) -> ExpertMatrices:
        numbers = torch.randn(count, outputs, inputs, device=DEVICE) / inputs**0.5
        bias = torch.randn(count * outputs, device=DEVICE).to(dtype) if biased else None
        if to == "same":
            return ExpertMatrices(numbers.flatten(0, 1).to(dtype), bias, count, outputs)
        first, *others = (quantise(each, to) for each in numbers)
        return ExpertMatrices(first.stacked(others), bias, count, outputs)  # type: ignore[arg-type]

    first, second = matrices(width, 2 * inner if gated else inner), matrices(inner, width)
    return Mixture(Routing(used, normalised=True), first, second, activation, gated)


@pytest.mark.parametrize("to", FORMATS)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_a_mixture_equals_its_experts_one_by_one(to: str, data: st.DataObject) -> None:
    """Odd numbers of tokens, of inputs and of outputs; experts without tokens, and with all of them."""
    pick = data.draw
    dtype, tokens, gated = pick(st.sampled_from(DTYPES)), pick(st.integers(1, 40)), pick(st.booleans())
    torch.manual_seed(pick(st.integers(0, 999)))
    activation = pick(st.sampled_from(["silu", "gelu_tanh", "clamped_silu"] if gated else ["relu2"]))
    count, width, inner = pick(st.integers(3, 7)), pick(st.sampled_from([16, 67, 160])), pick(st.sampled_from([17, 64]))
    mixture = random_mixture(
        to, dtype, width=width, inner=inner, gated=gated, activation=activation, biased=pick(st.booleans()),
        count=count, used=pick(st.integers(1, 3)),
    )  # fmt: skip
    scores = torch.randn(tokens, count, device=DEVICE).to(dtype)
    if pick(st.booleans()):
        scores[:, 1] = 30  # all tokens in one expert
        scores[:, 0] = -30  # and none in another
    x = torch.randn(tokens, width + 3, device=DEVICE)[:, :width].to(dtype)
    with mock.patch.object(GroupedProducts, "_tile", return_value=TILES[to]):
        found, expected = (steps.experts(x, scores, mixture) for steps in (TritonSteps(), TorchSteps()))
    torch.testing.assert_close(found, expected, atol=8 * CLOSE[dtype], rtol=8 * CLOSE[dtype])


def test_tokens_do_not_depend_on_others_in_their_tiles() -> None:
    """A tile's size does depend on their number, and with it the order of sums on a device, unless it is fixed."""
    mixture = random_mixture("int8", count=4)
    x, scores = torch.randn(70, 24, device=DEVICE), torch.randn(70, 4, device=DEVICE)
    for deterministic in (False, True):
        steps = TritonSteps(deterministic=deterministic)
        with mock.patch.object(module, "ordered", side_effect=ordered) as orders:
            together = steps.experts(x, scores, mixture)
            for token in (0, 69):
                alone = steps.experts(x[token : token + 1], scores[token : token + 1], mixture)
                torch.testing.assert_close(alone[0], together[token], atol=1e-6, rtol=1e-6)
                assert torch.equal(alone[0], together[token]) or not deterministic
        assert len({call.args[2] for call in orders.call_args_list}) == (1 if deterministic else 2)


def test_tiles_with_wrong_products_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = random_mixture("same")
    right = module.grouped
    tried: list[Any] = []

    def broken(x: Tensor, matrices: Any, order: Any, tile: Any) -> Tensor:
        tried.append(tile)
        return right(x, matrices, order, tile) * (1 if len(set(tried)) > 1 else 2)

    monkeypatch.setattr(module, "grouped", broken)
    assert first_right(torch.empty(1, 24, device=DEVICE), mixture.first, 16) == tried[-1] != tried[0]
    monkeypatch.setattr(module, "grouped", lambda *given: right(*given) + 1)
    with pytest.raises(ModelError, match="device='cpu'"):
        first_right(torch.empty(1, 24, device=DEVICE), mixture.first, 16)


@pytest.mark.parametrize(("pairs", "size"), [(1, 16), (128 * 16, 16), (128 * 16 + 1, 32), (1 << 20, 64)])
def test_tiles_are_as_large_as_the_pairs_of_an_expert(pairs: int, size: int) -> None:
    assert pairs_of_tile(pairs, 128) == size


FAMILIES: dict[str, Callable[[], Any]] = {
    **{
        name: partial(tiny, *NATIVE[name])
        for name in (
            "qwen3_moe", "olmoe", "granitemoe", "mixtral", "qwen2_moe", "deepseek_v2 with groups", "deepseek_v3",
            "glm4_moe", "hunyuan_v1_moe", "ernie4_5_moe", "phimoe", "aria_text", "cohere2_moe",
        )
    },
    **SHARED,
    "gemma4": partial(tiny_gemma4, **GEMMA4["experts and vectors"]),
    "lfm2_moe": tiny_lfm2_moe,
    "nemotron_h": tiny_nemotron,
    "nemotron_h with latent experts": partial(tiny_nemotron, moe_latent_size=40),
}  # fmt: skip


@pytest.mark.skipif(DEVICE == "cuda", reason="the tiny models are on the CPU; test_models.py compares whole models")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_familys_experts_equal_torchs_without_a_wait(name: str) -> None:
    """With its router, its norms, and the MLP beside the experts."""
    model = in_torch(FAMILIES[name]())
    mixture = next(block.mlp for block in model._blocks if isinstance(block.mlp, Experts))
    torch.manual_seed(0)
    x = torch.randn(5, model.spec.width)
    run = partial(mixture.with_own_norms, x, x.flip(0)) if mixture.norms else partial(mixture, x)
    with mock.patch.object(GroupedProducts, "_tile", return_value=TILE), NoHostReads():
        found = run(TritonSteps())
    torch.testing.assert_close(found, run(TorchSteps()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("to", "error"), [("int8", 0.01), ("fp8", 0.04), ("int4", 0.12)])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_experts_are_read_one_by_one_into_a_format(name: str, to: Any, error: float) -> None:
    """Beside their biases, from matrices that are stored stacked or apart; without gates, too."""
    theirs = FAMILIES[name]()
    checkpoint = open_checkpoint(theirs)
    options = ModelOptions(torch.float32, torch.device("cpu"), quantization=to)
    models = in_torch(theirs), prepare._in_triton(checkpoint, name, options)
    exact, rounded = (next(block.mlp for block in model._blocks if isinstance(block.mlp, Experts)) for model in models)
    for one, other in zip(matrices_of(exact), matrices_of(rounded), strict=True):
        assert (other.count, other.outputs, other.bias is None) == (one.count, one.outputs, one.bias is None)
        for expert in range(one.count):
            unit = torch.eye(models[0].spec.width if one is exact.mixture.first else exact.spec.expert.width)
            wanted, found = one.product(unit, expert), other.product(unit, expert)
            assert (found - wanted).norm() <= error * wanted.norm()
    assert models[1].weight_bytes() < models[0].weight_bytes()


def test_gpt_oss_keeps_the_codes_of_its_file(tmp_path: Path) -> None:
    """MXFP4 in 4 bits, though rows of gates and ups alternate there: no weight is rounded."""
    theirs = SHARED["gpt_oss"]()
    write_mxfp4(tmp_path, theirs)
    options = ModelOptions(torch.float32, torch.device("cpu"), quantization="int4")
    models = in_torch(theirs), prepare._in_triton(open_checkpoint(tmp_path), "gpt-oss", options)
    exact, kept = (next(block.mlp for block in model._blocks if isinstance(block.mlp, Experts)) for model in models)
    for one, other in zip(matrices_of(exact), matrices_of(kept), strict=True):
        assert isinstance(other.weight, FourBitWeight)
        assert other.weight.grid == "fp4"
        assert torch.equal(other.weight.widened().flatten(0, 1), one.weight)


def matrices_of(experts: Experts) -> tuple[ExpertMatrices, ExpertMatrices]:
    return experts.mixture.first, experts.mixture.second


@pytest.mark.skipif(not interpreted(), reason="counted in the interpreter, without a device")
def test_a_mixture_takes_seven_launches_with_its_router(monkeypatch: pytest.MonkeyPatch) -> None:
    model = in_torch(tiny(*NATIVE["qwen3_moe"]))
    mixture, steps, x = model._blocks[0].mlp, TritonSteps(), torch.randn(8, model.spec.width)
    assert isinstance(mixture, Experts)
    mixture(x, steps)
    with counted(monkeypatch) as found:
        mixture(x, steps)
    kernels = "route", "order", "grouped", "gate", "grouped", "sum"
    assert found == Counter(["aten.mm", *(f"triton.{name}_kernel" for name in kernels)])
