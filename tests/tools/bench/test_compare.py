"""Ratios of two runs of ``bench offline`` with their intervals."""

from typing import Any

import pytest

from paceline.errors import ParameterError
from paceline.tools.bench.compare import compared, different_settings


def run(seconds: list[float], side: str = "speculation", **settings: Any) -> dict[str, Any]:
    result = {"side": side, "batch_size": 2, "tokens": 100, "decode_seconds_of_all": seconds}
    return {**settings, "results": [result | {"mean_acceptance_length": 1.5}]}


def test_the_interval_holds_the_ratio_and_narrows_with_the_spread() -> None:
    (wide,) = compared(run([1.0, 1.4, 0.8]), run([0.5, 0.7, 0.4]))
    (narrow,) = compared(run([1.0, 1.01, 0.99]), run([0.5, 0.505, 0.495]))
    assert narrow.ratio == pytest.approx(2.0)
    assert narrow.tokens_per_second == pytest.approx((100.0, 200.0))
    for each in (wide, narrow):
        assert each.low <= each.ratio <= each.high
    assert narrow.high - narrow.low < 0.1 < wide.high - wide.low
    (same,) = compared(run([1.0, 1.2]), run([1.0, 1.2]))
    assert same.low <= 1.0 <= same.high


def test_runs_without_anything_in_common_are_refused_and_settings_that_differ_are_named() -> None:
    with pytest.raises(ParameterError, match="in common"):
        compared(run([1.0]), run([1.0], side="plain"))
    assert [*different_settings(run([1.0], machine={"cpu": 1}), run([1.0], machine={"cpu": 2}))] == ["machine"]
