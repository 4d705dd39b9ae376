import pytest
import torch

from model_support import NATIVE, Runner, ragged_error, random_tokens, tiny
from paceline.kernels.spec import LinearWeights
from paceline.models.load.loading import load_model
from paceline.models.torch.linear import Dense, dense
from paceline.models.torch.transformer import Transformer

TOLERANCE = 1e-3


def _pair(name: str, dtype: torch.dtype = torch.float32):
    theirs = tiny(*NATIVE[name], dtype=dtype)
    ours = load_model(theirs, dtype=dtype)
    assert isinstance(ours, Transformer)
    return ours, theirs


@pytest.mark.parametrize("name", NATIVE)
@torch.no_grad()
def test_logits_of_whole_sequences_equal_those_of_transformers(name: str) -> None:
    ours, theirs = _pair(name)
    tokens = random_tokens(2, 12)
    runner = Runner(ours, 2)
    logits = runner(tokens, torch.arange(12).expand(2, -1))
    assert logits.dtype == torch.float32
    assert (logits - theirs(tokens).logits).abs().max() < TOLERANCE
    assert runner.calls == list(ours.spec.places)


@pytest.mark.parametrize("name", NATIVE)
@torch.no_grad()
def test_ragged_rows_decoded_step_by_step_equal_each_row_alone(name: str) -> None:
    ours, theirs = _pair(name)
    assert ragged_error(ours, lambda tokens: theirs(tokens).logits) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt with norms after", "gpt2"])
@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16(name: str) -> None:
    ours, theirs = _pair(name, torch.bfloat16)
    tokens = random_tokens(4, 12)
    logits = Runner(ours, 4)(tokens, torch.arange(12).expand(4, -1))
    exact = tiny(*NATIVE[name]).to(torch.bfloat16).float()(tokens).logits
    assert logits.dtype == torch.float32
    assert (logits - exact).norm() < 1.5 * (theirs(tokens).logits.float() - exact).norm() + 1e-3


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
@torch.no_grad()
def test_padding_beyond_the_last_position_does_not_change_other_tokens(name: str) -> None:
    ours, theirs = _pair(name)
    runner, tokens = Runner(ours, 1, positions=64), random_tokens(1, 64)
    runner(tokens[:, :62], torch.arange(62)[None])
    logits = runner(torch.cat((tokens[:, 62:], tokens[:, :3]), 1), torch.arange(62, 67)[None])
    assert (logits[:, :2] - theirs(tokens).logits[:, 62:]).abs().max() < TOLERANCE


@torch.no_grad()
def test_rows_may_begin_anywhere_in_the_cache() -> None:
    ours, theirs = _pair("qwen2")
    runner, tokens = Runner(ours, 5), random_tokens(2, 6)
    logits = runner(tokens, torch.arange(6).expand(2, -1), first_row=3)
    assert (logits - theirs(tokens).logits).abs().max() < TOLERANCE
    assert not runner.cache.keys[:, :3].any()


@pytest.mark.parametrize("name", ["llama", "llama with tied embeddings", "opt with norms after", "gpt2"])
def test_weights_are_counted_once(name: str) -> None:
    ours, theirs = _pair(name)
    assert ours.weight_bytes() == sum(parameter.nbytes for parameter in theirs.parameters())


def test_linear_layers_can_be_of_another_kind() -> None:
    ours, _ = _pair("llama with biases")
    made: list[torch.Size] = []

    def factory(weights: LinearWeights) -> Dense:
        made.append(weights.weight.shape)
        return dense(weights)

    weights = {f"layers.{i}.{part}.weight": torch.zeros(1, 1) for i in range(3) for part in ("qkv", "o", "down")}
    weights |= {f"layers.{i}.gate_up.weight": torch.zeros(1, 1) for i in range(3)}
    weights |= {f"layers.{i}.{norm}.weight": torch.ones(1) for i in range(3) for norm in ("attn_norm", "mlp_norm")}
    weights |= {"embed.weight": torch.zeros(1, 1), "norm.weight": torch.ones(1), "head.weight": torch.zeros(1, 1)}
    Transformer(ours.spec, weights, "made by hand", linear=factory)
    assert len(made) == 4 * 3 + 1
