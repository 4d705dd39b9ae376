"""The parts of a decoder as the kernels run it: plain tensors (float32 or bfloat16) and numbers, before packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from paceline.core.recurrent_state import StateShape
from paceline.kernels.pack import Format, Weight, quantise, reorder_rows


@dataclass(frozen=True)
class LinearWeights:
    """y = x @ weight.T + bias; weight [outputs, inputs].

    read: makes the weight in a format when it is packed; ``weight`` then only gives the shape (device "meta").
    """

    weight: Tensor
    bias: Tensor | None = None
    read: Callable[[Format], Weight] | None = None

    def rounded(self, to: Format) -> Weight:
        """Return the weight in a format."""
        return quantise(self.weight, to) if self.read is None else self.read(to)

    def reordered(self, order: Callable[[Tensor], Tensor]) -> LinearWeights:
        """Return the layer with its outputs in another order. order: moves the first dimension of a tensor."""
        read, bias = self.read, None if self.bias is None else order(self.bias)
        return LinearWeights(
            order(self.weight), bias, None if read is None else lambda to: reorder_rows(read(to), order)
        )


class RecurrentMixer(Protocol):
    """A recurrent layer between its two large matrices: small weights, and the computation in float32, token by token.

    n tokens. Each kind of recurrent layer implements it (``kernels.delta``, ``mamba2``, ``short_conv``).
    """

    @property
    def gates(self) -> LinearWeights | None:
        """A small matrix beside the large ones, of the layer's input; None if this kind has none."""
        ...

    def shape(self, layers: int) -> StateShape:
        """Return what a slot keeps of ``layers`` layers like this one."""
        ...

    def split(self, projected: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what the state needs of the tokens [n, input_width], and what their outputs need [n, ...].

        projected: [n, outputs of the first matrix]. gates: [n, outputs of ``gates``]; None without such a matrix.
        """
        ...

    def append(self, state: Tensor, window: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of a token [...], and the state after it [*shape.state].

        state: before it. window [taps, channels]: inputs of the convolution that end with its own. gates [shape.gates].
        """
        ...

    def finish(self, mixed: Tensor, kept: Tensor) -> Tensor:
        """Return the input of the second matrix. mixed: outputs of ``append`` [n, ...]. kept: as ``split`` gave it."""
        ...


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (RoPE): the angle of pair i at position p is p * inverse_frequencies[i].

    With n frequencies, pair i of a head is its elements i and n + i; the elements from 2 n on are not rotated.
    Frequencies of zero leave a head as it is (layers without positions).
    scaling: factor of cos and sin.
    """

    inverse_frequencies: tuple[float, ...]
    scaling: float = 1.0


GatedActivation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. qkv: the rows of all q heads, then k, then v; gate_up: the rows of the gate, then of up.

    gated: whether qkv ends with rows of a gate of attention's output, one for each of its inputs.
    recurrent: of a recurrent layer, whose first matrix is called qkv here, too; None: attention.
    input_norm, post_norm: before attention and before the MLP; attention_out_norm, mlp_out_norm: after them.
    q_norm, k_norm: [head_dim], or [heads * head_dim] and [kv_heads * head_dim] for a norm over all heads together.
    rotary, scale: of this layer's attention; None: the model's.
    """

    qkv: LinearWeights
    attention_out: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights
    input_norm: Tensor | None = None
    post_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int | None = None
    gated: bool = False
    recurrent: RecurrentMixer | None = None
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    rotary: Rotary | None = None
    scale: float | None = None
    activation: GatedActivation = "silu"


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
    """A whole decoder with RMS norms, rotary positions and gated MLPs. head None: tied to the embedding [vocab, width].

    rotary, attention_scale: of the layers that have none of their own; None: head_dim ** -0.5.
    embed_scale: factor of the token embedding. tap_scale: factor of the hidden states that heads read.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    max_positions: int
    rotary: Rotary
    embedding: Tensor
    final_norm: Tensor
    layers: Sequence[LayerWeights]
    head: LinearWeights | None = None
    epsilon: float = 1e-6
    embed_scale: float = 1.0
    tap_scale: float = 1.0
    attention_scale: float | None = None
    fusion: FusionWeights | None = None

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values."""
        return sum(layer.recurrent is None for layer in self.layers)

    @property
    def states(self) -> StateShape | None:
        """What a slot keeps of the recurrent layers, which have one shape; None if all layers are attention."""
        mixers = [layer.recurrent for layer in self.layers if layer.recurrent is not None]
        return mixers[0].shape(len(mixers)) if mixers else None

    def scale_of(self, layer: LayerWeights) -> float:
        """Scale of a layer's attention."""
        own = self.attention_scale if layer.scale is None else layer.scale
        return self.head_dim**-0.5 if own is None else own

    def norm_all(self, layer: LayerWeights) -> bool:
        """Whether a layer's norms of queries and keys are over all heads together."""
        return layer.q_norm is not None and layer.q_norm.numel() > self.head_dim
