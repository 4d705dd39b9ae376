"""A forward pass that finds no memory raises MemoryError; the process and the model go on."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.tools import cache_for, random_spec
from paceline.core.cache import KVCache
from paceline.core.nodes import Nodes
from paceline.kernels import native
from paceline.models.native import NativeModel

_FREE = 48 << 20  # bytes for Python and torch; the buffers of the pass below need more than 100 MiB

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
