"""The CPU kernels give the same bits whether rows have pages of their own side by side, or share scattered ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from covering import in_pairs
from kernels.tools import cache_for, ragged, random_spec, with_every_feature, with_latent
from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.core.paged_tables import PagedTables
from paceline.errors import ParameterError
from paceline.kernels import native
from paceline.kernels.spec import NativeSpec
from paceline.models.base import cache_of
from paceline.models.native.model import NativeModel

EVERY = (*native.available(), *native.emulated())
SPECS: dict[str, Callable[[], NativeSpec]] = {
    "plain": lambda: random_spec(head_dim=48),
    "window": lambda: random_spec(window=150),
    "every feature": lambda: with_every_feature(random_spec(heads=4, kv_heads=2)),
    "latent": lambda: with_latent(random_spec(width=100)),
    "narrow values": lambda: random_spec(head_dim=48, value_dim=32),
}


def scattered(model: NativeModel, rows: int, positions: int, dtype: torch.dtype) -> KVCache:
    cache = cache_of(model, rows, positions, dtype)
    assert isinstance(cache.storage, PagedTables)
    table = cache.storage.table
    table.fresh = len(table.references)
    table.unused = random.Random(4).sample(range(1, table.fresh), table.fresh - 1)
    return cache


def written(cache: KVCache, layer: int, rows: dict[int, int]) -> list[Tensor]:
    return [table[row, :, :length] for table in cache.layer(layer) for row, length in rows.items()]


@in_pairs(kernels=EVERY, kind=[*SPECS], dtype=[torch.bfloat16, torch.float32, torch.int8])
def test_shared_pages_have_the_bits_of_rows_of_their_own(
    kernels: native.Kernels, kind: str, dtype: torch.dtype
) -> None:
    spec = SPECS[kind]()
    model = NativeModel(spec, kind, threads=2, kernels=kernels)
    caches = cache_for(spec, positions=400, dtype=dtype), scattered(model, 4, 400, dtype)
    tokens = torch.randint(spec.vocab_size, (1000,), generator=torch.Generator().manual_seed(1))
    starts, sizes = {0: 290, 1: 64, 2: 130, 3: 257}, {0: 3, 1: 9, 2: 150, 3: 1}
    results: list[list[Tensor]] = []
    for cache in caches:
        model.forward(Nodes(tokens[:290], *ragged({0: 290})), cache)
        for row in (1, 2, 3):
            cache.copy_row(0, row, starts[row])
        rows = torch.tensor([row for row, size in sizes.items() for _ in range(size)])
        positions = torch.cat([starts[row] + torch.arange(size) for row, size in sizes.items()])
        hidden = [model.forward(Nodes(tokens[: len(rows)], rows, positions), cache).hidden]
        ends = {row: starts[row] + size for row, size in sizes.items()}
        parents = [-1, 0, 0, 2, 1, 4]
        depths = [0, 1, 1, 2, 2, 3]
        slots = [ends[2] + node for node in range(6)]
        tree = Nodes(tokens[:6], *torch.tensor([[2] * 6, [ends[2] + depth for depth in depths], slots, parents]))
        hidden.append(model.forward(tree, cache).hidden)
        cache.keep(torch.tensor([2]), torch.tensor([ends[2]]), torch.tensor([[0, 2, 3]]))
        cache.cut(1, 50)
        ends |= {1: 50, 2: ends[2] + 3}
        rows, positions = torch.tensor([0, 1, 2]), torch.tensor([ends[row] for row in (0, 1, 2)])
        hidden.append(model.forward(Nodes(tokens[7:10], rows, positions), cache).hidden)
        kept = [vectors for layer in range(len(spec.kv_layers)) for vectors in written(cache, layer, ends)]
        results.append([*hidden, *kept])
        cache.storage.check_integrity()
    for own, shared in zip(*results, strict=True):
        assert torch.equal(own, shared)


def test_the_kernels_write_no_page_that_rows_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model = NativeModel(random_spec(), "plain", threads=1)
    cache = cache_of(model, 2, 200)
    nodes = Nodes(torch.tensor([1]), torch.tensor([0]), torch.tensor([70]))
    model.forward(nodes, cache)
    cache.copy_row(0, 1, 128)
    before = cache.keys[:, 1]
    monkeypatch.setattr(KVCache, "cover", lambda *_: None)
    for position in (70, 130):
        with pytest.raises(ParameterError, match="a token's page is missing or shared"):
            model.forward(nodes._replace(positions=torch.tensor([position])), cache)
    assert torch.equal(cache.keys[:, 1], before)
