"""EXAONE 3 and 3.5: Llama's layers under names of their own."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_GGUF_NAMES, LLAMA_NAMES, Family, GGUFForm, biases_of, llama_like


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return llama_like(config, **biases_of(config))


_IN_FILES = {
    "wte": "embed",
    "ln_f": "norm",
    "h.{}.ln_1": "layers.{}.attn_norm",
    "h.{}.ln_2": "layers.{}.mlp_norm",
    **{f"h.{{}}.attn.attention.{part}_proj": f"layers.{{}}.{part}" for part in ("q", "k", "v")},
    "h.{}.attn.attention.out_proj": "layers.{}.o",
    "h.{}.mlp.c_fc_0": "layers.{}.gate",
    "h.{}.mlp.c_fc_1": "layers.{}.up",
    "h.{}.mlp.c_proj": "layers.{}.down",
}

FAMILY = Family(
    "exaone",
    _describe,
    WeightNames({**LLAMA_NAMES, **_IN_FILES}, prefixes=("model.", "transformer.")),
    GGUFForm(("exaone",), WeightNames(LLAMA_GGUF_NAMES)),
)
