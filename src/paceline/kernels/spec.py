"""The parts of a llama-like decoder: plain tensors (float32 or bfloat16) and numbers, before packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.core.recurrent_state import StateShape


@dataclass(frozen=True)
class LinearWeights:
    """y = x @ weight.T + bias; weight [outputs, inputs]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class DeltaWeights:
    """What a gated delta net has beside its two large matrices (``models/qwen3_5`` of transformers).

    beta_decay: the rows of beta, then of the decay, one for each value head.
    conv [channels, taps]: a causal convolution of each channel. rate [value heads]: -exp(A_log). bias [value heads]:
        added to the decay's input. norm [value_dim]: of each head's output.
    """

    beta_decay: LinearWeights
    conv: Tensor
    rate: Tensor
    bias: Tensor
    norm: Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer. qkv: the rows of all q heads, then k, then v; gate_up: the rows of the gate, then of up.

    gated: whether qkv ends with rows of a gate of attention's output, one for each of its inputs.
    delta: of a gated delta net, whose qkv always ends so and whose heads ``NativeSpec.delta`` tells; None: attention.
    """

    qkv: LinearWeights
    attention_out: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int | None = None
    gated: bool = False
    delta: DeltaWeights | None = None


@dataclass(frozen=True)
class FusionWeights:
    """Extra weights of a head that reads its target's hidden states; its first layer's qkv has twice the inputs.

    fuse: all hidden states, concatenated, to the width.
    stream_norms: [streams, stream width], or joint_norm [streams * stream width]: norms applied before fuse.
    hidden_norm: [width], norm of the fused input beside the embedding.
    targets: [outputs of the head] int64, ascending: the target's token id of each of the head's tokens.
    vocabulary: size of the target's vocabulary, all of which the head reads.
    embedding_norm: [width], of a model's own head (MTP): ``fuse`` then maps the normed embedding, and the normed state
        behind it, to the first layer's input, and hidden states are kept as they are.
    mask: [width], with mask_token: stand for draft tokens that do not exist yet; None: the head reads its own draft
        tokens.
    """

    fuse: LinearWeights
    hidden_norm: Tensor
    targets: Tensor
    vocabulary: int
    streams: int
    stream_width: int
    stream_norms: Tensor | None = None
    joint_norm: Tensor | None = None
    mask: Tensor | None = None
    mask_token: int = 0
    normed_residual: bool = False
    normed_state: bool = False
    embedding_norm: Tensor | None = None


@dataclass(frozen=True)
class NativeSpec:
    """A whole decoder: RMS norms first, rotary positions, SwiGLU. head None: tied to the embedding [vocab, width]."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    max_positions: int
    inverse_frequencies: Sequence[float]
    embedding: Tensor
    final_norm: Tensor
    layers: Sequence[LayerWeights]
    head: LinearWeights | None = None
    epsilon: float = 1e-6
    rotary_scaling: float = 1.0
    attention_scale: float | None = None
    fusion: FusionWeights | None = None
    delta: StateShape | None = None

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values."""
        return sum(layer.delta is None for layer in self.layers)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
