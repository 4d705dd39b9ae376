"""``paceline list``, ``show``, ``rm`` and ``run`` as people type them."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.models.files import hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one embedded model, and an empty hub cache."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    hub.embedded_path("smollm2-135m").write_bytes(b"G" * 1_500_000)
    return tmp_path


def test_models_are_listed_and_deleted(paceline: Any, cache: Path) -> None:
    heading, line = paceline("list").stdout.splitlines()
    assert heading.split() == ["NAME", "SIZE", "MODIFIED", "MODEL"]
    assert line.split()[:3] == ["smollm2-135m", "2", "MB"]
    (entry,) = json.loads(paceline("list", "--json").stdout)
    assert (entry["name"], entry["size"]) == ("smollm2-135m", 1_500_000)
    assert "qwen3:0.6b" in paceline("list", "--known").stdout
    assert paceline("rm", "smollm2:135m").stdout == "deleted smollm2-135m, 2 MB\n"
    assert paceline("list").stdout == ""
    refused = paceline("rm", "smollm2:135m")
    assert (refused.exit_code, "is in no cache" in refused.stderr) == (2, True)


def test_show_describes_a_model_without_its_weights(paceline: Any, tiny: str) -> None:
    facts = json.loads(paceline("show", tiny, "--json").stdout)
    assert (facts["family"], facts["native"], facts["file_format"], facts["precision"]) == (
        "llama", True, "safetensors", "F32",
    )  # fmt: skip
    assert facts["abilities"] == ["completion", "embedding"]
    assert facts["parameters"] > 10_000
    assert f"{facts['context']} tokens" in paceline("show", tiny).stdout
    assert paceline("show", tiny, "--template").stdout.strip() == facts["chat_template"]


def test_run_answers_a_prompt_and_ends(paceline: Any, tiny: str) -> None:
    options = ("-q", "--temperature", "0", "--max-tokens", "6", "--dtype", "float32")
    said = paceline("run", tiny, "one", "two", *options)
    assert (said.exit_code, said.stderr) == (0, "")
    assert said.stdout == paceline("chat", tiny, *options, stdin="one two\n").stdout
    assert paceline("run", tiny, "x" * 9000, *options).exit_code == 2


def test_a_plan_is_a_table_of_80_columns_or_json(paceline: Any, tiny: str) -> None:
    found = paceline("plan", tiny, "--memory", "2GiB", "--device", "cpu", "--dtype", "float32").stdout
    assert "memory        2.00 GiB  given" in found
    assert "starts with 16 rows of" in found
    assert "int8" in found
    assert max(map(len, found.splitlines())) <= 80
    planned = json.loads(paceline("plan", tiny, "--memory", "2GB", "--device", "cpu", "--json").stdout)
    assert (planned["memory"], planned["rows"]) == (2 * 10**9, 16)
    refused = paceline("plan", tiny, "--memory", "plenty")
    assert (refused.exit_code, "such as 24GiB" in refused.stderr) == (2, True)
