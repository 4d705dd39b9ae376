"""The name that plugins know ``paceline.config`` by."""

from paceline.config import EngineConfig, SamplingParams, ServerConfig, StructuredOutputs

__all__ = ["EngineConfig", "SamplingParams", "ServerConfig", "StructuredOutputs"]
