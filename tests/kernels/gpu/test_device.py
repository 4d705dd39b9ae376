"""Tests that need a GPU, in one call of about three minutes with torch, triton, transformers, pytest and hypothesis:

    PYTHONPATH=src:tests python -m pytest -c /dev/null --rootdir . --import-mode=importlib -q \
        tests/kernels/gpu tests/kernels/attention

On a GPU the other tests of these directories compare every kernel with its reference on the device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from block_support import tiny_block
from kernels.gpu import reference
from paceline.config import EngineConfig, SamplingParams
from paceline.core.slots import Slots
from paceline.engine.engine import Engine, Models, Request
from paceline.kernels.attention import make_backend
from paceline.kernels.attention.base import Plan
from paceline.kernels.attention.reference import ReferenceAttention
from paceline.kernels.gpu import rotary
from paceline.kernels.gpu.linear import Linears
from paceline.kernels.gpu.state import PackedHeads
from paceline.models.description.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec, Rotary
from paceline.models.description.weights import slots
from paceline.models.torch.linear import LinearFactory, dense
from paceline.models.torch.transformer import Transformer
from toy import answers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]

DEVICE = "cuda"
DIM, HEADS, GROUPS, VOCAB, POSITIONS = 64, 8, 2, 2048, 384
_rng = random.Random(4)
PROMPTS = [[_rng.randrange(1, VOCAB) for _ in range(_rng.randrange(1, 60))] for _ in range(64)]


def small_llama(layers: int) -> DecoderSpec:
    rotary = Rotary(tuple(10_000.0 ** (-pair / (DIM // 2)) for pair in range(DIM // 2)))
    layer = LayerSpec(AttentionSpec(HEADS, GROUPS, DIM, rotary=rotary), MLPSpec(3 * DIM * HEADS))
    return DecoderSpec(
        family="llama",
        vocab_size=VOCAB,
        width=DIM * HEADS,
        max_positions=POSITIONS,
        layers=(layer,) * layers,
        norm=NormSpec(),
        embed_width=DIM * HEADS,
        tied=True,
    )


def weights_of(config: DecoderSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same on every machine: drawn on the CPU."""
    made = {}
    for slot in slots(config).values():
        shape = (slot.total, *slot.shape[1:])
        generator = torch.Generator().manual_seed(len(made))
        matrix = torch.randn(shape, generator=generator) * (2.0 * shape[-1] ** -0.5)
        made[slot.target] = (torch.ones(shape) if len(shape) == 1 else matrix).to(dtype)
    return made


def pair(
    device: str, dtype: torch.dtype = torch.float32, linear: Callable[[], LinearFactory] = lambda: dense
) -> Models:
    """A target of 4 layers, and its own first layers as the draft model, which gives fair acceptance."""
    target, draft = small_llama(4), small_llama(3)
    weights = {name: tensor.to(device) for name, tensor in weights_of(target, dtype).items()}
    names = {slot.target for slot in slots(draft).values()}
    fewer = {name: tensor for name, tensor in weights.items() if name in names}
    return Models(
        Transformer(target, weights, "target", linear=linear()), Transformer(draft, fewer, "draft", linear=linear())
    )


def with_block(device: str, kind: str) -> Models:
    """The same target, and a random block drafter."""
    target = pair(device).target
    return Models(target, tiny_block(target, DIM * HEADS, kind))


def engine_of(models: Models, **options: Any) -> Engine:
    options = {"drafter": "model", "num_speculative_tokens": 4, "max_model_len": POSITIONS} | options
    return Engine(models, EngineConfig(**options))


def run(
    engine: Engine, prompts: list[list[int]], tokens: int, temperatures: tuple[float, ...]
) -> list[list[list[int]]]:
    """Outputs of row i at temperatures[i % n]."""
    outputs = [
        engine.add(
            Request(p, SamplingParams(temperature=temperatures[i % len(temperatures)], max_tokens=tokens, seed=i))
        )
        for i, p in enumerate(prompts)
    ]
    while engine.busy:
        engine.step()
    return answers(outputs)


def equal_lines(one: list[list[list[int]]], other: list[list[list[int]]]) -> str:
    """A comparison in words, for the message of a failed test."""
    lines = [(i, a[0], b[0]) for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    first = [(i, next(p for p, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)) for i, a, b in lines[:8]]
    return f"{len(one) - len(lines)} of {len(one)} equal; the others first differ at (prompt, token) {first}"


@pytest.fixture(scope="module")
def on_cpu() -> list[list[list[int]]]:
    """Plain decoding in float32 on the CPU, the host's rounds."""
    engine = engine_of(pair("cpu"), drafter=None, attention="padded", rounds="host", max_batch_size=16)
    return run(engine, PROMPTS[:16], 48, (0, 1.0))


WAYS: dict[str, dict[str, Any]] = {
    "host, padded": {"rounds": "host", "attention": "padded"},
    "host, split": {"rounds": "host", "attention": "split"},
    "host, ragged": {"rounds": "host", "attention": "ragged"},
    "eager": {"rounds": "device", "attention": "ragged"},
    "graphs": {"rounds": "device", "attention": "ragged"},
    "graphs, padded": {"rounds": "device", "attention": "padded"},
    "graphs, few rows": {"rounds": "device", "attention": "ragged", "max_batch_size": 5},
    "graphs, plain": {"rounds": "device", "attention": "ragged", "num_speculative_tokens": 0},
    "graphs, bass": {"rounds": "device", "attention": "ragged", "num_speculative_tokens": "bass"},
    "graphs, auto": {"rounds": "device", "attention": "ragged", "num_speculative_tokens": "auto"},
}


@pytest.mark.parametrize("way", WAYS)
def test_float32_outputs_equal_the_cpus(way: str, on_cpu: list[list[list[int]]]) -> None:
    engine = engine_of(pair(DEVICE), **{"max_batch_size": 16} | WAYS[way])
    if engine._graph is not None:
        engine._graph.device_round.graphs.captures = way != "eager"
    found = run(engine, PROMPTS[:16], 48, (0, 1.0))
    assert found == on_cpu, equal_lines(found, on_cpu)
    if way.startswith("graphs"):
        assert engine._graph is not None
        assert engine._graph.device_round.graphs.keys


def test_after_a_capture_ahead_nothing_is_captured_and_outputs_equal_the_cpus(on_cpu: list[list[list[int]]]) -> None:
    engine = engine_of(pair(DEVICE), attention="ragged", max_batch_size=16)
    done = engine.capture_ahead(250)
    assert done is not None
    assert (done.captured > 0, done.left) == (True, 0), done
    assert engine._graph is not None
    graphs = engine._graph.device_round.graphs
    keys = set(graphs.keys)
    found = run(engine, PROMPTS[:16], 48, (0, 1.0))
    assert found == on_cpu, equal_lines(found, on_cpu)
    assert set(graphs.keys) == keys


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
def test_a_block_drafters_graphs_change_no_output(kind: str, on_cpu: list[list[list[int]]]) -> None:
    engine = engine_of(with_block(DEVICE, kind), drafter="feature", max_batch_size=16)
    assert "CUDA graphs, triton kernels" in engine.describe()
    found = run(engine, PROMPTS[:16], 48, (0, 1.0))
    assert found == on_cpu, equal_lines(found, on_cpu)


def test_greedy_rows_under_the_rejection_rule_equal_the_cpus(on_cpu: list[list[list[int]]]) -> None:
    engine = engine_of(pair(DEVICE), acceptance="rejection", max_batch_size=16)
    assert "CUDA graphs, triton kernels" in engine.describe()
    found = run(engine, PROMPTS[:16], 48, (0, 1.0))
    assert found[::2] == on_cpu[::2], equal_lines(found[::2], on_cpu[::2])


@pytest.mark.parametrize("to", ["same", "int8", "int4", "fp8"])
def test_bits_do_not_depend_on_the_batch_nor_on_speculation(to: Any) -> None:
    """64 prompts, 256 tokens each, bfloat16: with speculation, without, and a few of them alone."""
    models = pair(DEVICE, torch.bfloat16, lambda: Linears(to, deterministic=True))
    temperatures = (0, 1.0, 0.7)
    options = {"deterministic": True, "attention": "ragged", "max_batch_size": 64}
    speculation = engine_of(models, **options)
    found = run(speculation, PROMPTS, 256, temperatures)
    plain = run(engine_of(models, **options, drafter=None), PROMPTS, 256, temperatures)
    assert found == plain, equal_lines(found, plain)
    alone = engine_of(models, **options | {"max_batch_size": 1}, drafter=None)
    assert run(alone, PROMPTS[:3], 256, temperatures) == plain[:3]


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
def test_graphs_with_quantised_weights_give_what_eager_rounds_give(to: Any) -> None:
    models = pair(DEVICE, torch.bfloat16, lambda: Linears(to, deterministic=True))
    found = []
    for captures in (True, False):
        engine = engine_of(models, max_batch_size=8)
        assert engine._graph is not None
        engine._graph.device_round.graphs.captures = captures
        found.append(run(engine, PROMPTS[:8], 40, (0, 1.0)))
    assert found[0] == found[1], equal_lines(*found)


@pytest.fixture
def no_synchronising() -> Iterator[Callable[[], None]]:
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("k", "block"), [(0, None), (4, None), (4, "dspark"), (4, "dflash2")])
def test_the_loop_never_waits_for_the_device(k: int, block: str | None, no_synchronising: Callable[[], None]) -> None:
    """Except for the record of the previous round, which has its own event."""
    models = pair(DEVICE) if block is None else with_block(DEVICE, block)
    drafter = "model" if block is None else "hybrid"
    engine = engine_of(models, drafter=drafter, num_speculative_tokens=k, max_batch_size=8)
    outputs = [engine.add(Request(prompt, SamplingParams(max_tokens=300, seed=1))) for prompt in PROMPTS[:8]]
    for _ in range(5):
        engine.step()
    no_synchronising()
    for _ in range(20):
        engine.step()
    torch.cuda.set_sync_debug_mode("default")
    assert all(len(output.outputs[0].token_ids) >= 20 for output in outputs)


@pytest.mark.parametrize("name", ["ragged", "split", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("new", [1, 8, 33])
def test_attention_equals_the_reference(name: Any, dtype: torch.dtype, new: int) -> None:
    make = torch.Generator(DEVICE).manual_seed(new)
    lengths = torch.tensor([new, 40, 600, 4000, 777], device=DEVICE)
    cache = [torch.randn(5, 4, 4097, 128, device=DEVICE, generator=make).to(dtype) for _ in range(2)]
    q = torch.randn(5, 16, new, 128, device=DEVICE, generator=make).to(dtype)
    where = lengths[:, None] - new + torch.arange(new, device=DEVICE)
    backends = make_backend(name, torch.device(DEVICE)), ReferenceAttention()
    found, expected = [b.attend(q, cache[0], cache[1], b.plan(where, 4000)) for b in backends]
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("normed", [False, True])
def test_rotary_in_bfloat16_equals_the_reference(normed: bool) -> None:
    make = torch.Generator(DEVICE).manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=make).bfloat16()

    packed = PackedHeads(
        random(4, 5, 48, 128),
        32,
        8,
        (random(4, 5, 1, 128), random(4, 5, 1, 128)),
        random(40, 128) if normed else None,
        1e-5,
    )
    where = torch.tensor([[0], [7], [100], [255]], device=DEVICE) + torch.arange(5, device=DEVICE)
    plan = Plan(where, 257, cache_rows=Slots(torch.tensor([5, 0, 3, 1], device=DEVICE)))
    caches = [torch.zeros(2, 6, 8, 257, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    found = rotary.turn_and_store(packed, plan, *caches[0])
    expected = reference.turn_and_store(packed, plan, *caches[1])
    torch.testing.assert_close(found, expected, atol=4e-2, rtol=2e-2)
    torch.testing.assert_close(caches[0][..., :256, :], caches[1][..., :256, :], atol=4e-2, rtol=2e-2)
