"""``paceline trace``: an answer as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.tools.bench import syntax

ANSWER = ("--temperature", "0", "--max-tokens", "12", "--dtype", "float32", "--ignore-eos")


def test_a_page_is_written_with_its_tables(paceline: Any, tiny: str, tiny_draft: str, tmp_path: Path) -> None:
    output = tmp_path / "out.html"
    rounds = tmp_path / "rounds.json"
    options = ("-p", "abcabc", "--draft-model", tiny_draft, "-k", "3", "--json", str(rounds), *ANSWER)
    result = paceline("trace", str(output), tiny, *options)
    assert result.exit_code == 0, result.stderr
    document = json.loads(rounds.read_text())
    assert [token for made in document["rounds"] for token in made["tokens"]][:12] == document["token_ids"]
    assert sum(len(made["path"]) for made in document["rounds"]) >= document["metrics"]["accepted"]
    assert all(len(made["texts"]) == len(made["draft_tokens"]) == len(made["parents"]) for made in document["rounds"])
    assert f"{output}: 12 tokens in " in result.stderr
    written = output.read_text()
    assert all(part in written for part in ("tokens by depth", "tokens by source", "draft model"))


@pytest.mark.parametrize("there", [False, True])
def test_nodes_of_code_are_told_where_there_is_a_parser_and_else_what_brings_one(
    paceline: Any, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr(syntax, "available", lambda: there)
    monkeypatch.setattr(syntax, "node_kinds", lambda pieces: ["integer"] * len(pieces))
    output = tmp_path / "out.html"
    result = paceline("trace", str(output), tiny, "-p", "abcabcabc", "--drafter", "ngram", "-k", "3", *ANSWER)
    assert result.exit_code == 0, result.stderr
    assert ("node of the syntax tree" in output.read_text()) == there
    assert ('needs: pip install "paceline[trace]"' in result.stderr) == (not there)


def test_a_page_in_the_place_of_the_model_is_refused(paceline: Any, tiny: str, tmp_path: Path) -> None:
    result = paceline("trace", tiny, "-p", "abc", *ANSWER)
    assert result.exit_code == 2
    assert "ends in .html" in result.stderr
