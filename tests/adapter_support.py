"""LoRA adapters for tests: files as peft writes them, and the model with an adapter merged into its weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

EVERY_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    path: Path,
    model: PreTrainedModel,
    *,
    seed: int,
    rank: int = 4,
    modules: Sequence[str] = EVERY_LINEAR,
    **settings: Any,
) -> PreTrainedModel:
    """Write a random adapter of a model. Returns a copy of the model with the adapter merged in float32."""
    path.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(modules), "bias": "none"}
    config |= settings
    (path / "adapter_config.json").write_text(json.dumps(config))
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    merged, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] in modules and isinstance(module, nn.Linear):
            down = torch.randn(rank, module.in_features, generator=generator) * 0.3
            up = torch.randn(module.out_features, rank, generator=generator) * 0.3
            tensors |= {f"base_model.model.{name}.lora_{side}.weight": t for side, t in (("A", down), ("B", up))}
            with torch.no_grad():
                module.weight += (scale * up @ down).to(module.weight.dtype)
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    return merged
