"""A call of the kernels that finds no memory raises MemoryError; the process and the model go on."""

import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.tools import cache_for, random_spec
from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.core.values import DrawInputs, DrawRows, Penalties, Purpose
from paceline.drafters.lookup import CopySources, NativeLookup, SearchedRows
from paceline.kernels import abi, native
from paceline.kernels.cpu import CpuOps
from paceline.models.native.model import NativeModel

_FREE = 48 << 20  # bytes for Python and torch; every call below needs more than 64 MiB
_VOCABULARY = 9_000_000  # 36 MB for each list of a draw

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists() or native.select() is None, reason="needs Linux and the CPU kernels"
)


@contextmanager
def _little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _FREE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_pass_without_memory_is_an_error_and_the_next_one_runs() -> None:
    spec = random_spec(ffn=60_000, layers=1)
    model, tokens = NativeModel(spec, "random", quantization="int8", threads=2), torch.arange(256) % spec.vocab_size

    def run(model: NativeModel, cache: KVCache) -> Tensor:
        nodes = Nodes(tokens, torch.zeros(256, dtype=torch.int64), torch.arange(256))
        return model.forward(nodes, cache).hidden

    cache = cache_for(spec)
    with _little_memory(), pytest.raises(MemoryError):
        run(model, cache)
    found = run(model, cache)
    assert torch.equal(found, run(NativeModel(spec, "random", quantization="int8", threads=2), cache_for(spec)))


def test_logits_without_memory_are_an_error_and_the_next_ones_are_computed() -> None:
    spec = random_spec(ffn=240_000, layers=1)  # buffers larger than any that earlier tests have left in the heap
    model, hidden = NativeModel(spec, "random", quantization="int8", threads=2), torch.randn(256, spec.width)
    with _little_memory(), pytest.raises(MemoryError, match="lower max_batch_size"):
        model.logits(hidden)
    assert torch.equal(model.logits(hidden)[:5], model.logits(hidden[:5]))


@pytest.fixture
def caller(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    """A thread that calls the kernels, on pools of its own: a draw's memory ends with its threads."""
    monkeypatch.setattr(native, "_pools", {})
    with ThreadPoolExecutor(1) as one:
        yield one
    for pool in native._pools.values():
        native.available()[0].library.pl_pool_free(pool.handle)


def _drawn(logits: Tensor, threads: int, by: DrawRows) -> Tensor:
    with native.kernel_threads(threads):
        return CpuOps(native.available()[0]).draw(DrawInputs(logits, by), Purpose.DRAW)


def test_a_worker_thread_without_memory_is_an_error_and_the_next_draw_runs(caller: ThreadPoolExecutor) -> None:
    logits = torch.randn(4, 1, _VOCABULARY, generator=torch.Generator().manual_seed(0))
    by = DrawRows(torch.ones(4), torch.arange(4), torch.zeros(4, dtype=torch.int64))
    native.pool(native.available()[0], 2)
    alone = caller.submit(_drawn, logits, 1, by).result()  # now the caller has its memory, and the worker has none
    with _little_memory(), pytest.raises(MemoryError):
        caller.submit(_drawn, logits, 2, by).result()
    assert torch.equal(caller.submit(_drawn, logits, 2, by).result(), alone)


def test_a_draw_that_found_no_memory_for_a_rows_text_leaves_nothing_behind(caller: ThreadPoolExecutor) -> None:
    logits, zero = torch.zeros(1, 1, _VOCABULARY), torch.zeros(1, dtype=torch.int64)
    logits[0, 0, 7:9] = torch.tensor([2.0, 1.5])
    text = torch.arange(5_000_000)[None]
    penalties = Penalties(torch.zeros(1), torch.zeros(1), torch.full((1,), 2.0), text, zero)

    def drawn(length: int) -> int:
        by = DrawRows(torch.zeros(1), zero, torch.full((1,), length), penalties=penalties)
        return int(caller.submit(_drawn, logits, 1, by).result())

    assert drawn(0) == 7
    with _little_memory(), pytest.raises(MemoryError):
        drawn(5_000_000)
    assert drawn(0) == 7, "no token of the other text is penalised"
    assert drawn(8) == 8


def test_a_text_index_without_memory_is_an_error_and_goes_on() -> None:
    lookup = NativeLookup((), native.available()[0])
    texts = lookup.texts()
    with _little_memory(), pytest.raises(MemoryError, match="CPU kernels"):
        texts.append(100_000_000, [1])  # the index has a list for every number up to this one
    texts.append(1, [5, 6, 7])
    text = torch.tensor([[1, 5, 6]])
    rows = SearchedRows(text, torch.tensor([3]), [0], [CopySources(texts, None, 0, 0)])
    assert lookup.find(rows, 1).draft_tokens == [[7]]


def test_a_new_object_without_memory_is_an_error() -> None:
    with pytest.raises(MemoryError):
        native._address(abi.NewObject())


def test_every_function_that_may_allocate_reports_a_lack_of_memory() -> None:
    others = {name for name, (result, _) in abi.SIGNATURES.items() if result not in (abi.Problem, abi.NewObject)}
    chosen_once = {"pl_kernels", "pl_obstacle", "pl_multiplies_correctly"}
    makes = {"pl_pool_new", "pl_arena_new"}  # null is an error of its own
    frees = {name for name in abi.SIGNATURES if name.endswith("_free")}
    allocates_nothing = {
        *("pl_interface", "pl_layout", "pl_source_hash"),
        *("pl_experts_read", "pl_gain", "pl_rms_norm", "pl_embed", "pl_read", "pl_place"),
        *("pl_texts_held", "pl_texts_size", "pl_texts_count", "pl_texts_copy", "pl_exchange_bytes", "pl_ranks_ended"),
    }
    assert others == chosen_once | makes | frees | allocates_nothing
