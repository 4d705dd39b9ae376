from pathlib import Path

import pytest
import torch
from benchmarks.model_survey import tried
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from covering import in_pairs
from model_support import FOREIGN, NATIVE, VOCABULARY, Runner, ragged_error, random_tokens, tiny
from paceline.config import SamplingParams
from paceline.errors import ModelFormatError, ParameterError
from paceline.llm import LLM
from paceline.models.load.loading import eos_token_ids, load_model
from paceline.models.torch.huggingface import HuggingFaceModel
from paceline.models.torch.whole_texts import WholeTextModel

_BASE = NATIVE["llama"][1]
WHOLE = {  # model_type -> configuration, what paceline's cache lacks for it
    "bloom": ({"vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 2, "n_head": 2}, "attention interface"),
    "bart": (
        {"vocab_size": VOCABULARY, "d_model": 24, "decoder_layers": 2, "decoder_attention_heads": 2}
        | {"decoder_ffn_dim": 40, "max_position_embeddings": 64, "is_decoder": True},
        "counts positions itself",
    ),
    "jamba": (
        _BASE
        | {"num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
        | {"attn_layer_period": 2, "attn_layer_offset": 1},
        "of the kind linear_attention",
    ),
    "deepseek_v32": (  # sparse from the fifth token on
        NATIVE["deepseek_v3"][1]
        | {"index_topk": 4, "index_n_heads": 16, "index_head_dim": 16}
        | {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 16},
        "of the kind indexed_attention",
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FOREIGN)
def test_half_precision_runs(name: str, dtype: torch.dtype) -> None:
    ours, _ = _pair(name, dtype)
    assert Runner(ours, 1)(random_tokens(1, 5), torch.arange(5)[None]).dtype == torch.float32


@torch.no_grad()
def test_two_models_in_one_process_share_no_state() -> None:
    (one, its), (other, others) = _pair("cohere with norms of queries and keys"), _pair("gpt_neox")
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


@pytest.mark.parametrize("kind", WHOLE)
@torch.no_grad()
def test_what_cannot_use_the_cache_is_computed_over_whole_texts(kind: str) -> None:
    fields, reason = WHOLE[kind]
    theirs = tiny(kind, fields)
    ours = load_model(theirs, dtype=torch.float32)
    assert isinstance(ours, WholeTextModel)
    assert reason in ours.whole_texts
    assert ragged_error(ours, lambda tokens: theirs(tokens).logits) < 1e-3


@in_pairs(kind=WHOLE, drafter=["ngram", "tree"], dtype=["float32", "bfloat16"])
def test_whole_texts_with_speculation_equal_plain_decoding(kind: str, drafter: str, dtype: str) -> None:
    """Rows are computed one by one, so a batch gives the bits of each row alone."""
    theirs = tiny(kind, WHOLE[kind][0], dtype=getattr(torch, dtype))
    options = {"dtype": dtype, "max_batch_size": 3, "max_model_len": 40}
    prompts = [row[:length].tolist() for row, length in zip(random_tokens(3, 9), (9, 5, 7), strict=True)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
    plain = LLM(theirs, drafter=None, **options)
    assert "over whole texts in every pass" in plain.engine.describe()
    alone = [plain.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    drafts = {"ngram": {}, "tree": {"speculation_width": 2}}[drafter]
    fast = LLM(theirs, drafter="ngram", num_speculative_tokens=3, **drafts, **options)
    for output, wanted in zip(fast.generate(prompts, params, use_tqdm=False), alone, strict=True):
        assert output.outputs[0].token_ids == wanted.token_ids


def test_a_cache_of_tokens_has_no_other_precision() -> None:
    theirs = tiny("bloom", WHOLE["bloom"][0])
    with pytest.raises(ParameterError, match="whose cache holds tokens"):
        LLM(theirs, dtype="float32", max_model_len=32, kv_cache_dtype="int8")


class _Meddler(nn.Module):
    """A layer that mixes positions without the KV cache."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.cumsum(dim=1)


class _Lengthy(nn.Module):
    """A layer whose results depend on the length of the text."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[1]


@torch.no_grad()
def test_a_model_that_mixes_positions_itself_is_computed_over_whole_texts() -> None:
    theirs = tiny(*FOREIGN["gpt_neox"])
    theirs.gpt_neox.layers[1].post_mlp_dropout = _Meddler()
    ours = load_model(theirs, dtype=torch.float32)
    assert isinstance(ours, WholeTextModel)
    assert "logits differ" in ours.whole_texts
    assert ragged_error(ours, lambda tokens: theirs(tokens).logits) < 1e-3


@torch.no_grad()
def test_a_model_whose_beginnings_depend_on_the_length_is_refused() -> None:
    theirs = tiny(*FOREIGN["gpt_neox"])
    theirs.gpt_neox.layers[1].post_mlp_dropout = _Lengthy()
    with pytest.raises(ModelFormatError, match="logits differ"):
        load_model(theirs, dtype=torch.float32)


_BERTS = {
    "bert": _BASE,
    "roberta": _BASE | {"max_position_embeddings": 80},
    "gemma3_text": NATIVE["gemma3"][1] | {"use_bidirectional_attention": True},
}


@in_pairs(kind=_BERTS, dtype=[torch.float32, torch.bfloat16], scale=[0.1, 1.0])
def test_a_model_that_sees_later_tokens_is_refused_in_every_precision(
    kind: str, dtype: torch.dtype, scale: float
) -> None:
    theirs = tiny(kind, _BERTS[kind])
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1)
    with pytest.raises(ModelFormatError, match="not causal"):
        load_model(theirs.to(dtype), dtype=dtype)


_SIGHTED = {
    "text_config": NATIVE["gemma3"][1],
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
}


@torch.no_grad()
def test_a_multimodal_model_runs_as_its_text_model(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gemma3", **_SIGHTED, eos_token_id=[1, 7])
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(config).eval()
    theirs.save_pretrained(tmp_path)
    tokens, where = random_tokens(1, 9), torch.arange(9)[None]
    for source in (theirs, tmp_path):
        ours = load_model(source, dtype=torch.float32)
        assert (Runner(ours, 1)(tokens, where) - theirs(tokens).logits).abs().max() < 1e-3
        assert ours.weight_bytes() < sum(parameter.nbytes for parameter in theirs.parameters())
        assert eos_token_ids(source) == (1, 7)


def test_a_layer_without_a_window_runs_beside_layers_with_one() -> None:
    """Kolibri's full layers pass None."""
    assert tried("kolibri1") == {"state": "transformers"}


def test_a_model_that_generates_no_text_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFormatError, match=r"type 'vit' do not generate text"):
        load_model(tmp_path, dtype=torch.float32)


def test_messages_of_other_libraries_are_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tiny(*FOREIGN["gpt_neox"])

    def fail(*_: object, **__: object) -> None:
        raise KeyError("a line\n" * 1000)

    monkeypatch.setattr(HuggingFaceModel, "hidden_states", fail)
    monkeypatch.setattr(WholeTextModel, "_run", fail)
    with pytest.raises(ModelFormatError, match="transformers' code fails") as caught:
        load_model(theirs, dtype=torch.float32)
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)
