"""What a short draft vocabulary loses and saves: coverage of recorded answers, and times of drafts."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from benchmarks.short_vocabulary import coverage
from benchmarks.tree_gain import Answer

from benchmarks import random_models, short_vocabulary
from paceline.engine.engine import Engine
from paceline.kernels import native

VOCABULARY, SIZE = 9000, 4096


def answer(tokens: list[int], prompt: list[int]) -> Answer:
    return Answer("chat", 0.0, prompt, [], tokens)


def test_a_subset_that_follows_covers_what_comes_again_and_a_fixed_one_does_not() -> None:
    large = random.Random(3).sample(range(SIZE, VOCABULARY), 200)
    (line,) = (each for each in coverage([answer(large, [1])] * 3, VOCABULARY) if each["size"] == SIZE)
    assert line["fixed"]["all"] == 0
    assert line["following"]["all"] == pytest.approx(0.66, abs=0.12)  # the first answer is new


@pytest.mark.skipif(native.select() is None, reason=f"no native kernels: {native.why_none()}")
def test_drafts_of_a_models_own_head_are_timed_with_each_size_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_models.write(tmp_path / "tiny", "qwen3.5-tiny")
    measured, measure = [], Engine.measure_costs

    def noted(engine: Engine, *rest: object) -> object:
        measured.append(engine.config.draft_vocab_size)
        return measure(engine, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "measure_costs", noted)
    to = tmp_path / "passes.json"
    sizes = ["--rows", "4", "1", "--sizes", "64", "128", "--repeats", "2", "--output", str(to)]
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "tiny"), "--quantization", "int8", *sizes])
    short_vocabulary.main()
    found = json.loads(to.read_text())
    assert (found["model"], found["drafter"]) == ("tiny", "mtp")
    assert [line["size"] for line in found["passes"]] == [0, 64, 128]
    assert measured == [0, 64, 128] * 2
    for line in found["passes"]:
        assert line["rows"] == [1, 4]
        assert len(line["ms"]) == 2
        assert all(ms > 0 for ms in (*line["first_ms"], *line["plain_round_ms"]))
