import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covering import in_pairs
from kernels import reference
from kernels.tools import random_spec, run_attention
from paceline.core.cache import KVCache, KVHeads
from paceline.core.eight_bits import restored, stored, vector_width
from paceline.core.nodes import Nodes
from paceline.kernels import native

on_every_isa = pytest.mark.parametrize("kernels", native.available(), ids=lambda kernels: kernels.name)
ROWS, ROW = 3, 1
DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def filled_cache(kv_heads, positions, dim, dtype, seed=0):
    cache = KVCache([KVHeads(kv_heads, dim)], ROWS, positions, dtype=dtype)
    random = torch.Generator().manual_seed(seed)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(stored(torch.randn(*tensor.shape[:-1], dim, generator=random), dtype))
    return cache


def copy_of(cache):
    copy = KVCache(cache.shapes, cache.rows, cache.positions, dtype=cache.keys.dtype)
    copy.keys.copy_(cache.keys)
    copy.values.copy_(cache.values)
    return copy


def case(kv_heads, shared, dim, past, new, positions, dtype):
    spec = random_spec(kv_heads=kv_heads, heads=kv_heads * shared, head_dim=dim)
    cache = filled_cache(kv_heads, positions, dim, dtype)
    qkv = torch.randn(new, (shared + 2) * kv_heads * dim, generator=torch.Generator().manual_seed(1))
    return cache, qkv, past + torch.arange(new), spec.rotary.table(spec.max_positions)


def by_reference(cache, qkv, positions, table, heads, window):
    kv_heads, dim = cache.keys.shape[2], vector_width(cache.keys)
    q, k, v = qkv.view(qkv.shape[0], -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = (part[positions] for part in table)
    rows = torch.full_like(positions, ROW)
    reference.write(0, cache, rows, positions, reference.rotate(k, cos, sin), v)
    seen = reference.seen_by(Nodes(rows, rows, positions))
    return reference.attend(0, cache, reference.rotate(q, cos, sin), rows, seen, dim**-0.5, window).flatten(1)


@on_every_isa
@settings(max_examples=30, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 7),
    dim=st.sampled_from([16, 48, 64, 80, 128]),
    past=st.integers(0, 300),
    new=st.integers(1, 40),
    window=st.sampled_from([None, 1, 7, 100, 1000]),
    dtype=st.sampled_from(DTYPES),
)
def test_attention_equals_the_reference(kernels, kv_heads, shared, dim, past, new, window, dtype):
    cache, qkv, positions, table = case(kv_heads, shared, dim, past, new, 350, dtype)
    other = copy_of(cache)
    heads = kv_heads * shared
    out = run_attention(kernels, cache, qkv, ROW, positions, table, heads, window)
    expected = by_reference(other, qkv, positions, table, heads, window)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5 if dtype == torch.float32 else 2e-2)
    keys, others = (restored(each.keys, torch.float32) for each in (cache, other))
    torch.testing.assert_close(keys, others, rtol=1e-2, atol=4e-2 if dtype == torch.int8 else 1e-6)  # a step of int8
    assert torch.equal(cache.values, other.values)


@in_pairs(kernels=native.available(), dtype=DTYPES, window=[None, 5, 250])
def test_a_querys_bits_do_not_depend_on_the_other_queries(kernels, dtype, window):
    cache, qkv, positions, table = case(2, 3, 64, 200, 120, 400, dtype)
    together = run_attention(kernels, cache, qkv, ROW, positions, table, 6, window)
    for size in (1, 4, 7, 33):
        parts = [
            run_attention(kernels, cache, qkv[i : i + size], ROW, positions[i : i + size], table, 6, window)
            for i in range(0, 120, size)
        ]
        assert torch.equal(torch.cat(parts), together)


@on_every_isa
def test_keys_beyond_the_query_are_never_read(kernels):
    cache, qkv, positions, table = case(2, 3, 64, 100, 4, 400, torch.bfloat16)
    first = run_attention(kernels, cache, qkv, ROW, positions, table, 6)
    cache.keys[:, :, :, 104:] = 50.0
    cache.values[:, :, :, 104:] = -50.0
    assert torch.equal(run_attention(kernels, cache, qkv, ROW, positions, table, 6), first)


@on_every_isa
def test_padding_beyond_the_end_is_written_to_the_trash_position(kernels):
    cache, qkv, positions, table = case(2, 3, 64, 18, 5, 20, torch.float32)
    before = copy_of(cache)
    out = run_attention(kernels, cache, qkv, ROW, positions, table, 6)
    alone = run_attention(kernels, before, qkv[:2], ROW, positions[:2], table, 6)
    assert torch.equal(out[:2], alone)
    assert torch.equal(cache.keys[:, :, :, :20], before.keys[:, :, :, :20])
    assert not torch.equal(cache.values[0, ROW, :, 20], before.values[0, ROW, :, 20])


@in_pairs(kernels=native.available(), part=[0, 3], dtype=[torch.float32, torch.int8])  # of the query, of a key
def test_scores_that_are_nan_give_nan(kernels, part, dtype):
    cache, qkv, positions, table = case(1, 3, 64, 100, 4, 400, dtype)
    qkv.view(4, 5, 64)[2, part, 5] = torch.nan
    expected = by_reference(copy_of(cache), qkv, positions, table, 3, None)
    assert torch.equal(run_attention(kernels, cache, qkv, ROW, positions, table, 3).isnan(), expected.isnan())
    assert expected.isnan().any()


@on_every_isa
def test_other_rows_stay_unchanged(kernels):
    cache, qkv, positions, table = case(2, 3, 64, 18, 5, 40, torch.float32)
    before = copy_of(cache)
    run_attention(kernels, cache, qkv, ROW, positions, table, 6)
    for row in (0, 2):
        assert torch.equal(cache.keys[:, row], before.keys[:, row])
        assert torch.equal(cache.values[:, row], before.values[:, row])
