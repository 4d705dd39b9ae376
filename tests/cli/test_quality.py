"""``paceline bench quality``."""

import json
from pathlib import Path
from typing import Any


def test_the_command_ends_with_one_json_document(paceline: Any, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the of " * 40)
    options = ["--text", str(tmp_path / "text"), "--tokens", "30", "--output", str(tmp_path / "out")]
    result = paceline("bench", "quality", tiny, "--precisions", "float32,bfloat16", *options)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document == json.loads((tmp_path / "out").read_text())
    fp32, bf16 = document["results"]
    assert fp32["perplexity_change"] == 0
    assert 0 < abs(bf16["perplexity_change"]) < 0.1
    assert bf16["weight_bytes"] < fp32["weight_bytes"]


def test_an_unknown_precision_is_named(paceline: Any, tiny: str) -> None:
    result = paceline("bench", "quality", tiny, "--precisions", "int3")
    assert result.exit_code == 2
    assert "int3" in result.stderr
