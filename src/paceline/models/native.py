"""Decoders on the native CPU kernels: one call per forward pass, packed weights, batch-invariant results.

The hidden state and the logits of a token are bitwise the same whatever else is in the call: alone, among other rows,
verified with its draft tokens, or prefilled in any chunks. Without the compiled extension the reference implementation
in torch runs instead (``kernels`` names it); its results are not batch-invariant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.config import QuantizationName
from paceline.core.cache import KVCache, KVHeads
from paceline.core.nodes import Nodes
from paceline.errors import ModelFormatError, ParameterError
from paceline.kernels import abi, native, reference
from paceline.kernels.delta import DeltaHeads, DeltaNet
from paceline.kernels.pack import Format, Weight, packed_bytes
from paceline.kernels.spec import (
    ExpertsWeights,
    GatedActivation,
    Heads,
    LayerWeights,
    LinearWeights,
    NativeSpec,
    TokenInputWeights,
    TokenTableWeights,
)
from paceline.models.base import WITHOUT_KERNELS, HiddenStates, check_taps
from paceline.models.description import (
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    ExpertsSpec,
    Mamba2Spec,
    MixerSpec,
    RecurrentSpec,
    ShortConvSpec,
    TokenInputsSpec,
)
from paceline.models.experts import Experts
from paceline.models.linear import Dense
from paceline.models.mixers import mixer_of
from paceline.models.packing import PackedDecoder, ReadPacked, packed_size
from paceline.models.short_head import PackedShortHead, PassBytes, column_bytes
from paceline.models.transformer import Transformer

Quantization = Literal["int8", "int4"]


class ReadMatrix(Protocol):
    """Reads a matrix while it is packed."""

    def __call__(self, to: Format) -> Weight: ...

    def of_expert(self, expert: int) -> ReadMatrix:
        """Return the matrix of one expert, of those that this one has side by side."""
        ...


MAX_TAPS = 8  # kMostTaps in csrc/kernels.h
LAYER_FORMAT: dict[str | None, Format] = {None: "bf16", "int8": "int8", "int4": "int4"}
HEAD_FORMAT: dict[str | None, Format] = {None: "bf16", "int8": "int8", "int4": "int8"}  # int4 costs the head too much
ACTIVATIONS: dict[str, GatedActivation] = {  # those that the kernels have
    "silu": "silu",
    "gelu_tanh": "gelu_tanh",
    "clamped_silu": "clamped_silu",
}


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
        self.state_shape, self.kv_layers = spec.states, spec.kv_layers
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
        self._expert_sizes = _expert_sizes(spec, formats[0])

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

    def expert_bytes(self) -> int:
        """Return the bytes of the weights of all experts; see ``CountsExperts``."""
        return sum(self._expert_sizes)

    def expert_bytes_read(self) -> int:
        """Return the bytes of experts' weights that were read so far; the reference implementation counts none."""
        read = 0 if self._packed is None else self._packed.decoder.experts_read()
        return read * self._expert_sizes[0] if read else 0

    @property
    def pass_bytes(self) -> PassBytes | None:
        """Return what a forward pass reads, see ``Shortenable``; None for the reference implementation."""
        if self._packed is None:
            return None
        head = self._packed.model.head
        token = column_bytes(head)
        embedding = 0 if self.tied else 2 * head.inputs  # one row of it is read for each token
        return PassBytes(self._weight_bytes - self.vocab_size * (token + embedding), token)

    def short_head(self, size: int) -> PackedShortHead:
        """Return an output head over ``size`` tokens; see ``Shortenable``."""
        return PackedShortHead(self.packed_decoder, size)

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


def _expert_sizes(spec: NativeSpec, to: Format) -> list[int]:
    """Return the bytes of each expert of each layer; all have one shape."""
    mixtures = [layer.experts for layer in spec.layers if layer.experts is not None]
    return [
        sum(packed_bytes(linear.weight.shape[0], linear.weight.shape[1], to) for linear in pair)
        for mixture in mixtures
        for pair in zip(mixture.gate_up, mixture.down, strict=True)
    ]


def _multiply_adds(spec: NativeSpec) -> int:
    counts = [linear.weight.numel() for layer in spec.layers for linear in layer.linears]
    for experts in (layer.experts for layer in spec.layers if layer.experts is not None):
        counts += [experts.router.numel()]
        counts += [experts.used * linears[0].weight.numel() for linears in (experts.gate_up, experts.down)]
    inputs = [linear for one in spec.layers if one.input is not None for linear in (one.input.gate, one.input.out)]
    inputs += [] if spec.inputs is None else [spec.inputs.project]
    return sum(counts) + sum(linear.weight.numel() for linear in inputs) + spec.vocab_size * spec.width


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

    source = _WeightSource(weights, readers or {})
    return NativeSpec(
        width=spec.width,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        vocab_size=spec.vocab_size,
        max_positions=spec.max_positions,
        rotary=attention.rotary,
        embedding=weights["embed.weight"],
        final_norm=weights["norm.weight"] * spec.logits_scale,
        layers=[_layer_of(spec, index, source) for index in range(len(spec.layers))],
        head=source.linear("head") if "head.weight" in weights else None,
        epsilon=spec.norm.eps,
        embed_scale=spec.embed_scale,
        tap_scale=spec.residual_scale,
        inputs=_token_table_of(spec.token_inputs, weights, source.linear),
        logits_cap=spec.logits_cap,
    )


def _token_table_of(
    spec: TokenInputsSpec | None, weights: Mapping[str, Tensor], linear: Callable[[str], LinearWeights]
) -> TokenTableWeights | None:
    if spec is None:
        return None
    scales = spec.table_scale, spec.project_scale, spec.sum_scale
    return TokenTableWeights(linear("input_table"), linear("input_project"), weights["input_norm.weight"], *scales)


def gate_last(qkv: LinearWeights, spec: MixerSpec) -> LinearWeights:
    """Move the gates of the heads, each stored behind its head's query, behind all queries, keys and values."""
    if not isinstance(spec, AttentionSpec) or not spec.gated:
        return qkv
    stacked = 2 * spec.query_width

    def order(rows: Tensor) -> Tensor:
        heads = rows[:stacked].view(spec.heads, 2, spec.head_dim, *rows.shape[1:])
        return torch.cat([heads[:, 0].flatten(0, 1), rows[stacked:], heads[:, 1].flatten(0, 1)])

    return qkv.reordered(order)


@dataclass(frozen=True)
class _WeightSource:
    """A model's tensors by the names of ``models.weights``, and what reads those that are not read yet."""

    weights: Mapping[str, Tensor]
    readers: Mapping[str, ReadMatrix]

    def linear(self, name: str) -> LinearWeights:
        """Return a matrix and its bias."""
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        return LinearWeights(weight, bias, self.readers.get(f"{name}.weight"))

    def experts(self, name: str) -> list[LinearWeights]:
        """Return the matrix and the bias of each expert."""
        whole = self.linear(name)
        biases = [None] * len(whole.weight) if whole.bias is None else list(whole.bias)
        reader = self.readers.get(f"{name}.weight")
        return [
            LinearWeights(weight, bias, None if reader is None else reader.of_expert(expert))
            for expert, (weight, bias) in enumerate(zip(whole.weight, biases, strict=True))
        ]


def _experts_of(spec: ExpertsSpec, name: str, source: _WeightSource) -> ExpertsWeights:
    """Return the experts of a layer. name: of the layer, with a point."""
    router = source.linear(f"{name}router")
    rows = [router.weight, *([source.weights[f"{name}shared_gate.weight"]] if spec.shared_gate else [])]
    return ExpertsWeights(
        router=torch.cat(rows),
        gate_up=source.experts(f"{name}experts_gate_up"),
        down=source.experts(f"{name}experts_down"),
        used=spec.used,
        normalised=spec.normalised,
        router_bias=router.bias,
    )


def _layer_of(spec: DecoderSpec, index: int, source: _WeightSource) -> LayerWeights:
    layer, name = spec.layers[index], f"layers.{index}."
    mixer, mlp, weights, linear = layer.mixer, layer.mlp, source.weights, source.linear
    mixture = mlp if isinstance(mlp, ExpertsSpec) else None
    one = mlp.expert if isinstance(mlp, ExpertsSpec) else mlp
    attention = mixer if isinstance(mixer, AttentionSpec) else None
    reads = None if attention is None else attention.reads_layer
    return LayerWeights(
        qkv=gate_last(linear(f"{name}qkv"), mixer),
        attention_out=linear(f"{name}o"),
        gate_up=None if layer.shared is None else linear(f"{name}gate_up"),
        down=None if layer.shared is None else linear(f"{name}down"),
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
        activation=ACTIVATIONS[one.activation],
        experts=None if mixture is None else _experts_of(mixture, name, source),
        sinks=weights.get(f"{name}sinks.weight"),
        heads=None if attention is None else Heads(attention.heads, attention.kv_heads, attention.head_dim),
        v_norm=attention is not None and attention.v_norm,
        place=None if reads is None else spec.kv_places[index],
        reads_only=reads is not None,
        input=None if spec.token_inputs is None else _token_input_of(name, weights, linear),
        scale_out=weights.get(f"{name}scale.weight"),
    )


def _token_input_of(
    name: str, weights: Mapping[str, Tensor], linear: Callable[[str], LinearWeights]
) -> TokenInputWeights:
    norm = weights[f"{name}input_out_norm.weight"]
    return TokenInputWeights(linear(f"{name}input_gate"), linear(f"{name}input_out"), norm)


def _weights_of(model: Transformer) -> dict[str, Tensor]:
    """Return the weights that a transformer was made of, by name. Raises ModelFormatError if they are quantized."""
    found: dict[str, Tensor | None] = {
        "embed.weight": model._embedding,
        "norm.weight": model._norm.weight if model._norm else None,
    }
    linears = {name: getattr(owner, part) for owner, part, name in model.layer_linears()}
    linears |= {} if model.spec.tied else {"head": model._head}
    if (inputs := model._token_inputs) is not None:
        found |= {"input_table.weight": inputs.table, "input_norm.weight": inputs.norm}
        linears |= {"input_project": inputs.project}
    for i, block in enumerate(model._blocks):
        attention, mlp = block.attention, block.mlp
        if isinstance(mlp, Experts):
            found |= {f"layers.{i}.{name}": tensor for name, tensor in mlp.stacked.items()}
        found |= {f"layers.{i}.{name}.weight": norm.weight for name, norm in block.norms.items()}
        found |= {f"layers.{i}.scale.weight": block.scale}
        if block.input is not None:
            found |= {f"layers.{i}.input_out_norm.weight": block.input.norm.weight}
            linears |= {
                f"layers.{i}.input_gate": block.input.input_gate,
                f"layers.{i}.input_out": block.input.input_out,
            }
        if attention.qk_norm is not None:
            norms = torch.split(attention.qk_norm, attention.split[:2])  # [heads, head_dim] each
            for part, norm in zip("qk" if len(norms[1]) else "q", norms, strict=False):
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
    attentions, shapes = spec.attentions, {(a.heads, a.kv_heads, a.head_dim) for a in spec.attentions}
    experts = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, ExpertsSpec)]
    shared = [layer.shared for layer in spec.layers if layer.shared is not None]
    mlps = [*shared, *(mixture.expert for mixture in experts)]
    wanted = {
        "RMS norms before or after each part": spec.norm.kind == "rms"
        and spec.final_norm
        and all(layer.norms != "after_sum" for layer in spec.layers),
        f"a gated MLP with {' or '.join(ACTIVATIONS)}": all(
            mlp.gated and mlp.activation in ACTIVATIONS for mlp in mlps
        ),
        "one activation in a mixture and the MLP beside it": all(
            mixture.shared is None or mixture.shared.activation == mixture.expert.activation for mixture in experts
        ),
        "experts of one shape in all layers": len({replace(mixture, shared=None) for mixture in experts}) <= 1,
        "rotary positions": all(attention.rotary is not None for attention in attentions),
        "heads of one shape beside recurrent layers": len(shapes) == 1 or not recurrent_layers(spec),
        "recurrent layers of one shape": len(set(recurrent_layers(spec))) <= 1,
        "attention in some layer": bool(attentions),
        "vectors by token for its MLP's activation": spec.token_inputs is None
        or {mlp.activation for mlp in mlps} == {spec.token_inputs.activation},
        "a norm behind the last part of a scaled layer": all(
            not layer.scaled or layer.norms in ("after", "both") for layer in spec.layers
        ),
        "the same epsilon in all norms": all(a.qk_norm is None or a.qk_norm_eps == spec.norm.eps for a in attentions),
        "an embedding as wide as the model": spec.embed_width == spec.width,
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
    for heads in dict.fromkeys(spec.heads_of(layer) for layer in spec.layers):
        if heads.dim % 16 or heads.heads % heads.kv_heads or heads.heads // heads.kv_heads > 64:
            shape = f"{heads.heads} heads of {heads.dim} over {heads.kv_heads}"
            needed = "a head width that is a multiple of 16 and at most 64 query heads per key/value head"
            raise ModelFormatError(f"the CPU kernels need {needed}; not {shape}")
    if spec.inputs is not None and spec.inputs.width % 16:
        needed = "vectors by token whose width is a multiple of 16"
        raise ModelFormatError(f"the CPU kernels need {needed}; not {spec.inputs.width}")


def _check_delta(shape: DeltaHeads) -> None:
    """Raise ModelFormatError for heads of recurrent layers that the kernels do not support."""
    shared = shape.key_heads > 0 and shape.value_heads % shape.key_heads == 0
    if not shared or shape.key_dim % 16 or shape.value_dim % 16 or not 1 < shape.taps <= MAX_TAPS:
        needed = f"head widths that are multiples of 16, value heads shared evenly, and 2 to {MAX_TAPS} taps"
        raise ModelFormatError(f"the CPU kernels need recurrent layers of {needed}; not {shape}")


def _check_cache(cache: KVCache, model: NativeModel) -> None:
    found = [cache.shapes[table] for table, _ in cache.places]
    if found != list(model.kv_layers):
        raise ParameterError("cache", _in_words(found), _in_words(model.kv_layers))
    if cache.keys.dtype not in (torch.float32, torch.bfloat16):
        raise ParameterError("cache", cache.keys.dtype, "float32 or bfloat16")


def _in_words(layers: Sequence[KVHeads]) -> str:
    counts = Counter(layers)
    return ", ".join(f"{count} layers of {shape.heads} heads of {shape.dim}" for shape, count in counts.items())


__all__ = ["NativeModel", "Quantization", "spec_of"]
