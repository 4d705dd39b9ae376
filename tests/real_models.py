"""Real model weights for tests."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.errors import ModelNotFoundError
from paceline.models.files.hub import resolve


def find(name: str) -> Path:
    """Path of NAME.gguf in $PACELINE_TEST_MODELS or, for embedded models, in paceline's cache; else skip the test."""
    directory = Path(os.environ.get("PACELINE_TEST_MODELS") or "~/.cache/paceline-test-models").expanduser()
    path = directory / f"{name}.gguf"
    if path.is_file():
        return path
    try:
        return resolve(name)
    except ModelNotFoundError as error:
        pytest.skip(f"no {path}, and: {error}")


@functools.lru_cache(maxsize=1)
def load_in_transformers(path: Path) -> PreTrainedModel:
    """Load the file in float32 with transformers. It takes 15 s, so consecutive tests share the model."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate to load GGUF files")
    from transformers import GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
