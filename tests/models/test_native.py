import functools
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from covering import in_pairs, in_turn, named
from kernels.reference_model import ReferenceModel
from kernels.tools import (
    cache_for,
    in_parallel,
    ragged,
    random_spec,
    with_every_feature,
    with_experts,
    with_latent,
    with_orders,
    with_sinks,
)
from paceline.core.cpus import Node, usable_cpus
from paceline.core.nodes import Nodes
from paceline.errors import ModelFormatError, ParameterError
from paceline.kernels import native
from paceline.kernels.spec import LinearWeights, NativeSpec
from paceline.models.description.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec, NormSpec, Rotary
from paceline.models.native.model import NativeModel
from paceline.models.native.spec import spec_of
from paceline.models.torch.transformer import Transformer

QUANTIZATIONS = (None, "int8", "int4")
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = {
    "smollm": {"width": 144, "heads": 9, "kv_heads": 3, "ffn": 200},
    "mistral": {"window": 20, "head_dim": 64, "heads": 2, "kv_heads": 1, "tied": False},
    "qwen2": {"bias": True, "head_dim": 128, "heads": 4, "kv_heads": 2, "width": 100},
    "qwen3": {"qk_norm": True, "head_dim": 32, "heads": 5, "kv_heads": 5},
    "every feature": {"qk_norm": True, "window": 20, "width": 100},
    "every feature, norms of all heads": {"heads": 4, "kv_heads": 2, "bias": True},
    "experts": {"width": 100, "tied": False},
    "experts, every feature": {"bias": True, "window": 20},
    "experts, gpt-oss": {"bias": True, "window": 20, "head_dim": 64, "heads": 4, "kv_heads": 1},
    "narrow values, gpt-oss": {"window": 20, "heads": 4, "kv_heads": 2, "head_dim": 48, "value_dim": 32},
    "latent": {"width": 100},
    "latent, experts": {},
    "in parallel": {"width": 100, "qk_norm": True, "bias": True, "tied": False},
    "experts, in parallel": {"window": 20},
    "inputs in an order": {"width": 100, "ffn": 200},
    "experts, inputs in an order, in parallel": {"bias": True},
}
MIXTURES = {
    "experts": {"normalised": False, "count": 21, "used": 4},
    "experts, every feature": {"shared": True},
    "experts, gpt-oss": {},
    "latent, experts": {"shared": True, "count": 7},
    "experts, in parallel": {"shared": True, "count": 12, "sigmoid": True, "groups": 4, "latent": 40},
    "experts, inputs in an order, in parallel": {"shared": True, "count": 7},
}
LATENT = {"latent": {}, "latent, experts": {"heads": 80, "rank": 64, "query_rank": None}}  # more heads than go together
EVERY = (*native.available(), *native.emulated())
ONE = (*native.available()[:1], None)  # kernels, and their reference
on_every_isa = pytest.mark.parametrize("kernels", EVERY, ids=lambda kernels: kernels.name)


@functools.cache
def spec_of_shape(shape):
    spec = random_spec(**SHAPES[shape])
    if shape in MIXTURES:
        spec = with_experts(spec, **MIXTURES[shape])
    if shape in LATENT:
        spec = with_latent(spec, **LATENT[shape])
    if "gpt-oss" in shape:
        spec = with_sinks(spec)
    if "in an order" in shape:
        spec = with_orders(spec)
    if "in parallel" in shape:
        return in_parallel(spec)
    return with_every_feature(spec, norm_all="all heads" in shape) if "every feature" in shape else spec


def model_of(spec, kernels, quantization=None, threads=1):
    """None for the kernels: their reference implementation. With two threads small products mostly wait."""
    if kernels is None:
        return ReferenceModel(spec, "random", quantization=quantization)
    return NativeModel(spec, "random", quantization=quantization, threads=threads, kernels=kernels)


def forward(model, tokens, rows, positions, cache):
    return model.forward(Nodes(tokens, rows, positions), cache).hidden


def some_tokens(spec, count, seed=0):
    return torch.randint(0, spec.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def plain_forward(spec: NativeSpec, tokens):
    """Run one row from position 0 in plain float32 torch -> final hidden states, inputs of the layers."""
    weights = {"embed": spec.embedding.float()}
    positions = torch.arange(len(tokens))

    def norm(x, weight):
        if weight is None:
            return x
        if weight.dim() == 2:
            return functional.layer_norm(x, x.shape[-1:], *weight, spec.epsilon)
        if x.dim() == 3 and weight.numel() > x.shape[-1]:
            return norm(x.flatten(1), weight).view_as(x)
        return x * (x.square().mean(-1, keepdim=True) + spec.epsilon).rsqrt() * weight.float()

    def linear(x, layer):
        return functional.linear(x, layer.weight.float(), None if layer.bias is None else layer.bias.float())

    def rotate(x, rotary):
        angles = positions[:, None] * torch.tensor(rotary.inverse_frequencies)
        cos, sin = torch.cat([angles.cos()] * 2, 1)[:, None], torch.cat([angles.sin()] * 2, 1)[:, None]
        x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([x * cos + torch.cat([-b, a], dim=-1) * sin, rest], -1)

    x = weights["embed"][tokens] * spec.embed_scale
    x = norm(x if spec.positions is None else x + spec.positions[positions], spec.embedding_norm)
    entering = []
    for layer in spec.layers:
        entering.append(x * spec.tap_scale)
        rotary, first = layer.rotary or spec.rotary, linear(norm(x, layer.input_norm), layer.qkv)
        if layer.latent is not None:
            heads = plain_latent(layer, first, linear, functools.partial(rotate, rotary=rotary))
            x = x + linear(heads, layer.attention_out)
            x = x + plain_mlp(layer, norm(x, layer.post_norm), linear)
            continue
        shape = spec.heads_of(layer)
        counts = spec.heads, spec.kv_heads, spec.kv_heads
        widths = spec.head_dim, spec.head_dim, shape.value_width
        parts = first.split([count * width for count, width in zip(counts, widths, strict=True)], dim=1)
        q, k, v = (part.unflatten(1, (count, -1)) for part, count in zip(parts, counts, strict=True))
        if layer.norm_after:
            q, k = norm(rotate(q, rotary), layer.q_norm), norm(rotate(k, rotary), layer.k_norm)
        else:
            q, k = rotate(norm(q, layer.q_norm), rotary), rotate(norm(k, layer.k_norm), rotary)
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        distance = positions[:, None] - positions[None]
        mask = (distance >= 0) & (distance < (layer.window or 10**9))
        if layer.sinks is not None:  # a key of zeros whose score is the sink, and whose value is zero
            bias = torch.where(mask, 0.0, -torch.inf).expand(spec.heads, -1, -1)
            mask = torch.cat([bias, layer.sinks[:, None, None].expand(-1, len(tokens), 1)], 2)[None]
            k, v = (functional.pad(part, (0, 0, 0, 1)) for part in (k, v))
        if layer.cap is None:
            y = functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, scale=layer.scale, enable_gqa=True
            )[0]
        else:
            scores = q @ k.repeat_interleave(spec.heads // spec.kv_heads, 0).mT * spec.scale_of(layer)
            scores = (layer.cap * (scores / layer.cap).tanh()).masked_fill(~mask, -torch.inf)
            y = scores.softmax(-1) @ v.repeat_interleave(spec.heads // spec.kv_heads, 0)
        attended = norm(linear(y.transpose(0, 1).flatten(1), layer.attention_out), layer.attention_out_norm)
        read = x if layer.parallel else x + attended
        x = x + attended + norm(plain_mlp(layer, norm(read, layer.post_norm), linear), layer.mlp_out_norm)
    return norm(x, spec.final_norm), entering


def plain_latent(layer, first, linear, rotate):
    """The outputs of all heads of latent attention, with keys and values of their own, in plain float32 torch."""
    latent, (heads, _, dim, _) = layer.latent, layer.heads
    turned = latent.rotary_dim
    queries, vector, shared = first.split([first.shape[1] - dim, dim - turned, turned], 1)

    def norm(x, weight):
        return functional.rms_norm(x, weight.shape, weight, latent.epsilon)

    if latent.query_up is not None:
        queries = linear(norm(queries, latent.query_norm), latent.query_up)
    still, q = queries.view(len(first), heads, -1).tensor_split([-turned], 2)
    vector = norm(vector, latent.norm)
    keys = torch.stack([vector @ matrix.weight.float() for matrix in latent.absorb], 1)
    values = torch.stack([linear(vector, matrix) for matrix in latent.expand], 1)
    q = torch.cat([still, rotate(q)], 2)
    k = torch.cat([keys, rotate(shared[:, None]).expand(-1, heads, -1)], 2)
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, values))
    return (
        functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale)[0]
        .transpose(0, 1)
        .flatten(1)
    )


def plain_mlp(layer, x, linear):
    """The MLP of a layer, its experts, or both, in plain float32 torch."""

    def run(gate_up, down, x):
        if layer.plain:
            inner = linear(x, gate_up)
            return linear(functional.gelu(inner) if layer.xielu is None else xielu(inner, layer.xielu), down)
        gate, up = linear(x, gate_up).chunk(2, dim=-1)
        if layer.activation == "clamped_silu":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return linear(gate * (1.702 * gate).sigmoid() * (up + 1.0), down)
        active = functional.silu(gate) if layer.activation == "silu" else functional.gelu(gate, approximate="tanh")
        return linear(active * up, down)

    experts = layer.experts
    out = torch.zeros_like(x) if layer.down is None else run(layer.gate_up, layer.down, x)
    if experts is None:
        return out
    scores = functional.linear(x, experts.router.float())
    if experts.shared_gate:
        out = out * scores[:, -1:].sigmoid()
    scores = scores[:, : len(experts.down)]
    if experts.router_bias is not None:
        scores = scores + experts.router_bias.float()
    shares, chosen = shares_of(scores, experts.routing, experts.correction)
    read = x if experts.latent is None else linear(x, experts.latent[0])
    mixed = torch.zeros_like(read)
    for token in range(len(x)):
        for share, expert in zip(shares[token], chosen[token].tolist(), strict=True):
            mixed[token] += share * run(experts.gate_up[expert], experts.down[expert], read[token])
    return out + (mixed if experts.latent is None else linear(mixed, experts.latent[1]))


def shares_of(scores, routing, correction):
    """Return weights and numbers of each token's experts."""
    chances = scores.sigmoid() if routing.sigmoid else scores.softmax(1)
    values = chances if correction is None else chances + correction
    if routing.groups > 1:
        for row, own in enumerate(values.tolist()):
            size = len(own) // routing.groups
            totals = [sum(sorted(own[i : i + size])[-2:]) for i in range(0, len(own), size)]
            kept = sorted(totals)[-routing.used_groups :]
            values[row] = torch.tensor([x if totals[i // size] in kept else -9.0 for i, x in enumerate(own)])
    chosen = values.topk(routing.used)[1]
    shares = chances.gather(1, chosen)
    return shares / shares.sum(1, keepdim=True) if routing.normalised else shares, chosen


def xielu(x, shape):
    p, n, beta, eps = shape.tolist()
    high, low = np.log1p(np.exp(p)) * x * x, (x.clamp(max=eps).expm1() - x) * (beta + np.log1p(np.exp(n)))
    return torch.where(x > 0, high, low) + beta * x


@functools.cache
def plain_forward_of(shape):
    """Some tokens, and what ``plain_forward`` gives for them."""
    spec = spec_of_shape(shape)
    tokens = some_tokens(spec, 60)
    return tokens, *plain_forward(spec, tokens)


def error(x, expected):
    return float((x - expected).norm() / expected.norm())


@in_pairs(kernels=[*EVERY, None], shape=SHAPES, quantization=QUANTIZATIONS)
def test_the_forward_pass_agrees_with_plain_torch(kernels, shape, quantization):
    spec, (tokens, expected, entering) = spec_of_shape(shape), plain_forward_of(shape)
    model, (rows, positions) = model_of(spec, kernels, quantization), ragged({2: 60})
    hidden = forward(model, tokens, rows, positions, cache_for(spec))
    tapped = model.forward(Nodes(tokens, rows, positions), cache_for(spec), taps=(1, 0))
    assert torch.equal(tapped.hidden, hidden), "taps change nothing"
    bound = {None: 0.01, "int8": 0.03, "int4": 0.25}[quantization]
    assert error(hidden, expected) < bound
    assert error(tapped.features, torch.stack([entering[1], entering[0]], 1)) < bound
    head = spec.head or LinearWeights(spec.embedding)
    bias = None if head.bias is None else head.bias.float()
    assert error(model.logits(hidden), functional.linear(hidden, head.weight.float(), bias)) < 0.02


@pytest.mark.skipif(len(EVERY) < 2, reason="needs two instruction sets")
@pytest.mark.parametrize(
    ("shape", "quantization"), [("qwen2", "int8"), ("qwen2", "int4"), ("inputs in an order", "int4")]
)
def test_all_instruction_sets_give_the_same_logits_to_the_bit(shape, quantization):
    spec = spec_of_shape(shape)
    tokens, (rows, positions) = some_tokens(spec, 70), ragged({2: 50, 0: 20})
    models = [model_of(spec, kernels, quantization) for kernels in EVERY]
    logits = [model.logits(forward(model, tokens, rows, positions, cache_for(spec))) for model in models]
    assert all(torch.equal(logits[0], other) for other in logits[1:])


@on_every_isa
def test_bf16_agrees_closely_with_the_reference_with_a_float32_cache(kernels):
    spec = random_spec(bias=True, qk_norm=True)
    tokens, (rows, positions) = some_tokens(spec, 90), ragged({2: 60, 0: 30})
    both = [
        forward(model_of(spec, which), tokens, rows, positions, cache_for(spec, dtype=torch.float32))
        for which in (kernels, None)
    ]
    assert error(*both) < 0.003


def in_parts(length, sizes):
    """The length as a sum of these sizes, in turn; the last may be smaller."""
    parts, sizes = [], itertools.cycle(sizes)
    while (left := length - sum(parts)) > 0:
        parts.append(min(next(sizes), left))
    return parts


# The shape and the cache's dtype decide how attention runs, the quantization how matrix products run.
@in_pairs(kernels=EVERY, shape=SHAPES, quantization=QUANTIZATIONS, dtype=DTYPES, threads=[1, 2])
def test_results_are_bitwise_independent_of_other_tokens_in_the_call(kernels, shape, quantization, dtype, threads):
    spec = spec_of_shape(shape)
    model = model_of(spec, kernels, quantization, threads)
    lengths = {3: 70, 0: 33, 1: 1, 2: 7}
    tokens, (rows, positions) = some_tokens(spec, 111), ragged(lengths)
    together = forward(model, tokens, rows, positions, cache_for(spec, dtype=dtype))
    logits = model.logits(together)
    for row, length in lengths.items():
        mine = rows == row
        for sizes in ((1, 5, 7, 40), (40, 7, 1, 1, 5), (200,)):  # decoding, drafts, chunks of prompts
            cache, counts = cache_for(spec, dtype=dtype), in_parts(length, sizes)
            pieces = zip(*(t[mine].split(counts) for t in (tokens, rows, positions)), strict=True)
            assert torch.equal(torch.cat([forward(model, *piece, cache) for piece in pieces]), together[mine])
        assert torch.equal(model.logits(together[mine]), logits[mine])
        assert torch.equal(model.logits(together[mine][0]), logits[mine][0])


@on_every_isa
def test_results_are_bitwise_independent_of_the_number_of_threads(kernels):
    spec = random_spec(**SHAPES["smollm"])
    tokens, (rows, positions) = some_tokens(spec, 103), ragged({1: 99, 0: 4})
    results = [
        (model := model_of(spec, kernels, "int8", threads)).logits(
            forward(model, tokens, rows, positions, cache_for(spec))
        )
        for threads in (1, 2, 5, 24)  # with 24, products are also cut by rows
    ]
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.skipif(not EVERY, reason=f"no kernels here: {native.why_none()}")
@pytest.mark.parametrize("shape", ["experts, every feature", "latent, experts", "in parallel"])
def test_results_are_bitwise_independent_of_nodes(shape):
    """Of a matrix, threads compute the panels of their own node; here all nodes are the machine's first."""
    spec, cpus = spec_of_shape(shape), usable_cpus()
    tokens, (rows, positions) = some_tokens(spec, 70), ragged({1: 64, 0: 6})
    expected = forward(model_of(spec, EVERY[0], "int8", 2), tokens, rows, positions, cache_for(spec))
    for threads, nodes in ((5, 2), (3, 3), (40, 7)):
        with native.kernel_threads(threads, tuple(Node(0, cpus[i % len(cpus) :][:1]) for i in range(nodes))):
            model = model_of(spec, EVERY[0], "int8", 2)
            assert torch.equal(forward(model, tokens, rows, positions, cache_for(spec)), expected)


@on_every_isa
def test_a_long_prefill_equals_a_chunked_one(kernels):
    spec = random_spec()
    model, tokens = model_of(spec, kernels, "int8"), some_tokens(spec, 700)
    rows, positions = ragged({0: 700})
    whole = forward(model, tokens, rows, positions, cache_for(spec, 1, 700))
    cache = cache_for(spec, 1, 700)
    parts = [forward(model, *(t[i : i + 90] for t in (tokens, rows, positions)), cache) for i in range(0, 700, 90)]
    assert torch.equal(whole, torch.cat(parts))


@on_every_isa
def test_the_features_of_a_long_prefill_are_those_of_a_chunked_one(kernels):
    spec = random_spec(layers=3)
    model, tokens = model_of(spec, kernels, "int8"), some_tokens(spec, 300)
    nodes = Nodes(tokens, *ragged({0: 300}))
    whole = model.forward(nodes, cache_for(spec, 1), taps=(2, 0, 1)).features
    cache = cache_for(spec, 1)
    chunks = [Nodes(*(t[i : i + 90] for t in nodes[:3])) for i in range(0, 300, 90)]
    parts = [model.forward(chunk, cache, taps=(2, 0, 1)) for chunk in chunks]
    assert torch.equal(whole, torch.cat([part.features for part in parts]))


@pytest.mark.parametrize(
    ("shape", "kernels", "quantization"),
    [
        *((*case, to) for case, to in in_turn(in_turn(SHAPES, EVERY), ("int8", "int4", "int8", None))),
        *(("every feature", None, "int8"), ("latent, experts", None, "int4")),
    ],
    ids=named,
)
def test_last_tokens_have_the_hidden_states_of_a_whole_pass(kernels, shape, quantization):
    """To the bit, with all keys, values and features, wherever the tokens without hidden states end.

    ``fill`` writes the same keys and values, and returns the same features.
    """
    spec = spec_of_shape(shape)
    model, (rows, positions) = model_of(spec, kernels, quantization), ragged({2: 40, 0: 260})
    nodes, cache, every = Nodes(some_tokens(spec, 300), rows, positions), cache_for(spec), (1, 0, len(spec.layers))
    whole = model.forward(nodes, cache, every)

    def check(own, features, taps):
        if taps:
            assert torch.equal(features, whole.features[:, [every.index(tap) for tap in taps]])
        else:
            assert features is None
        for table in ("keys", "values"):
            pairs = zip(getattr(cache, table), getattr(own, table), strict=True)
            assert all(torch.equal(*layers) for layers in pairs)

    for text, taps in ((39, (1, 0)), (256, ()), (299, every[2:]), (300, every)):
        own = cache_for(spec)
        ends = model.forward(nodes._replace(text=text), own, taps)
        assert torch.equal(ends.hidden, whole.hidden[text:])
        check(own, ends.features, taps)
    for taps in ((1, 0), ()):
        own = cache_for(spec)
        check(own, model.fill(nodes, own, taps), taps)


@on_every_isa
def test_trees_have_the_hidden_states_of_all_tokens(kernels):
    spec = random_spec()
    tree = Nodes(some_tokens(spec, 2), *(torch.tensor(t) for t in ([0, 0], [0, 1], [0, 1], [-1, 0])), text=1)
    with pytest.raises(ParameterError, match="only a chain"):
        model_of(spec, kernels).forward(tree, cache_for(spec, 1))


@in_pairs(kernels=ONE, taps=[(3,), (0, -1)])  # 2 layers, and what the output head reads
def test_taps_must_be_layers(kernels, taps):
    spec, one = random_spec(), torch.zeros(1, dtype=torch.int64)
    model, none = model_of(spec, kernels), torch.empty(0, dtype=torch.int64)
    with pytest.raises(ParameterError, match="taps"):
        model.forward(Nodes(one, one, one), cache_for(spec), taps)
    assert model.forward(Nodes(none, none, none), cache_for(spec), (0,)).features.shape == (0, 1, spec.width)


@in_pairs(kernels=[*EVERY, None], limit=[None, 30.0], quantization=QUANTIZATIONS)
def test_hidden_states_with_nan_give_no_finite_logit(kernels, quantization, limit):
    spec = replace(random_spec(), logits_cap=limit)
    hidden = torch.randn(3, spec.width, generator=torch.Generator().manual_seed(0))
    hidden[1, 5] = torch.nan
    assert model_of(spec, kernels, quantization).logits(hidden).isfinite().all(1).tolist() == [True, False, True]
    assert model_of(spec, kernels, quantization).logits(hidden)[1].isnan().all()


@on_every_isa
def test_rejected_tokens_leave_no_trace(kernels):
    spec = random_spec()
    model, cache, clean = model_of(spec, kernels), cache_for(spec), cache_for(spec)
    tokens, (rows, positions) = some_tokens(spec, 20), ragged({1: 20})
    for which in (cache, clean):
        forward(model, tokens[:15], rows[:15], positions[:15], which)
    forward(model, some_tokens(spec, 5, seed=9), rows[15:], positions[15:], cache)
    last = [forward(model, tokens[15:], rows[15:], positions[15:], which) for which in (cache, clean)]
    assert torch.equal(last[0], last[1])


def random_trees(rng, starts, size):
    """Return row, position, slot and parent of each node of random trees with ``size`` nodes.

    starts: row -> number of tokens of its text, behind which the tree lies.
    """
    rows, positions, slots, parents = [], [], [], []
    for row, text in starts.items():
        root = len(rows)
        for node in range(size):
            parent = -1 if node == 0 else root + rng.randint(max(0, node - 4), node - 1)
            positions.append(text if parent < 0 else positions[parent] + 1)
            rows, slots, parents = [*rows, row], [*slots, text + node], [*parents, parent]
    return rows, positions, slots, parents


def filled_with_texts(model, spec, starts, dtype):
    cache = cache_for(spec, positions=600, dtype=dtype)
    for row, text in starts.items():
        if text:
            forward(model, some_tokens(spec, text, row), *ragged({row: text}), cache)
    return cache


def copy_into(cache, tables):
    for table, kept in zip((cache.keys, cache.values), tables, strict=True):
        table.copy_(kept)


@in_pairs(kernels=EVERY, window=[None, 7, 100], starts=[{0: 5, 1: 0, 3: 21}, {2: 250, 0: 255}, {1: 256, 2: 500}])
def test_tree_nodes_have_bitwise_the_results_of_plain_decoding(kernels, starts, window):
    """The kernels sum blocks of 256 keys. Trees that cross a block's edge, in slots or in positions, are included."""
    spec, rng = random_spec(window=window, head_dim=32), random.Random(str(starts))
    quantization, dtype = ("int8", torch.bfloat16) if window else (None, torch.float32)
    model = model_of(spec, kernels, quantization)
    cache = filled_with_texts(model, spec, starts, dtype)
    rows, positions, slots, parents = random_trees(rng, starts, 12)
    nodes = Nodes(some_tokens(spec, len(rows)), *torch.tensor([rows, positions, slots, parents]))
    before = cache.keys.clone(), cache.values.clone()
    together = model.forward(nodes, cache).hidden
    after = cache.keys.clone(), cache.values.clone()
    for node in rng.sample(range(len(rows)), 8):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        copy_into(cache, before)
        alone = [forward(model, *(t[i : i + 1] for t in nodes[:3]), cache) for i in path]
        assert torch.equal(alone[-1][0], together[node])
        plain = [table[:, rows[node], :, : positions[node] + 1].clone() for table in (cache.keys, cache.values)]
        copy_into(cache, after)
        root = slots[path[0]]
        moved = torch.tensor([[slots[i] - root for i in path]])
        cache.keep(torch.tensor([rows[node]]), torch.tensor([root]), moved)
        for table, wanted in zip((cache.keys, cache.values), plain, strict=True):
            assert torch.equal(table[:, rows[node], :, : positions[node] + 1], wanted), "keep left something behind"


@functools.cache
def after_trees(kernels, window, heads):
    """Hidden states of trees. Of 21 heads seven queries share a key, in texts that span several blocks of keys."""
    starts = {6: {0: 30, 2: 4}, 21: {0: 300, 1: 250, 2: 490}}[heads]
    spec = random_spec(window=window, heads=heads)
    trees = random_trees(random.Random(1), starts, 9)
    nodes = Nodes(some_tokens(spec, 9 * len(starts)), *torch.tensor(trees))
    model = model_of(spec, kernels)
    return model.forward(nodes, filled_with_texts(model, spec, starts, torch.float32)).hidden


@in_pairs(kernels=EVERY, window=[None, 7, 300], heads=[6, 21])
def test_trees_agree_with_the_reference(kernels, window, heads):
    assert error(after_trees(kernels, window, heads), after_trees(None, window, heads)) < 0.003


@on_every_isa
def test_trees_split_over_two_passes_give_bitwise_the_same_results(kernels):
    spec, rng = random_spec(), random.Random(4)
    model, starts = model_of(spec, kernels), {0: 3, 1: 200}
    nodes = Nodes(some_tokens(spec, 360), *torch.tensor(random_trees(rng, starts, 180)))
    whole = model.forward(nodes, filled_with_texts(model, spec, starts, torch.bfloat16)).hidden
    cache = filled_with_texts(model, spec, starts, torch.bfloat16)
    rest = nodes.parents[180:] - torch.where(nodes.parents[180:] < 0, 0, 180)
    halves = Nodes(*(t[:180] for t in nodes[:5])), Nodes(*(t[180:] for t in nodes[:4]), rest)
    assert torch.equal(torch.cat([model.forward(half, cache).hidden for half in halves]), whole)


INVALID_TREES = [
    ([4, 5], [4, 5], [-1, 1], "comes before"),
    ([4, 5], [4, 5], [-1, -2], "comes before"),
    ([4, 6], [4, 5], [-1, 0], "does not follow"),
    ([4, 5, 5], [4, 5, 5], [-1, 0, 0], "share a slot"),
    ([4, 5], [4, 3], [-1, 0], "in the row's text"),
    ([4, 5], [4, 300], [-1, 0], "outside the cache"),
    ([4, 6], [4, 7], [-1, -1], "texts of different lengths"),
]


@on_every_isa
def test_invalid_trees_are_refused(kernels):
    model, cache = model_of(random_spec(), kernels), cache_for(random_spec())
    for positions, slots, parents, what in INVALID_TREES:
        nothing = [0] * len(positions)
        with pytest.raises(ParameterError, match=what):
            model.forward(Nodes(*torch.tensor([nothing, nothing, positions, slots, parents])), cache)


@on_every_isa
def test_an_empty_call_returns_empty_results(kernels):
    spec = random_spec()
    model, none = model_of(spec, kernels), torch.empty(0, dtype=torch.int64)
    assert forward(model, none, none, none, cache_for(spec)).shape == (0, spec.width)
    assert model.logits(torch.empty(0, spec.width)).shape == (0, spec.vocab_size)


INVALID_TEXTS = [
    ([131], [0], [0], "vocabulary"),
    ([-1], [0], [0], "vocabulary"),
    ([1], [4], [0], "row"),
    ([1], [0], [-1], "position"),
    ([1, 2], [0, 0], [3, 3], "ascend"),
]


@on_every_isa
def test_invalid_tokens_rows_and_positions_are_refused(kernels):
    model, cache = model_of(random_spec(), kernels), cache_for(random_spec())
    for *text, what in INVALID_TEXTS:
        with pytest.raises(ParameterError, match=what):
            forward(model, *map(torch.tensor, text), cache)


@on_every_isa
def test_a_cache_of_another_model_is_refused(kernels):
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ParameterError, match="cache"):
        forward(model_of(random_spec(), kernels), one, one, one, cache_for(random_spec(layers=3)))


def test_heads_of_odd_width_are_refused():
    with pytest.raises(ModelFormatError, match="multiple of 16"):
        NativeModel(random_spec(head_dim=24), "random")


def test_rotary_positions_wider_than_a_head_are_refused():
    spec = replace(random_spec(head_dim=16), rotary=Rotary((1.0,) * 9))
    with pytest.raises(ModelFormatError, match="18 elements of heads of 16"):
        NativeModel(spec, "random")


def tiny_decoder(
    tied: bool = False, qk_norm: str | None = "head", activation: str = "silu", norms: str = "before", scale=None
) -> tuple[DecoderSpec, dict[str, torch.Tensor]]:
    """Description and weights of two layers, of which the second has a window and the scale given."""
    torch.manual_seed(0)
    rotary = Rotary(tuple(10000 ** (-i / 8) for i in range(8)))
    first = AttentionSpec(4, 2, 16, rotary=rotary, qk_norm=qk_norm, bias=True)
    second = replace(first, window=12, scale=scale)
    layers = tuple(LayerSpec(attention, MLPSpec(80, activation), norms) for attention in (first, second))
    config = DecoderSpec("qwen3", 90, 48, 128, layers, NormSpec(), 48, tied=tied)
    weights = {"embed.weight": torch.randn(90, 48), "norm.weight": torch.rand(48) + 0.5}
    if not tied:
        weights["head.weight"] = torch.randn(90, 48) / 7
    for i in range(2):
        shapes = {"qkv": (128, 48), "o": (48, 64), "gate_up": (160, 48), "down": (48, 80)}
        weights |= {f"layers.{i}.{n}.weight": torch.randn(s) / s[1] ** 0.5 for n, s in shapes.items()}
        weights[f"layers.{i}.qkv.bias"] = torch.randn(128) / 5
        norms = {"attn_norm": 48, "mlp_norm": 48} | ({"q_norm": 16, "k_norm": 16} if qk_norm else {})
        weights |= {f"layers.{i}.{n}.weight": torch.rand(s) + 0.5 for n, s in norms.items()}
    return config, weights


def transformers_logits(model, tokens):
    """Return the logits of a ``Transformer`` for one row from position 0."""
    positions = torch.arange(len(tokens))

    def attend(layer, q, k, v, terms):
        distance = positions[:, None] - positions[None]
        mask = (distance >= 0) & (distance < (terms.window or 10**9))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=terms.scale, enable_gqa=True)

    return model.logits(model.hidden_states(tokens[None], positions[None], attend).hidden)[0]


@on_every_isa
@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"qk_norm": None}], ids=str)
def test_a_loaded_transformer_gives_the_same_logits(kernels, changes, monkeypatch):
    monkeypatch.setattr(native, "select", lambda: kernels)
    transformer, model = (
        Transformer(*tiny_decoder(**changes), "tiny"),
        NativeModel(spec_of(*tiny_decoder(**changes)), "tiny"),
    )
    tokens, (rows, positions) = torch.arange(40) * 2, ragged({0: 40})
    logits = model.logits(forward(model, tokens, rows, positions, cache_for_model(model)))
    assert error(logits, transformers_logits(transformer, tokens)) < 0.03
    assert model.kernels == kernels.name


def cache_for_model(model):
    from paceline.core.cache import KVCache

    return KVCache(model.kv_layers, 2, 64, dtype=torch.float32)


@pytest.mark.parametrize("changes", [{"activation": "gelu"}, {"norms": "after_sum"}], ids=["gelu", "norms last"])
def test_unsupported_architectures_are_refused_with_the_reason(changes):
    with pytest.raises(ModelFormatError, match="without"):
        spec_of(*tiny_decoder(**changes))


def test_an_unknown_quantization_is_refused():
    with pytest.raises(ParameterError, match="quantization"):
        NativeModel(random_spec(), "random", quantization="int3")
