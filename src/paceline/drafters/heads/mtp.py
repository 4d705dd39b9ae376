"""The head in a target's own checkpoint (multi-token prediction): Qwen3.5's, ``mtp.*``.

At position i it reads the embedding of token i + 1 and the target's hidden state of token i, after the final norm, and
predicts token i + 2. The next step reads the draft token and the head's own normed state. One decoder layer of the
target's kind, with keys and values of its own; embedding and output head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from paceline.drafters.heads.config import HeadConfig
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.layers import HeadStep, rms_norm
from paceline.errors import ModelFormatError
from paceline.kernels.attention.base import Attend
from paceline.models.description.weights import StoredTensor, check_finite

PREFIX = "mtp."
_NORMS = ("norm.weight", "_norm_embedding.weight", "_norm_hidden.weight", "layernorm.weight")  # stored around 0


class MtpHead(Head):
    """The target's own head. Its tensors are named as in the checkpoint, without the prefix."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, joined=0)

    def _add_fusion(self, config: HeadConfig) -> None:
        self.fc = nn.Linear(2 * config.width, config.width, bias=False)
        self.pre_fc_norm_embedding = rms_norm(config.width, config)
        self.pre_fc_norm_hidden = rms_norm(config.width, config)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device  # the output head may have no memory here

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's hidden state as it is: features [..., 1, H] -> [..., H]."""
        return features.squeeze(-2).to(self.dtype)

    def step(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> HeadStep:
        embedded = self.pre_fc_norm_embedding(self.embed_tokens(tokens).to(hidden.dtype))
        joined = torch.cat((embedded, self.pre_fc_norm_hidden(hidden)), dim=-1)
        return super().step(tokens, self.fc(joined), positions, attend)


def own_head(
    config: PretrainedConfig, stored: Mapping[str, StoredTensor], ends: tuple[Tensor, Tensor], where: str
) -> MtpHead:
    """Make the head of a target's checkpoint.

    stored: the tensors of the checkpoint, of which those named ``mtp.*`` are read. ends: the target's embedding and
    output head [V, H], which are shared; on device "meta" where the CPU kernels have them.

    Raises ModelFormatError if a tensor is missing, unknown, of another shape, or has numbers that are not finite.
    """
    head_config = _config_of(config)
    with torch.device("meta"):
        head = MtpHead(head_config)
    wanted = {name: tensor for name, tensor in head.state_dict().items() if not name.startswith(_NOT_STORED)}
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items() if name.startswith(PREFIX)}
    wrong = sorted(wanted.keys() ^ tensors.keys())
    wrong += [name for name, tensor in tensors.items() if name in wanted and tensor.shape != tuple(wanted[name].shape)]
    if wrong:
        raise ModelFormatError(f"{where}: the tensor mtp.{wrong[0]} is missing, unknown or of another shape")
    vocabulary = head_config.draft_vocab_size
    state = {name: _read(name, tensor, ends[0].dtype, f"{where}: {PREFIX}{name}") for name, tensor in tensors.items()}
    state |= {"embed_tokens.weight": ends[0], "lm_head.weight": ends[1]}
    state |= {"d2t": torch.zeros(vocabulary, dtype=torch.int64), "t2d": torch.ones(vocabulary, dtype=torch.bool)}
    head.load_state_dict(state, assign=True)
    return head.requires_grad_(False).eval()


_NOT_STORED = ("embed_tokens.", "lm_head.", "d2t", "t2d")


def _config_of(config: PretrainedConfig) -> HeadConfig:
    """Return the head's configuration: one full attention layer of the target's sizes."""
    text = config.get_text_config()
    fields: dict[str, Any] = text.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    fields.pop("quantization_config", None)  # stored tensors are read dequantised
    sizes = text.hidden_size, text.vocab_size
    return HeadConfig(fields, *sizes, taps=(text.num_hidden_layers,), norm_output=True, own=True)


def _read(name: str, stored: StoredTensor, dtype: torch.dtype, where: str) -> Tensor:
    """Read a tensor; norms are stored less one. Raises ModelFormatError for numbers that are not finite."""
    exact = torch.empty(stored.shape, dtype=torch.float32)
    stored.unpack_into(exact)
    check_finite(exact, where)
    return (exact + 1.0 if name.endswith(_NORMS) else exact).to(dtype)
