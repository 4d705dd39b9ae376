"""The ragged kernel against the reference, over random shapes; on a CPU through Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from kernels import tools
from kernels.tools import GARBAGE, in_pages, terms_for
from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.eight_bits import LARGEST, stored
from paceline.core.nodes import Tree
from paceline.core.slots import Slots
from paceline.kernels.attention import BACKENDS, ragged
from paceline.kernels.attention.base import PLAIN, AttentionTerms
from paceline.kernels.attention.ragged import FIXED, RaggedAttention, Tiles
from paceline.kernels.attention.reference import ReferenceAttention

pytestmark = pytest.mark.usefixtures("one_thread")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(positions=16)
TILES = {
    "by shape": Tiles(),
    "small": SMALL,
    "fixed": FIXED,
    "stretches": Tiles(queries=16, positions=16, split=16),
    "long stretches": Tiles(queries=32, positions=16, split=64),
}
FEW_TILES = [name if name in ("small", "stretches") else pytest.param(name, marks=pytest.mark.slow) for name in TILES]
ragged_cache = partial(tools.ragged_cache, device=DEVICE)


def compare(
    backend: RaggedAttention,
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    where: Tensor,
    longest: int,
    terms: AttentionTerms = PLAIN,
    dtype: torch.dtype = torch.float32,
) -> None:
    """dtype: of the cache, which is given in float32."""
    reference = ReferenceAttention()
    where = where.to(DEVICE)
    q = q.to(DEVICE)
    plan, places = backend.plan(where, longest), torch.randperm(len(q) + 1)[: len(q)]
    plan.cache_rows = Slots(places.to(DEVICE))
    wide = [table.new_full((len(q) + 1, *table.shape[1:]), GARBAGE) for table in cache]
    for table, own in zip(wide, cache, strict=True):
        table[places.to(DEVICE)] = own
    found = backend.attend(q, stored(wide[0], dtype), stored(wide[1], dtype), plan, terms)
    keys, values = (stored(table, dtype) for table in cache)
    expected = reference.attend(q, keys, values, reference.plan(where, longest), terms)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("tiles", FEW_TILES)
@settings(max_examples=8)
@given(data=st.data())
def test_the_kernel_equals_the_reference_on_ragged_rows(tiles: str, data: st.DataObject) -> None:
    pick = data.draw
    rows, groups, shared = pick(st.integers(1, 3)), pick(st.integers(1, 2)), pick(st.integers(1, 3))
    dim, positions = pick(st.sampled_from([4, 16, 24])), 90
    new = pick(st.sampled_from([1, 2, 5, 8]))
    lengths = [pick(st.one_of(st.just(new), st.just(positions), st.integers(new, positions))) for _ in range(rows)]
    window, scale = pick(st.sampled_from([None, None, 1, 3, 40, 100])), pick(st.sampled_from([None, 0.3]))
    terms = pick(st.sampled_from([PLAIN, *terms_for(groups * shared, DEVICE)]))
    terms = replace(terms, scale=scale, window=window)
    seed, value_dim = pick(st.integers(0, 1000)), pick(st.sampled_from([None, 8, 20]))
    cache = ragged_cache(lengths, groups, positions + 4, dim, seed, value_dim=value_dim)
    where = torch.tensor(lengths)[:, None] - new + torch.arange(new)
    q = torch.randn(rows, groups * shared, new, dim)
    longest, dtype = max(lengths) + pick(st.integers(0, 3)), pick(st.sampled_from([torch.float32, *LARGEST]))
    compare(RaggedAttention(tiles=TILES[tiles]), q, cache, where, longest, terms, dtype)


@pytest.mark.parametrize("tiles", FEW_TILES)
def test_the_longest_draft_takes_several_tiles(tiles: str) -> None:
    new = MAX_SPECULATION_LENGTH + 1
    cache = ragged_cache([new, 70], 1, 80, 16, 5)
    where = torch.tensor([[new], [70]]) - new + torch.arange(new)
    compare(RaggedAttention(tiles=TILES[tiles]), torch.randn(2, 3, new, 16), cache, where, 70)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("tiles", FEW_TILES)
def test_the_queries_of_a_block_see_each_other(tiles: str, window: int | None) -> None:
    cache = ragged_cache([9, 40], 2, 60, 16, 5)
    where = torch.tensor([[4], [35]], device=DEVICE) + torch.arange(5, device=DEVICE)
    everyone = torch.ones(2, 5, 5, dtype=torch.bool, device=DEVICE)
    backend, reference, q = (
        RaggedAttention(tiles=TILES[tiles]),
        ReferenceAttention(),
        torch.randn(2, 4, 5, 16).to(DEVICE),
    )
    plan = backend.plan(where, 40, everyone)
    plan.looks_ahead = True
    found = backend.attend(q, *cache, plan, AttentionTerms(window=window))
    expected = reference.attend(q, *cache, reference.plan(where, 40, everyone), AttentionTerms(window=window))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("longest", [38, 90])
def test_queries_and_caches_may_be_views_of_larger_tensors(longest: int) -> None:
    """The decoder's layout: the rows of one layer, heads and tokens swapped."""
    cache = torch.randn(2, 3, 5, 2, 91, 16, device=DEVICE)  # keys and values, layers, rows, heads, positions
    q = torch.randn(2, 4, 6, 16, device=DEVICE).transpose(1, 2)
    where = torch.tensor([[10, 11, 12, 13], [34, 35, 36, 37]])
    compare(RaggedAttention(tiles=SMALL), q, (cache[0, 1, 2:4], cache[1, 1, 2:4]), where, longest)


@pytest.mark.parametrize("window", [None, 4])
def test_padding_beyond_the_longest_row_is_finite_and_changes_no_other_row(window: int | None) -> None:
    cache = ragged_cache([1, 9], 2, 16, 4, 0)
    where = torch.tensor([[0, 1, 2, 3], [8, 9, 10, 11]], device=DEVICE)
    q = torch.randn(2, 4, 4, 4, device=DEVICE)
    backend, reference = RaggedAttention(), ReferenceAttention()
    found = backend.attend(q, *cache, backend.plan(where, 9), AttentionTerms(window=window))
    real = reference.attend(q[:, :, :1], *cache, reference.plan(where[:, :1], 9), AttentionTerms(window=window))
    assert found.isfinite().all()
    torch.testing.assert_close(found[:, :, :1], real, atol=1e-5, rtol=1e-5)


def test_a_key_at_the_querys_own_position_is_visible_and_the_next_is_not() -> None:
    values = torch.zeros(1, 1, 8, 4, device=DEVICE)
    values[0, 0, 3] = 1.0
    backend, zeros = RaggedAttention(), torch.zeros(1, 1, 3, 4, device=DEVICE)
    where = torch.tensor([[2, 3, 4]], device=DEVICE)
    out = backend.attend(zeros, torch.zeros_like(values), values, backend.plan(where, 8))
    assert out[0, 0, :, 0].tolist() == pytest.approx([0, 1 / 4, 1 / 5])


@pytest.mark.parametrize("tiles", ["small", "stretches"])
@settings(max_examples=8)
@given(data=st.data())
def test_a_tree_sees_the_text_and_its_ancestors_only(tiles: str, data: st.DataObject) -> None:
    """New token j has the parent parents[j] < j; it must equal the last token of a chain that holds its ancestors."""
    pick = data.draw
    nodes, text = pick(st.integers(2, 9)), pick(st.integers(0, 40))
    parents = [-1] + [pick(st.integers(0, node - 1)) for node in range(1, nodes)]
    chains: list[list[int]] = []
    for node, parent in enumerate(parents):
        chains.append([*(chains[parent] if parent >= 0 else []), node])
    mask = torch.zeros(1, nodes, nodes, dtype=torch.bool)
    for node, chain in enumerate(chains):
        mask[0, node, chain] = True
    window = pick(st.sampled_from([None, 1, 3, 20]))
    keys, values = ragged_cache([text + nodes], 2, text + nodes + 3, 16, 1)
    q = torch.randn(1, 4, nodes, 16, device=DEVICE)
    where = text + torch.tensor([[len(chain) - 1 for chain in chains]], device=DEVICE)
    backend, reference = RaggedAttention(tiles=TILES[tiles]), ReferenceAttention()
    plan = backend.plan(where, text + nodes, ancestors=mask.to(DEVICE))
    found = backend.attend(q, keys, values, plan, AttentionTerms(window=window))
    for node, chain in enumerate(chains):
        kept = [*range(text), *(text + n for n in chain)]
        alone = reference.plan(torch.tensor([[len(kept) - 1]], device=DEVICE), len(kept))
        expected = reference.attend(
            q[:, :, node : node + 1], keys[:, :, kept], values[:, :, kept], alone, AttentionTerms(window=window)
        )
        torch.testing.assert_close(found[:, :, node : node + 1], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("ordered_products")
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_deterministic_bits_do_not_depend_on_the_batch(data: st.DataObject) -> None:
    """A query alone, at k = 0, in a batch of one: the same bits as in a batch with a block of draft tokens."""
    pick = data.draw
    lengths = [pick(st.integers(8, 300)) for _ in range(3)]
    new, row, token = pick(st.integers(1, 8)), pick(st.integers(0, 2)), pick(st.integers(0, 7))
    token = min(token, new - 1)
    keys, values = ragged_cache(lengths, 2, 304, 16, 2)
    where = (torch.tensor(lengths)[:, None] - new + torch.arange(new)).to(DEVICE)
    q = torch.randn(3, 6, new, 16, device=DEVICE)
    backend = RaggedAttention(deterministic=True)
    company = backend.attend(q, keys, values, backend.plan(where, 304))[row, :, token]
    one = slice(row, row + 1)
    plan = backend.plan(where[one, token : token + 1], lengths[row])
    alone = backend.attend(q[one, :, token : token + 1], keys[one], values[one], plan)
    assert torch.equal(company, alone[0, :, 0])


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("text", [3, 60, 250])
def test_deterministic_nodes_of_a_tree_have_the_bits_of_their_chain(text: int) -> None:
    """Also where slots and positions lie in different blocks of 64 or splits of 256."""
    parents = [-1, 0, 0, 1, 1, 3, 5, 2, 7]
    ancestors = Tree.of(torch.tensor([parents[1:]]) - 1, torch.tensor([8])).ancestors.to(DEVICE)
    keys, values = ragged_cache([text + 9], 2, 304, 16, 2)
    q = torch.randn(1, 6, 9, 16, device=DEVICE)
    backend = RaggedAttention(deterministic=True)
    where = text + ancestors.sum(2) - 1
    tree = backend.attend(q, keys, values, backend.plan(where, text + 9, ancestors))
    for node in range(9):
        way = text + ancestors[0, node].nonzero()[:, 0]
        chain = [*range(text), *way.tolist()]
        plain = backend.plan(where[:, node, None], len(chain))
        alone = backend.attend(q[:, :, node, None], keys[:, :, chain], values[:, :, chain], plain)
        assert torch.equal(tree[:, :, node], alone[:, :, 0])


@pytest.mark.usefixtures("ordered_products")
def test_deterministic_splits_do_not_move_with_the_rows_length() -> None:
    """Seven more tokens in the row fill another block of 64: evenly shared splits would all begin elsewhere."""
    keys, values = ragged_cache([196], 2, 304, 16, 2)
    where = torch.arange(188, 196, device=DEVICE)[None]
    q = torch.randn(1, 6, 8, 16, device=DEVICE)
    backend = RaggedAttention(deterministic=True)
    together = backend.attend(q, keys, values, backend.plan(where, 304))[:, :, :1]
    alone = backend.attend(q[:, :, :1], keys, values, backend.plan(where[:, :1], 304))
    assert torch.equal(together, alone)


def test_half_precision_is_as_close_as_its_format() -> None:
    cache = tuple(t.half() for t in ragged_cache([5, 70], 2, 80, 16, 3))
    where = torch.tensor([[3, 4], [68, 69]], device=DEVICE)
    q = torch.randn(2, 4, 2, 16, device=DEVICE).half()
    backend, reference = RaggedAttention(tiles=SMALL), ReferenceAttention()
    found = backend.attend(q, cache[0], cache[1], backend.plan(where, 70))
    expected = reference.attend(q, cache[0], cache[1], reference.plan(where, 70))
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, expected, atol=4e-3, rtol=4e-3)


def test_the_backend_is_registered() -> None:
    assert BACKENDS["ragged"]().name == "ragged"


@pytest.mark.parametrize(
    ("compute", "limit", "dtype", "width", "queries", "positions"),
    [
        ((7, 5), 64, torch.float16, 128, 64, 64),  # 65,536 bytes, as Triton reports
        ((7, 5), 64, torch.float16, 256, 16, 32),  # 49,152; with 64 positions 81,920
        ((7, 5), 64, torch.float16, 256, 32, 32),  # 65,536; 98,304
        ((7, 5), 64, torch.float32, 256, 16, 32),  # 51,264; 86,080
        ((8, 0), 163, torch.float32, 512, 16, 32),  # 100,416; 168,000
        ((8, 6), 99, torch.float32, 512, 16, 32),
        ((8, 6), 99, torch.bfloat16, 512, 16, 64),  # 83,968
        ((9, 0), 227, torch.float32, 512, 16, 64),
    ],
)
def test_tiles_fit_into_a_programs_shared_memory(
    compute: tuple[int, int],
    limit: int,
    dtype: torch.dtype,
    width: int,
    queries: int,
    positions: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ragged, "capability", lambda device: compute)
    monkeypatch.setattr(ragged, "shared_memory", lambda device: limit << 10)
    assert Tiles().positions_for(queries, width, dtype.itemsize, torch.device("cuda")) == positions


@pytest.mark.usefixtures("ordered_products")
def test_long_chunks_of_deterministic_attention_take_bounded_memory_and_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, most = ragged_cache([600, 590], 1, 600, 16, seed=5), 1 << 14
    where = (torch.arange(40) + torch.tensor([[560], [550]])).to(DEVICE)
    q, backend = torch.randn(2, 2, 40, 16, device=DEVICE), RaggedAttention(deterministic=True)
    whole = backend.attend(q, *cache, backend.plan(where, 600))
    monkeypatch.setattr(ragged, "_MOST_SCRATCH", most)
    sizes, empty = [], torch.empty

    def recorded(*size: Any, **options: Any) -> Tensor:
        made = empty(*size, **options)
        sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", recorded)
    parts = backend.attend(q, *cache, backend.plan(where, 600))
    assert torch.equal(parts, whole)
    assert max(sizes) <= most < 3 * whole.nbytes  # of three splits


@pytest.mark.parametrize("tiles", ["by shape", "fixed"])
@pytest.mark.parametrize("window", [None, 40])
def test_a_tile_reads_no_keys_after_its_last_query_nor_before_its_firsts_window(tiles: str, window: int | None) -> None:
    """Masked values would still be multiplied by 0, and NaN x 0 is NaN."""
    backend, new, dim = RaggedAttention(tiles=TILES[tiles]), 128, 16
    q, (keys, values) = torch.randn(1, 1, new, dim), (torch.randn(1, 1, new + 1, dim) for _ in range(2))
    keys, q = keys.to(DEVICE), q.to(DEVICE)
    plan = backend.plan(torch.arange(new, device=DEVICE)[None], new)
    clean = backend.attend(q, keys, values.to(DEVICE), plan, AttentionTerms(window=window))
    for tile in range(new // 64):
        first = 0 if window is None else max(0, 64 * tile - window + 1) // 64 * 64
        spoilt = values.clone()
        spoilt[:, :, :first] = spoilt[:, :, 64 * (tile + 1) :] = torch.nan
        found = backend.attend(q, keys, spoilt.to(DEVICE), plan, AttentionTerms(window=window))
        mine = slice(64 * tile, 64 * (tile + 1))
        assert torch.equal(found[:, :, mine], clean[:, :, mine])


@pytest.mark.parametrize("tiles", FEW_TILES)
def test_idle_rows_read_no_keys(tiles: str) -> None:
    """Their slots keep prefixes of any length, which cost a round nothing."""
    backend, (keys, values) = RaggedAttention(tiles=TILES[tiles]), ragged_cache([30, 90, 60], 2, 94, 16, 3)
    keys, values = keys.to(DEVICE), values.to(DEVICE)
    where, order = torch.tensor([[59], [29], [89]], device=DEVICE), torch.tensor([2, 0, 1], device=DEVICE)
    q = torch.randn(3, 4, 1, 16, device=DEVICE)
    plans = [backend.plan(where, 90) for _ in range(2)]
    plans[0].cache_rows, plans[1].cache_rows = Slots(order), Slots(order, live=torch.tensor([2], device=DEVICE))
    expected = backend.attend(q, keys, values, plans[0])
    values[1] = torch.nan
    found = backend.attend(q, keys, values, plans[1])
    assert torch.equal(found[:2], expected[:2])
    assert torch.equal(found[2], torch.zeros_like(found[2]))


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize(
    ("tiles", "kind", "window", "dtype"),
    [
        ("small", "chain", None, torch.float32),
        ("by shape", "chain", 70, torch.int8),
        ("stretches", "tree", None, torch.float32),
        ("fixed", "tree", 70, torch.float32),
        ("fixed", "chain", None, torch.float8_e4m3fn),
    ],
)
def test_keys_and_values_in_scattered_pages_give_the_same_bits(
    tiles: str, kind: str, window: int | None, dtype: torch.dtype
) -> None:
    """Page 0, which stands for none, holds NaN. The reference gathers the pages."""
    lengths, new = [70, 9, 100], 6
    cache = [stored(table, dtype) for table in ragged_cache(lengths, 2, 109, 16, 4, value_dim=20)]
    backend, q = RaggedAttention(tiles=TILES[tiles]), torch.randn(3, 2, new, 16, device=DEVICE)
    starts = torch.tensor(lengths, device=DEVICE)[:, None] - new
    tree = Tree.of(torch.tensor([[-1, -1, 0, 2, 1]]).repeat(3, 1), torch.full((3,), 5))
    where = starts + (torch.arange(new) if kind == "chain" else tree.depths).to(DEVICE)
    ancestors = None if kind == "chain" else tree.ancestors.to(DEVICE)
    order, terms = torch.tensor([1, 2, 0], device=DEVICE), AttentionTerms(window=window)
    plans = [backend.plan(where[order], 110, None if ancestors is None else ancestors[order]) for _ in range(2)]
    paged, pages = in_pages(cache, lengths)
    for plan in plans:
        plan.cache_rows = Slots(order, live=torch.tensor([2], device=DEVICE))
    plans[1].pages = pages
    side_by_side = backend.attend(q, cache[0], cache[1], plans[0], terms)
    assert torch.equal(backend.attend(q, paged[0], paged[1], plans[1], terms), side_by_side)
    without_0 = replace(plans[1], pages=pages - 1)
    expected = ReferenceAttention().attend(q, paged[0][1:], paged[1][1:], without_0, terms)
    torch.testing.assert_close(side_by_side[:2], expected[:2], atol=2e-5, rtol=2e-5)


def test_splits_fill_the_last_wave() -> None:
    """40 rows of 8 key heads on 132 multiprocessors: tiles of 32 queries would take two waves for 1.2 waves' work."""
    for rows, numbers, splits, share in ((64, 32 * 128, 1, 0.96), (40, 32 * 128, 4, 0.96), (64, 16 * 128, 1, 0.77)):
        places, programs = 132 * ragged.programs_at_once(numbers), 8 * rows
        assert ragged.splits_for(programs, 64, ragged.programs_at_once(numbers), 132) == splits
        waves = -(-programs * splits // places)
        assert programs * splits / (waves * places) >= share
    assert [ragged.splits_for(8 * rows, 64, 5, 132) for rows in (1, 2, 8, 16)] == [33, 17, 5, 3]
    assert ragged.splits_for(8, 4, 5, 132) == 4
