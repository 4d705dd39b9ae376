"""Where tests find real weights."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.errors import ModelNotFoundError
from paceline.models.hub import resolve


def find(name: str) -> Path:
    """The file NAME.gguf from $PACELINE_TEST_MODELS or, if embedded, paceline's own cache; else skips the test."""
    kept = Path(os.environ.get("PACELINE_TEST_MODELS") or "~/.cache/paceline-test-models").expanduser()
    path = kept / f"{name}.gguf"
    if path.is_file():
        return path
    try:
        return resolve(name)
    except ModelNotFoundError as error:
        pytest.skip(f"no {path}, and: {error}")


@functools.lru_cache(maxsize=1)
def load_in_transformers(path: Path) -> PreTrainedModel:
    """The same file in float32, read by transformers, which takes 15 s: once for all tests that follow each other."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate to load GGUF files")
    from transformers import GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
