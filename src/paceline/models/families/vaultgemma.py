"""VaultGemma: Gemma 2 with norms before each part alone."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_NAMES, Family
from paceline.models.families.gemma2 import NORM_BEFORE_MLP, PLUS_ONE, describe


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return describe(config, "before")


FAMILY = Family(
    "vaultgemma", _describe, WeightNames({**LLAMA_NAMES, **NORM_BEFORE_MLP}, prefixes=("model.",), plus_one=PLUS_ONE)
)
