"""OLMo 2: norms after each part instead of before, and norms of queries and keys over all heads together."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import (
    GGUF_NORMS_AFTER,
    LLAMA_GGUF_NAMES,
    LLAMA_NAMES,
    NORMS_AFTER,
    Family,
    GGUFForm,
    biases_of,
    llama_like,
)


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return llama_like(config, "after", qk_norm="all", **biases_of(config))


FAMILY = Family(
    "olmo2",
    _describe,
    WeightNames({**LLAMA_NAMES, **NORMS_AFTER}, prefixes=("model.",)),
    GGUFForm(("olmo2",), WeightNames({**LLAMA_GGUF_NAMES, **GGUF_NORMS_AFTER})),
)
