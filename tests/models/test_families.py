from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import ExpertGatingFuncType, GGUFValueType, RopeScalingType
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gguf_support import begun, finish
from kernels.tools import ragged
from model_support import LLAMA3_ROPE, NATIVE, YARN_ROPE, Runner, packed, random_tokens, rope, tiny
from models.test_latent_gguf import add_by_name
from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.errors import ModelFormatError
from paceline.models.description.spec import DecoderSpec, ExpertsSpec
from paceline.models.description.weights import XIELU
from paceline.models.families import FAMILIES, describe
from paceline.models.families.rotary import longest_sequence
from paceline.models.load.loading import load_model
from paceline.models.native.model import NativeModel
from paceline.models.torch.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

_SHORT_LONG = {"short_factor": [1.0] * 3, "long_factor": [4.0] * 3, "original_max_position_embeddings": 16}
_LONGROPE = {"short_factor": [1.0, 2.0, 3.0], "long_factor": [4.0] * 3, "original_max_position_embeddings": 32}
_ROPES = {
    "default": rope("default"),
    "linear": rope("linear", factor=3.0),
    "dynamic": rope("dynamic", factor=3.0),
    "yarn": YARN_ROPE,
    "llama3": LLAMA3_ROPE,
    "longrope": rope("longrope", **_SHORT_LONG),
}


def _native(kind: str, **changes: object) -> DecoderSpec | None:
    fields = next(fields for family, fields in NATIVE.values() if family == kind)
    return describe({"model_type": kind, **fields, **changes})


TESTED_APART = {  # test_recurrent*.py, test_other_states.py, test_sinks_and_shared_experts.py
    *("qwen3_5", "qwen3_5_text", "lfm2", "granitemoehybrid", "gpt_oss", "qwen3_5_moe", "qwen3_5_moe_text"),
    *("qwen3_next", "lfm2_moe", "lfm3", "bamba", "nemotron_h", "falcon_h1"),
}


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in TESTED_APART])
def test_a_dictionary_and_a_configuration_object_give_the_same(kind: str) -> None:
    fields = next(fields for family, fields in NATIVE.values() if family == kind)
    assert _native(kind) == describe(AutoConfig.for_model(kind, **fields))
    assert _native(kind).family == kind


@pytest.mark.parametrize("kind", _ROPES)
def test_rotary_frequencies_are_those_of_transformers(kind: str) -> None:
    config = LlamaConfig(**NATIVE["llama"][1] | _ROPES[kind])
    theirs = LlamaRotaryEmbedding(config)
    ours = describe(config).layers[0].attention.rotary
    torch.testing.assert_close(torch.tensor(ours.inverse_frequencies), theirs.inv_freq, rtol=0, atol=0)
    assert ours.scaling == theirs.attention_scaling


def test_longrope_models_end_before_their_frequencies_change() -> None:
    config = LlamaConfig(**NATIVE["llama"][1] | _ROPES["longrope"])
    assert longest_sequence(config) == 16
    assert describe(config).max_positions == 16


def test_windows_are_each_layers_own() -> None:
    def windows(kind: str, **changes: object) -> list[int | None]:
        return [attention.window for attention in _native(kind, **changes).attentions]

    assert windows("mistral", sliding_window=4) == [4, 4, 4]
    assert windows("qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1) == [None, 4, 4]
    assert windows("qwen3", layer_types=["full_attention"] * 3) == [None] * 3


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"hidden_act": "relu2"}),
        ("llama", {"quantization_config": {"quant_method": "awq"}}),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("opt", {"activation_function": "quick_gelu"}),
        ("gpt2", {"add_cross_attention": True}),
    ],
)
def test_unsupported_architectures_run_through_transformers(kind: str, changes: dict[str, object]) -> None:
    assert _native(kind, **changes) is None


def test_another_family_runs_through_transformers() -> None:
    assert describe({"model_type": "jetmoe"}) is None


@pytest.mark.parametrize("fields", [{}, {"model_type": "no such thing"}, {"model_type": "llama", "hidden_size": "x"}])
def test_an_invalid_configuration_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ModelFormatError, match="cannot be used"):
        describe(fields)


# One table over families: text, bits of the kernels, GGUF files

_NEW = [
    "gemma3", "phi3", "phi3 with a partial rotation", "granite", "olmo2", "olmo3", "smollm3", "ministral3",
    "exaone4 with windows",
]  # fmt: skip
_EXPERTS = ["qwen3_moe", "olmoe", "granitemoe"]
_LATENT = [
    *("minicpm3", "youtu", "youtu with biases", "youtu without a query vector"),
    *("deepseek_v2 with groups", "deepseek_v3"),
]
_HEADS = {"head_dim": 16, "num_hidden_layers": 2, "tie_word_embeddings": False}  # the kernels' narrowest heads


def _model(name: str, **changes: object) -> PreTrainedModel:
    kind, fields = NATIVE[name]
    if "layer_types" in fields:
        changes["layer_types"] = fields["layer_types"][
            : int(changes.get("num_hidden_layers", fields["num_hidden_layers"]))
        ]  # type: ignore[call-overload]
    return tiny(kind, fields | changes)


@pytest.mark.parametrize("name", [*_NEW, *_EXPERTS, *_LATENT])
def test_the_kernels_run_a_family_with_bits_that_do_not_depend_on_the_batch(name: str) -> None:
    width = {"hidden_size": 64} if name == "olmoe" else {}  # whose heads are as wide as the model together
    theirs = _model(name, **_HEADS, **width)
    ours = load_model(theirs, dtype=torch.float32)
    assert isinstance(ours, Transformer)
    exact = Runner(ours, 1)(random_tokens(1, 20), torch.arange(20)[None])[0]
    for quantization, bound in ((None, 0.03), ("int8", 0.05)):
        model = packed(theirs, quantization)
        assert float((_native_logits(model, 20) - exact).norm() / exact.norm()) < bound
        assert torch.equal(_native_logits(model, 20), _native_logits(model, 20, at_once=3)), quantization


def _native_logits(model: NativeModel, length: int, at_once: int = 100) -> Tensor:
    cache = KVCache(model.kv_layers, 2, 64, dtype=torch.bfloat16)
    tokens, (rows, positions) = random_tokens(1, length)[0], ragged({1: length})
    parts = [
        model.forward(Nodes(*(t[first : first + at_once] for t in (tokens, rows, positions))), cache).hidden
        for first in range(0, length, at_once)
    ]
    return model.logits(torch.cat(parts))


# llama.cpp's keys, and the names of the fields in configurations
_KEYS = {
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "use_parallel_residual": ("use_parallel_residual",),
}


def _written(
    path: Path,
    theirs: PreTrainedModel,
    more: Mapping[str, Any] | None = None,
    head: tuple[str, Mapping[str, Tensor]] | None = None,
) -> Path:
    """Write a GGUF file by the family's two tables of names. more: metadata that are added or replaced.

    head: llama.cpp's name of the architecture, and tensors of a draft head, named as one more layer.
    """
    config, family = theirs.config, FAMILIES[theirs.config.model_type]
    form = family.gguf
    described = describe(config)
    assert form is not None
    assert described is not None
    writer = begun(path, form.architectures[0], config, more_layers=int(head is not None))
    if head is not None:
        writer.add_nextn_predict_layers(1)
        add_by_name(writer, head[0], theirs, head[1])
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(dim)
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4}
    if "full_attention" in rope and family.model_type == "mellum":
        writer.add_float32(f"{form.architectures[0]}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        writer.add_array(
            f"{form.architectures[0]}.attention.sliding_window_pattern",
            [kind == "sliding_attention" for kind in config.layer_types],
        )
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"] * rope.get("alpha", 1.0) ** (dim / (dim - 2)))
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    mixture = next((layer.mlp for layer in described.layers if isinstance(layer.mlp, ExpertsSpec)), None)
    if mixture is not None:
        writer.add_expert_count(mixture.count)
        writer.add_expert_used_count(mixture.used)
        writer.add_expert_feed_forward_length(mixture.expert.width)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID if mixture.sigmoid else ExpertGatingFuncType.SOFTMAX)
    for key, fields in _KEYS.items():
        for field in fields:
            if (value := getattr(config, field, None)) is not None:
                writer.add_key_value(f"{form.architectures[0]}.{key}", value, GGUFValueType.get_type(value))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "llama_4_scaling_beta" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        writer.add_tensor("rope_freqs.weight", (plain / theirs.model.rotary_emb.inv_freq).numpy())
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(theirs.model.rotary_emb.attention_scaling)
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", torch.tensor(rope[f"{kind}_factor"]).numpy())
    for key, value in (more or {}).items():
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, GGUFValueType.get_type(value))
    theirs_of = {ours: name for name, ours in form.names.parts.items()}
    for name in XIELU:
        numbers = [float(tensor) for own, tensor in theirs.state_dict().items() if own.endswith(f"act_fn.{name}")]
        if numbers:
            writer.add_array(f"xielu.{name}", numbers)
    for name, tensor in theirs.state_dict().items():
        ours = family.safetensors.ours(name)
        assert ours is not None
        if ours.split(".")[-2] in XIELU:
            continue
        stem, suffix = ours.rsplit(".", 1)
        parts = stem.split(".")
        index = parts[1] if parts[0] == "layers" else ""
        part = parts[-1]
        stored = tensor + 1 if part in family.safetensors.plus_one and suffix == "weight" else tensor
        if part in family.safetensors.by_head:
            stored = stored.unflatten(0, (-1, 3, dim)).transpose(0, 1).flatten(0, 2)
        stored = stored.mT if part in family.safetensors.transposed and stored.dim() == 2 else stored
        stored = stored[0] if len(stored) == 1 else stored  # llama.cpp has vectors of such matrices
        if form.paired and part in ("q", "k"):
            heads = config.num_attention_heads if part == "q" else config.num_key_value_heads
            stored = stored.view(heads, 2, -1, *stored.shape[1:]).transpose(1, 2).reshape(stored.shape)
        halves = {part: stored}
        if part == "experts_gate_up":
            halves = dict(zip(("experts_gate", "experts_up"), stored.chunk(2, 1), strict=True))
        for half, values in halves.items():
            stem = f"layers.{{}}.{half}" if index else half
            whole = theirs_of.get(f"{stem}.{suffix}") or f"{theirs_of[stem]}.{suffix}"
            writer.add_tensor(whole.format(index), values.contiguous().numpy())
    finish(writer)
    return path


_IN_GGUF = [
    "qwen3_moe",
    "olmoe",
    "gemma3",
    "phi3 with a partial rotation",
    "granite",
    "olmo2",
    "smollm3",
    "exaone4 with windows",
    "exaone4",
    "ministral3",
]


@pytest.mark.parametrize("name", _IN_GGUF)
def test_a_gguf_file_gives_the_logits_of_its_safetensors(name: str, tmp_path: Path) -> None:
    """Layers whose kinds GGUF files do not tell are those that llama.cpp knows by the family."""
    changes = {"gemma3": 6, "smollm3": 4, "exaone4 with windows": 4}
    kind, fields = NATIVE[name]
    told = () if name == "exaone4" else ("layer_types", "no_rope_layer_interval")
    fields = {key: value for key, value in fields.items() if key not in told}
    heads = {"query_pre_attn_scalar": 8} if name == "gemma3" else {}
    theirs = tiny(kind, fields | heads | {"num_hidden_layers": changes.get(name, 3), "tie_word_embeddings": False})
    _check_gguf(tmp_path / "tiny.gguf", theirs, 12)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("exaone4 with windows", LLAMA3_ROPE | {"num_hidden_layers": 4}),
        ("phi3", {}),
        ("phi3", rope("longrope", **_LONGROPE) | {"original_max_position_embeddings": 32, "sliding_window": 2**18}),
    ],
    ids=["exaone4 with llama3 rope", "phi3 with a window", "phi3 with longrope"],
)
def test_a_gguf_file_gives_the_logits_of_its_variant(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    kind, usual = NATIVE[name]
    usual = {key: value for key, value in usual.items() if key != "layer_types"}
    ours = _check_gguf(tmp_path / "tiny.gguf", tiny(kind, usual | fields | {"tie_word_embeddings": False}), 30)
    assert ours.max_positions == (32 if "original_max_position_embeddings" in fields else 64)


@pytest.mark.parametrize(
    ("name", "fields", "more"),
    [
        ("phi3", {"sliding_window": None}, {"phi3.attention.sliding_window": 0}),
        (
            "granite",
            {"num_hidden_layers": 3, "num_key_value_heads": 2},
            {
                "granite.expert_count": 0,
                "granite.expert_used_count": 0,
                "granite.attention.head_count_kv": [2] * 3,
                "granite.rope.scaling.finetuned": True,
            },
        ),
    ],
    ids=["a window of 0 as in Phi-4", "heads by layer and no experts as in Granite 4"],
)
def test_metadata_that_say_nothing_change_nothing(
    name: str, fields: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    kind, usual = NATIVE[name]
    usual = {key: value for key, value in usual.items() if key != "layer_types"}
    theirs = tiny(kind, usual | fields | {"tie_word_embeddings": False})
    _check_gguf(tmp_path / "tiny.gguf", theirs, 12, more)


@pytest.mark.parametrize(
    ("name", "more"),
    [("granite", {"granite.rope.scaling.finetuned": False}), ("granite", {"granite.attention.causal": False})],
)
def test_metadata_of_another_model_are_refused(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    theirs = tiny(NATIVE[name][0], NATIVE[name][1] | {"tie_word_embeddings": False})
    with pytest.raises(ModelFormatError, match=r"finetuned=false|causal=false"):
        load_model(_written(tmp_path / "tiny.gguf", theirs, more), dtype=torch.float32)


def test_old_files_of_phi3_for_4096_positions_have_its_window(tmp_path: Path) -> None:
    usual = {key: value for key, value in NATIVE["phi3"][1].items() if key not in ("layer_types", "sliding_window")}
    fields = usual | {"num_hidden_layers": 32, "max_position_embeddings": 4096, "sliding_window": None}
    for length, window in ((4096, 2047), (64, None)):
        theirs = tiny("phi3", fields | {"max_position_embeddings": length, "tie_word_embeddings": False})
        ours = load_model(_written(tmp_path / f"{length}.gguf", theirs), dtype=torch.float32)
        assert isinstance(ours, Transformer)
        assert {layer.mixer.window for layer in ours.spec.layers} == {window}


@pytest.mark.parametrize("positions", [0, -1])
def test_a_model_for_no_positions_is_refused(positions: int) -> None:
    with pytest.raises(ModelFormatError, match="max_position_embeddings"):
        _native("llama", max_position_embeddings=positions, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


def test_a_bidirectional_decoder_is_none_of_a_family() -> None:
    assert describe({"model_type": "qwen3", "is_causal": True}) is not None
    assert describe({"model_type": "qwen3", "is_causal": False}) is None


@pytest.mark.parametrize("tied", [False, True])
def test_a_multimodal_model_is_tied_by_the_field_of_the_whole(tied: bool) -> None:
    spec = describe({"model_type": "qwen3_5", "tie_word_embeddings": tied, "text_config": {"num_hidden_layers": 4}})
    assert spec is not None
    assert spec.tied is tied


def _check_gguf(path: Path, theirs: PreTrainedModel, length: int, more: Mapping[str, Any] | None = None) -> Any:
    ours = load_model(_written(path, theirs, more), dtype=torch.float32)
    tokens = random_tokens(1, length)
    with torch.no_grad():
        wanted = theirs(tokens).logits
    assert (Runner(ours, 1)(tokens, torch.arange(length)[None]) - wanted).abs().max() < 1e-3
    return ours
