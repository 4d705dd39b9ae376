"""``benchmarks.block_cost``: the cost of a block drafter's drafts, in one document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.block_cost import QWEN3_8B, main

from paceline.kernels import native

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 61}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}")
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_cost_of_drafts_is_measured_by_rows_and_length(tmp_path: Path, kind: str) -> None:
    output = tmp_path / "cost.json"
    small = ["--rows", "1", "3", "--drafted", "1", "4", "--block", "6", "--layers", "2", "--repeats", "1"]
    main([*small, "--kind", kind, "--output", str(output)], QWEN3_8B | SMALL)
    found = json.loads(output.read_text())
    assert found["weights"] == "random"
    assert [line["rows"] for line in found["costs"]] == [1, 3]
    assert all(min(line["draft_ms"]) > 0 and line["plain_ms"] > 0 for line in found["costs"])
