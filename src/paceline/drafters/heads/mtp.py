"""The head in a target's own checkpoint (multi-token prediction): ``mtp.*`` of Qwen3.5, one more layer of DeepSeek.

At position i it reads the embedding of token i + 1 and the target's hidden state of token i, after the final norm, and
predicts token i + 2. The next step reads the draft token and the head's own normed state. One decoder layer of the
target's kind, with keys and values of its own; embedding and output head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.layers import HeadStep
from paceline.kernels.attention.base import Attend
from paceline.kernels.gpu.steps import steps_for
from paceline.models.description.checkpoint import Checkpoint
from paceline.models.description.weight_names import WeightNames
from paceline.models.description.weights import StoredTensor, place
from paceline.models.torch.layers import DecoderLayer, ForwardContext, WeightSource
from paceline.models.torch.linear import dense


class MtpHead(Head):
    """The target's own head in torch.

    weights: by the names of ``description.weights.slots``, of one dtype and on one device.
    ends: the target's embedding and output head [V, H], which are shared.
    """

    def __init__(self, config: HeadConfig, weights: Mapping[str, Tensor], ends: tuple[Tensor, Tensor]) -> None:
        with torch.device("meta"):
            super().__init__(config, joined=0)
        self.weights = weights
        self._dtype, self._device = weights["mtp.fc.weight"].dtype, weights["mtp.fc.weight"].device
        self.embed_tokens.weight, self.lm_head.weight = (nn.Parameter(end, requires_grad=False) for end in ends)
        self.d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=self._device)
        self.t2d = torch.ones(config.draft_vocab_size, dtype=torch.bool, device=self._device)
        for name, tensor in weights.items():
            self.register_buffer(name.replace(".", "_"), tensor)
        spec, parts = config.decoder, WeightSource(config.decoder, weights, dense)
        rotary = spec.layers[0].attention.rotary
        self._fc = weights["mtp.fc.weight"]
        self._embedding_norm, self._hidden_norm = parts.norm("mtp.embedding_norm"), parts.norm("mtp.hidden_norm")
        self._decoder_layer = DecoderLayer(spec, parts, 0, 0, {} if rotary is None else {rotary: 0})
        self._norm, self._steps = parts.norm("norm"), steps_for(self._device)

    def _add_layers(self, config: HeadConfig, joined: int) -> None:
        """Its layer is one of the target's, not of trained heads."""

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's hidden state as it is: features [..., 1, H] -> [..., H]."""
        return features.squeeze(-2).to(self.dtype)

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> HeadStep:
        embedded = self._embedding_norm(self.embed_tokens(tokens).to(hidden.dtype))
        joined = torch.cat((embedded, self._hidden_norm(hidden)), dim=-1)
        x = functional.linear(joined, self._fc).flatten(0, 1)
        forward = ForwardContext(len(tokens), [self._rotation(positions, hidden.dtype)], attend, self._steps)
        entry = self._decoder_layer.entry
        assert entry is not None, "families with such heads have norms before each part"
        normed = self._decoder_layer(x, entry(x), forward, self._norm)[1].view(hidden.shape)
        return HeadStep(normed, normed)


def own_config(config: PretrainedConfig) -> HeadConfig:
    """Return the configuration of a target's own head: one layer of the target's sizes.

    Its attention is full, unless the configuration has the kind of the head's layer.
    """
    text = config.get_text_config()
    kinds = getattr(text, "mtp_layer_types", None) or ["full_attention"]
    one: dict[str, Any] = {"num_hidden_layers": 1, "layer_types": kinds}
    # the fields of families that tell which layers have experts: a head of a model with experts has some
    mixture: dict[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1, "first_k_dense_replace": 0}
    mixture |= {"mlp_layer_types": ["sparse"]}
    fields: dict[str, Any] = text.to_dict() | one | mixture
    fields.pop("quantization_config", None)  # stored tensors are read dequantised
    sizes = text.hidden_size, text.vocab_size
    return HeadConfig(fields, *sizes, taps=(text.num_hidden_layers,), norm_output=True, own=True)


def own_checkpoint(
    config: HeadConfig, names: WeightNames, stored: Mapping[str, StoredTensor], where: str
) -> Checkpoint:
    """Pair the tensors of a target's own head with its weights, without reading them.

    Raises ModelFormatError if a tensor is missing, unknown or of another shape.
    """
    return Checkpoint(where, config.decoder, place(config.decoder, names, stored, where))
