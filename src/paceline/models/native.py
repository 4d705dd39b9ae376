"""Decoders on the native CPU kernels: one call per forward pass, packed weights, batch-invariant results.

The hidden state and the logits of a token are bitwise the same whatever else is in the call: alone, among other rows,
verified with its draft tokens, or prefilled in any chunks. Without the compiled extension the reference implementation
in torch runs instead (``kernels`` names it); its results are not batch-invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.config import QuantizationName
from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.errors import ModelFormatError, ParameterError
from paceline.kernels import abi, native, reference
from paceline.kernels.delta import DeltaHeads, DeltaNet
from paceline.kernels.pack import Format, Weight
from paceline.kernels.spec import GatedActivation, LayerWeights, LinearWeights, NativeSpec
from paceline.models.base import WITHOUT_KERNELS, HiddenStates, check_taps
from paceline.models.description import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    LayerSpec,
    Mamba2Spec,
    MixerSpec,
    MLPSpec,
    RecurrentSpec,
    ShortConvSpec,
)
from paceline.models.linear import Dense
from paceline.models.mixers import mixer_of
from paceline.models.packing import PackedDecoder, ReadPacked, packed_size
from paceline.models.transformer import Transformer, _GatedMLP

Quantization = Literal["int8", "int4"]
ReadMatrix: TypeAlias = Callable[[Format], Weight]
MAX_TAPS = 8  # kMostTaps in csrc/kernels.h
LAYER_FORMAT: dict[str | None, Format] = {None: "bf16", "int8": "int8", "int4": "int4"}
HEAD_FORMAT: dict[str | None, Format] = {None: "bf16", "int8": "int8", "int4": "int8"}  # int4 costs the head too much
ACTIVATIONS: dict[str, GatedActivation] = {"silu": "silu", "gelu_tanh": "gelu_tanh"}  # those that the kernels have


class NativeModel:
    """A decoder on packed weights: bf16 (quantization None), int8 or int4. Implements ``FlatModel``.

    dtype: preferred dtype of the KV cache; float32 caches work too.
    threads: threads of the kernels; None: torch's number.
    kernels: the kernel library; "choose": the best for this CPU; None: the reference implementation in torch.
    read_packed: fills memory with weights that were packed before; the spec's tensors then only give the shapes.
    Raises ModelFormatError for a spec that the kernels cannot run, ParameterError for a bad quantization.
    """

    def __init__(
        self,
        spec: NativeSpec,
        name: str,
        *,
        quantization: Quantization | None = None,
        threads: int | None = None,
        kernels: native.Kernels | Literal["choose"] | None = "choose",
        read_packed: ReadPacked | None = None,
    ) -> None:
        check_spec(spec)
        if quantization not in LAYER_FORMAT:
            raise ParameterError("quantization", quantization, "None, 'int8' or 'int4'")
        self.name = name
        self.quantization: QuantizationName | None = quantization
        self.vocab_size, self.layers = spec.vocab_size, len(spec.layers)
        self.state_shape, self.attention_layers = spec.states, spec.attention_layers
        self.kv_heads, self.head_dim, self.width = spec.kv_heads, spec.head_dim, spec.width
        self.max_positions, self.tied = spec.max_positions, spec.head is None
        self.dtype, self.device = torch.bfloat16, torch.device("cpu")
        self.threads = torch.get_num_threads() if threads is None else threads
        chosen = native.select() if kernels == "choose" else kernels
        self.kernels = WITHOUT_KERNELS if chosen is None else chosen.name
        self.seconds = torch.zeros(len(native.PHASES), dtype=torch.float64)  # time of each phase, if ``timed``
        self.timed = False
        formats = LAYER_FORMAT[quantization], HEAD_FORMAT[quantization]
        assert read_packed is None or chosen is not None
        self._reference = reference.ReferenceDecoder(spec, *formats) if chosen is None else None
        self._packed = None if chosen is None else PackedDecoder(spec, formats, chosen, self.threads, read_packed)
        self._caches: WeakKeyDictionary[KVCache, abi.CCache] = WeakKeyDictionary()
        self._weight_bytes, self._multiply_adds = packed_size(spec, *formats), _multiply_adds(spec)

    @classmethod
    def from_weights(
        cls,
        spec: DecoderSpec,
        weights: Mapping[str, Tensor],
        name: str,
        *,
        quantization: Quantization | None = None,
        threads: int | None = None,
    ) -> NativeModel:
        """Make the model from the weights that ``Transformer`` takes."""
        return cls(spec_of(spec, weights), name, quantization=quantization, threads=threads)

    @classmethod
    def from_transformer(
        cls, model: Transformer, *, quantization: Quantization | None = None, threads: int | None = None
    ) -> NativeModel:
        """Make the model from a loaded one, which is not changed."""
        check_description(model.spec)
        weights = _weights_of(model)
        return cls.from_weights(model.spec, weights, model.name, quantization=quantization, threads=threads)

    def forward(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> HiddenStates:
        """Run N nodes -> hidden [N - read, width], features [N - read, taps, width], both float32.

        Writes the nodes' keys and values. The first ``nodes.read`` nodes are in the cache already and are not run.
        """
        check_taps(taps, self.layers + 1)
        if self._reference is not None:
            return HiddenStates(*self._reference.forward(nodes, cache, taps))
        hidden = torch.empty(nodes.tokens.shape[0] - nodes.read, self.width, dtype=torch.float32)
        return HiddenStates(hidden, self._forward(nodes, cache, taps, hidden))

    def fill(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> Tensor | None:
        """Write the keys and values of N nodes -> features [N - read, taps, width] float32, None without taps.

        The last layer is skipped after its keys and values.
        """
        check_taps(taps, self.layers + 1)
        if self._reference is not None:
            return self._reference.forward(nodes, cache, taps, text=True)[1]
        return self._forward(nodes, cache, taps, None)

    def _forward(self, nodes: Nodes, cache: KVCache, taps: Sequence[int], hidden: Tensor | None) -> Tensor | None:
        assert self._packed is not None
        count = nodes.tokens.shape[0] - nodes.read
        features = torch.empty(count, len(taps), self.width, dtype=torch.float32) if taps else None
        if count > 0:
            tensors = (None if tensor is None else tensor.contiguous() for tensor in nodes[:-1])
            flat = Nodes(*tensors)._replace(read=nodes.read)  # type: ignore[arg-type]
            tapped = None if features is None else (self.tap_places(taps), features)
            seconds = self.seconds if self.timed else None
            problem = self._packed.decoder.forward(flat, self._c_cache(cache), hidden, tapped, seconds)
            if problem is not None:
                raise ParameterError("tokens", f"[{count} tokens]", problem)
        return features

    def tap_places(self, taps: Sequence[int]) -> list[int]:
        """Return the kernels' numbers of tapped layers: theirs for the hidden state is one higher."""
        return [self.layers + 1 if tap == self.layers else tap for tap in taps]

    @property
    def packed_decoder(self) -> PackedDecoder:
        """The weights and the library's decoder. There are none without the CPU kernels."""
        assert self._packed is not None
        return self._packed

    @property
    def runs_rounds(self) -> bool:
        """Whether ``run_round`` may be called: the reference implementation does not run whole rounds."""
        return self._packed is not None

    def run_round(self, call: abi.CRound, cache: KVCache, threads: int | None = None) -> None:
        """Run a round in one call: verify, accept, commit. Raises ParameterError for an invalid token or row.

        threads: default number of threads, which ``kernel_threads`` overrides; None: the model's.
        """
        assert self._packed is not None
        seconds = self.seconds if self.timed else None
        problem = self._packed.decoder.round(call, self._c_cache(cache), seconds, threads)
        if problem is not None:
            raise ParameterError("tokens", f"[{call.rows} rows]", problem)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab_size], float32, of hidden states [..., width]."""
        flat = hidden.reshape(-1, self.width).float().contiguous()
        if self._reference is not None:
            return self._reference.logits(flat).view(*hidden.shape[:-1], self.vocab_size)
        assert self._packed is not None
        out = flat.new_empty(flat.shape[0], self.vocab_size)
        self._packed.decoder.logits(flat, out)
        return out.view(*hidden.shape[:-1], self.vocab_size)

    def weight_bytes(self) -> int:
        """Return the bytes of all weights. Tied weights are counted once."""
        return self._weight_bytes

    def multiply_adds(self) -> int:
        """Return the multiply-adds of all weight matrices for one token; see ``Counted``."""
        return self._multiply_adds

    def packed(self) -> Tensor | None:
        """Return the packed weights, uint8 [packed_size]; None for the reference implementation.

        The memory belongs to the model and is freed with it.
        """
        return None if self._packed is None else self._packed.memory

    def _c_cache(self, cache: KVCache) -> abi.CCache:
        """Return the C description of a cache. Made once per cache, because its memory never moves."""
        described = self._caches.get(cache)
        if described is None:
            _check_cache(cache, self)
            described = self._caches[cache] = abi.CCache.of(cache)
        return described


def _multiply_adds(spec: NativeSpec) -> int:
    linears = [linear for one in spec.layers for linear in (one.qkv, one.attention_out, one.gate_up, one.down)]
    return sum(linear.weight.numel() for linear in linears) + spec.vocab_size * spec.width


def spec_of(
    spec: DecoderSpec, weights: Mapping[str, Tensor], readers: Mapping[str, ReadMatrix] | None = None
) -> NativeSpec:
    """Return the kernels' spec of a model. weights: by the names of ``models.weights``.

    readers: makes matrices while they are packed, by the names of weights, which then only give the shapes.
    Raises ModelFormatError if neither the kernels nor their reference can run the model.
    """
    check_reference(spec)
    attention = spec.attentions[0]
    assert attention.rotary is not None

    def linear(name: str) -> LinearWeights:
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        return LinearWeights(weight, bias, (readers or {}).get(f"{name}.weight"))

    return NativeSpec(
        width=spec.width,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        ffn=spec.layers[0].dense.width,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        rotary=attention.rotary,
        embedding=weights["embed.weight"],
        final_norm=weights["norm.weight"] * spec.logits_scale,
        layers=[_layer_of(layer, f"layers.{i}.", weights, linear) for i, layer in enumerate(spec.layers)],
        head=linear("head") if "head.weight" in weights else None,
        epsilon=spec.norm.eps,
        embed_scale=spec.embed_scale,
        tap_scale=spec.residual_scale,
    )


def gate_last(qkv: LinearWeights, spec: MixerSpec) -> LinearWeights:
    """Move the gates of the heads, each stored behind its head's query, behind all queries, keys and values."""
    if not isinstance(spec, AttentionSpec) or not spec.gated:
        return qkv
    stacked = 2 * spec.query_width

    def order(rows: Tensor) -> Tensor:
        heads = rows[:stacked].view(spec.heads, 2, spec.head_dim, *rows.shape[1:])
        return torch.cat([heads[:, 0].flatten(0, 1), rows[stacked:], heads[:, 1].flatten(0, 1)])

    return qkv.reordered(order)


def _layer_of(
    layer: LayerSpec, name: str, weights: Mapping[str, Tensor], linear: Callable[[str], LinearWeights]
) -> LayerWeights:
    mixer = layer.mixer
    attention = mixer if isinstance(mixer, AttentionSpec) else None
    return LayerWeights(
        qkv=gate_last(linear(f"{name}qkv"), mixer),
        attention_out=linear(f"{name}o"),
        gate_up=linear(f"{name}gate_up"),
        down=linear(f"{name}down"),
        input_norm=weights.get(f"{name}attn_norm.weight"),
        post_norm=weights.get(f"{name}mlp_norm.weight"),
        attention_out_norm=weights.get(f"{name}attn_out_norm.weight"),
        mlp_out_norm=weights.get(f"{name}mlp_out_norm.weight"),
        q_norm=weights.get(f"{name}q_norm.weight"),
        k_norm=weights.get(f"{name}k_norm.weight"),
        window=None if attention is None else attention.window,
        rotary=None if attention is None else attention.rotary,
        scale=None if attention is None else attention.scale,
        gated=attention is not None and attention.gated,
        recurrent=None if isinstance(mixer, AttentionSpec) else mixer_of(mixer, name, weights),
        activation=ACTIVATIONS[layer.dense.activation],
    )


def _weights_of(model: Transformer) -> dict[str, Tensor]:
    """Return the weights that a transformer was made of, by name. Raises ModelFormatError if they are quantized."""
    found: dict[str, Tensor | None] = {
        "embed.weight": model._embedding,
        "norm.weight": model._norm.weight if model._norm else None,
    }
    linears = {} if model.spec.tied else {"head": model._head}
    for i, block in enumerate(model._blocks):
        attention, mlp = block.attention, block.mlp
        assert isinstance(mlp, _GatedMLP)
        linears |= {f"layers.{i}.qkv": attention.qkv, f"layers.{i}.o": attention.output}
        linears |= {f"layers.{i}.gate_up": mlp.gate_up, f"layers.{i}.down": mlp.down}
        found |= {f"layers.{i}.{name}.weight": norm.weight for name, norm in block.norms.items()}
        if attention.qk_norm is not None:
            norms = torch.split(attention.qk_norm, attention.split[:2])  # [heads, head_dim] each
            for part, norm in zip("qk", norms, strict=True):
                whole = attention.spec.qk_norm == "all"  # else all rows are equal
                found[f"layers.{i}.{part}_norm.weight"] = norm.flatten() if whole else norm[0]
    for name, linear in linears.items():
        if not isinstance(linear, Dense):
            raise ModelFormatError(f"{model.name}: weights of kind {type(linear).__name__} cannot be packed")
        found |= {f"{name}.weight": linear.weight, f"{name}.bias": linear.bias}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def check_description(spec: DecoderSpec) -> None:
    """Raise ModelFormatError for a model that the kernels cannot run."""
    check_reference(spec)
    mixers = recurrent_layers(spec)
    if others := {type(mixer) for mixer in mixers} - {DeltaNetSpec}:
        missing = "kernels for " + " and ".join(sorted(_KINDS[other] for other in others))
        raise ModelFormatError(f"{_REFUSAL.format(spec.family)} {missing}")
    if any(isinstance(mixer, DeltaNetSpec) and mixer.norm_eps != spec.norm.eps for mixer in mixers):
        raise ModelFormatError(f"{_REFUSAL.format(spec.family)} recurrent layers with the norms' epsilon")


_REFUSAL = "the CPU kernels cannot run a {} model without"
_KINDS: dict[type[RecurrentSpec], str] = {Mamba2Spec: "Mamba-2 layers", ShortConvSpec: "short convolutions"}


def recurrent_layers(spec: DecoderSpec) -> list[RecurrentSpec]:
    """Return the mixer of every layer that is not attention."""
    return [layer.mixer for layer in spec.layers if not isinstance(layer.mixer, AttentionSpec)]


def check_reference(spec: DecoderSpec) -> None:
    """Raise ModelFormatError for a model that ``NativeSpec`` cannot express."""
    attentions, one_shape = spec.attentions, {(a.heads, a.kv_heads, a.head_dim) for a in spec.attentions}
    mlps = [layer.mlp for layer in spec.layers]
    dense = [mlp for mlp in mlps if isinstance(mlp, MLPSpec)]
    wanted = {
        "a dense MLP in every layer": len(dense) == len(spec.layers),
        "RMS norms before or after each part": spec.norm.kind == "rms"
        and spec.final_norm
        and all(layer.norms != "after_sum" for layer in spec.layers),
        f"a gated MLP with {' or '.join(ACTIVATIONS)}": all(
            mlp.gated and mlp.activation in ACTIVATIONS for mlp in dense
        ),
        "rotary positions": all(attention.rotary is not None for attention in attentions),
        "heads of one shape in all layers": len(one_shape) == 1,
        "recurrent layers of one shape": len(set(recurrent_layers(spec))) <= 1,
        "attention in some layer": bool(attentions),
        "an MLP of one width in all layers": len({mlp.width for mlp in dense}) <= 1,
        "the same epsilon in all norms": all(a.qk_norm is None or a.qk_norm_eps == spec.norm.eps for a in attentions),
        "attention without sinks": not any(a.sinks for a in attentions),
        "an embedding as wide as the model": spec.embed_width == spec.width,
        "logits without a cap": spec.logits_cap is None,
    }
    missing = [feature for feature, present in wanted.items() if not present]
    if missing:
        raise ModelFormatError(f"{_REFUSAL.format(spec.family)} {' and '.join(missing)}")


def check_spec(spec: NativeSpec) -> None:
    """Raise ModelFormatError for a number or width of heads that the kernels do not support."""
    for layer in spec.layers:
        if layer.recurrent is None:
            continue
        if not isinstance(layer.recurrent, DeltaNet):
            raise ModelFormatError(f"the CPU kernels have no layers of the kind {type(layer.recurrent).__name__}")
        _check_delta(layer.recurrent.heads)
    if spec.head_dim % 16 or spec.heads % spec.kv_heads or spec.heads // spec.kv_heads > 64:
        shape = f"{spec.heads} heads of {spec.head_dim} over {spec.kv_heads}"
        needed = "a head width that is a multiple of 16 and at most 64 query heads per key/value head"
        raise ModelFormatError(f"the CPU kernels need {needed}; not {shape}")


def _check_delta(shape: DeltaHeads) -> None:
    """Raise ModelFormatError for heads of recurrent layers that the kernels do not support."""
    shared = shape.key_heads > 0 and shape.value_heads % shape.key_heads == 0
    if not shared or shape.key_dim % 16 or shape.value_dim % 16 or not 1 < shape.taps <= MAX_TAPS:
        needed = f"head widths that are multiples of 16, value heads shared evenly, and 2 to {MAX_TAPS} taps"
        raise ModelFormatError(f"the CPU kernels need recurrent layers of {needed}; not {shape}")


def _check_cache(cache: KVCache, model: NativeModel) -> None:
    shape = cache.keys.shape
    if (shape[0], shape[2], shape[4]) != (model.attention_layers, model.kv_heads, model.head_dim):
        raise ParameterError(
            "cache", tuple(shape), f"{model.attention_layers} layers, {model.kv_heads} heads of {model.head_dim}"
        )
    if cache.keys.dtype not in (torch.float32, torch.bfloat16):
        raise ParameterError("cache", cache.keys.dtype, "float32 or bfloat16")


__all__ = ["NativeModel", "Quantization", "spec_of"]
