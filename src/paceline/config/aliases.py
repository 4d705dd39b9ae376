"""Short names of models as people type them, and the hub files that they stand for."""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, str] = {
    "smollm2:135m": "smollm2-135m",
    "smollm2:360m": "HuggingFaceTB/SmolLM2-360M-Instruct-GGUF:Q8_0",
    "smollm2:1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
    "qwen3:0.6b": "Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "qwen3:1.7b": "Qwen/Qwen3-1.7B-GGUF:Q8_0",
    "qwen3:4b": "Qwen/Qwen3-4B-GGUF:Q4_K_M",
    "qwen3:8b": "Qwen/Qwen3-8B-GGUF:Q4_K_M",
    "qwen3:14b": "Qwen/Qwen3-14B-GGUF:Q4_K_M",
    "qwen3:32b": "Qwen/Qwen3-32B-GGUF:Q4_K_M",
    "qwen3:30b-a3b": "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M",
    "qwen2.5:0.5b": "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5:1.5b": "Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5:3b": "Qwen/Qwen2.5-3B-Instruct-GGUF:Q4_K_M",
    "qwen2.5:7b": "bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder:0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder:1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder:3b": "Qwen/Qwen2.5-Coder-3B-Instruct-GGUF:Q4_K_M",
    "qwen2.5-coder:7b": "bartowski/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
    "llama3.2:1b": "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    "llama3.2:3b": "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
    "llama3.1:8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
    "mistral:7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
    "gemma3:1b": "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
    "gemma3:4b": "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
    "gpt-oss:20b": "ggml-org/gpt-oss-20b-GGUF:MXFP4",
}
"""Names in the form of Ollama's library. The type is the one nearest to Ollama's that the publisher offers."""


def full_name(name: str) -> str:
    """The name that an alias stands for; any other name as it is."""
    return ALIASES.get(name.lower(), name)
