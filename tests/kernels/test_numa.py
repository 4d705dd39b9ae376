"""Weights, keys and values on NUMA nodes: every page where the threads that read it are. The nodes are fakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.tools import cache_for, random_spec
from paceline.core.cache import KVCache
from paceline.core.cpus import Node, usable_cpus
from paceline.core.nodes import Nodes
from paceline.kernels import build, native
from paceline.models.base import cache_of
from paceline.models.native.model import NativeModel

SHIM = Path(__file__).with_name("mbind.c")
pytestmark = pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}")

NODES = (Node(0, usable_cpus()[:1]), Node(2, usable_cpus()[-1:]))


def placed() -> dict[str, Any]:
    """Place a model and its cache on ``NODES`` -> where, and whether a pass has the bits of one without nodes.

    Each item of "matrices" and "heads" is an address, a number of panels or heads, and the bytes of one.
    """
    torch.manual_seed(0)
    spec = random_spec(width=256, heads=4, kv_heads=4, head_dim=64, layers=2)
    tokens = Nodes(torch.arange(7), torch.zeros(7, dtype=torch.int64), torch.arange(7))
    cache = KVCache(spec.kv_layers, 3, 200, dtype=torch.bfloat16, paged=True)

    def logits(model: NativeModel, cache: KVCache) -> torch.Tensor:
        return model.logits(model.forward(tokens, cache).hidden)

    plain = logits(NativeModel(spec, "random", quantization="int8", threads=2), cache_for(spec))
    with native.kernel_threads(5, NODES):
        model = NativeModel(spec, "random", quantization="int8")
        same = torch.equal(logits(model, cache), plain)
    packed = model.packed_decoder
    matrices = [packed.model.head]
    for layer in packed.model.layers[: packed.model.layer_count]:
        matrices += [layer.qkv, layer.attention_out, layer.gate_up, layer.down]
    heads = [
        [table.memory.data_ptr() + 2 * layer * table.layer_stride, 4, 2 * table.head_stride]
        for table in map(cache.paged, range(2))
        for layer in range(2)
    ]
    return {
        "same": same,
        "heads": heads,
        "nodes": [node.number for node in packed.nodes],
        "matrices": [[each.weights, -(-each.outputs // 32), each.inputs * 32] for each in matrices],
    }


@pytest.mark.skipif(build.compiler() is None or sys.platform != "linux", reason="needs a compiler, and Linux")
def test_every_page_lies_with_the_threads_that_read_it(tmp_path: Path) -> None:
    shim, bound = tmp_path / "mbind.so", tmp_path / "bound"
    subprocess.run([build.compiler() or "", "-x", "c", "-shared", "-fPIC", SHIM, "-o", shim], check=True)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "LD_PRELOAD": str(shim), "NODES_FILE": str(bound)}
    script = "import json; from kernels.test_numa import placed; print(json.dumps(placed()))"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["same"]
    assert found["nodes"] == [0, 2]
    page = os.sysconf("SC_PAGESIZE")
    node_of: dict[int, int] = {}
    for line in bound.read_text().splitlines():
        address, nbytes, node = map(int, line.split())
        node_of |= dict.fromkeys(range(address, address + nbytes, page), node)
    for first, items, item_bytes in found["matrices"] + found["heads"]:
        boundary = first + items * 2 // 5 * item_bytes  # of five threads, two are on the first node
        for start in range(-(-first // page) * page, (first + items * item_bytes) // page * page, page):
            if abs(start + page // 2 - boundary) >= page:  # a page in which both nodes read may lie with either
                assert node_of[start] == (0 if start < boundary else 2)


def test_threads_of_two_nodes_give_a_hybrid_the_same_bits() -> None:
    """Attention's heads are divided between the nodes, and the heads of recurrent layers are not."""
    from recurrent_support import tiny_native_recurrent  # imports transformers, which the other test's process need not

    model, tokens = tiny_native_recurrent(kinds="fddf"), torch.arange(9)
    found = []
    for nodes in ((), NODES):
        with native.kernel_threads(3, nodes):
            cache = cache_of(model, 2, 20)
            found.append(model.forward(Nodes(tokens, tokens // 5, tokens % 5), cache).hidden)
    assert torch.equal(*found)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.skipif(Path("/sys/devices/system/node/node2").exists(), reason="this machine has the node")
def test_a_system_that_does_not_place_pages_is_told_and_changes_no_bits(caplog: pytest.LogCaptureFixture) -> None:
    found = placed()
    assert found["same"]
    assert found["nodes"] == []
    assert caplog.text.count("weights are not placed on the NUMA nodes") == 1
    assert "--cap-add SYS_NICE" in caplog.text
