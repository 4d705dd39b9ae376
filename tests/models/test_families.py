import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model_support import LLAMA3_ROPE, NATIVE, YARN_ROPE, rope
from paceline.errors import ModelFormatError
from paceline.models.description import DecoderSpec
from paceline.models.families import FAMILIES, describe
from paceline.models.families.rotary import longest_sequence

_SHORT_LONG = {"short_factor": [1.0] * 3, "long_factor": [4.0] * 3, "original_max_position_embeddings": 16}
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


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if not kind.startswith("qwen3_5")])
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
    assert describe({"model_type": "gpt_neox"}) is None


@pytest.mark.parametrize("fields", [{}, {"model_type": "no such thing"}, {"model_type": "llama", "hidden_size": "x"}])
def test_an_invalid_configuration_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ModelFormatError, match="cannot be used"):
        describe(fields)
