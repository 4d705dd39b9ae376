"""Decoders on the native CPU kernels: one call per forward pass, packed weights, batch-invariant results.

The hidden state and the logits of a token are bitwise the same whatever else is in the call: alone, among other rows,
verified with its draft tokens, or prefilled in any chunks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.config import QuantizationName
from paceline.core.cache import KVCache, KVHeads
from paceline.core.nodes import Nodes
from paceline.errors import ParameterError
from paceline.kernels import abi, native, structs
from paceline.kernels.pack import Format, packed_bytes
from paceline.kernels.spec import NativeSpec
from paceline.models.base import HiddenStates, PassBytes, RowAdapters, check_taps
from paceline.models.description.checkpoint import Checkpoint
from paceline.models.native.low_rank import LowRank
from paceline.models.native.matrices import Outcome, unread_spec
from paceline.models.native.packing import PackedDecoder, ReadPacked, packed_size
from paceline.models.native.short_head import PackedShortHead, column_bytes
from paceline.models.native.spec import check_reference, check_spec

log = logging.getLogger("paceline")

Quantization = Literal["int8", "int4"]


LAYER_FORMAT: dict[str | None, Format] = {None: "bf16", "int8": "int8", "int4": "int4"}
HEAD_FORMAT: dict[str | None, Format] = {None: "bf16", "int8": "int8", "int4": "int8"}  # int4 costs the head too much


class NativeModel:
    """A decoder on packed weights: bf16 (quantization None), int8 or int4. Implements ``FlatModel``.

    dtype: preferred dtype of the KV cache; float32 caches work too.
    threads: threads of the kernels; None: torch's number.
    kernels: the kernel library; None: the best for this CPU.
    read_packed: fills memory with weights that were packed before; the spec's tensors then only give the shapes.
    is_part: whether it is a rank's part of a model (``models.parallel``).
    Raises ModelFormatError for a spec that the kernels cannot run, or without kernels; ParameterError for a bad
    quantization.
    """

    paged = True
    is_part = False

    def __init__(
        self,
        spec: NativeSpec,
        name: str,
        *,
        quantization: Quantization | None = None,
        threads: int | None = None,
        kernels: native.Kernels | None = None,
        read_packed: ReadPacked | None = None,
    ) -> None:
        check_spec(spec)
        if quantization not in LAYER_FORMAT:
            raise ParameterError("quantization", quantization, "None, 'int8' or 'int4'")
        self._take_sizes(spec, name, quantization)
        self.threads = torch.get_num_threads() if threads is None else threads
        chosen = native.required() if kernels is None else kernels
        self.kernels = chosen.name
        self.seconds = torch.zeros(len(native.PHASES), dtype=torch.float64)  # time of each phase, if ``timed``
        self.timed = False
        formats = LAYER_FORMAT[quantization], HEAD_FORMAT[quantization]
        self.packed_decoder = PackedDecoder(spec, formats, chosen, self.threads, read_packed)
        self.adapters: RowAdapters | None = None
        self._caches: WeakKeyDictionary[KVCache, abi.CCache] = WeakKeyDictionary()
        self._multiply_adds = _multiply_adds(spec)
        self._expert_sizes = _expert_sizes(spec, formats[0])
        self._idle_expert_bytes = idle_expert_bytes(spec, formats[0])

    def _take_sizes(self, spec: NativeSpec, name: str, quantization: Quantization | None) -> None:
        """Set what follows from the weights' shapes alone."""
        self.name = name
        self.quantization: QuantizationName | None = quantization
        self.vocab_size, self.layers = spec.vocab_size, len(spec.layers)
        self.state_shape, self.kv_layers = spec.states, spec.kv_layers
        self.kv_heads, self.head_dim, self.width = spec.kv_heads, spec.head_dim, spec.width
        self.max_positions, self.tied, self.ordered = spec.max_positions, spec.head is None, spec.ordered
        self.dtype, self.device = torch.bfloat16, torch.device("cpu")
        self.is_part = spec.division is not None
        self._weight_bytes = packed_size(spec, LAYER_FORMAT[quantization], HEAD_FORMAT[quantization])

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        *,
        quantization: Quantization | None = None,
        threads: int | None = None,
        tell: Callable[[float], None] | None = None,
    ) -> NativeModel:
        """Pack a checkpoint's weights, which are read matrix by matrix.

        dtype: of what is not packed (norms and biases) or also read by token (the embedding).
        tell: called after each matrix with the share of them that is packed.
        Raises ModelFormatError if the kernels cannot run the model, or for numbers that are not finite.
        """
        check_reference(checkpoint.spec)
        outcome = Outcome(tell)
        spec = unread_spec(checkpoint, dtype, outcome)
        model = cls(spec, checkpoint.name, quantization=quantization, threads=threads)
        if text := str(outcome):
            log.info("weights of %s in %s: %s", Path(checkpoint.name).name, quantization or "bfloat16", text)
        return model

    def adapt(self, adapters: RowAdapters, by_layer: Mapping[str, Mapping[int, Sequence[LowRank]]]) -> None:
        """Add the changes of adapters, by layer and the adapter's number; a row's adapter is in ``KVCache.adapter_of``.

        Before the first forward pass.
        """
        self._weight_bytes += self.packed_decoder.adapt(by_layer, len(adapters.names))
        self.adapters = adapters

    def forward(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> HiddenStates:
        """Run N nodes -> hidden [N - read - text, width], features [N - read, taps, width], both float32.

        Writes the nodes' keys and values. The first ``nodes.read`` nodes are in the cache already and are not run.
        """
        check_taps(taps, self.layers + 1)
        wanted = nodes.tokens.shape[0] - nodes.read - nodes.text
        hidden = torch.empty(wanted, self.width, dtype=torch.float32)
        return HiddenStates(hidden, self._forward(nodes, cache, taps, hidden))

    def fill(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> Tensor | None:
        """Write the keys and values of N nodes -> features [N - read, taps, width] float32, None without taps.

        The last layer is skipped after its keys and values.
        """
        check_taps(taps, self.layers + 1)
        return self._forward(nodes, cache, taps, None)

    def _forward(self, nodes: Nodes, cache: KVCache, taps: Sequence[int], hidden: Tensor | None) -> Tensor | None:
        count = nodes.tokens.shape[0] - nodes.read
        features = torch.empty(count, len(taps), self.width, dtype=torch.float32) if taps else None
        if count > 0:
            cache.cover(*nodes.written())
            tensors = [None if tensor is None else tensor.contiguous() for tensor in nodes[:5]]
            flat = Nodes(*tensors)._replace(read=nodes.read, text=nodes.text)  # type: ignore[arg-type]
            tapped = None if features is None else (self.tap_places(taps), features)
            seconds = self.seconds if self.timed else None
            problem = self.packed_decoder.decoder.forward(flat, self._c_cache(cache), hidden, tapped, seconds)
            if problem is not None:
                raise ParameterError("tokens", f"[{count} tokens]", problem)
        return features

    def tap_places(self, taps: Sequence[int]) -> list[int]:
        """Return the kernels' numbers of tapped layers: theirs for the hidden state is one higher."""
        return [self.layers + 1 if tap == self.layers else tap for tap in taps]

    def run_round(self, call: abi.CRoundCall, cache: KVCache, threads: int | None = None) -> None:
        """Run a round in one call: verify, accept, commit. Raises ParameterError for an invalid token or row.

        threads: default number of threads, which ``kernel_threads`` overrides; None: the model's.
        """
        seconds = self.seconds if self.timed else None
        problem = self.packed_decoder.decoder.round(call, self._c_cache(cache), seconds, threads)
        if problem is not None:
            raise ParameterError("tokens", f"[{call.rows} rows]", problem)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab_size], float32, of hidden states [..., width]."""
        flat = hidden.reshape(-1, self.width).float().contiguous()
        out = flat.new_empty(flat.shape[0], self.vocab_size)
        self.packed_decoder.decoder.logits(flat, out)
        return out.view(*hidden.shape[:-1], self.vocab_size)

    def weight_bytes(self) -> int:
        """Return the bytes of all weights, adapters included. Tied weights are counted once."""
        return self._weight_bytes

    def multiply_adds(self) -> int:
        """Return the multiply-adds of all weight matrices for one token; see ``Counted``."""
        return self._multiply_adds

    def expert_bytes(self) -> int:
        """Return the bytes of the weights of all experts, which are part of ``weight_bytes``."""
        return sum(self._expert_sizes)

    def expert_bytes_read(self) -> int:
        """Return the bytes of experts' weights that all forward passes so far have read.

        A pass reads an expert of a layer once, if any of its tokens runs through it.
        """
        read = self.packed_decoder.decoder.experts_read()
        return read * self._expert_sizes[0] if read else 0

    @property
    def pass_bytes(self) -> PassBytes:
        """Return what a forward pass reads, see ``Shortenable``."""
        head = self.packed_decoder.model.head
        token = column_bytes(head)
        embedding = 0 if self.tied else 2 * head.inputs  # one row of it is read for each token
        layers = self._weight_bytes - self.vocab_size * (token + embedding)
        return PassBytes(layers - self._idle_expert_bytes, token)

    def short_head(self, size: int) -> PackedShortHead:
        """Return an output head over ``size`` tokens; see ``Shortenable``."""
        return PackedShortHead(self.packed_decoder, size)

    def packed(self) -> Tensor:
        """Return the packed weights, uint8 [packed_size]. The memory belongs to the model and is freed with it."""
        return self.packed_decoder.memory

    def _c_cache(self, cache: KVCache) -> abi.CCache:
        """Return the C description of a cache. Made once per cache, because its memory never moves."""
        described = self._caches.get(cache)
        if described is None:
            _check_cache(cache, self)
            described = self._caches[cache] = structs.cache(cache)
        return described


def _expert_sizes(spec: NativeSpec, to: Format) -> list[int]:
    """Return the bytes of each expert of each layer; all have one shape."""
    mixtures = [layer.experts for layer in spec.layers if layer.experts is not None]
    return [
        sum(packed_bytes(linear.weight.shape[0], linear.weight.shape[1], to) for linear in pair)
        for mixture in mixtures
        for pair in zip(mixture.gate_up, mixture.down, strict=True)
    ]


def idle_expert_bytes(spec: NativeSpec, to: Format) -> int:
    """Return the bytes of the experts that one token does not run through."""
    mixture = next((layer.experts for layer in spec.layers if layer.experts is not None), None)
    if mixture is None:
        return 0
    return sum(_expert_sizes(spec, to)) * (len(mixture.down) - mixture.routing.used) // len(mixture.down)


def _multiply_adds(spec: NativeSpec) -> int:
    counts = [linear.weight.numel() for layer in spec.layers for linear in layer.linears]
    for experts in (layer.experts for layer in spec.layers if layer.experts is not None):
        counts += [experts.router.numel()]
        counts += [experts.routing.used * linears[0].weight.numel() for linears in (experts.gate_up, experts.down)]
    inputs = [linear for one in spec.layers if one.input is not None for linear in (one.input.gate, one.input.out)]
    inputs += [] if spec.inputs is None else [spec.inputs.project]
    return sum(counts) + sum(linear.weight.numel() for linear in inputs) + spec.vocab_size * spec.width


def _check_cache(cache: KVCache, model: NativeModel) -> None:
    found = [cache.shapes[table] for table, _ in cache.places]
    if found != list(model.kv_layers):
        raise ParameterError("cache", _in_words(found), _in_words(model.kv_layers))
    if cache.dtype not in structs.CACHE_ELEMENTS:
        raise ParameterError("cache", cache.dtype, "float32, bfloat16 or int8")


def _in_words(layers: Sequence[KVHeads]) -> str:
    counts = Counter(layers)
    return ", ".join(f"{count} layers of {shape.heads} heads of {shape.dim}" for shape, count in counts.items())


__all__ = ["NativeModel", "Quantization"]
