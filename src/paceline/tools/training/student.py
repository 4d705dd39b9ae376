"""A draft model distilled from its target: some of the target's layers, with its embedding and output.

A target without most of its layers predicts little at first. It learns from the target's answers, as heads do
(DistillSpec, arXiv 2310.08461). It reads only tokens, so any engine can draft with it.
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

FAMILIES = ("llama", "qwen2", "qwen3")  # model types with Llama's tensor names
LAYERS_RATIO = 8  # by default one layer is taken for this many of the target's
MIN_LAYERS = 2


def spread(layers: int, wanted: int) -> list[int]:
    """Indices of the target's layers to take: spread evenly from the first to the last."""
    if wanted == 1:
        return [0]
    return [round(index * (layers - 1) / (wanted - 1)) for index in range(wanted)]


def usual_layers(layers: int) -> int:
    """The default number of layers to take from a target with ``layers`` layers."""
    return min(layers, max(MIN_LAYERS, round(layers / LAYERS_RATIO)))


def student_config(target: PreTrainedConfig, layers: Sequence[int], *, tied: bool) -> PreTrainedConfig:
    """The target's configuration, reduced to the given layers. tied: whether output and embedding share weights."""
    config = deepcopy(target)
    config.__dict__.pop("quantization_config", None)  # what is saved is not quantised
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype, config.tie_word_embeddings = torch.bfloat16, tied
    return config


class Student(nn.Module):
    """A float32 ``transformers`` model of the target's family, with the interface that training needs of heads.

    Only the layers and the last norm are trained. The embedding is the target's. lm_head [Vd, H] has the target's
    output rows of the Vd tokens that training considers; ``save`` writes the rows of all tokens.
    """

    at_any_size = False  # it reads no hidden states
    stride = 1
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
        self,
        embedding: Tensor,
        output: Tensor,
        norm: Tensor,
        layers: Sequence[Mapping[str, Tensor]],
        vocabulary: Tensor,
    ) -> None:
        """Copy the target's weights: embedding and output [V, H], norm [H], and each layer's tensors by name.

        vocabulary [Vd] int64: the tokens that training considers.
        """
        self.body.get_input_embeddings().weight.copy_(embedding)
        self.body.norm.weight.copy_(norm)
        for layer, tensors in zip(self.body.layers, layers, strict=True):
            layer.load_state_dict(tensors)
        self.lm_head.weight.copy_(output[vocabulary])
        self.targets.copy_(vocabulary)

    def drafts(self, tokens: Tensor, features: Tensor, begins: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield the states [M, H] of each step, as ``Head.drafts`` does. features are ignored.

        A draft token depends on the draft tokens before it. Where these are correct they equal the text, so one pass
        over the text gives all steps.
        """
        states = self.body(input_ids=tokens, use_cache=False).last_hidden_state
        for step in range(steps):
            known = states[:, 1 + step :]
            padded = nn.functional.pad(known, (0, 0, 0, states.shape[1] - 1 - known.shape[1]))
            yield padded.flatten(0, 1)[begins]

    def continued(self, states: Tensor, path: Tensor) -> tuple[Tensor, Tensor | None]:
        """See ``Head.continued``."""
        return self.logits(states[:, -1]), None

    def trained_steps(self, unroll: int, alone: bool) -> int:
        """1: the pass that trains the first draft token is also that of the later ones, at later positions."""
        return 1

    def logits(self, normed: Tensor) -> Tensor:
        """[..., H] -> [..., Vd]."""
        return cast(Tensor, self.lm_head(normed))

    def absorb(self, scale: Tensor) -> None:
        """Do nothing: the model reads no hidden states that would have to be scaled."""

    def save(self, directory: Path, output: Tensor) -> None:
        """Write a checkpoint in the layout of ``transformers``, each file atomically.

        output [V, H]: the target's output weights.
        """
        state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in self.body.state_dict().items()}
        if not self.config.tie_word_embeddings:
            state["lm_head.weight"] = output
        tensors = {name: tensor.detach().cpu().bfloat16().contiguous().clone() for name, tensor in state.items()}
        with written_whole(directory / "model.safetensors") as part:
            save_file(tensors, part, metadata={"format": "pt"})
        write_text(directory / "config.json", self.config.to_json_string())
