"""Granite with windows and experts (SWA): the dense one's attention, and Granite's mixtures."""

from __future__ import annotations

from transformers import PretrainedConfig

from paceline.models.description.spec import DecoderSpec
from paceline.models.description.weight_names import WeightNames
from paceline.models.families.base import LLAMA_NAMES, Family
from paceline.models.families.granite_swa import SINKS, describe
from paceline.models.families.granitemoe import MIXED_NAMES, mixed


def _describe(config: PretrainedConfig) -> DecoderSpec | None:
    return mixed(config, describe(config))


FAMILY = Family("granitemoe_swa", _describe, WeightNames({**LLAMA_NAMES, **SINKS, **MIXED_NAMES}, prefixes=("model.",)))
