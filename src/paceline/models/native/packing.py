"""Packing of a decoder's weights into one block of memory, in the order in which the kernels read them.

One walk over the weights has three uses: to compute the memory size, to pack the weights, and to locate them in memory
that was packed before and cached on disk (``packed_file``). The offset of each weight follows from the shapes alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_float, c_int32, pointer
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from paceline.core.cache import table_places
from paceline.core.eight_bits import key_balance
from paceline.kernels import abi, native, pack, structs
from paceline.kernels.delta import DeltaNet
from paceline.kernels.mamba2 import Mamba2
from paceline.kernels.pack import Format
from paceline.kernels.short_conv import ShortConv
from paceline.kernels.spec import (
    Activation,
    BlockConvWeights,
    Division,
    ExpertsNorms,
    ExpertsWeights,
    FusionWeights,
    LatentWeights,
    LayerWeights,
    LinearWeights,
    NativeSpec,
    RecurrentMixer,
    Rotary,
    TokenInputWeights,
    TokenTableWeights,
)
from paceline.models.native.low_rank import LowRank, pack_changes

log = logging.getLogger("paceline")

ReadPacked: TypeAlias = Callable[[Tensor], None]
"""Fills memory, uint8 [packed_size], with weights that were packed before."""

_ACTIVATIONS: dict[Activation, abi.Activation] = {
    "silu": abi.Activation.SILU,
    "gelu_tanh": abi.Activation.GELU_TANH,
    "clamped_silu": abi.Activation.CLAMPED_SILU,
    "gelu": abi.Activation.GELU,
    "relu": abi.Activation.RELU,
    "relu2": abi.Activation.RELU2,
    "xielu": abi.Activation.XIELU,
}
# Of ``RecurrentMixer.gates`` in every model, because a state would carry their rounding on; and of the weights of taps.
GATES_FORMAT: Format = "bf16"
_LINE = 64  # bytes: every weight begins on a cache line
_ALLOW = "A container needs --cap-add SYS_NICE for that; --numa off leaves it to the system"
_UNBOUNDED = 1 << 62  # bytes of a meta tensor that is larger than any model


def packed_size(spec: NativeSpec, layers: Format, head: Format, *, shares_ends: bool = False) -> int:
    """Return the bytes of all weights once packed; tied weights are counted once. spec: meta tensors suffice.

    shares_ends: whether embedding and output head are another decoder's.
    """
    nowhere = torch.empty(_UNBOUNDED, dtype=torch.uint8, device="meta")
    packer = _Packer(nowhere, fill=False, place=lambda _: None)
    packer.pack_model(spec, layers, head, ends=abi.CModelSpec() if shares_ends else None)
    return packer.used


class NodePlaces:
    """Divides layers between a pool's NUMA nodes. nodes: empty without a pool, or if the system refuses."""

    def __init__(self, pool: native.Pool | None) -> None:
        self._pool, self.nodes = pool, () if pool is None else pool.nodes

    def place(self, packed: pack.Packed) -> None:
        """Bind the pages of a layer's panels to the nodes whose threads read them; warns once if that is refused."""
        if self._pool is None or not self.nodes:
            return
        try:
            self._pool.place(packed)
        except OSError as error:
            self.nodes = ()
            log.warning("weights are not placed on the NUMA nodes that read them: %s. %s", error, _ALLOW)


class PackedDecoder:
    """The kernel library's decoder on packed weights. memory: the packed weights, uint8 [packed_size].

    formats: formats of the layers and of the head.
    ends_of: a decoder whose embedding and output head this one uses; the spec's then only give the shapes.
    read_packed: fills the memory with weights that were packed before; the spec's tensors then only give the shapes.
        None: the spec's tensors are packed now.
    nodes: NUMA nodes between which every matrix is divided; empty: pages lie where they were written.
    """

    def __init__(
        self,
        spec: NativeSpec,
        formats: tuple[Format, Format],
        kernels: native.Kernels,
        threads: int,
        read_packed: ReadPacked | None = None,
        ends_of: PackedDecoder | None = None,
    ) -> None:
        self.model: abi.CModelSpec
        size = packed_size(spec, *formats, shares_ends=ends_of is not None)
        arena = native.Arena(kernels.library, size)
        self.memory = arena.take(size)
        pool = native.node_pool(kernels)
        alone = spec.division is not None and pool is not None and len(pool.nodes) == 1  # a rank is packed on its node
        places = NodePlaces(None if alone else pool)
        packer = _Packer(self.memory, fill=read_packed is None, place=places.place)
        model = packer.pack_model(spec, *formats, ends=None if ends_of is None else ends_of.model)
        if read_packed is not None:
            read_packed(self.memory)
        self.nodes = places.nodes
        tables = _rotate_by_tables(spec, model), _balance_keys(spec, model), _divide(spec.division, model)
        self.model = model
        self._kept, self._kernels, self._threads = (arena, tables, ends_of), kernels, threads
        self.decoder = native.NativeDecoder(kernels, model, self._kept, threads)

    def adapt(self, by_layer: Mapping[str, Mapping[int, Sequence[LowRank]]], count: int) -> int:
        """Add the changes of ``count`` adapters -> their bytes. The decoder is made anew, so nothing may use it yet."""
        changes = pack_changes(self.model, by_layer, count)
        self.decoder = native.NativeDecoder(self._kernels, self.model, (*self._kept, changes), self._threads)
        return sum(matrix.nbytes for matrix in changes)


def _rotate_by_tables(spec: NativeSpec, model: abi.CModelSpec) -> object:
    """Give every layer its rotary table -> the tables, which must outlive the model. Equal ones are made once."""
    tables: dict[Rotary, tuple[Tensor, Tensor]] = {}
    for index, layer in enumerate(spec.layers):
        rotary = layer.rotary or spec.rotary
        if rotary not in tables:
            cosine, sine = rotary.table(spec.max_positions + spec.ahead)
            tables[rotary] = cosine[spec.ahead :], sine[spec.ahead :]
        into = model.layers[index]
        into.cosine, into.sine = (table.data_ptr() for table in tables[rotary])
        into.rotary_half = len(rotary.inverse_frequencies)
    return tables


def _divide(division: Division | None, model: abi.CModelSpec) -> object:
    """Describe a rank's part of a model -> what must outlive the model."""
    if division is None:
        return None
    Edges = c_int32 * (division.ranks + 1)
    kept = [Edges(*edges) for edges in (division.hidden, division.tokens, *division.attended, *division.activated)]
    hidden, tokens, *of_layers = map(addressof, kept)
    for index, into in enumerate(model.layers[: model.layer_count]):
        into.attended, into.activated = of_layers[index], of_layers[model.layer_count + index]
    exchange = division.memory.data_ptr(), division.numbers_at_once, division.patience
    model.ranks = pointer(abi.CRanks(division.rank, division.ranks, hidden, tokens, *exchange))
    return kept, division.memory


def _balance_keys(spec: NativeSpec, model: abi.CModelSpec) -> list[Tensor]:
    """Set and return the divisors of keys with biases in caches of int8; see ``eight_bits.key_balance``."""
    kept: list[Tensor] = []
    for layer, into in zip(spec.layers, model.layers[: model.layer_count], strict=True):
        plain = layer.latent is None and layer.k_norm is None
        if not (plain and into.qkv.bias) or any(each.reads_only and each.qkv is not None for each in spec.layers):
            continue
        bias = torch.frombuffer((c_float * into.qkv.outputs).from_address(into.qkv.bias), dtype=torch.float32)
        heads = bias[: (into.heads + into.kv_heads) * into.dim].view(-1, into.dim)
        kept.append(key_balance(heads[into.heads :], 2 * into.rotary_half).contiguous())
        into.balance = kept[-1].data_ptr()
    return kept


class _Packer:
    """Walks over the weights and gives each one its offset in ``memory``; packs it there if ``fill``.

    place: told each linear layer before anything is written there.
    """

    def __init__(self, memory: Tensor, *, fill: bool, place: Callable[[pack.Packed], None]) -> None:
        self._memory, self._fill, self._place, self.used = memory, fill, place, 0
        self._ordered = False

    def pack_model(
        self, spec: NativeSpec, to: Format, head_to: Format, ends: abi.CModelSpec | None = None
    ) -> abi.CModelSpec:
        """Return the C description of the whole decoder, without its rotary tables.

        ends: the decoder whose embedding and output head are used; None: the spec's are packed.
        """
        self._ordered = spec.ordered
        layers = [self._layer(spec, layer, to) for layer in spec.layers]
        cached = table_places(spec.kv_layers)
        for layer, place in zip(layers, spec.places, strict=True):
            layer.table, layer.place = cached[place]
        for place, recurrent in enumerate(layer.recurrent for layer in layers if layer.recurrent):
            recurrent.contents.place = place
        fusion = None if spec.fusion is None else pointer(self._fusion(spec.fusion, to))
        head, embedding = self._ends(spec, head_to) if ends is None else (ends.head, ends.embedding)
        return abi.CModelSpec(
            layers=(abi.CLayer * len(layers))(*layers),
            head=head,
            embedding=embedding,
            final_norm=self._vector(self._padded(spec.final_norm)),
            positions=spec.max_positions,
            layer_count=len(layers),
            width=spec.width,
            epsilon=spec.epsilon,
            embed_scale=spec.embed_scale,
            tap_scale=spec.tap_scale,
            fusion=fusion,
            recurrent=_shape_of(spec),
            inputs=None if spec.inputs is None else pointer(self._inputs(spec.inputs, to, head_to)),
            logits_cap=spec.logits_cap or 0.0,
            centred=spec.centred,
            places=None if spec.positions is None else self._vector(self._padded(spec.positions)),
            embedding_norm=self._norm(spec.embedding_norm),
        )

    def _inputs(self, inputs: TokenTableWeights, to: Format, table_to: Format) -> abi.CTokenInputs:
        """Pack the vectors of every token. The table is read by token, like a tied embedding, and rounded like it."""
        return abi.CTokenInputs(
            table=self._linear(inputs.table, table_to),
            project=self._linear(inputs.project, to),
            norm=self._vector(inputs.norm),
            width=inputs.width,
            table_scale=inputs.table_scale,
            project_scale=inputs.project_scale,
            sum_scale=inputs.sum_scale,
        )

    def _ends(self, spec: NativeSpec, to: Format) -> tuple[abi.CLinear, int | None]:
        """Pack the output head and, unless it is tied to it, the embedding."""
        head = self._linear(spec.head or LinearWeights(spec.embedding), to)
        return head, None if spec.head is None else self._vector(self._padded(spec.embedding), torch.bfloat16)

    def _fusion(self, fusion: FusionWeights, to: Format) -> abi.CFusion:
        norms, joint = fusion.tap_norms, fusion.joint_norm
        return abi.CFusion(
            fuse=self._linear(fusion.fuse, to),
            tap_norms=None if norms is None else self._vector(self._padded(norms)),
            joint_norm=None if joint is None else self._vector(self._padded(joint)),
            hidden_norm=self._vector(self._padded(fusion.hidden_norm)),
            targets=self._vector(fusion.targets, torch.int64),
            mask=None if fusion.mask is None else self._vector(fusion.mask),
            mask_token=fusion.mask_token,
            vocabulary=fusion.vocabulary,
            tap_count=fusion.tap_count,
            target_width=fusion.target_width,
            normed_residual=fusion.normed_residual,
            normed_state=fusion.normed_state,
            block=fusion.block,
            embedding_norm=None if fusion.embedding_norm is None else self._vector(self._padded(fusion.embedding_norm)),
        )

    def _layer(self, spec: NativeSpec, layer: LayerWeights, to: Format) -> abi.CLayer:
        heads, states = spec.heads_of(layer), layer.recurrent
        matrices = () if states is None else (self._linear(states.first, to), self._linear(states.second, to))
        return abi.CLayer(
            qkv=abi.CLinear() if layer.qkv is None else self._linear(layer.qkv, to),
            attention_out=abi.CLinear() if layer.attention_out is None else self._linear(layer.attention_out, to),
            gate_up=self._first_of(layer, to),
            down=abi.CLinear() if layer.down is None else self._linear(layer.down, to),
            input_norm=self._norm(layer.input_norm),
            post_norm=self._norm(layer.post_norm),
            q_norm=None if layer.q_norm is None else self._vector(layer.q_norm),
            k_norm=None if layer.k_norm is None else self._vector(layer.k_norm),
            window=layer.window or 0,
            recurrent=None if states is None else pointer(self._recurrent(states.mixer, abi.CRecurrent(*matrices))),
            gated=layer.gated,
            attention_out_norm=self._norm(layer.attention_out_norm),
            mlp_out_norm=self._norm(layer.mlp_out_norm),
            scale=spec.scale_of(layer),
            norm_all=spec.norm_all(layer),
            activation=_ACTIVATIONS[layer.activation],
            reads_only=layer.reads_only,
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            dim=heads.dim,
            value_dim=heads.value_width,
            v_norm=self._vector(torch.ones(heads.dim)) if layer.v_norm else None,
            input=None if layer.input is None else pointer(self._input(layer.input, to)),
            scale_out=None if layer.scale_out is None else self._vector(layer.scale_out),
            experts=None if layer.experts is None else pointer(self._experts(layer.experts, to, plain=layer.plain)),
            looks_ahead=layer.looks_ahead,
            sinks=None if layer.sinks is None else self._vector(layer.sinks),
            latent=None if layer.latent is None else pointer(self._latent(layer.latent, to)),
            norm_after=layer.norm_after,
            cap=layer.cap or 0.0,
            parallel=layer.parallel,
            plain=layer.plain,
            shape=None if layer.xielu is None else self._vector(self._xielu(layer.xielu)),
            convs=None if layer.convs is None else (abi.CBlockConv * 2)(*map(self._conv, layer.convs)),
        )

    def _conv(self, conv: BlockConvWeights) -> abi.CBlockConv:
        return abi.CBlockConv(
            project=self._linear(conv.project, GATES_FORMAT),
            base=self._vector(self._padded(conv.base)),
            taps=conv.base.shape[1],
            group=conv.group,
        )

    def _first_of(self, layer: LayerWeights, to: Format) -> abi.CLinear:
        if layer.gate_up is None:
            return abi.CLinear()
        return self._linear(layer.gate_up, to) if layer.plain else self._gate_up(layer.gate_up, to)

    def _xielu(self, shape: Tensor) -> Tensor:
        """Return alpha_p, alpha_n, beta and eps."""
        p, n, beta, eps = self._maybe_meta(shape).float()
        return torch.stack([softplus(p), beta + softplus(n), beta, eps])

    def _gate_up(self, linear: LinearWeights, to: Format) -> abi.CLinear:
        return self._linear(linear.reordered(lambda rows: pack.interleave_gate_up(self._maybe_meta(rows))), to)

    def _latent(self, latent: LatentWeights, to: Format) -> abi.CLatent:
        count, up, query_norm = len(latent.absorb), latent.query_up, latent.query_norm
        rank, key_dim = latent.absorb[0].weight.shape
        return abi.CLatent(
            query_up=abi.CLinear() if up is None else self._linear(up, to),
            absorb=(abi.CLinear * count)(*(self._linear(linear, to) for linear in latent.absorb)),
            expand=(abi.CLinear * count)(*(self._linear(linear, to) for linear in latent.expand)),
            query_norm=self._norm(query_norm),
            norm=self._vector(latent.norm),
            query_rank=0 if query_norm is None else query_norm.shape[0],
            rank=rank,
            rotary_dim=latent.rotary_dim,
            key_dim=key_dim,
            value_dim=latent.expand[0].weight.shape[0],
            epsilon=latent.epsilon,
        )

    def _experts(self, experts: ExpertsWeights, to: Format, *, plain: bool) -> abi.CExperts:
        count, routing = len(experts.down), experts.routing
        first = self._linear if plain else self._gate_up
        no_latent = abi.CLinear(), abi.CLinear()
        latent_in, latent_out = (self._linear(part, to) for part in experts.latent) if experts.latent else no_latent
        return abi.CExperts(
            router=self._router(experts),
            gate_up=(abi.CLinear * count)(*(first(linear, to) for linear in experts.gate_up)),
            down=(abi.CLinear * count)(*(self._linear(linear, to) for linear in experts.down)),
            count=count,
            used=routing.used,
            normalised=routing.normalised,
            sigmoid=routing.sigmoid,
            groups=routing.groups,
            used_groups=routing.used_groups,
            group_best=routing.group_best,
            margin=routing.margin,
            shared_scale=experts.shared_scale,
            correction=None if experts.correction is None else self._vector(experts.correction),
            factors=None if experts.factors is None else self._vector(experts.factors),
            norms=None if experts.norms is None else pointer(self._experts_norms(experts.norms)),
            latent_in=latent_in,
            latent_out=latent_out,
        )

    def _experts_norms(self, norms: ExpertsNorms) -> abi.CExpertsNorms:
        return abi.CExpertsNorms(**{name: self._norm(weight) for name, weight in norms._asdict().items()})

    def _router(self, experts: ExpertsWeights) -> abi.CRouter:
        outputs, bias = experts.router.shape[0], experts.router_bias
        panels = pack.router_panels(self._maybe_meta(experts.router))
        return abi.CRouter(
            weights=self._vector(panels),
            bias=None
            if bias is None
            else self._vector(pack.pad_rows(self._maybe_meta(bias), panels.shape[0] * abi.ROUTER_PANEL)),
            inputs=panels.shape[1],
            outputs=outputs,
        )

    def _input(self, part: TokenInputWeights, to: Format) -> abi.CTokenInput:
        return abi.CTokenInput(
            gate=self._linear(part.gate, to), out=self._linear(part.out, to), norm=self._norm(part.norm)
        )

    def _recurrent(self, mixer: RecurrentMixer, packed: abi.CRecurrent) -> abi.CRecurrent:
        """Add the small weights to the matrices of a recurrent layer."""
        assert isinstance(mixer, DeltaNet | Mamba2 | ShortConv)
        if isinstance(mixer, ShortConv):
            packed.conv = self._vector(mixer.conv.T)
            return packed
        packed.gates, packed.conv = self._linear(mixer.gates, GATES_FORMAT), self._vector(mixer.conv.T)
        packed.rate, packed.bias = self._vector(mixer.rate), self._vector(mixer.bias)
        packed.norm = None if mixer.norm is None else self._vector(mixer.norm)
        packed.epsilon = mixer.epsilon
        if isinstance(mixer, Mamba2):
            packed.skip, packed.least_step = self._vector(mixer.skip), mixer.least_step
            packed.conv_bias = None if mixer.conv_bias is None else self._vector(mixer.conv_bias)
        return packed

    def _norm(self, weight: Tensor | None) -> int | None:
        return None if weight is None else self._vector(self._padded(weight))

    def _maybe_meta(self, values: Tensor) -> Tensor:
        """Return the tensor, or a meta tensor of its shape if nothing is packed."""
        return values if self._fill else values.to("meta")

    def _linear(self, linear: LinearWeights, to: Format) -> abi.CLinear:
        outputs, inputs = linear.weight.shape
        packed = pack.allocate(outputs, inputs, to, linear.bias is not None, self._take)
        self._place(packed)
        if self._ordered and to == "int4":
            packed = replace(packed, order=self._take(packed.inputs * torch.int32.itemsize).view(torch.int32))
        if self._fill:
            pack.fill(packed, linear.rounded(to), linear.bias)
        return structs.linear(packed)

    def _vector(self, values: Tensor, dtype: torch.dtype = torch.float32) -> int:
        memory = self._take(values.numel() * dtype.itemsize).view(dtype)
        if self._fill:
            memory.copy_(values.flatten())
        return memory.data_ptr()

    def _padded(self, values: Tensor) -> Tensor:
        return pad(self._maybe_meta(values), (0, -values.shape[-1] % abi.INPUT_MULTIPLE))

    def _take(self, nbytes: int) -> Tensor:
        start = pack.round_up(self.used, _LINE)
        self.used = start + nbytes
        return self._memory[start : self.used]


def _shape_of(spec: NativeSpec) -> abi.CRecurrentShape:
    """Return the kind and the sizes of the recurrent layers, all 0 if there are none."""
    weights = next((layer.recurrent for layer in spec.layers if layer.recurrent is not None), None)
    if weights is None:
        return abi.CRecurrentShape()
    mixer, shape = weights.mixer, weights.mixer.shape(1)
    described = abi.CRecurrentShape(
        kind=abi.RecurrentKind.SHORT_CONV,
        taps=shape.taps,
        channels=shape.channels,
        gates=shape.gates,
        state=math.prod(shape.state),
    )
    if isinstance(mixer, DeltaNet):
        described.kind = abi.RecurrentKind.DELTA_NET
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            setattr(described, name, getattr(mixer.heads, name))
    elif isinstance(mixer, Mamba2):
        heads, described.kind = mixer.heads, abi.RecurrentKind.MAMBA2
        described.key_heads, described.value_heads = heads.groups, heads.heads
        described.key_dim, described.value_dim = heads.state_dim, heads.head_dim
    return described
