"""paceline: batched speculative decoding for language models. It does not change the output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.config import EngineConfig, SamplingParams, StructuredOutputs
    from paceline.core.outputs import CompletionOutput, Metrics, RequestOutput
    from paceline.llm import LLM

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Metrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

_HOMES = {
    "LLM": "paceline.llm",
    "CompletionOutput": "paceline.core.outputs",
    "Metrics": "paceline.core.outputs",
    "RequestOutput": "paceline.core.outputs",
    "EngineConfig": "paceline.config",
    "SamplingParams": "paceline.config",
    "StructuredOutputs": "paceline.config",
}


def __getattr__(name: str) -> object:
    """Import public names on first use, so that ``paceline --help`` does not import torch."""
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
