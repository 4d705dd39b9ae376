"""Models with random weights, created on the device: only for timing, their text is meaningless.

``gpt-7.8b`` has the sizes of the model in the BASS paper (7.8B parameters, keys and values of all its heads),
``llama-8b`` those of a current model (few key and value heads, a large vocabulary). Each has a draft model of 310M.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from paceline.kernels.gpu.launch import require_triton
from paceline.kernels.gpu.steps import TritonSteps
from paceline.models.description.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec, Rotary
from paceline.models.description.weights import slots
from paceline.models.torch.linear import LinearFactory, dense
from paceline.models.torch.transformer import Transformer

WeightFormat = Literal["bf16", "int8", "fp8", "int4"]
# Bytes of a weight; int4 has groups of 32 with a scale and a lowest value
WEIGHT_BYTES: dict[WeightFormat, float] = {"bf16": 2, "int8": 1, "fp8": 1, "int4": 0.625}
MOST_POSITIONS = 16384
_HEAD_DIM = 128


@dataclass(frozen=True)
class Pair:
    """A target and its draft model."""

    name: str
    target: DecoderSpec
    draft: DecoderSpec


def gpt(layers: int, width: int, vocab_size: int, *, head_dim: int = _HEAD_DIM) -> DecoderSpec:
    """A GPT-like decoder: learned positions, layer norms, a plain MLP four times as wide, tied embeddings."""
    heads = width // head_dim
    attention = AttentionSpec(heads, heads, head_dim, bias=True, output_bias=True)
    mlp = MLPSpec(4 * width, "gelu_tanh", gated=False, bias=True)
    return DecoderSpec(
        family="gpt2",
        vocab_size=vocab_size,
        width=width,
        max_positions=MOST_POSITIONS,
        layers=(LayerSpec(attention, mlp),) * layers,
        norm=NormSpec("layer"),
        embed_width=width,
        learned_positions=True,
        tied=True,
    )


def llama(layers: int, width: int, vocab_size: int, kv_heads: int, mlp_width: int) -> DecoderSpec:
    """A Llama-like decoder: rotary positions, RMS norms, a gated MLP, few key and value heads."""
    frequencies = tuple(500_000.0 ** (-pair / (_HEAD_DIM // 2)) for pair in range(_HEAD_DIM // 2))
    attention = AttentionSpec(width // _HEAD_DIM, kv_heads, _HEAD_DIM, rotary=Rotary(frequencies))
    return DecoderSpec(
        family="llama",
        vocab_size=vocab_size,
        width=width,
        max_positions=MOST_POSITIONS,
        layers=(LayerSpec(attention, MLPSpec(mlp_width)),) * layers,
        norm=NormSpec(),
        embed_width=width,
    )


PAIRS: dict[str, Pair] = {
    "gpt-7.8b": Pair("gpt-7.8b", gpt(24, 5120, 50304), gpt(4, 2048, 50304)),
    "llama-8b": Pair(
        "llama-8b",
        llama(32, 4096, 128256, kv_heads=8, mlp_width=14336),
        replace(llama(4, 1536, 128256, kv_heads=4, mlp_width=4096), tied=True),
    ),
}


def tiny(pair: Pair) -> Pair:
    """The same kinds of models with one layer, small enough for a CPU."""
    return replace(pair, target=_shrunk(pair.target), draft=_shrunk(pair.draft))


def _shrunk(config: DecoderSpec) -> DecoderSpec:
    heads, dim = 2, 16
    layer, width = config.layers[0], heads * dim
    rotary = layer.attention.rotary and Rotary(layer.attention.rotary.inverse_frequencies[: dim // 2])
    kv_heads = heads if layer.attention.kv_heads == layer.attention.heads else 1
    small = LayerSpec(
        replace(layer.attention, heads=heads, kv_heads=kv_heads, head_dim=dim, rotary=rotary),
        replace(layer.dense, width=2 * width),
    )
    return replace(config, vocab_size=96, width=width, embed_width=width, max_positions=512, layers=(small,))


def matrices(config: DecoderSpec) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of the matrices in a forward pass: the embedding's only if it is the head."""
    found = {slot.target: (slot.total, slot.shape[1]) for slot in slots(config).values() if len(slot.shape) == 2}
    tables = ["positions.weight"] if config.tied else ["positions.weight", "embed.weight"]
    return {name: shape for name, shape in found.items() if name not in tables}


def matrix_parameters(config: DecoderSpec) -> int:
    """Number of weights in all its matrices."""
    return sum(outputs * inputs for outputs, inputs in matrices(config).values())


class RandomWeights(Mapping[str, Tensor]):
    """A model's weights, each created on request: a matrix kept in 8 bits never exists in 16.

    Weights outside the layers (embedding, head) are kept, because a model requests them twice.
    """

    def __init__(self, config: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = {slot.target: (slot.total, *slot.shape[1:]) for slot in slots(config).values()}
        self._dtype, self._device = dtype, device
        self._kept: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        made = self._make(name, self._shapes[name])
        if not name.startswith("layers."):
            self._kept[name] = made
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def _make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Matrices that preserve a vector's length, identity norms, no biases."""
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if len(shape) == 1:
            return tensor.fill_(float(name.endswith(".weight")))
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return tensor.normal_(std=shape[1] ** -0.5, generator=generator)


def linear_factory(to: WeightFormat, dtype: torch.dtype, device: torch.device) -> LinearFactory:
    """The factory for weights in this format: torch's own product, or Triton's with tiles timed at first use.

    dtype: of the activations. Raises ParameterError if Triton's kernels cannot run on the device.
    """
    if to == "bf16":
        return dense
    require_triton(device, "formats", to)
    from paceline.kernels.gpu.linear import Linears
    from paceline.models.load.kept_tiles import kernel_seconds

    timer = kernel_seconds if device.type == "cuda" else None
    return Linears(to, rounds_rows=to == "fp8" and dtype == torch.bfloat16, timer=timer)


def random_model(
    config: DecoderSpec, name: str, to: WeightFormat, dtype: torch.dtype, device: torch.device
) -> Transformer:
    """A model with this config, its matrices in the format ``to``; raises like ``linear_factory``."""
    weights = RandomWeights(config, dtype, device)
    head = linear_factory("int8" if to == "int4" else to, dtype, device)
    model = Transformer(config, weights, name, linear=linear_factory(to, dtype, device), head=head)
    if to == "fp8" and dtype == torch.bfloat16 and isinstance(model.steps, TritonSteps):
        model.steps = TritonSteps(rounds=True)
    return model
