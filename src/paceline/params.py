"""Import path of ``paceline.config`` for plugins."""

from paceline.config import EngineConfig, SamplingParams, ServerConfig, StructuredOutputs

__all__ = ["EngineConfig", "SamplingParams", "ServerConfig", "StructuredOutputs"]
