"""``paceline bench quality``."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest


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


def test_a_model_without_chat_template_is_asked_plainly(paceline: Any, tiny: str, tmp_path: Path) -> None:
    base = shutil.copytree(tiny, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    (tmp_path / "text").write_text("the of " * 40)
    result = paceline("bench", "quality", str(base), "--precisions", "float32", "--text", str(tmp_path / "text"))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_short_text_is_counted_as_it_is(paceline: Any, tiny: str, tmp_path: Path, mark: str) -> None:
    (tmp_path / "text").write_text(mark + "ab", encoding="utf-8")
    result = paceline("bench", "quality", tiny, "--precisions", "float32", "--text", str(tmp_path / "text"))
    assert result.exit_code == 0, result.output
    last = result.stdout.splitlines()[-1]
    document = json.loads(last, parse_constant=pytest.fail)  # NaN is no JSON
    assert document["tokens"] == 2
    assert document["results"][0]["standard_error"] is None


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x80", b"", b"a"])
def test_a_text_that_is_none_is_one_clear_error(
    paceline: Any, tiny: str, tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    result = paceline("bench", "quality", tiny, "--precisions", "float32", "--text", str(tmp_path / "text"))
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: --text=")


def test_an_unknown_precision_is_named(paceline: Any, tiny: str) -> None:
    result = paceline("bench", "quality", tiny, "--precisions", "int3")
    assert result.exit_code == 2
    assert "int3" in result.stderr
