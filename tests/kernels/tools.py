"""Small decoders with random weights, and single kernels as functions of tensors."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.core.cache import KVCache
from paceline.core.eight_bits import vector_width
from paceline.core.pages import PAGE_POSITIONS, blocks_for, pages_for
from paceline.kernels import abi, native, pack, structs
from paceline.kernels.abi import Epilogue
from paceline.kernels.attention.base import AttentionTerms
from paceline.kernels.experts import Routing
from paceline.kernels.pack import Format, Int4Weight, Weight, quantise
from paceline.kernels.spec import ExpertsWeights, Heads, LatentWeights, LayerWeights, LinearWeights, NativeSpec, Rotary

THREADS = 2
GARBAGE = 3e4  # in a cache, beyond a row's length


def random_spec(
    *,
    width: int = 72,
    heads: int = 6,
    kv_heads: int = 3,
    head_dim: int = 16,
    ffn: int = 88,
    vocab_size: int = 131,
    layers: int = 2,
    tied: bool = True,
    bias: bool = False,
    qk_norm: bool = False,
    window: int | None = None,
    value_dim: int | None = None,
    max_positions: int = 512,
    seed: int = 0,
) -> NativeSpec:
    shape = Heads(heads, kv_heads, head_dim, value_dim)
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=random) * scale).bfloat16()

    def linear(outputs: int, inputs: int) -> LinearWeights:
        return LinearWeights(normal(outputs, inputs, scale=inputs**-0.5), normal(outputs, scale=0.1) if bias else None)

    def norm(size: int) -> Tensor:
        return 1 + normal(size, scale=0.1)

    made = [
        LayerWeights(
            qkv=linear((heads + kv_heads) * head_dim + kv_heads * shape.value_width, width),
            attention_out=linear(width, heads * shape.value_width),
            gate_up=linear(2 * ffn, width),
            down=linear(width, ffn),
            input_norm=norm(width),
            post_norm=norm(width),
            q_norm=norm(head_dim) if qk_norm else None,
            k_norm=norm(head_dim) if qk_norm else None,
            window=window,
            heads=None if value_dim is None else shape,
        )
        for _ in range(layers)
    ]
    return NativeSpec(
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=max_positions,
        rotary=_rotary(10000.0, head_dim),
        embedding=normal(vocab_size, width),
        final_norm=norm(width),
        layers=made,
        head=None if tied else linear(vocab_size, width),
    )


def _rotary(base: float, rotated: int) -> Rotary:
    return Rotary(tuple(base ** (-2 * i / rotated) for i in range(rotated // 2)))


def with_every_feature(spec: NativeSpec, norm_all: bool = False) -> NativeSpec:
    """The spec with norms after each part and, in half of the layers, none before; with GELU, scales, two rotaries.

    norm_all: with norms of queries and keys over all heads together.
    """
    random = torch.Generator().manual_seed(9)

    def norm(size: int) -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=random)

    def changed(index: int, layer: LayerWeights) -> LayerWeights:
        after = {"attention_out_norm": norm(spec.width), "mlp_out_norm": norm(spec.width)}
        all_heads = {"q_norm": norm(spec.heads * spec.head_dim), "k_norm": norm(spec.kv_heads * spec.head_dim)}
        more: dict[str, object] = {**after, "activation": "gelu_tanh", **(all_heads if norm_all else {})}
        if index % 2:
            more |= {"input_norm": None, "post_norm": None, "scale": 0.3, "window": None}
            more["rotary"] = _rotary(1e6, spec.head_dim // 2)
        return replace(layer, **more)  # type: ignore[arg-type]

    layers = [changed(index, layer) for index, layer in enumerate(spec.layers)]
    return replace(spec, layers=layers, embed_scale=3.7, tap_scale=0.25)


def with_experts(
    spec: NativeSpec,
    *,
    count: int = 11,
    used: int = 3,
    width: int = 40,
    normalised: bool = True,
    shared: bool = False,
    sigmoid: bool = False,
    groups: int = 1,
    latent: int | None = None,
) -> NativeSpec:
    """The spec with mixtures of experts in place of its MLPs, or beside them behind a gate if ``shared``."""
    outer = latent or spec.width
    random = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=random) * shape[-1] ** -0.5).bfloat16()

    def linears(outputs: int, inputs: int, bias: Tensor | None) -> list[LinearWeights]:
        return [LinearWeights(normal(outputs, inputs), None if bias is None else normal(outputs)) for _ in range(count)]

    def changed(layer: LayerWeights) -> LayerWeights:
        experts = ExpertsWeights(
            router=4.0 * normal(count + shared, spec.width),
            gate_up=linears(2 * width, outer, layer.qkv.bias),
            down=linears(outer, width, layer.qkv.bias),
            routing=Routing(used, normalised, sigmoid, groups, max(1, groups // 2)),
            correction=None if groups == 1 else 2.0 * torch.randn(count, generator=random),
            router_bias=None if layer.qkv.bias is None else normal(count),
            latent=None
            if latent is None
            else (LinearWeights(normal(latent, spec.width)), LinearWeights(normal(spec.width, latent))),
        )
        return replace(layer, experts=experts) if shared else replace(layer, experts=experts, gate_up=None, down=None)

    return replace(spec, layers=[changed(layer) for layer in spec.layers])


def with_orders(spec: NativeSpec) -> NativeSpec:
    """The spec with 4-bit codes whose inputs are in an order of each matrix, as GPTQ's activation order has them."""
    seeds = itertools.count()

    def ordered(linear: LinearWeights | None) -> LinearWeights | None:
        return None if linear is None else replace(linear, read=partial(_in_an_order, linear.weight, next(seeds)))

    def changed(layer: LayerWeights) -> LayerWeights:
        names = ("qkv", "attention_out", "gate_up", "down")
        parts: dict[str, Any] = {name: ordered(getattr(layer, name)) for name in names}
        if layer.experts is not None:
            both = {name: [ordered(one) for one in getattr(layer.experts, name)] for name in ("gate_up", "down")}
            parts["experts"] = replace(layer.experts, **both)  # type: ignore[arg-type]
        return replace(layer, **parts)

    return replace(spec, layers=[changed(layer) for layer in spec.layers], ordered=True)


def _in_an_order(weight: Tensor, seed: int, to: Format) -> Weight:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    rounded = quantise(weight[:, order] if to == "int4" else weight, to)
    return replace(rounded, order=order) if isinstance(rounded, Int4Weight) else rounded


def with_sinks(spec: NativeSpec) -> NativeSpec:
    """The spec with one more score of each head in every softmax, and with gpt-oss's activation."""
    random = torch.Generator().manual_seed(12)
    layers = [
        replace(layer, sinks=torch.randn(spec.heads, generator=random), activation="clamped_silu")
        for layer in spec.layers
    ]
    return replace(spec, layers=layers)


def with_latent(spec: NativeSpec, *, heads: int = 5, rank: int = 48, query_rank: int | None = 30) -> NativeSpec:
    """The spec with latent attention in every layer."""
    random = torch.Generator().manual_seed(13)
    turned, key_dim, value_dim = 16, 24, 20

    def linear(outputs: int, inputs: int) -> LinearWeights:
        return LinearWeights((torch.randn(outputs, inputs, generator=random) * inputs**-0.5).bfloat16())

    def norm(size: int) -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=random)

    def changed(layer: LayerWeights) -> LayerWeights:
        queries = heads * (key_dim + turned)
        latent = LatentWeights(
            turned,
            [linear(rank, key_dim) for _ in range(heads)],
            [linear(value_dim, rank) for _ in range(heads)],
            norm(rank),
            query_up=None if query_rank is None else linear(queries, query_rank),
            query_norm=None if query_rank is None else norm(query_rank),
            epsilon=1e-5,
        )
        return replace(
            layer,
            qkv=linear((query_rank or queries) + rank + turned, spec.width),
            attention_out=linear(spec.width, heads * value_dim),
            heads=Heads(heads, 1, turned + rank),
            rotary=_rotary(10000.0, turned),
            scale=0.17,
            latent=latent,
        )

    return replace(spec, layers=[changed(layer) for layer in spec.layers])


def in_parallel(spec: NativeSpec) -> NativeSpec:
    """The spec with MLPs that read the layers' inputs, layer norms, capped scores, and norms behind the rotation.

    A position's vector and a norm stand behind the embedding; MLPs without experts have no gate.
    """
    random = torch.Generator().manual_seed(13)

    def norm(size: int) -> Tensor:
        return torch.stack([1 + 0.1 * torch.randn(size, generator=random), 0.1 * torch.randn(size, generator=random)])

    def changed(index: int, layer: LayerWeights) -> LayerWeights:
        more: dict[str, object] = {"parallel": index % 2 == 0, "cap": 2.0, "norm_after": True}
        more |= {"input_norm": norm(spec.width), "post_norm": norm(spec.width)}
        if layer.experts is None:
            assert layer.down is not None
            inner = layer.down.weight.shape[1]
            weight = torch.randn(inner, spec.width, generator=random) * spec.width**-0.5
            bias = None if layer.down.bias is None else torch.randn(inner, generator=random)
            more |= {"plain": True, "gate_up": LinearWeights(weight.bfloat16(), bias)}
            more |= {"activation": "gelu"} if index % 2 else {"activation": "xielu", "xielu": XIELU}
        return replace(layer, **more)  # type: ignore[arg-type]

    return replace(
        spec,
        layers=[changed(index, layer) for index, layer in enumerate(spec.layers)],
        final_norm=norm(spec.width),
        embedding_norm=norm(spec.width),
        positions=torch.randn(spec.max_positions, spec.width, generator=random),
        centred=True,
    )


XIELU = torch.tensor([0.8, 0.3, 0.5, -1e-3])


def cache_for(spec: NativeSpec, rows: int = 4, positions: int = 300, dtype: torch.dtype = torch.bfloat16) -> KVCache:
    return KVCache(spec.kv_layers, rows, positions, dtype=dtype)


def terms_for(heads: int, device: str = "cpu") -> list[AttentionTerms]:
    """Caps, sinks, and both."""
    sinks = torch.linspace(-1.0, 2.0, heads, device=device)
    return [AttentionTerms(cap=0.7), AttentionTerms(sinks=sinks), AttentionTerms(cap=0.7, sinks=sinks)]


def ragged_cache(
    lengths: Sequence[int],
    groups: int,
    positions: int,
    dim: int,
    seed: int,
    device: str = "cpu",
    value_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Random keys and values up to each row's length, large finite numbers beyond."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), groups, positions)
    keys = torch.randn(*shape, dim, generator=generator)
    values = torch.randn(*shape, value_dim or dim, generator=generator)
    for row, length in enumerate(lengths):
        keys[row, :, length:] = GARBAGE
        values[row, :, length:] = -GARBAGE
    return keys.to(device), values.to(device)


def in_pages(tables: Sequence[Tensor], lengths: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Tables [R, G, P, W] in scattered pages [pages, G, 64, W], and the rows' pages, int32 [R, blocks].

    Blocks behind a row's length have page 0, which holds NaN.
    """
    blocks = blocks_for(tables[0].shape[2])
    owned = [(row, block) for row, length in enumerate(lengths) for block in range(pages_for(length))]
    pages = torch.zeros(len(lengths), blocks, dtype=torch.int32, device=tables[0].device)
    numbers = random.Random(len(owned)).sample(range(1, len(owned) + 3), len(owned))
    found = [table.new_zeros(len(owned) + 3, table.shape[1], PAGE_POSITIONS, table.shape[3]) for table in tables]
    for (row, block), page in zip(owned, numbers, strict=True):
        pages[row, block] = page
        for own, table in zip(found, tables, strict=True):
            part = table[row, :, block * PAGE_POSITIONS : (block + 1) * PAGE_POSITIONS]
            own[page, :, : part.shape[1]] = part
    for own in found:
        own[0].view(torch.int8).fill_(-1)  # NaN, also of a scale
    return found, pages


def ragged(lengths: dict[int, int], starts: dict[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Rows and positions of a flat call: row -> number of tokens, row -> first position (default 0)."""
    starts = starts or {}
    rows = torch.cat([torch.full((n,), row) for row, n in lengths.items()])
    return rows, torch.cat([torch.arange(n) + starts.get(row, 0) for row, n in lengths.items()])


def run_linear(
    kernels: native.Kernels,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    epilogue: Epilogue = Epilogue.STORE,
    out: Tensor | None = None,
    threads: int = THREADS,
) -> Tensor:
    """x [N, K] through one packed linear layer; the output's columns are those of the weight (half with SwiGLU)."""
    packed = pack.pack(weight, bias)
    description = structs.linear(packed)
    columns = packed.outputs // 2 if epilogue == Epilogue.SWIGLU else packed.outputs
    stride = pack.round_up(packed.outputs, 64)
    wide = torch.zeros(x.shape[0], stride) if out is None else pad(out, (0, stride - out.shape[1])).contiguous()
    padded = pad(x, (0, packed.inputs - x.shape[1])).contiguous()
    place = native.pool(kernels, threads).handle, ctypes.addressof(description), padded.data_ptr(), x.shape[0]
    kernels.library.pl_linear(kernels.handle, *place, epilogue, wide.data_ptr(), stride)
    return wide[:, :columns].contiguous()


def quantise_row(kernels: native.Kernels, x: Tensor, weight: Weight) -> tuple[Tensor, Tensor, Tensor]:
    """x [K] -> int8 values [K padded], scales of groups of 64, sums."""
    packed = pack.pack(weight)
    description = structs.linear(packed)
    padded = pad(x, (0, packed.inputs - x.shape[0])).contiguous()
    values = torch.zeros(packed.inputs, dtype=torch.int8)
    scales = torch.zeros(packed.inputs // 64)
    sums = torch.zeros(packed.inputs // (packed.group or 64), dtype=torch.int32)
    place = padded.data_ptr(), values.data_ptr(), scales.data_ptr(), sums.data_ptr()
    kernels.library.pl_quantise(kernels.handle, ctypes.addressof(description), *place)
    return values, scales, sums


def run_attention(
    kernels: native.Kernels,
    cache: KVCache,
    qkv: Tensor,
    row: int,
    positions: Tensor,
    table: tuple[Tensor, Tensor],
    heads: int,
    window: int | None = None,
) -> Tensor:
    """Rotary, cache write and attention of one row's new tokens in layer 0: qkv [N, (H + 2G) D] -> [N, H D]."""
    kv_heads, dim = cache.keys.shape[2], vector_width(cache.keys)
    qkv = qkv.clone()
    out = torch.zeros(qkv.shape[0], heads * dim)
    whole = structs.cache(cache)
    where = whole.tables[0]
    cos, sin = (part.contiguous() for part in table)
    attention = abi.CAttention(
        qkv=qkv.data_ptr(),
        qkv_stride=qkv.shape[1],
        out=out.data_ptr(),
        out_stride=out.shape[1],
        positions=positions.data_ptr(),
        keys=where.keys,
        values=where.values,
        element=whole.element,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        value_dim=dim,
        capacity=whole.capacity,
        blocks=blocks_for(whole.capacity),
        window=window or 0,
        scale=dim**-0.5,
        epsilon=1e-6,
    )
    rotary = abi.CRotary(cosine=cos.data_ptr(), sine=sin.data_ptr(), half=cos.shape[1], positions=cos.shape[0])
    place = ctypes.addressof(attention), ctypes.addressof(rotary)
    kernels.library.pl_attend(kernels.handle, *place, row, qkv.shape[0])
    return out


def rms_norm(kernels: native.Kernels, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    width = x.shape[0]
    full = pack.round_up(width, 64)
    padded, weights, out = pad(x, (0, full - width)), pad(weight, (0, full - width)), torch.zeros(full)
    place = padded.data_ptr(), weights.data_ptr(), width, full, epsilon, out.data_ptr()
    kernels.library.pl_rms_norm(kernels.handle, *place)
    return out[:width]


def embed(kernels: native.Kernels, weight: Weight, token: int) -> Tensor:
    packed = pack.pack(weight)
    description = structs.linear(packed)
    out = torch.zeros(packed.inputs)
    kernels.library.pl_embed(kernels.handle, ctypes.addressof(description), token, out.data_ptr())
    return out


def same_bits(tensors: Sequence[Tensor]) -> bool:
    return all(torch.equal(tensors[0], other) for other in tensors[1:])
