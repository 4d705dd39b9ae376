"""A draft model that is distilled from its target: some of its layers, between its own embedding and output.

What is left of a target when most layers are taken out says little at first; it learns from the target's answers, as
heads do (DistillSpec, arXiv 2310.08461). It reads nothing but tokens, so any engine can draft with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from paceline.config.files import write_text, written_whole

FAMILIES = ("llama", "qwen2", "qwen3")  # whose layers' tensors are named as Llama's
SHARE = 8  # one layer of so many is taken where nobody says how many
LEAST = 2


def spread(layers: int, wanted: int) -> list[int]:
    """Which layers of a target are taken: evenly from the first to the last."""
    if wanted == 1:
        return [0]
    return [round(place * (layers - 1) / (wanted - 1)) for place in range(wanted)]


def usual_layers(layers: int) -> int:
    """How many of a target's are taken where nobody says."""
    return min(layers, max(LEAST, round(layers / SHARE)))


def student_config(target: PreTrainedConfig, layers: Sequence[int], *, tied: bool) -> PreTrainedConfig:
    """The target's configuration with these of its layers alone. tied: whether output and embedding are one."""
    config = deepcopy(target)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype, config.tie_word_embeddings = torch.bfloat16, tied
    return config


class Student(nn.Module):
    """``transformers``' model of the target's family, float32, with the interface of heads in training.

    B texts of T tokens, width H. Layers and the last norm learn. The embedding is the target's, and so is lm_head
    [Vd, H]: the output's rows of the tokens that training looks at; ``save`` writes those of all tokens.
    """

    at_any_size = unrolls = False  # it reads no streams; one pass over a text learns all draft tokens of all drafts
    targets: Tensor

    def __init__(self, config: PreTrainedConfig, vocabulary: int) -> None:
        super().__init__()
        self.config = config
        self.body = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
        self.body.get_input_embeddings().requires_grad_(False)
        self.lm_head = nn.Linear(config.hidden_size, vocabulary, bias=False).requires_grad_(False)
        self.register_buffer("targets", torch.zeros(vocabulary, dtype=torch.int64))

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @torch.no_grad()
    def take(
        self, embedding: Tensor, rows: Tensor, norm: Tensor, layers: Sequence[Mapping[str, Tensor]], says: Tensor
    ) -> None:
        """The target's weights: embedding and rows [V, H], norm [H], the layers'. says [Vd]: what is looked at."""
        self.body.get_input_embeddings().weight.copy_(embedding)
        self.body.norm.weight.copy_(norm)
        for layer, tensors in zip(self.body.layers, layers, strict=True):
            layer.load_state_dict(tensors)
        self.lm_head.weight.copy_(rows[says])
        self.targets.copy_(says)

    def drafts(self, tokens: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """As ``Head.drafts``. What a draft token reads are the draft tokens before it: where they are right, the text
        itself.
        """
        states = self.body(input_ids=tokens, use_cache=False).last_hidden_state
        for step in range(steps):
            known = states[:, 1 + step :]
            yield nn.functional.pad(known, (0, 0, 0, states.shape[1] - 1 - known.shape[1]))

    def logits(self, normed: Tensor) -> Tensor:
        """[..., H] -> [..., Vd]."""
        return cast(Tensor, self.lm_head(normed))

    def absorb(self, scale: Tensor) -> None:
        """It reads no streams."""

    def save(self, directory: Path, rows: Tensor) -> None:
        """A checkpoint as ``transformers`` writes it, each file whole. rows [V, H]: of the target's output."""
        state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in self.body.state_dict().items()}
        if not self.config.tie_word_embeddings:
            state["lm_head.weight"] = rows
        kept = {name: tensor.detach().cpu().bfloat16().contiguous().clone() for name, tensor in state.items()}
        with written_whole(directory / "model.safetensors") as part:
            save_file(kept, part, metadata={"format": "pt"})
        write_text(directory / "config.json", self.config.to_json_string())
