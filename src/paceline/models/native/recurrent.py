"""Models with recurrent layers, gated attention or sinks in plain torch on a CPU, unrounded in float32.

Every kind of recurrent layer runs here; the kernels have gated delta nets and short convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.config import QuantizationName
from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.kernels import reference
from paceline.models.base import WITHOUT_KERNELS, HiddenStates, check_taps
from paceline.models.description.spec import AttentionSpec, DecoderSpec, MixerSpec
from paceline.models.native.spec import spec_of


def is_recurrent(spec: DecoderSpec) -> bool:
    """Whether ``RecurrentModel`` runs a model on a CPU: one with recurrent layers, gated attention or sinks."""
    return not all(_is_usual(layer.mixer) for layer in spec.layers)


def _is_usual(mixer: MixerSpec) -> bool:
    return isinstance(mixer, AttentionSpec) and not mixer.gated and not mixer.sinks


class RecurrentModel:
    """A decoder with recurrent layers, unrounded in torch; implements ``FlatModel`` and ``Recurrent``.

    weights: tensors by the names of ``description.weights.slots``, on the CPU. They are computed with in float32.
    """

    kernels = WITHOUT_KERNELS
    quantization: QuantizationName | None = None

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Tensor], name: str) -> None:
        embedding = weights["embed.weight"]
        self.spec, self.weights, self.name = spec, weights, name
        self._packable = packable = spec_of(spec, weights)
        self.vocab_size, self.layers, self.width = spec.vocab_size, len(spec.layers), spec.width
        self.kv_heads, self.head_dim = packable.kv_heads, packable.head_dim
        self.max_positions, self.tied = spec.max_positions, spec.tied
        self.weights_dtype = embedding.dtype
        self.dtype, self.device = torch.float32, embedding.device
        self.state_shape, self.kv_layers = packable.states, spec.kv_layers
        self._reference: reference.ReferenceDecoder | None = None

    @property
    def _decoder(self) -> reference.ReferenceDecoder:
        """Made when first used: most models are only loaded to be packed."""
        if self._reference is None:
            self._reference = reference.ReferenceDecoder(self._packable, "fp32", "fp32")
        return self._reference

    def forward(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> HiddenStates:
        """Run N nodes -> hidden [N - text, width], features [N, taps, width]; see ``FlatModel``."""
        check_taps(taps, self.layers + 1)
        return HiddenStates(*self._decoder.forward(nodes, cache, taps))

    def fill(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> Tensor | None:
        """Write keys, values and states of N nodes of text -> features [N, taps, width], None without taps."""
        check_taps(taps, self.layers + 1)
        return self._decoder.forward(nodes, cache, taps, text=True)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab_size], float32, of hidden states [..., width]."""
        return self._decoder.logits(hidden.reshape(-1, self.width)).view(*hidden.shape[:-1], self.vocab_size)

    def weight_bytes(self) -> int:
        """Return the bytes of all weights. Tied weights are counted once."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self.weights.values()}.values())

    def multiply_adds(self) -> int:
        """Return the multiply-adds of all weight matrices for one token; see ``Counted``."""
        matrices = [tensor for name, tensor in self.weights.items() if tensor.dim() == 2 and name != "embed.weight"]
        return sum(tensor.numel() for tensor in matrices) + (self.vocab_size * self.width if self.tied else 0)
