"""Reference implementation of every CPU kernel in plain torch.

The quantisation arithmetic is the same, so integer sums agree exactly; sums of floats agree up to their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.cache import KVCache
from paceline.core.eight_bits import restored, stored, vector_width
from paceline.core.nodes import Nodes
from paceline.core.recurrent_state import WINDOW, RecurrentStates, StatefulCache
from paceline.kernels.abi import ACTIVATION_GROUP
from paceline.kernels.experts import route
from paceline.kernels.gpu.steps import ACTIVATIONS, gate, xielu
from paceline.kernels.pack import Bf16Weight, Format, Int4Weight, Int8Weight, Weight, dequantise, quantise
from paceline.kernels.recurrent import _append
from paceline.kernels.spec import ExpertsWeights, LayerWeights, LinearWeights, NativeSpec, RecurrentMixer
from paceline.models.native.packing import GATES_FORMAT

ReferenceFormat = Format | Literal["fp32"]
"""Formats of the reference: fp32 rounds neither weights nor inputs."""

_SILENT = 1e-30  # rows whose largest amplitude is at most this count as zero


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K] float32 -> int8 values [N, G, 64] and the scale of each group of 64 inputs [N, G].

    The scale of a group with NaN or infinity is NaN, and its values are 0.
    """
    groups = functional.pad(x, (0, -x.shape[1] % ACTIVATION_GROUP)).view(x.shape[0], -1, ACTIVATION_GROUP)
    amplitude = groups.abs().amax(dim=2)
    broken = ~amplitude.isfinite()
    silent = (amplitude <= _SILENT) | broken
    # A true division, like the kernels': torch computes ``127.0 / tensor`` as 127 times a reciprocal, which rounds
    # twice.
    inverse = torch.where(silent, 0.0, torch.full_like(amplitude, 127.0) / amplitude)
    scales = torch.where(silent, 0.0, amplitude / 127.0).masked_fill(broken, torch.nan)
    return (groups * inverse[:, :, None]).nan_to_num().round().to(torch.int8), scales


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [N, K] float32 -> [N, M] float32, with the kernels' arithmetic."""
    if isinstance(weight, Bf16Weight):
        y = (x.bfloat16().double() @ weight.values.double().T).float()
    else:
        y = _int4(x, weight) if isinstance(weight, Int4Weight) else _int8(x, weight)
    return y if bias is None else y + bias.float()


def _int8(x: Tensor, weight: Int8Weight) -> Tensor:
    values, scales = quantise_rows(x)
    groups = functional.pad(weight.values, (0, -x.shape[1] % ACTIVATION_GROUP)).view(-1, *values.shape[1:])
    exact = torch.einsum("ngk,mgk->nmg", values.double(), groups.double())
    return ((exact * scales.double()[:, None]).sum(dim=2) * weight.scales.double()).float()


def _int4(x: Tensor, weight: Int4Weight) -> Tensor:
    values, scales = quantise_rows(x if weight.order is None else x[:, weight.order])
    fine = values.view(values.shape[0], -1, weight.group)
    scales = scales.repeat_interleave(ACTIVATION_GROUP // weight.group, dim=1)
    groups = weight.values.view(*weight.scales.shape, weight.group).double()
    there = groups.shape[1]  # the weight and the activations are padded to different multiples
    exact = torch.einsum("ngk,mgk->nmg", fine[:, :there].double(), groups) * weight.scales.double()
    exact += fine[:, :there].double().sum(dim=2)[:, None] * weight.lows.double()
    return (exact * scales[:, None, :there].double()).sum(dim=2).float()


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32."""
    return functional.rms_norm(x, (x.shape[-1],), weight.float(), epsilon)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D]; cos, sin [N, half]: rotate the pairs (i, i + half); elements beyond 2 * half stay."""
    half = cos.shape[1]
    a, b, rest = x.split_with_sizes([half, half, x.shape[2] - 2 * half], dim=2)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s, rest], dim=2)


class Seen(NamedTuple):
    """Slots a node attends to: the first ``text`` slots of its row, and ``tail``, its ancestors and itself in order."""

    text: int
    tail: tuple[int, ...]


def seen_by(nodes: Nodes) -> list[Seen]:
    """Slots that each node attends to, in plain Python."""
    positions = nodes.positions.tolist()
    if nodes.slots is None or nodes.parents is None:
        return [Seen(position, (position,)) for position in positions]
    seen: list[Seen] = []
    for position, slot, parent in zip(positions, nodes.slots.tolist(), nodes.parents.tolist(), strict=True):
        text, tail = (position, ()) if parent < 0 else seen[parent]
        seen.append(Seen(text, (*tail, slot)))
    return seen


def write(layer: int, cache: KVCache, rows: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k and v [N, G, D] of tokens at (rows, slots); slots beyond the capacity go to the trash position.

    v is stored a second time where values are a part of the keys.
    """
    at = slots.clamp(max=cache.positions)
    for table, new in zip(cache.layer(layer), (k, v), strict=True):
        table[rows, :, at] = stored(new, table.dtype)


def attend(
    layer: int,
    cache: KVCache,
    q: Tensor,
    rows: Tensor,
    seen: Sequence[Seen],
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """q [N, H, D] over the keys that each token sees in its row, at most the last ``window`` -> [N, H, value].

    sinks: [H], one more score of each head, without a value. cap: scores are cap * tanh(scores / cap).
    """
    out = q.new_empty(*q.shape[:2], vector_width(cache.layer(layer)[1]))
    for i, (row, (text, tail)) in enumerate(zip(rows.tolist(), seen, strict=True)):
        slots = [*range(text), *tail][: cache.positions]
        visible = slots if window is None else slots[max(0, len(slots) - window) :]
        k, v = (restored(table[row][:, visible], torch.float32) for table in cache.layer(layer))
        grouped = q[i].view(k.shape[0], -1, q.shape[2])
        scores = (grouped * scale) @ k.transpose(1, 2)
        scores = scores if cap is None else cap * (scores / cap).tanh()
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(*scores.shape[:2], 1)], 2)
        shares = scores.softmax(dim=2)[..., : len(visible)]
        out[i] = (shares @ v).flatten(0, 1)
    return out


def norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """``rms_norm``, a layer norm of weight and bias [2, width], or x without a weight."""
    if weight is None:
        return x
    if weight.dim() == 1:
        return rms_norm(x, weight, epsilon)
    return functional.layer_norm(x, x.shape[-1:], *weight.float(), eps=epsilon)


@dataclass(frozen=True)
class SlotPass:
    """The nodes of one slot in a forward pass.

    first, stop: its nodes' indices in the pass. slot: its place in the cache.
    start: position of its first node. applied: inputs of the slot's last pass that lie before ``start``.
    certain: leading nodes whose inputs become part of the stored state in this pass.
    parents: parent of each node among the slot's nodes, -1: the text.
    """

    first: int
    stop: int
    slot: int
    start: int
    applied: int
    certain: int
    parents: tuple[int, ...]


def plan(states: RecurrentStates, nodes: Nodes, *, text: bool) -> list[SlotPass]:
    """Split a forward pass by slots, and check that each can go on where its nodes begin.

    text: whether all nodes are text, as in prefill, so that none can be rejected.
    """
    passes: list[SlotPass] = []
    rows, positions = nodes.rows.tolist(), nodes.positions.tolist()
    parents = None if nodes.parents is None else nodes.parents.tolist()
    first = 0
    while first < len(rows):
        stop = first + 1
        while stop < len(rows) and rows[stop] == rows[first]:
            stop += 1
        passes.append(_slot_pass(states, first, stop, rows[first], positions[first], parents, text=text))
        first = stop
    return passes


def _slot_pass(
    states: RecurrentStates, first: int, stop: int, slot: int, start: int, parents: list[int] | None, *, text: bool
) -> SlotPass:
    base, count, size = int(states.base[slot]), int(states.count[slot]), stop - first
    applied = 0 if start == 0 else start - base
    if not 0 <= applied <= count:
        raise ValueError(f"slot {slot} cannot go on at token {start}: it holds {base} to {base + count}")
    own = range(-1, size - 1) if parents is None else [max(-1, parent - first) for parent in parents[first:stop]]
    certain = size if text else max(1, size - WINDOW)  # the first is the row's last token, which is text
    return SlotPass(first, stop, slot, start, applied, certain, tuple(own))


def finish(states: RecurrentStates, passes: Sequence[SlotPass]) -> None:
    """Note what the slots hold after a forward pass, once all layers have run."""
    for each in passes:
        states.base[each.slot] = each.start + each.certain
        states.count[each.slot] = each.stop - each.first - each.certain


def run_slot(states: RecurrentStates, layer: int, mixer: RecurrentMixer, part: SlotPass, inputs: Tensor) -> Tensor:
    """Run the nodes of one slot through a layer -> outputs [n, ...]. inputs [n, input_width]: their own.

    Applies the inputs of the slot's last pass first, and stores the state after the certain nodes.
    """
    slot = part.slot
    state, tail = states.state[layer, slot], states.tail[layer, slot]
    if part.start == 0:
        state, tail = torch.zeros_like(state), torch.zeros_like(tail)
    after = state, tail
    for earlier in states.inputs[layer, slot, : part.applied].clone():
        after = _append(mixer, after, earlier)[1]
    certain = after
    reached = {-1: after}  # after the text, then after the nodes that others may follow
    outputs = []
    for node, (parent, own) in enumerate(zip(part.parents, inputs, strict=True)):
        output, after = _append(mixer, reached[parent], own)
        if node < part.certain:
            del reached[parent]  # a chain: a long text's states would take gigabytes
        reached[node] = after
        outputs.append(output)
        if node + 1 == part.certain:
            certain = after
    states.state[layer, slot], states.tail[layer, slot] = certain
    kept = inputs[part.certain :]
    states.inputs[layer, slot, : len(kept)] = kept
    return torch.stack(outputs)


class ReferenceDecoder:
    """A whole decoder in plain torch. Weights are quantised like the kernels' and kept as float32."""

    def __init__(self, spec: NativeSpec, layer_format: ReferenceFormat, head_format: ReferenceFormat) -> None:
        self._spec = spec
        self._tables = [(layer.rotary or spec.rotary).table(spec.max_positions) for layer in spec.layers]
        self._layers = [_ReferenceLayer(layer, self._make(layer_format)) for layer in spec.layers]
        head = spec.head or LinearWeights(spec.embedding)
        self._head = self._make(head_format)(head)
        self._inputs = None if spec.inputs is None else _ReferenceInputs(spec, layer_format, head_format)
        self._embedding = self._embedding_in(head_format)

    def _embedding_in(self, to: ReferenceFormat) -> Tensor:
        spec = self._spec
        if to == "fp32":
            return spec.embedding.float()
        tied = dequantise(quantise(spec.embedding, to), spec.width)
        return tied if spec.head is None else spec.embedding.bfloat16().float()

    @staticmethod
    def _make(to: ReferenceFormat) -> Callable[[LinearWeights], _ReferenceLinear]:
        return lambda weights: _ReferenceLinear(weights, to)

    def forward(
        self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = (), *, text: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """-> hidden [N - read - text, width] after the final norm, features [N - read, taps, width]; writes the cache.

        text: whether no node can be rejected later; recurrent layers then store the state after all of them.
        """
        spec, new = self._spec, nodes.tokens[nodes.read :]
        if len(new) == 0:
            empty = torch.empty(0, spec.width, dtype=torch.float32)
            return empty, empty.new_empty(0, len(taps), spec.width) if taps else None
        context = _ReferencePass(spec, nodes, cache, self._tables, text=text)
        x = self._embedding[new] * spec.embed_scale
        if spec.positions is not None:
            x = x + spec.positions[nodes.positions[nodes.read :].clamp(max=spec.max_positions - 1)].float()
        x = norm(x, spec.embedding_norm, spec.epsilon)
        vectors = None if self._inputs is None else self._inputs(new, x)
        entering = []
        for index, layer in enumerate(self._layers):
            entering.append(x * spec.tap_scale)
            weights, between = layer.weights, x
            if weights.qkv is not None or weights.recurrent is not None:
                mixed = context.mixed(index, layer, norm(x, weights.input_norm, spec.epsilon))
                between = x + norm(mixed, weights.attention_out_norm, spec.epsilon)
            if weights.gate_up is not None or weights.experts is not None:
                made = layer.mlp(x if weights.parallel else between, spec.epsilon)
                between = between + norm(made, weights.mlp_out_norm, spec.epsilon)
            x = between
            if weights.input is not None:
                assert vectors is not None
                x = x + layer.token_input(x, vectors[:, index], spec.epsilon)
            x = x if weights.scale_out is None else x * weights.scale_out.float()
        context.finish()
        entering.append(norm(x, spec.final_norm, spec.epsilon))
        features = torch.stack([entering[tap] for tap in taps], 1) if taps else None
        return entering[-1][nodes.text :], features

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [M, width] -> [M, vocab]."""
        logits, limit = self._head(hidden), self._spec.logits_cap
        return logits if limit is None else (logits / limit).tanh() * limit


class _ReferencePass:
    """The mixers of one forward pass of the reference."""

    def __init__(
        self, spec: NativeSpec, nodes: Nodes, cache: KVCache, tables: Sequence[tuple[Tensor, Tensor]], *, text: bool
    ) -> None:
        self._spec, self._cache = spec, cache
        self._seen = seen_by(nodes)[nodes.read :]
        self._rows, positions = nodes.rows[nodes.read :], nodes.positions[nodes.read :]
        self._slots = positions if nodes.slots is None else nodes.slots[nodes.read :]
        self._tables, self._at = tables, positions.clamp(max=spec.max_positions - 1)
        self._places, self._recurrent_layer = spec.places, 0
        self._states: RecurrentStates | None = None
        self._passes: list[SlotPass] = []
        if spec.states is not None:
            assert nodes.read == 0, "a recurrent model reads each node once"
            self._states = cast(StatefulCache, cache).states
            self._passes = plan(self._states, nodes, text=text)

    def mixed(self, layer_index: int, layer: _ReferenceLayer, normed: Tensor) -> Tensor:
        """The sum of what a layer's attention and its recurrent part give [N, width]."""
        mixed = torch.zeros_like(normed)
        if layer.weights.recurrent is not None:
            mixed = mixed + self.recurrent(layer, layer.weights.recurrent.mixer, normed)
        return mixed if layer.weights.qkv is None else mixed + self.attention(layer_index, layer, normed)

    def attention(self, layer_index: int, layer: _ReferenceLayer, normed: Tensor) -> Tensor:
        """The output of an attention layer [N, width], from its normed input."""
        spec, weights, index = self._spec, layer.weights, self._places[layer_index]
        if weights.latent is not None:
            return self._latent(layer_index, layer, normed)
        heads = spec.heads_of(weights)
        own, values = 0 if weights.reads_only else heads.kv_heads, heads.value_width
        projected, gates = layer.qkv(normed), heads.heads * values if weights.gated else 0
        widths = [heads.heads * heads.dim, own * heads.dim, own * values, gates]
        q, k, v, gate = projected.split_with_sizes(widths, dim=1)
        q, k = q.view(len(q), heads.heads, -1), k.view(len(k), own, heads.dim)
        v = v.view(len(v), own, values)
        cos, sin = (table[self._at] for table in self._tables[layer_index])

        def turned(x: Tensor, norm: Tensor | None) -> Tensor:
            if weights.norm_after:
                return self._normed_heads(rotate(x, cos, sin), norm)
            return rotate(self._normed_heads(x, norm), cos, sin)

        q = turned(q, weights.q_norm)
        if own:
            k = turned(k, weights.k_norm)
            v = functional.rms_norm(v, (values,), None, spec.epsilon) if weights.v_norm else v
            write(index, self._cache, self._rows, self._slots, k, v)
        scale = spec.scale_of(weights)
        seen = self._rows, self._seen, scale, weights.window, weights.sinks, weights.cap
        attended = attend(index, self._cache, q, *seen)
        if weights.gated:
            attended = attended * gate.view_as(attended).sigmoid()
        return layer.attention_out(attended.flatten(1))

    def _latent(self, layer_index: int, layer: _ReferenceLayer, normed: Tensor) -> Tensor:
        """The output of a layer of latent attention [N, width], from its normed input."""
        weights, index = layer.weights, self._places[layer_index]
        latent, (count, _, dim, _) = weights.latent, self._spec.heads_of(weights)
        assert latent is not None
        rank, turned = dim - latent.rotary_dim, latent.rotary_dim
        first = layer.qkv(normed)
        queries, vector, shared = first.split_with_sizes([first.shape[1] - dim, rank, turned], 1)
        if layer.query_up is not None and latent.query_norm is not None:
            queries = layer.query_up(rms_norm(queries, latent.query_norm, latent.epsilon))
        heads = queries.view(len(normed), count, -1)
        absorbed = [matrix(heads[:, head, :-turned]) for head, matrix in enumerate(layer.absorb)]
        q = torch.cat([heads[..., -turned:], torch.stack(absorbed, 1)], 2)
        k = torch.cat([shared, rms_norm(vector, latent.norm, latent.epsilon)], 1)[:, None]
        cos, sin = (table[self._at] for table in self._tables[layer_index])
        k = rotate(k, cos, sin)
        write(index, self._cache, self._rows, self._slots, k, k[..., turned:])
        scale = self._spec.scale_of(weights)
        mixed = attend(index, self._cache, rotate(q, cos, sin), self._rows, self._seen, scale, weights.window)
        return layer.attention_out(torch.cat([matrix(mixed[:, head]) for head, matrix in enumerate(layer.expand)], 1))

    def _normed_heads(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Norm queries or keys [N, heads, D], each head or all together."""
        if weight is None or weight.numel() == x.shape[2]:
            return norm(x, weight, self._spec.epsilon)
        return norm(x.flatten(1), weight, self._spec.epsilon).view_as(x)

    def recurrent(self, layer: _ReferenceLayer, mixer: RecurrentMixer, normed: Tensor) -> Tensor:
        """The output of a recurrent layer [N, width], from its normed input."""
        index, states = self._recurrent_layer, self._states
        assert states is not None
        self._recurrent_layer += 1
        inputs, kept = mixer.split(layer.first(normed), None if layer.gates is None else layer.gates(normed))
        parts = [run_slot(states, index, mixer, part, inputs[part.first : part.stop]) for part in self._passes]
        return layer.second(mixer.finish(torch.cat(parts), kept))

    def finish(self) -> None:
        """Note what the slots of recurrent layers hold now."""
        if self._states is not None:
            finish(self._states, self._passes)


class _ReferenceLinear:
    """A product of rounded weights and rounded activations in float32."""

    def __init__(self, weights: LinearWeights, to: ReferenceFormat) -> None:
        self.to = to
        self._bias = None if weights.bias is None else weights.bias.float()
        weight = weights.weight
        rounded = None if to == "fp32" else weights.rounded(to)
        self.weight = weight.float() if rounded is None else dequantise(rounded, weight.shape[1])
        self._order = rounded.order if isinstance(rounded, Int4Weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(self._rounded(x), self.weight, self._bias)

    def _rounded(self, x: Tensor) -> Tensor:
        if self.to == "fp32":
            return x
        if self.to == "bf16":
            return x.bfloat16().float()
        order = torch.arange(x.shape[1]) if self._order is None else self._order
        values, scales = quantise_rows(x[:, order])
        return (values.float() * scales[:, :, None]).flatten(1)[:, order.argsort()]


class _ReferenceLayer:
    def __init__(self, weights: LayerWeights, make: Callable[[LinearWeights], _ReferenceLinear]) -> None:
        self.weights = weights
        pair = _made(make, weights.qkv, weights.attention_out)
        if pair is not None:
            self.qkv, self.attention_out = pair
        self._mlp = _made(make, weights.gate_up, weights.down)
        latent, experts = weights.latent, weights.experts
        self.query_up = None if latent is None or latent.query_up is None else make(latent.query_up)
        self.absorb = [] if latent is None else [make(matrix) for matrix in latent.absorb]
        self.expand = [] if latent is None else [make(matrix) for matrix in latent.expand]
        self._experts = (
            [] if experts is None else [_made(make, *pair) for pair in zip(experts.gate_up, experts.down, strict=True)]
        )
        self._latent = None if experts is None or experts.latent is None else _made(make, *experts.latent)
        part = weights.input
        self.input_gate = None if part is None else make(part.gate)
        self.input_out = None if part is None else make(part.out)
        self.gates = None
        if weights.recurrent is not None:
            self.first, self.second = make(weights.recurrent.first), make(weights.recurrent.second)
            gates = weights.recurrent.mixer.gates
            to: ReferenceFormat = "fp32" if self.first.to == "fp32" else GATES_FORMAT
            self.gates = None if gates is None else _ReferenceLinear(gates, to)

    def mlp(self, x: Tensor, epsilon: float) -> Tensor:
        """The output of the MLP, of the experts, or of both [N, width], from the hidden states."""
        normed = norm(x, self.weights.post_norm, epsilon)
        dense, experts = self._run(self._mlp, normed), self.weights.experts
        if experts is None:
            return dense
        norms = experts.norms
        scores = functional.linear(normed if norms is None else norm(x, norms.router, epsilon), experts.router.float())
        if experts.shared_gate:
            dense = dense * scores[:, -1:].sigmoid()
        dense = dense * experts.shared_scale
        read = normed if norms is None else norm(x, norms.before, epsilon)
        read = read if self._latent is None else self._latent[0](read)
        mixed = self._mixed(read, scores[:, : len(experts.down)], experts)
        mixed = mixed if self._latent is None else self._latent[1](mixed)
        if norms is None:
            return dense + mixed
        return norm(dense, norms.shared_after, epsilon) + norm(mixed, norms.after, epsilon)

    def _mixed(self, x: Tensor, scores: Tensor, experts: ExpertsWeights) -> Tensor:
        """The weighted sum of the outputs of each token's experts."""
        scores = scores if experts.router_bias is None else scores + experts.router_bias.float()
        weights, chosen = route(scores, experts.routing, experts.correction)
        weights = weights if experts.factors is None else weights * experts.factors.float()[chosen]
        outputs = x.new_empty(*chosen.shape, x.shape[1])
        for expert in torch.unique(chosen).tolist():
            token, rank = (chosen == expert).nonzero(as_tuple=True)
            outputs[token, rank] = self._run(self._experts[expert], x[token])
        return (outputs * weights[..., None]).sum(1)

    def _run(self, mlp: _GatedMLP | None, x: Tensor) -> Tensor:
        if mlp is None:
            return torch.zeros_like(x)
        inner, weights = mlp[0](x), self.weights
        if weights.xielu is not None:
            return mlp[1](xielu(inner, weights.xielu))
        return mlp[1](ACTIVATIONS[weights.activation](inner) if weights.plain else gate(inner, weights.activation))

    def token_input(self, x: Tensor, vectors: Tensor, epsilon: float) -> Tensor:
        """What the layer adds of its tokens' vectors [N, inputs] to x [N, width]."""
        assert self.weights.input is not None
        assert self.input_gate is not None
        assert self.input_out is not None
        inner = ACTIVATIONS[self.weights.activation](self.input_gate(x)) * vectors
        return rms_norm(self.input_out(inner), self.weights.input.norm, epsilon)


_GatedMLP: TypeAlias = tuple[_ReferenceLinear, _ReferenceLinear]


def _made(
    make: Callable[[LinearWeights], _ReferenceLinear], gate_up: LinearWeights | None, down: LinearWeights | None
) -> _GatedMLP | None:
    return None if gate_up is None or down is None else (make(gate_up), make(down))


class _ReferenceInputs:
    """The vectors of every token for every layer."""

    def __init__(self, spec: NativeSpec, to: ReferenceFormat, table_to: ReferenceFormat) -> None:
        assert spec.inputs is not None
        self._weights, self._epsilon = spec.inputs, spec.epsilon
        self._project = _ReferenceLinear(spec.inputs.project, to)
        self._table = _ReferenceLinear(spec.inputs.table, table_to).weight

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Tokens [N], their embeddings x [N, width] -> [N, layers, inputs]."""
        weights = self._weights
        projected = (self._project(x) * weights.project_scale).view(len(x), -1, weights.width)
        stored = self._table[tokens].view_as(projected) * weights.table_scale
        return (rms_norm(projected, weights.norm, self._epsilon) + stored) * weights.sum_scale
