"""Models with recurrent layers in plain torch: what runs in float32, and what the CPU kernels are packed from.

Every kind of recurrent layer runs here; the kernels have gated delta nets and short convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.config import QuantizationName
from paceline.core.cache import KVCache, KVHeads
from paceline.core.nodes import Nodes
from paceline.core.recurrent_state import StatefulCache, StateShape
from paceline.kernels import reference
from paceline.models.base import WITHOUT_KERNELS, AnyModel, HiddenStates, OwnKVLayers, check_taps
from paceline.models.description import AttentionSpec, DecoderSpec, MixerSpec
from paceline.models.native_spec import spec_of


@runtime_checkable
class Recurrent(AnyModel, Protocol):
    """A model that may have recurrent layers, which have no keys and values but a state for each slot."""

    state_shape: StateShape | None  # None: all of its layers are attention


def state_shape_of(model: AnyModel) -> StateShape | None:
    """Return the shape of a model's recurrent states; None if it has none."""
    return model.state_shape if isinstance(model, Recurrent) else None


def kv_layers_of(model: AnyModel) -> Sequence[KVHeads]:
    """Return the key heads of a model's layers that have keys and values of their own."""
    one = KVHeads(model.kv_heads, model.head_dim)
    return model.kv_layers if isinstance(model, OwnKVLayers) else [one] * model.layers


def cache_of(model: AnyModel, rows: int, positions: int) -> KVCache:
    """Allocate the keys and values of a model, and its recurrent states."""
    layers = kv_layers_of(model)
    heads, dims = [each.heads for each in layers], [each.dim for each in layers]
    sizes = len(layers), rows, heads, positions, dims, model.dtype, model.device
    shape = state_shape_of(model)
    return KVCache(*sizes) if shape is None else StatefulCache(shape, *sizes)


def is_recurrent(spec: DecoderSpec) -> bool:
    """Whether ``RecurrentModel`` runs a model on a CPU: one with recurrent layers, gated attention or sinks."""
    return not all(_is_usual(layer.mixer) for layer in spec.layers)


def _is_usual(mixer: MixerSpec) -> bool:
    return isinstance(mixer, AttentionSpec) and not mixer.gated and not mixer.sinks


class RecurrentModel:
    """A decoder with recurrent layers, unrounded in torch; implements ``FlatModel`` and ``Recurrent``.

    weights: tensors by the names of ``models.weights.slots``, on the CPU. They are computed with in float32.
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
