"""A llama-like decoder that runs on the CPU kernels: one call a forward pass, packed weights, batch-invariant bits.

A token's hidden state and logits are the same bits whatever else is in the call: alone, among other rows, verified
with its draft tokens, or prefilled in any chunks. Without the extension the plain torch twin runs instead, and
``kernels`` says so (the twin makes no promise about bits).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.config import QuantizationName
from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.errors import ModelFormatError, ParameterError
from paceline.kernels import abi, native, twin
from paceline.kernels.pack import Format
from paceline.kernels.spec import LayerWeights, LinearWeights, NativeSpec
from paceline.models.base import Streams, check_taps
from paceline.models.config import ModelConfig
from paceline.models.linear import Dense
from paceline.models.packing import Contents, PackedDecoder, packed_size
from paceline.models.transformer import Transformer, _GatedMLP

Quantization = Literal["int8", "int4"]
LAYER_FORMAT: dict[str | None, Format] = {None: "bf16", "int8": "int8", "int4": "int4"}
HEAD_FORMAT: dict[str | None, Format] = {None: "bf16", "int8": "int8", "int4": "int8"}  # 4 bits hurt the head most


class NativeModel:
    """A decoder on packed weights: bf16 (quantization None), int8 or int4.

    It takes flat lists of nodes. dtype is that of the cache which the model wants; float32 caches work too.

    contents: writes weights that were packed before, for kernels; of the spec's tensors only the shapes matter then.
    """

    def __init__(
        self,
        spec: NativeSpec,
        name: str,
        *,
        quantization: Quantization | None = None,
        threads: int | None = None,
        kernels: native.Kernels | Literal["choose"] | None = "choose",
        contents: Contents | None = None,
    ) -> None:
        check_spec(spec)
        if quantization not in LAYER_FORMAT:
            raise ParameterError("quantization", quantization, "None, 'int8' or 'int4'")
        self.name = name
        self.quantization: QuantizationName | None = quantization
        self.vocab_size, self.layers = spec.vocab_size, len(spec.layers)
        self.kv_heads, self.head_dim, self.width = spec.kv_heads, spec.head_dim, spec.width
        self.max_positions, self.tied = spec.max_positions, spec.head is None
        self.dtype, self.device = torch.bfloat16, torch.device("cpu")
        self.threads = torch.get_num_threads() if threads is None else threads
        chosen = native.select() if kernels == "choose" else kernels
        self.kernels = _kernels_in_words(chosen)
        self.seconds = torch.zeros(len(native.PHASES), dtype=torch.float64)
        self.timed = False  # whether forward adds to ``seconds``, by native.PHASES
        formats = LAYER_FORMAT[quantization], HEAD_FORMAT[quantization]
        assert contents is None or chosen is not None
        self._twin = twin.TwinDecoder(spec, *formats) if chosen is None else None
        self._packed = None if chosen is None else PackedDecoder(spec, formats, chosen, self.threads, contents)
        self._caches: WeakKeyDictionary[KVCache, abi.CCache] = WeakKeyDictionary()
        self._weight_bytes, self._multiply_adds = packed_size(spec, *formats), _multiply_adds(spec)

    @classmethod
    def from_weights(
        cls,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        name: str,
        *,
        quantization: Quantization | None = None,
        threads: int | None = None,
    ) -> NativeModel:
        """From the tensors that ``Transformer`` takes."""
        return cls(spec_of(config, weights), name, quantization=quantization, threads=threads)

    @classmethod
    def from_transformer(
        cls, model: Transformer, *, quantization: Quantization | None = None, threads: int | None = None
    ) -> NativeModel:
        """From a loaded model, which stays as it is."""
        check_config(model.config)
        weights = _weights_of(model)
        return cls.from_weights(model.config, weights, model.name, quantization=quantization, threads=threads)

    def forward(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> Streams:
        """N nodes -> hidden [N - read, width], features [N - read, taps, width], both float32; writes the cache."""
        check_taps(taps, self.layers)
        if self._twin is not None:
            return Streams(*self._twin.forward(nodes, cache, taps))
        hidden = torch.empty(nodes.tokens.shape[0] - nodes.read, self.width, dtype=torch.float32)
        return Streams(hidden, self._forward(nodes, cache, taps, hidden))

    def fill(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> Tensor | None:
        """As ``forward``, for keys and values alone -> the features. Behind its keys the last layer is left out."""
        check_taps(taps, self.layers)
        if self._twin is not None:
            return self._twin.forward(nodes, cache, taps)[1]
        return self._forward(nodes, cache, taps, None)

    def _forward(self, nodes: Nodes, cache: KVCache, taps: Sequence[int], hidden: Tensor | None) -> Tensor | None:
        assert self._packed is not None
        count = nodes.tokens.shape[0] - nodes.read
        features = torch.empty(count, len(taps), self.width, dtype=torch.float32) if taps else None
        if count > 0:
            tensors = (None if tensor is None else tensor.contiguous() for tensor in nodes[:-1])
            flat = Nodes(*tensors)._replace(read=nodes.read)  # type: ignore[arg-type]
            tapped = None if features is None else (taps, features)
            seconds = self.seconds if self.timed else None
            problem = self._packed.decoder.forward(flat, self._describe(cache), hidden, tapped, seconds)
            if problem is not None:
                raise ParameterError("tokens", f"[{count} tokens]", problem)
        return features

    @property
    def plays_rounds(self) -> bool:
        """Whether ``play`` may be called: the twin has no rounds."""
        return self._packed is not None

    def play(self, call: abi.CRound, cache: KVCache, threads: int | None = None) -> None:
        """A round in one call: verify, accept, commit. Raises ParameterError for what is no token or no row.

        threads: where ``kernel_threads`` says nothing; None: the model's.
        """
        assert self._packed is not None
        seconds = self.seconds if self.timed else None
        problem = self._packed.decoder.round(call, self._describe(cache), seconds, threads)
        if problem is not None:
            raise ParameterError("tokens", f"[{call.rows} rows]", problem)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., width] -> logits [..., vocab_size] in float32."""
        flat = hidden.reshape(-1, self.width).float().contiguous()
        if self._twin is not None:
            return self._twin.logits(flat).view(*hidden.shape[:-1], self.vocab_size)
        assert self._packed is not None
        out = flat.new_empty(flat.shape[0], self.vocab_size)
        self._packed.decoder.logits(flat, out)
        return out.view(*hidden.shape[:-1], self.vocab_size)

    def weight_bytes(self) -> int:
        """Memory of the weights, each counted once (tied ones too), in bytes."""
        return self._weight_bytes

    def multiply_adds(self) -> int:
        """Of its matrices for one token, the head included, attention over the cache not."""
        return self._multiply_adds

    def packed(self) -> Tensor | None:
        """All weights as the kernels read them, uint8; None on the twin. Not to be used after the model is gone."""
        return None if self._packed is None else self._packed.memory

    def _describe(self, cache: KVCache) -> abi.CCache:
        """The cache's description, made once: caches never move."""
        known = self._caches.get(cache)
        if known is None:
            _check_cache(cache, self)
            known = self._caches[cache] = abi.CCache.of(cache)
        return known


def _multiply_adds(spec: NativeSpec) -> int:
    of_layers = [linear for each in spec.layers for linear in (each.qkv, each.attention_out, each.gate_up, each.down)]
    return sum(linear.weight.numel() for linear in of_layers) + spec.vocab_size * spec.width


def _kernels_in_words(kernels: native.Kernels | None) -> str:
    """For the start line; says why a CPU's AMX is not used."""
    name = "torch twin" if kernels is None else kernels.name
    obstacle = native.amx_obstacle()
    return f"{name} (not AMX: {obstacle})" if obstacle else name


def spec_of(config: ModelConfig, weights: Mapping[str, Tensor]) -> NativeSpec:
    """A model's parts by the names of ``models.weights``. Raises ModelFormatError if the kernels cannot run it."""
    check_config(config)
    assert config.rotary is not None

    def linear(name: str) -> LinearWeights:
        return LinearWeights(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    layers = [
        LayerWeights(
            qkv=linear(f"layers.{i}.qkv"),
            attention_out=linear(f"layers.{i}.o"),
            gate_up=linear(f"layers.{i}.gate_up"),
            down=linear(f"layers.{i}.down"),
            input_norm=weights[f"layers.{i}.attn_norm.weight"],
            post_norm=weights[f"layers.{i}.mlp_norm.weight"],
            q_norm=weights.get(f"layers.{i}.q_norm.weight"),
            k_norm=weights.get(f"layers.{i}.k_norm.weight"),
            window=window,
        )
        for i, window in enumerate(config.windows)
    ]
    return NativeSpec(
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        ffn=config.mlp_width,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        inverse_frequencies=config.rotary.inverse_frequencies,
        embedding=weights["embed.weight"],
        final_norm=weights["norm.weight"],
        layers=layers,
        head=linear("head") if "head.weight" in weights else None,
        epsilon=config.norm_eps,
        rotary_scaling=config.rotary.scaling,
        attention_scale=config.scales[0],
    )


def _weights_of(model: Transformer) -> dict[str, Tensor]:
    """The tensors that a transformer was made of, by their names. Raises ModelFormatError if they are quantised."""
    found: dict[str, Tensor | None] = {
        "embed.weight": model._embedding,
        "norm.weight": model._norm.weight if model._norm else None,
    }
    linears = {} if model.config.tied else {"head": model._head}
    for i, block in enumerate(model._blocks):
        attention, mlp = block.attention, block.mlp
        assert isinstance(mlp, _GatedMLP)
        linears |= {f"layers.{i}.qkv": attention.qkv, f"layers.{i}.o": attention.output}
        linears |= {f"layers.{i}.gate_up": mlp.gate_up, f"layers.{i}.down": mlp.down}
        found[f"layers.{i}.attn_norm.weight"] = block.attention_norm.weight
        found[f"layers.{i}.mlp_norm.weight"] = block.mlp_norm.weight
        if attention.qk_norm is not None:  # one line a head, all of q alike and all of k
            found[f"layers.{i}.q_norm.weight"] = attention.qk_norm[0]
            found[f"layers.{i}.k_norm.weight"] = attention.qk_norm[-1]
    for name, linear in linears.items():
        if not isinstance(linear, Dense):
            raise ModelFormatError(f"{model.name}: weights of kind {type(linear).__name__} cannot be packed")
        found |= {f"{name}.weight": linear.weight, f"{name}.bias": linear.bias}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def check_config(config: ModelConfig) -> None:
    """Raise ModelFormatError for what ``NativeSpec`` cannot say."""
    wanted = {
        "an RMS norm before each part": config.norm == "rms" and config.norm_first and config.final_norm,
        "SwiGLU": config.gated and config.activation == "silu",
        "rotary positions": config.rotary is not None,
        "one attention scale for all layers": len(set(config.scales)) == 1,
        "an embedding as wide as the model": config.embed_width in (0, config.width),
    }
    missing = [what for what, there in wanted.items() if not there]
    if missing:
        raise ModelFormatError(f"the CPU kernels cannot run a {config.family} model without {' and '.join(missing)}")


def check_spec(spec: NativeSpec) -> None:
    if spec.head_dim % 16 or spec.heads % spec.kv_heads or spec.heads // spec.kv_heads > 64:
        shape = f"{spec.heads} heads of {spec.head_dim} over {spec.kv_heads}"
        raise ModelFormatError(f"the CPU kernels need heads of a multiple of 16, at most 64 to a key head; not {shape}")


def _check_cache(cache: KVCache, model: NativeModel) -> None:
    shape = cache.keys.shape
    if (shape[0], shape[2], shape[4]) != (model.layers, model.kv_heads, model.head_dim):
        raise ParameterError(
            "cache", tuple(shape), f"{model.layers} layers, {model.kv_heads} heads of {model.head_dim}"
        )
    if cache.keys.dtype not in (torch.float32, torch.bfloat16):
        raise ParameterError("cache", cache.keys.dtype, "float32 or bfloat16")


__all__ = ["NativeModel", "Quantization", "spec_of"]
