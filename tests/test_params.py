"""Every bad value is refused, by name and with the range that is allowed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_type_hints

import pytest

from paceline.errors import PacelineError, ParameterError
from paceline.params import MAX_SPECULATION_LENGTH, DrafterName, EngineConfig, EngineOptions, SamplingParams

BAD_SAMPLING: list[tuple[str, Any]] = [
    *[("n", v) for v in (0, -1, 1.0, True, "2", None)],
    *[("max_tokens", v) for v in (0, -3, 2.5, None)],
    *[("min_tokens", v) for v in (-1, 129, 0.5)],
    *[("temperature", v) for v in (-0.1, 100.5, 3.5e38, math.nan, math.inf, "hot", None, True)],
    *[("top_p", v) for v in (0, -0.5, 1.01, math.nan)],
    *[("top_k", v) for v in (-1, 1.5, True)],
    *[("min_p", v) for v in (-0.01, 1.01, math.nan)],
    *[("seed", v) for v in (-1, 2**63, 1.5, "x")],
    *[("presence_penalty", v) for v in (-2.1, 2.1, math.nan)],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, math.inf)],
    *[("repetition_penalty", v) for v in (0, -1, math.nan, math.inf)],
    *[("stop", v) for v in ("", ["a", ""], [1], 5, None)],
    *[("stop_token_ids", v) for v in ([-1], [1.5], [True], 3, None, "ab")],
    *[("logit_bias", v) for v in ({-1: 1.0}, {"1": 1.0}, {1: 101}, {1: math.nan}, {1: "much"}, {1: None}, None, [1])],
    *[("logprobs", v) for v in (-1, 21, 1.0, True)],
]

BAD_ENGINE: list[tuple[str, Any]] = [
    *[("drafter", v) for v in ("eagle", "", 3)],
    *[("num_speculative_tokens", v) for v in (-1, MAX_SPECULATION_LENGTH + 1, 1.0, True, "fast", None)],
    *[("acceptance", v) for v in ("greedy", None)],
    *[("attention", v) for v in ("flash", None)],
    *[("rounds", v) for v in ("graph", None)],
    *[("deterministic", v) for v in (1, None)],
    *[("benchmark", v) for v in ("yes", None)],
    *[("dtype", v) for v in ("float16", None)],
    *[("max_batch_size", v) for v in (0, -1, 4097, 2.0, True)],
    *[("max_model_len", v) for v in (0, 1, 2.5)],
    *[("prefill_chunk", v) for v in (0, -5, 1.5)],
    *[("threads", v) for v in (0, 1.5)],
    *[("memory_limit", v) for v in (0, -1, 1.5)],
]


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
def test_a_bad_sampling_parameter_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{field}=.* is not allowed: .+") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PacelineError)


@pytest.mark.parametrize(("field", "value"), BAD_ENGINE)
def test_a_bad_engine_option_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{field}=.* is not allowed: .+"):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 100),
        ("max_tokens", 1),
        ("temperature", 0),
        ("temperature", 100),
        ("top_p", 1e-9),
        ("top_p", 1),
        ("top_k", 10**9),
        ("min_p", 1),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("repetition_penalty", 0.01),
        ("logit_bias", {0: -100, 5: 100.0}),
        ("logprobs", 0),
        ("logprobs", 20),
    ],
)
def test_the_ends_of_every_range_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(("drafter", "asks"), [(None, False), ("ngram", False), ("model", True), ("hybrid", True)])
def test_drafters_with_a_draft_model_are_known(drafter: DrafterName | None, asks: bool) -> None:
    assert EngineConfig(drafter=drafter).asks_draft_model == asks


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_min_tokens_may_be_as_many_as_max_tokens_and_no_more() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(ParameterError, match=r"min_tokens=6 .* from 0 to 5"):
        SamplingParams(min_tokens=6, max_tokens=5)


def test_the_parameters_cannot_change_under_a_running_request() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 1000.0
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 3  # type: ignore[misc]


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.01).greedy


def test_the_keyword_options_are_the_configs_fields() -> None:
    assert set(get_type_hints(EngineOptions)) == {field.name for field in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize("value", ["synthetic:", "synthetic:often", "synthetic:1.1", "synthetic:-0.1", "synthetic:nan"])
def test_a_synthetic_acceptance_is_a_probability(value: str) -> None:
    with pytest.raises(ParameterError, match="probability"):
        EngineConfig(acceptance=value, benchmark=True)


def test_a_synthetic_acceptance_is_for_benchmarks_that_say_so() -> None:
    with pytest.raises(ParameterError, match="benchmark=True"):
        EngineConfig(acceptance="synthetic:0.8")
    assert EngineConfig(acceptance="synthetic:0.8", benchmark=True).synthetic_acceptance == 0.8
    assert EngineConfig().synthetic_acceptance is None
