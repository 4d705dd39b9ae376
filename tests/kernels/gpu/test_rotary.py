"""Norm, rotation and cache write in the kernel against plain torch, and a whole model with it against one without."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from kernels.gpu import reference
from kernels.tools import in_pages
from paceline.core.nodes import Tree
from paceline.core.slots import Slots
from paceline.kernels.attention import make_backend
from paceline.kernels.attention.base import Plan
from paceline.kernels.gpu import rotary
from paceline.kernels.gpu.state import PackedHeads
from paceline.models.decoding.decoder import Decoder
from toy import tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=25)
@given(data=st.data())
def test_the_kernel_equals_the_reference(data: st.DataObject) -> None:
    pick = data.draw
    rows, length, groups = pick(st.integers(1, 3)), pick(st.integers(1, 4)), pick(st.integers(1, 3))
    heads, dim, positions = groups * pick(st.integers(1, 4)), pick(st.sampled_from([4, 6, 16])), 20
    dtype = pick(st.sampled_from([torch.float32, torch.float16]))
    make = torch.Generator().manual_seed(pick(st.integers(0, 999)))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make).to(dtype).to(DEVICE)

    rotation = (random(rows, length, 1, dim), random(rows, length, 1, dim)) if pick(st.booleans()) else None
    norm = random(heads + groups, dim) if pick(st.booleans()) else None
    packed = PackedHeads(random(rows, length, heads + 2 * groups, dim), heads, groups, rotation, norm, 1e-5)
    start = torch.tensor([pick(st.integers(0, positions)) for _ in range(rows)], device=DEVICE)
    where = start[:, None] + torch.arange(length, device=DEVICE)
    before = random(2, 2, rows + 2, groups, positions + 1, dim)  # keys and values, layers, rows
    places = torch.tensor(pick(st.permutations(range(rows + 1)))[:rows], device=DEVICE)
    caches = before.clone(), before.clone()
    plan = Plan(where, positions + 1, cache_rows=Slots(places))
    queries = [
        turn_and_store(packed, plan, cache[0, 1, 1:], cache[1, 1, 1:])
        for turn_and_store, cache in zip((rotary.turn_and_store, reference.turn_and_store), caches, strict=True)
    ]
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 4e-3}
    torch.testing.assert_close(*queries, **close)
    kernel, plain = (cache[..., :positions, :] for cache in caches)  # positions beyond the end are not compared
    torch.testing.assert_close(kernel, plain, **close)
    untouched = plain == before[..., :positions, :]
    assert torch.equal(kernel[untouched], plain[untouched])


def test_keys_and_values_are_written_to_their_rows_pages() -> None:
    """Also of a row that goes on in its next page, and of one that has no page there."""
    packed = PackedHeads(torch.randn(3, 4, 6, 16, device=DEVICE), 2, 2, None, None, 1e-5)
    tables, pages = in_pages(torch.randn(2, 4, 2, 150, 16, device=DEVICE).unbind(), [128, 130, 64, 1])
    where = torch.tensor([[62], [126], [62]], device=DEVICE) + torch.arange(4, device=DEVICE)
    plan = Plan(where, 151, cache_rows=Slots(torch.tensor([0, 1, 2], device=DEVICE)), pages=pages)
    caches = [[table.clone() for table in tables] for _ in range(2)]
    rotary.turn_and_store(packed, plan, *caches[0])
    reference.turn_and_store(packed, plan, *caches[1])
    for kernel, plain, before in zip(*caches, tables, strict=True):
        assert torch.equal(kernel[1:], plain[1:])
        assert (kernel[1:] != before[1:]).any(-1).sum() == 2 * (4 + 4 + 2)  # two heads


def test_packed_heads_give_the_same_hidden_states() -> None:
    if DEVICE == "cuda":
        pytest.skip("the tiny model is on the CPU; test_device.py compares whole models on the GPU")
    ragged = make_backend("ragged", torch.device("cpu"))
    decoders = [Decoder(tiny_llama(), ragged, 3, 30) for _ in range(2)]
    decoders[1].passes.packs = True  # type: ignore[attr-defined]
    tokens = torch.arange(12).view(3, 4)
    for start in ([0, 0, 0], [4, 4, 4], [8, 6, 5], [9, 28, 1]):  # the last: beyond the end
        inside = torch.tensor(start)[:, None] + torch.arange(4) < 30  # positions beyond the end are not compared
        hidden = [decoder.forward(tokens, torch.tensor(start), 31)[inside] for decoder in decoders]
        torch.testing.assert_close(*hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(decoders[0].cache.keys[..., :30, :], decoders[1].cache.keys[..., :30, :])


@pytest.mark.skipif(DEVICE == "cuda", reason="the tiny model is on the CPU; test_device.py compares whole models")
def test_packed_heads_of_trees_give_the_same_hidden_states() -> None:
    """Nodes side by side stand at one position, and their keys in slots of their own."""
    ragged = make_backend("ragged", torch.device("cpu"))
    decoders = [Decoder(tiny_llama(), ragged, 2, 30) for _ in range(2)]
    decoders[1].passes.packs = True  # type: ignore[attr-defined]
    tree = Tree.of(torch.tensor([[-1, -1, 0, 2], [-1, 0, 0, 1]]), torch.tensor([4, 3]))
    hidden = []
    for decoder in decoders:
        decoder.forward(torch.arange(14).view(2, 7), torch.tensor([0, 0]), 31)
        hidden.append(decoder.forward(torch.arange(10).view(2, 5), torch.tensor([5, 7]), 31, tree=tree))
    torch.testing.assert_close(*hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(decoders[0].cache.keys[..., :30, :], decoders[1].cache.keys[..., :30, :])
