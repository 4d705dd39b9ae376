"""Options of users: parameters with defaults and ranges, option names, input files. All defaults are declared here."""

from __future__ import annotations

from paceline.config.engine import (
    LOOKS_UP,
    OWN_HEAD,
    EngineConfig,
    EngineOptions,
    FamiliarOptions,
    check_used,
    engine_config,
    uses_own_head,
)
from paceline.config.limits import (
    DEFAULT_MODEL,
    DEFAULT_SPECULATION_LENGTH,
    MAX_LOGPROBS,
    MAX_REFERENCE_TOKENS,
    MAX_REFERENCES,
    MAX_SPECULATION_LENGTH,
    MIN_TEMPERATURE,
    SYNTHETIC,
    AcceptanceName,
    AttentionName,
    DrafterName,
    DtypeName,
    Length,
    PoolingName,
    QuantizationName,
    RankName,
)
from paceline.config.sampling import (
    CHAT_SAMPLING,
    RECOMMENDED_FIELDS,
    LogitsProcessor,
    SamplingParams,
    StructuredOutputs,
)
from paceline.config.server import ServerConfig
from paceline.config.training import DraftData, DraftTraining

__all__ = [
    "CHAT_SAMPLING",
    "DEFAULT_MODEL",
    "DEFAULT_SPECULATION_LENGTH",
    "LOOKS_UP",
    "MAX_LOGPROBS",
    "MAX_REFERENCES",
    "MAX_REFERENCE_TOKENS",
    "MAX_SPECULATION_LENGTH",
    "MIN_TEMPERATURE",
    "OWN_HEAD",
    "RECOMMENDED_FIELDS",
    "SYNTHETIC",
    "AcceptanceName",
    "AttentionName",
    "DraftData",
    "DraftTraining",
    "DrafterName",
    "DtypeName",
    "EngineConfig",
    "EngineOptions",
    "FamiliarOptions",
    "Length",
    "LogitsProcessor",
    "PoolingName",
    "QuantizationName",
    "RankName",
    "SamplingParams",
    "ServerConfig",
    "StructuredOutputs",
    "check_used",
    "engine_config",
    "uses_own_head",
]
