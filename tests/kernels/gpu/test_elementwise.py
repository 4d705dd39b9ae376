"""Sum and norm, activation and gate in the kernels against plain torch; and how many kernels a layer takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.interpreter import GridExecutor

from covering import in_pairs
from paceline.kernels.attention import make_backend
from paceline.kernels.gpu.launch import interpreted
from paceline.kernels.gpu.linear import Linears
from paceline.kernels.gpu.state import Norm
from paceline.kernels.gpu.steps import ACTIVATIONS, TorchSteps, TritonSteps
from paceline.kernels.spec import LinearWeights
from paceline.models.decoding.decoder import Decoder
from paceline.models.load.loading import load_model
from paceline.models.torch.transformer import Transformer
from toy import VOCAB, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def tiny_opt() -> Any:
    """A model with layer norms, biases and no gate."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    shape = OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=1024, word_embed_proj_dim=32, init_std=0.35,
    )  # fmt: skip
    return load_model(OPTForCausalLM(shape), dtype=torch.float32)


def random(make: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=make).to(dtype).to(DEVICE)


@settings(max_examples=25)
@given(data=st.data())
def test_sum_and_norm_equal_torchs(data: st.DataObject) -> None:
    pick = data.draw
    tokens, width, dtype = pick(st.integers(1, 4)), pick(st.sampled_from([8, 12, 72])), pick(st.sampled_from(DTYPES))
    make = torch.Generator().manual_seed(pick(st.integers(0, 999)))
    centred = pick(st.booleans())
    weight = random(make, dtype, width) if pick(st.booleans()) else None
    bias = random(make, dtype, width) if centred and weight is not None and pick(st.booleans()) else None
    norm = Norm(width, 1e-5, weight, bias, centred)
    x = random(make, dtype, tokens, 2 * width)[:, :width]  # lines may lie apart
    added = random(make, dtype, tokens, width)
    (total, found), (plain, expected) = (steps.add_norm(x, added, norm) for steps in (TritonSteps(), TorchSteps()))
    if dtype == torch.bfloat16 and DEVICE == "cpu":  # the interpreter truncates where it should round
        torch.testing.assert_close(total, plain, atol=0, rtol=2**-7)
    else:
        assert torch.equal(total, plain)
    torch.testing.assert_close(found, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.filterwarnings("ignore:overflow")  # from numpy, which the interpreter uses
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation_and_gate_equal_torchs(activation: str, dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(1)
    gate_up = 3 * random(make, dtype, 3, 2 * 1100)  # more than a program's block
    found, expected = (steps.gate(gate_up, activation) for steps in (TritonSteps(), TorchSteps()))
    torch.testing.assert_close(found, expected, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.filterwarnings("ignore:overflow")
def test_gates_far_from_zero_stay_finite() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, -1e4, 1e4, 1.0, 1.0, 1.0, 1.0]], device=DEVICE)
    for activation in ACTIVATIONS:
        found, expected = (steps.gate(gate_up, activation) for steps in (TritonSteps(), TorchSteps()))
        torch.testing.assert_close(found, expected)


@pytest.mark.skipif(DEVICE == "cuda", reason="the tiny model is on the CPU; test_device.py compares whole models")
@pytest.mark.parametrize("make", [tiny_llama, tiny_opt])
def test_a_model_with_the_kernels_gives_the_same_hidden_states(make: Any) -> None:
    models = [make(), copy(make())]
    models[1].steps = TritonSteps()
    hidden = []
    for model in models:
        decoder = Decoder(model, make_backend("padded", torch.device("cpu")), 2, 30)
        hidden.append(decoder.forward(torch.arange(8).view(2, 4), torch.tensor([0, 0]), 30))
    torch.testing.assert_close(*hidden, atol=1e-5, rtol=1e-5)


NO_KERNEL = {
    "aten.view", "aten._unsafe_view", "aten.t", "aten.transpose", "aten.empty", "aten.unsqueeze", "aten.select",
    "aten.slice", "aten.empty_like", "aten.new_empty", "aten.split", "aten.split_with_sizes", "aten.detach",
    "aten.alias", "aten.expand", "aten.as_strided",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts the kernels of a device: torch's operations except views, and Triton's launches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).rsplit(".", 1)[0]
        if name not in NO_KERNEL:
            self.names[name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Triton's kernels are counted and not run."""
    launches = Launches()
    monkeypatch.setattr(
        GridExecutor, "__call__", lambda self, *_, **__: launches.names.update([f"triton.{self.fn.__name__}"])
    )
    with launches:
        yield launches.names


def kernels_of_a_layer(model: Transformer, rows: int, new: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The kernels of a pass over the model, minus those without its last layer."""
    names = []
    for blocks in (model._blocks, model._blocks[:-1]):
        same = copy(model)
        same._blocks, same.steps = blocks, TritonSteps()
        decoder = Decoder(same, make_backend("ragged", torch.device("cpu")), rows, 1000)
        decoder.passes.packs = True  # type: ignore[attr-defined]
        given = torch.zeros(rows, new, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64), 900
        with counted(monkeypatch) as found:
            decoder.forward(*given)
        names.append(found)
    return names[0] - names[1]


@pytest.mark.skipif(not interpreted(), reason="counted in the interpreter, without a device")
@in_pairs(make=[tiny_llama, tiny_opt], tokens=[(1, 1, 10), (8, 8, 10), (150, 1, 9)], weights=["same", "int8", "int4"])
def test_a_layer_takes_at_most_ten_kernels(
    make: Any, tokens: tuple[int, int, int], weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine if attention has one split; in a plain round and in one that verifies.

    tokens: rows, new tokens of each, and the most kernels.
    """
    rows, new, most = tokens
    model, linears = deepcopy(make()), Linears(weights)
    for owner, name in model._linears() if weights != "same" else ():
        dense = getattr(owner, name)
        quantised = linears(LinearWeights(dense.weight, dense.bias))
        quantised(torch.zeros(rows * new, dense.weight.shape[1]))  # a shape's first product checks tiles
        setattr(owner, name, quantised)
    found = kernels_of_a_layer(model, rows, new, monkeypatch)
    assert found["triton.attend_kernel"] == 1, found
    assert found["triton.join_kernel"] == (most == 10), found
    assert found.total() <= most, found
