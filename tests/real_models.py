"""Where tests find real weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.models.hub import cache_directory


def find(name: str) -> Path:
    """The file NAME.gguf, from $PACELINE_TEST_MODELS or paceline's own cache; skips the test if it is in neither."""
    kept = Path(os.environ.get("PACELINE_TEST_MODELS") or "~/.cache/paceline-test-models").expanduser()
    for path in (kept / f"{name}.gguf", *cache_directory().rglob(f"{name}.gguf")):
        if path.is_file():
            return path
    pytest.skip(f"no {name}.gguf: run `paceline pull {name}` if it is an embedded model, or set PACELINE_TEST_MODELS")


def load_in_transformers(path: Path) -> PreTrainedModel:
    """The same file in float32, read by transformers."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate to load GGUF files")
    from transformers import GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
