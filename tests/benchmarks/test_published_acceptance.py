"""Draft tokens of a model's own head, replaced by right ones at a given rate: texts stay those of plain decoding."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import published_acceptance, random_models
from paceline.kernels import native

pytestmark = pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")


def test_acceptance_is_the_given_one_position_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_models.write(tmp_path / "tiny", "qwen3.5-tiny")
    to = tmp_path / "rounds.json"
    sizes = ["--rows", "1", "4", "--lengths", "1", "2", "--max-tokens", "48", "--repeats", "1", "--output", str(to)]
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "tiny"), "--rates", "0.8", "0", *sizes])
    published_acceptance.main()
    document = json.loads(to.read_text())
    found = {(line["batch_size"], line["side"]): line for line in document["results"]}
    assert list(found) == [(rows, f"k={k}") for rows in (1, 4) for k in (0, 1, 2)]
    for rows in (1, 4):
        assert found[rows, "k=1"]["acceptance_rate"] == pytest.approx(0.8, abs=0.04)
        assert found[rows, "k=2"]["acceptance_rate"] == pytest.approx(0.4, abs=0.04), "no second one"
    assert document["more_rows_carry"] > 0
