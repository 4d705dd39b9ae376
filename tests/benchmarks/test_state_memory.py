"""Memory of recurrent states: what is planned for a row is what its pages take, draft tokens included."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import random_models, state_memory
from paceline.core.row_tables import GROWS
from paceline.kernels import native

pytestmark = [
    pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}"),
    pytest.mark.skipif(not GROWS, reason="elsewhere memory is allocated as a whole"),
]


def test_pages_that_states_take_are_those_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_models.write(tmp_path / "tiny", "qwen3.5-tiny")
    to = tmp_path / "states.json"
    sizes = ["--rows", "1", "3", "--lengths", "0", "3", "--max-tokens", "8", "--output", str(to)]
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "tiny"), *sizes])
    state_memory.main()
    lines = json.loads(to.read_text())["results"]
    assert [(line["rows"], line["draft_tokens"]) for line in lines] == [(1, 0), (1, 3), (3, 0), (3, 3)]
    for line in lines:
        assert line["resident"] == pytest.approx(line["planned"], rel=0.5), "tiny states end within pages"
