"""What a llama-like decoder is made of: plain tensors (float32 or bfloat16) and numbers, before any packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LinearWeights:
    """y = x @ weight.T + bias; weight [outputs, inputs]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One layer. qkv: the rows of all q heads, then k, then v; gate_up: the rows of the gate, then of up."""

    qkv: LinearWeights
    attention_out: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int | None = None


@dataclass(frozen=True)
class FusionWeights:
    """What makes a decoder a head that reads its target's streams; its first layer's qkv has two widths of inputs.

    fuse: all streams side by side to the width. stream_norms [streams, stream width] or joint_norm [streams * stream
    width]: before it. hidden_norm [width]: of what enters beside the embedding. targets [outputs of the head] int64:
    the target's number of each of its tokens, ascending; vocabulary: how many the target has, all of which it reads.
    mask [width] and mask_token: what stands for guesses that are not there yet; None: it reads its own guesses.
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

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
