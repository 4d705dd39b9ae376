"""Families of models that paceline runs itself, one module each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from paceline.errors import ModelFormatError
from paceline.models.description.multiplied import multiplied
from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.description.weights import StoredTensor
from paceline.models.families import (
    afmoe,
    apertus,
    arcee,
    aria_text,
    bamba,
    cohere,
    cohere2,
    cohere2_moe,
    cwm,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone,
    exaone4,
    exaone_moe,
    falcon_h1,
    flex_olmo,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_swa,
    granitemoe,
    granitemoe_swa,
    granitemoehybrid,
    helium,
    hunyuan_v1_dense,
    hunyuan_v1_moe,
    hy_v3,
    hyperclovax,
    jais2,
    lfm2,
    lfm2_moe,
    lfm3,
    llama,
    mellum,
    mimo_v2_flash,
    minicpm3,
    minimax_m2,
    ministral,
    ministral3,
    mistral,
    mistral4,
    mixtral,
    nanochat,
    nemotron,
    nemotron_h,
    olmo,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi,
    phi3,
    phimoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    sarvam_moe,
    seed_oss,
    smollm3,
    solar_open,
    stablelm,
    starcoder2,
    vaultgemma,
    youtu,
)
from paceline.models.families.base import LLAMA_NAMES, Family
from paceline.models.families.wrappers import WRAPPERS, in_wrapper

_MODULES = (
    *(llama, mistral, ministral3, ministral, qwen2, qwen3, qwen3_5, gemma3, gemma4, phi3, granite),
    *(olmo2, olmo3, smollm3, exaone, exaone4, glm, glm4, gemma, gemma2, vaultgemma, seed_oss, hunyuan_v1_dense),
    *(ernie4_5, cwm, helium, arcee, apertus, granite_swa, nanochat, hyperclovax),
    *(opt, gpt2, gpt_bigcode, gpt_neox, gptj, cohere, cohere2, starcoder2, phi, stablelm, nemotron, jais2, olmo),
    *(mixtral, qwen2_moe, qwen3_moe, mellum, olmoe, flex_olmo, granitemoe, granitemoe_swa, gpt_oss),
    *(qwen3_5_moe, qwen3_next, aria_text, cohere2_moe, phimoe),
    *(
        mimo_v2_flash,
        glm4_moe,
        dots1,
        solar_open,
        sarvam_moe,
        exaone_moe,
        hy_v3,
        minimax_m2,
        afmoe,
        ernie4_5_moe,
        hunyuan_v1_moe,
    ),
    *(granitemoehybrid, bamba, falcon_h1, nemotron_h, lfm2, lfm2_moe, lfm3),
    *(minicpm3, youtu, deepseek_v2, deepseek_v3, glm4_moe_lite, mistral4),
)

FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
"""By Hugging Face's model_type."""

_FORMS = [
    (architecture, family, family.gguf.mixture)
    for family in FAMILIES.values()
    if family.gguf is not None
    for architecture in family.gguf.architectures
]
GGUF_FAMILIES: dict[str, Family] = {architecture: family for architecture, family, mixture in _FORMS if not mixture}
"""By the architecture that GGUF files name."""

GGUF_MIXTURES: dict[str, Family] = {architecture: family for architecture, family, mixture in _FORMS if mixture}
"""Those of files with experts, where they differ."""

_BY_TEXT = {kind: family for family in FAMILIES.values() for kind in (family.model_type, *family.other_types)}

USUAL_NAMES = WeightNames(LLAMA_NAMES, prefixes=("model.",))
"""Names that models outside of ``FAMILIES`` have most often."""


def describe(config: PretrainedConfig | Mapping[str, Any]) -> DecoderSpec | None:
    """Describe the model of a Hugging Face configuration; None if only transformers' own code can run it.

    Raises ModelFormatError if a dictionary has an unknown ``model_type`` or values of a wrong type.
    """
    config = config if isinstance(config, PretrainedConfig) else _parse(config)
    family = family_of(config)
    if family is None or getattr(config, "quantization_config", None):
        return None
    text = config.get_text_config()
    if getattr(text, "is_causal", True) is False:
        return None  # transformers' way to make a decoder bidirectional: its code is refused with that reason
    spec = family.describe(text)
    if spec is not None:
        spec = replace(spec, family=family.model_type, headless=spec.headless or _is_headless(config))
    # transformers ties a multimodal model by the field of the whole; a stored head that differs is found in the files
    tied = text is not config and getattr(config, "tie_word_embeddings", False)
    return replace(spec, tied=True) if spec is not None and tied else spec


def _is_headless(config: PretrainedConfig) -> bool:
    """Whether a configuration names transformers' class of a decoder without an output head, such as Qwen2Model."""
    names = [str(name) for name in getattr(config, "architectures", None) or ()]
    return bool(names) and all(name.endswith("Model") and "Head" not in name for name in names)


def family_of(config: PretrainedConfig) -> Family | None:
    """Return the family of a configuration, or of the text model of a multimodal one; None if it has none here."""
    is_known = config.model_type in WRAPPERS or config.get_text_config() is config
    return _BY_TEXT.get(config.get_text_config().model_type) if is_known else None


def names_of(config: PretrainedConfig) -> WeightNames:
    """Return the names of the weights in safetensors files and loaded models of a configuration."""
    family = family_of(config)
    if family is None:
        return USUAL_NAMES
    names = in_wrapper(family.safetensors) if config.model_type in WRAPPERS else family.safetensors
    is_layer = family.head is not None and family.head.behind(0) != family.head
    return names.ignoring_layer(config.get_text_config().num_hidden_layers) if is_layer else names


def as_described(config: PretrainedConfig, stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Return the tensors of safetensors files or a loaded model, those with a factor multiplied when they are read."""
    family = family_of(config)
    factors = {} if family is None else family.factors(config.get_text_config())
    return with_factors(stored, names_of(config), factors)


def with_factors(
    stored: Mapping[str, StoredTensor], names: WeightNames, factors: Mapping[str, Tensor]
) -> Mapping[str, StoredTensor]:
    """Return the tensors, those with a factor multiplied when they are read. factors: see ``Family.factors``."""
    if not factors:
        return stored
    return {name: _multiplied(tensor, names.ours(name), factors) for name, tensor in stored.items()}


def _multiplied(tensor: StoredTensor, name: str | None, factors: Mapping[str, Tensor]) -> StoredTensor:
    found = factors.get(_OF_LAYER.sub("", name or ""))
    return tensor if found is None else multiplied(tensor, found)


_OF_LAYER = re.compile(r"layers\.\d+\.|\.weight$")


def _parse(config: Mapping[str, Any]) -> PretrainedConfig:
    fields = dict(config)
    kind = fields.pop("model_type", None)
    try:
        return AutoConfig.for_model(kind, **fields)
    except Exception as error:  # transformers raises many kinds for a bad field
        raise ModelFormatError(f"the model's configuration (model_type {kind!r}) cannot be used: {error}") from error
