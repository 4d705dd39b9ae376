"""Vectors in 8 bits keep their numbers closely, and nothing but a vector's own numbers decides about its bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.cache import KVCache, KVHeads
from paceline.core.eight_bits import LARGEST, restored, scales_of, stored, stored_width, vector_width

on_both = pytest.mark.parametrize("dtype", LARGEST, ids=str)
LARGEST_ERROR = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 16 / 448}  # of the largest magnitude: half of a step


@on_both
@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 40).map(lambda n: 4 * n), size=st.floats(1e-20, 1e20), seed=st.integers(0, 99))
def test_a_vector_is_kept_to_half_a_step_of_its_own_scale(
    dtype: torch.dtype, width: int, size: float, seed: int
) -> None:
    vectors = size * torch.randn(5, width, generator=torch.Generator().manual_seed(seed))
    table = stored(vectors, dtype)
    assert (table.dtype, table.shape[1], vector_width(table)) == (dtype, stored_width(width, dtype), width)
    errors = (restored(table, torch.float32) - vectors).abs()
    assert bool((errors <= 1.001 * LARGEST_ERROR[dtype] * vectors.abs().amax(1, keepdim=True)).all())
    assert torch.equal(
        torch.cat([stored(vector[None], dtype).view(torch.int8) for vector in vectors]), table.view(torch.int8)
    )


def test_int8_rounds_to_nearest_even() -> None:
    table = stored(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 0.49]]), torch.int8)
    assert table[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -126, 0]
    assert scales_of(table).tolist() == [1.0]


@on_both
def test_zeros_stay_zeros_and_what_is_not_finite_gives_nan(dtype: torch.dtype) -> None:
    vectors = torch.tensor(
        [[0.0, 0, 0, 0], [1e-31, 0, 0, 0], [torch.nan, 1, 1, 1], [1, -torch.inf, 1, 1], [1, 1, 1, 1]]
    )
    found = restored(stored(vectors, dtype), torch.float32)
    assert not found[:2].any()
    assert found[2:4].isnan().all()
    assert torch.equal(found[4], vectors[4])
    memory = torch.zeros(2, stored_width(4, dtype), dtype=torch.int8).view(dtype)
    assert not restored(memory, torch.float32).any(), "fresh memory must not hold NaN"


@on_both
@pytest.mark.parametrize("shape", [KVHeads(2, 8), KVHeads(2, 12, 8), KVHeads(1, 12, 8, values_in_keys=True)])
def test_a_cache_writes_moves_and_copies_vectors_with_their_scales(dtype: torch.dtype, shape: KVHeads) -> None:
    cache = KVCache([shape] * 2, 3, 9, dtype)
    sizes = (2, shape.heads, 5, shape.dim)
    keys = torch.randn(sizes, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 6)[:, None]
    values = keys[..., -shape.value_width :]
    cache.write(1, cache.write_index(torch.tensor([2, 0]), torch.arange(5).expand(2, 5)), keys, values)
    cache.keep(torch.tensor([2]), torch.tensor([1]), torch.tensor([[1, 3]]))  # nodes 1 and 3 go to slots 1 and 2
    cache.copy_row(2, 1, 3)
    expected = keys[0][:, [0, 2, 4]]
    for row in (1, 2):
        found, found_values = (restored(table[row, :, :3], torch.float32) for table in cache.layer(1))
        assert torch.equal(found, restored(stored(expected, dtype), torch.float32))
        own = found[..., -shape.value_width :] if shape.values_in_keys else expected[..., -shape.value_width :]
        assert torch.allclose(found_values, own, atol=0 if shape.values_in_keys else 0.5)
    assert not cache.layer(0)[0].view(torch.int8).any()
    cache.erase_row(2)
    assert not cache.layer(1)[0][2].view(torch.int8).any()


@on_both
def test_a_cache_takes_the_predicted_memory(dtype: torch.dtype) -> None:
    layers = [KVHeads(2, 8), KVHeads(1, 12, 8, values_in_keys=True)]
    cache = KVCache(layers, 3, 7, dtype, "meta")
    assert sum(table.nbytes for table in cache.tables) == KVCache.bytes_for(layers, 3, 7, dtype)
    assert KVCache.bytes_for([KVHeads(2, 64)], 1, 7, dtype) == KVCache.bytes_for([KVHeads(2, 34)], 1, 7, torch.bfloat16)
