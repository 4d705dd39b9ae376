"""Forced calls of real models: valid, and the same bytes with and without speculation, streamed and not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import real_models
from paceline.chat.values import ToolDefinition

pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")

from benchmarks.call_schemas import TOOLS
from benchmarks.forced_calls import call, load

PARSERS = {"smollm2-135m": "json", "qwen-coder-0.5b": None}


def check(name: str, tools: Sequence[ToolDefinition], samples: int) -> None:
    """Make all calls: none may be invalid or different on any side, and draft tokens are accepted."""
    llm = load(str(real_models.find(name)))
    plain = llm.plain()
    made = [call(llm, plain, tool, samples, PARSERS[name]) for tool in tools]  # type: ignore[arg-type]
    assert [each["calls"] for each in made] == [samples] * len(tools)
    assert [fault for each in made for fault in each["invalid"]] == []
    assert [each["different"] for each in made] == [0] * len(tools)
    assert sum(each["accepted"] for each in made) > 0


@pytest.mark.usefixtures("caches_of_the_run")
def test_six_forced_calls_of_smollm2_are_valid_and_lossless() -> None:
    check("smollm2-135m", [TOOLS[n] for n in (2, 12, 30)], 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", PARSERS)
def test_a_thousand_forced_calls_are_valid_and_lossless(name: str) -> None:
    check(name, TOOLS, 25)
