import pytest
import torch
from torch import nn

from model_support import FOREIGN, NATIVE, VOCABULARY, Runner, ragged_error, random_tokens, tiny
from paceline.errors import ModelFormatError
from paceline.models.huggingface import HuggingFaceModel
from paceline.models.loading import load_model

_BASE = NATIVE["llama"][1]
_REFUSED = {
    "softcap": ("gemma2", _BASE | {"head_dim": 8, "sliding_window": 4}),
    "s_aux": ("gpt_oss", _BASE | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "longest sequence": ("mamba", {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2}),
    "attention interface": (
        "gptj",
        {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 64, "rotary_dim": 4},
    ),
}


def _pair(name: str, dtype: torch.dtype = torch.float32):
    theirs = tiny(*FOREIGN[name], dtype=dtype)
    ours = load_model(theirs, dtype=dtype)
    assert isinstance(ours, HuggingFaceModel)
    return ours, theirs


@pytest.mark.parametrize("name", FOREIGN)
@torch.no_grad()
def test_prefill_and_token_by_token_equal_transformers(name: str) -> None:
    ours, theirs = _pair(name)
    tokens, runner = random_tokens(2, 12), Runner(ours, 2)
    everywhere = torch.arange(12).expand(2, -1)
    steps = [everywhere[:, :7], *(everywhere[:, i : i + 1] for i in range(7, 12))]
    logits = torch.cat([runner(tokens.gather(1, where), where) for where in steps], dim=1)
    assert (logits - theirs(tokens).logits).abs().max() < 1e-3


@pytest.mark.parametrize("name", FOREIGN)
@torch.no_grad()
def test_ragged_rows_equal_each_row_alone(name: str) -> None:
    ours, theirs = _pair(name)
    assert ragged_error(ours, lambda tokens: theirs(tokens).logits) < 1e-3


@pytest.mark.parametrize("name", FOREIGN)
def test_bfloat16_runs(name: str) -> None:
    ours, _ = _pair(name, torch.bfloat16)
    assert Runner(ours, 1)(random_tokens(1, 5), torch.arange(5)[None]).dtype == torch.float32


@torch.no_grad()
def test_two_models_in_one_process_do_not_disturb_each_other() -> None:
    (one, its), (other, others) = _pair("gemma3"), _pair("gpt_neox")
    tokens, positions = random_tokens(1, 8), torch.arange(8)[None]
    runners = Runner(one, 1), Runner(other, 1)
    for i in range(8):
        for runner, model in zip(runners, (its, others), strict=True):
            logits = runner(tokens[:, i : i + 1], positions[:, i : i + 1])
            assert (logits[:, 0] - model(tokens).logits[:, i]).abs().max() < 1e-3


@torch.no_grad()
def test_the_loaded_model_still_works_and_shares_its_weights() -> None:
    theirs = tiny(*FOREIGN["gpt_neox"])
    tokens = random_tokens(1, 8)
    before = theirs(tokens).logits
    ours = HuggingFaceModel(theirs)
    assert torch.equal(theirs(tokens).logits, before)
    assert theirs.config._attn_implementation != "paceline"
    shared = {parameter.data_ptr() for parameter in theirs.parameters()}
    assert {parameter.data_ptr() for parameter in ours._decoder.parameters()} <= shared
    assert ours.weight_bytes() == sum(parameter.nbytes for parameter in theirs.parameters())


def test_another_dtype_leaves_the_loaded_model_alone() -> None:
    theirs = tiny(*FOREIGN["gpt_neox"])
    assert load_model(theirs, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert theirs.dtype == torch.float32


@pytest.mark.parametrize("reason", _REFUSED)
def test_attention_that_cannot_be_expressed_is_refused(reason: str) -> None:
    with pytest.raises(ModelFormatError, match=reason):
        load_model(tiny(*_REFUSED[reason]), dtype=torch.float32)


class _Meddler(nn.Module):
    """Mixes neighbouring positions, behind the cache's back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.cumsum(dim=1)


def test_a_model_whose_logits_would_differ_is_refused() -> None:
    theirs = tiny(*FOREIGN["gpt_neox"])
    theirs.gpt_neox.layers[1].post_mlp_dropout = _Meddler()
    with pytest.raises(ModelFormatError, match="logits differ"):
        load_model(theirs, dtype=torch.float32)
