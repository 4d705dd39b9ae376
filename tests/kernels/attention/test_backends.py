"""padded and split against the reference, on random ragged shapes with garbage in hidden positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.tools import ragged_cache, terms_for
from paceline.core.nodes import Tree
from paceline.core.slots import Slots
from paceline.kernels.attention import BACKENDS
from paceline.kernels.attention.base import PLAIN, AttentionTerms
from paceline.kernels.attention.reference import ReferenceAttention

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["padded", "split"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_backends_equal_the_reference_on_ragged_rows(name: str, data: st.DataObject) -> None:
    pick = data.draw
    rows, groups, shared = pick(st.integers(1, 4)), pick(st.integers(1, 3)), pick(st.integers(1, 3))
    dim, positions, new = pick(st.sampled_from([4, 8])), 20, pick(st.integers(1, 5))
    lengths = [pick(st.one_of(st.just(new), st.just(positions), st.integers(new, positions))) for _ in range(rows)]
    window, scale = pick(st.sampled_from([None, None, 1, 3, 100])), pick(st.sampled_from([None, 0.3, 1.0]))
    spare = pick(st.integers(0, 3))
    seed, value_dim = pick(st.integers(0, 1000)), pick(st.sampled_from([None, 2, 12]))
    keys, values = ragged_cache(lengths, groups, positions + 4, dim, seed, value_dim=value_dim)
    q = torch.randn(rows, groups * shared, new, dim)
    where = torch.tensor(lengths)[:, None] - new + torch.arange(new)
    longest = max(lengths) + spare
    terms = replace(pick(st.sampled_from([PLAIN, *terms_for(groups * shared)])), scale=scale, window=window)
    found, expected = [
        backend.attend(q, keys, values, backend.plan(where, longest), terms)
        for backend in (BACKENDS[name](), ReferenceAttention())
    ]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("places", [[0, 1, 2], [2, 3, 4], [0, 2, 4], [4, 1, 0]])
@pytest.mark.parametrize("name", ["padded", "split", "reference"])
def test_rows_may_lie_anywhere_in_the_cache(name: str, places: list[int]) -> None:
    backend = {**BACKENDS, "reference": ReferenceAttention}[name]()
    keys, values = ragged_cache([9, 4, 20], 2, 24, 8, 1)
    wide = [torch.full((5, *table.shape[1:]), torch.nan) for table in (keys, values)]
    for table, own in zip(wide, (keys, values), strict=True):
        table[places] = own
    q, where = torch.randn(3, 4, 2, 8), torch.tensor([[7, 8], [2, 3], [18, 19]])
    plan = backend.plan(where, 20)
    expected = backend.attend(q, keys, values, backend.plan(where, 20))
    plan.cache_rows = Slots.listed(places, torch.device("cpu"))
    assert torch.equal(backend.attend(q, wide[0], wide[1], plan), expected)


@pytest.mark.parametrize("name", ["padded", "split", "reference"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_node_of_a_tree_attends_as_the_last_token_of_its_chain(name: str, data: st.DataObject) -> None:
    pick = data.draw
    rows, new, positions = pick(st.integers(1, 3)), pick(st.integers(1, 7)), 20
    texts = [pick(st.integers(0, positions - new)) for _ in range(rows)]
    counts = [pick(st.integers(0, new - 1)) for _ in range(rows)]  # the rest is padding
    parents = [[pick(st.integers(-1, node - 1)) for node in range(new - 1)] for _ in range(rows)]
    window = pick(st.sampled_from([None, 1, 2, 3, 100]))
    keys, values = ragged_cache(
        [text + 1 + count for text, count in zip(texts, counts, strict=True)], 2, positions, 4, 0
    )
    q = torch.randn(rows, 4, new, 4)
    tree = Tree.of(torch.tensor(parents, dtype=torch.int64).view(rows, new - 1), torch.tensor(counts))
    backend = ReferenceAttention() if name == "reference" else BACKENDS[name]()
    plan = backend.plan(torch.tensor(texts)[:, None] + tree.depths, max(texts) + new, tree.ancestors)
    found = backend.attend(q, keys, values, plan, AttentionTerms(window=window))
    assert found.isfinite().all()
    for row, text in enumerate(texts):
        for place in range(counts[row] + 1):
            way = [place]
            while way[0] > 0:
                way.insert(0, parents[row][way[0] - 1] + 1)
            kept = [*range(text), *(text + node for node in way)][-(window or positions) :]
            expected = F.scaled_dot_product_attention(
                q[row, :, None, place].unflatten(0, (2, 2)), keys[row, :, None, kept], values[row, :, None, kept]
            )
            torch.testing.assert_close(found[row, :, place], expected.reshape(4, 4), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["padded", "split"])
@pytest.mark.parametrize("window", [None, 4])
def test_padding_beyond_the_longest_row_is_finite_and_changes_no_other_row(name: str, window: int | None) -> None:
    lengths = [1, 9]
    keys, values = ragged_cache(lengths, 2, 16, 4, 0)
    where = torch.tensor([[0, 1, 2, 3], [8, 9, 10, 11]])
    q = torch.randn(2, 4, 4, 4)
    backend, reference = BACKENDS[name](), ReferenceAttention()
    found = backend.attend(q, keys, values, backend.plan(where, 9), AttentionTerms(window=window))
    real = reference.attend(q[:, :, :1], keys, values, reference.plan(where[:, :1], 9), AttentionTerms(window=window))
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, :, :1], real, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["padded", "split"])
def test_one_plan_serves_layers_with_and_without_a_window(name: str) -> None:
    keys, values = ragged_cache([5, 12], 1, 16, 4, 0)
    where, q = torch.tensor([[3, 4], [10, 11]]), torch.randn(2, 2, 2, 4)
    backend, reference = BACKENDS[name](), ReferenceAttention()
    plan, exact = backend.plan(where, 12), reference.plan(where, 12)
    for window in (None, 3, None, 2, 3):
        found = backend.attend(q, keys, values, plan, AttentionTerms(window=window))
        expected = reference.attend(q, keys, values, exact, AttentionTerms(window=window))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["padded", "split"])
def test_a_key_at_the_querys_own_position_is_visible_and_the_next_is_not(name: str) -> None:
    values = torch.zeros(1, 1, 8, 4)
    values[0, 0, 3] = 1.0
    backend = BACKENDS[name]()
    zeros = torch.zeros(1, 1, 3, 4)
    out = backend.attend(zeros, torch.zeros_like(values), values, backend.plan(torch.tensor([[2, 3, 4]]), 8))
    assert out[0, 0, :, 0].tolist() == pytest.approx([0, 1 / 4, 1 / 5])


def test_every_backend_has_its_name() -> None:
    for name, make in BACKENDS.items():
        if name == "ragged":
            pytest.importorskip("triton", reason="triton is not installed")
        assert make().name == name
