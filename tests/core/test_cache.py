"""The KV cache stores keys and values at their slots and nowhere else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.cache import KVCache, KVHeads
from paceline.errors import ParameterError


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_write_changes_the_rows_own_slots_only(data: st.DataObject) -> None:
    layers, rows, heads, positions, dim = (data.draw(st.integers(1, 4)) for _ in range(5))
    of_layer = KVHeads(heads, dim, data.draw(st.integers(1, dim)), data.draw(st.booleans()))
    positions += 3
    first = data.draw(st.integers(0, rows - 1))
    live, width = data.draw(st.integers(1, rows - first)), data.draw(st.integers(1, 5))
    start = [data.draw(st.integers(0, positions + 2)) for _ in range(live)]
    cache = KVCache([of_layer] * layers, rows, positions)
    expected = torch.zeros_like(cache.keys)
    places = torch.tensor(start)[:, None] + torch.arange(width)
    index = cache.write_index(torch.arange(first, first + live), places)
    for layer in range(layers):
        k = torch.randn(live, heads, width, dim)
        values = k if of_layer.values_in_keys else -k
        cache.write(layer, index, k, values[..., -of_layer.value_width :])
        for row in range(live):
            for column in range(width):
                if places[row, column] < positions:
                    expected[layer, first + row, :, places[row, column]] = k[row, :, column]
    assert torch.equal(cache.keys[:, :, :, :positions], expected[:, :, :, :positions])
    values = expected[..., -of_layer.value_width :] * (1 if of_layer.values_in_keys else -1)
    assert torch.equal(cache.values[:, :, :, :positions], values[:, :, :, :positions])


def test_keys_may_be_views_of_any_layout() -> None:
    cache = KVCache([KVHeads(2, 3)], 2, 5)
    k = torch.randn(2, 4, 2, 3).transpose(1, 2)
    cache.write(0, cache.write_index(torch.arange(2), torch.arange(4).expand(2, 4)), k, k)
    assert torch.equal(cache.keys[0, :, :, :4], k)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_keep_moves_an_accepted_path_to_the_end_of_the_text_and_nothing_before_it(data: st.DataObject) -> None:
    rows, positions, k = data.draw(st.integers(1, 4)), 12, data.draw(st.integers(1, 6))
    cache = KVCache([KVHeads(2, 3)] * 2, 5, positions)
    cache.keys.normal_()
    cache.values.normal_()
    keys, values = cache.keys.clone(), cache.values.clone()
    cache_rows = data.draw(st.permutations(range(5)))[:rows]
    text = [data.draw(st.integers(0, positions)) for _ in range(rows)]
    kept = [sorted(data.draw(st.sets(st.integers(0, k - 1)))) for _ in range(rows)]
    paths = [[*path, *range(len(path), k)] for path in kept]
    cache.keep(torch.tensor(cache_rows), torch.tensor(text), torch.tensor(paths))
    for row, start, path in zip(cache_rows, text, kept, strict=True):
        for place, node in enumerate(path):
            if start + node < positions:
                assert torch.equal(cache.keys[:, row, :, start + place], keys[:, row, :, start + node])
                assert torch.equal(cache.values[:, row, :, start + place], values[:, row, :, start + node])
        assert torch.equal(cache.keys[:, row, :, :start], keys[:, row, :, :start])
    others = [row for row in range(5) if row not in cache_rows]
    assert torch.equal(cache.keys[:, others], keys[:, others])


def test_copy_row_copies_the_first_positions_only() -> None:
    cache = KVCache([KVHeads(2, 4)] * 2, 3, 6)
    cache.keys.normal_()
    cache.values.normal_()
    keys, values = cache.keys.clone(), cache.values.clone()
    cache.copy_row(2, 0, 4)
    for now, before in ((cache.keys, keys), (cache.values, values)):
        assert torch.equal(now[:, 0, :, :4], before[:, 2, :, :4])
        assert torch.equal(now[:, 0, :, 4:], before[:, 0, :, 4:])
        assert torch.equal(now[:, 1:], before[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_takes_the_predicted_memory_and_starts_as_zeros(dtype: torch.dtype) -> None:
    cache = KVCache([KVHeads(2, 4)] * 2, 3, 7, dtype=dtype, device="meta")
    assert cache.keys.nbytes + cache.values.nbytes == KVCache.bytes_for([KVHeads(2, 4)] * 2, 3, 7, dtype)
    cache = KVCache([KVHeads(2, 4)] * 2, 3, 7, dtype=dtype)
    assert cache.keys.dtype == dtype
    assert (cache.rows, cache.positions) == (3, 7)
    assert not cache.keys.any()
    assert not cache.values.any()


@pytest.mark.parametrize("field", ["layers", "rows", "heads", "positions"])
def test_a_cache_of_size_zero_is_refused(field: str) -> None:
    sizes = {"layers": 1, "rows": 1, "heads": 1, "positions": 1} | {field: 0}
    with pytest.raises(ParameterError, match=field):
        KVCache([KVHeads(sizes["heads"], 2)] * sizes["layers"], sizes["rows"], sizes["positions"])
