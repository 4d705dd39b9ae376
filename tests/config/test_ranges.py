"""Every bad value is refused, by name and with the range that is allowed."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import sys
from collections import Counter
from types import FrameType
from typing import Any, get_type_hints

import pytest

from paceline.config import (
    MAX_SPECULATION_LENGTH,
    DrafterName,
    EngineConfig,
    EngineOptions,
    SamplingParams,
    ServerConfig,
    StructuredOutputs,
    check_used,
    engine_config,
    limits,
)
from paceline.config.limits import MAX_SPECULATION_WIDTH
from paceline.config.names import ENGINE, SAME, SAMPLING
from paceline.config.ranges import check_text, rule_for
from paceline.errors import LONGEST_SHOWN, PacelineError, ParameterError

BAD_SAMPLING: list[tuple[str, Any]] = [
    *[("n", v) for v in (0, -1, 1.0, True, "2", None)],
    *[("max_tokens", v) for v in (0, -3, 2.5, None)],
    *[("min_tokens", v) for v in (-1, 129, 0.5)],
    *[("temperature", v) for v in (-0.1, 100.5, 3.5e38, math.nan, math.inf, "hot", None, True)],
    *[("top_p", v) for v in (-1e-9, -0.5, 1.01, math.nan)],
    *[("top_k", v) for v in (-2, -1.0, 1.5, True)],
    *[("min_p", v) for v in (-0.01, 1.01, math.nan)],
    *[("typical_p", v) for v in (0, -0.5, 1.01, math.nan)],
    *[(name, v) for name in ("epsilon_cutoff", "eta_cutoff") for v in (-0.01, 1.01, math.nan)],
    *[("top_n_sigma", v) for v in (-0.1, 101, math.inf)],
    *[("seed", v) for v in (-(2**63) - 1, 2**64, 1.5, "x", True)],
    *[("presence_penalty", v) for v in (-2.1, 2.1, math.nan)],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, math.inf)],
    *[("repetition_penalty", v) for v in (0, -1, math.nan, math.inf)],
    *[("stop", v) for v in ("", ["a", ""], [1], 5)],
    *[("bad_words", v) for v in ("", [""], [1], 5, None, ["\ud800"], ["a"] * (limits.MAX_BAD_WORDS + 1))],
    *[("allowed_token_ids", v) for v in ([], (), [-1], [1.0], "ab", 5, [True])],
    *[("logits_processors", v) for v in (None, max, [1], "ab", [max, None])],
    *[("prompt_logprobs", v) for v in (-1, 21, True, 1.5)],
    *[("skip_special_tokens", v) for v in (None, 1, "no")],
    *[("stop_token_ids", v) for v in ([-1], [1.5], [True], 3, None, "ab")],
    *[("logit_bias", v) for v in ({-1: 1.0}, {"1": 1.0}, {1: 101}, {1: math.nan}, {1: "much"}, {1: None}, None, [1])],
    *[("logprobs", v) for v in (-1, 21, 1.0, True)],
    *[("time_budget", v) for v in ("5", 0, -1, math.nan, math.inf, 10**400, True)],
    *[("best_of", v) for v in (0, -1, 1.5, True, 2**16 + 1)],
    *[("rank_by", v) for v in ("logprobs", "", 1)],
    *[("n", v) for v in (limits.MAX_ANSWERS + 1, 10**9)],
    *[("max_tokens", v) for v in (2**31, 10**22)],
    *[("temperature", v) for v in (1e-50, 1e-31, 10**400)],
    *[("top_p", v) for v in (-1e-50, 10**400)],
    *[("top_k", v) for v in (2**31, 2**63, 10**22)],
    *[("repetition_penalty", v) for v in (1e-50, 0.009, 101, 10**400)],
    *[("presence_penalty", v) for v in (10**400, -(10**400))],
    *[("stop_token_ids", v) for v in ([2**31], [2**63], [1] * (limits.MAX_STOP_TOKEN_IDS + 1), b"ab")],
    *[("stop", v) for v in (["a"] * (limits.MAX_STOP_STRINGS + 1), "a" * (limits.MAX_STOP_CHARACTERS + 1), b"a")],
    *[("stop", v) for v in ("\ud800", ["a", "\udfff"])],
    *[("logit_bias", v) for v in ({2**31: 1}, {2**63: 1}, {1: 10**400}, dict.fromkeys(range(2**16 + 1), 1), {True: 1})],
    *[("ignore_eos", v) for v in ("false", 1, None)],
    *[("structured_outputs", v) for v in ("json", ["json"], {}, {"json_object": False})],
]

BAD_ENGINE: list[tuple[str, Any]] = [
    *[("drafter", v) for v in ("eagle", "", 3)],
    *[("num_speculative_tokens", v) for v in (-1, MAX_SPECULATION_LENGTH + 1, 1.0, True, "fast", None)],
    *[("draft_vocab_size", v) for v in (-1, 2**20 + 1, 1.0, True, "full")],
    *[("speculation_width", v) for v in (0, MAX_SPECULATION_WIDTH + 1, 1.0, True, "wide", None)],
    *[("acceptance", v) for v in ("greedy", None)],
    *[("attention", v) for v in ("flash", None)],
    *[("rounds", v) for v in ("graph", None)],
    *[("deterministic", v) for v in (1, None)],
    *[("benchmark", v) for v in ("yes", None)],
    *[("dtype", v) for v in ("float64", None)],
    *[("max_batch_size", v) for v in (0, -1, 4097, 2.0, True)],
    *[("max_model_len", v) for v in (0, 1, 2.5)],
    *[("prefill_chunk", v) for v in (0, -5, 1.5)],
    *[("threads", v) for v in (0, 1.5)],
    *[("numa", v) for v in ("", "both", "0,", "0-1", "-1", 0, None)],
    *[("memory_limit", v) for v in (0, -1, 1.5, 2**63)],
    *[("prefix_memory", v) for v in (-1, 1.5, 2**63)],
    *[("max_model_len", v) for v in (2**31, 10**22)],
    *[("prefill_chunk", v) for v in (2**20 + 1, 2**63)],
    *[("threads", v) for v in (1025, 2**63)],
    *[("device", v) for v in ("", None, 0)],
    *[("profile", v) for v in ("", "a\0b", 3, b"profile.json")],
]

BAD_SERVER: list[tuple[str, Any]] = [
    *[("host", v) for v in ("", None, "\ud800")],
    *[("port", v) for v in (-1, 65536, 80.0, True)],
    *[("served_model_name", v) for v in ("", 5)],
    *[("api_keys", v) for v in ("secret", ["secret", ""], [1], None)],
    *[("max_waiting", v) for v in (-1, 2**63)],
    *[("max_body_bytes", v) for v in (0, 2**63)],
    *[("max_upload_bytes", v) for v in (0, 2**63)],
    *[("body_timeout", v) for v in (0, math.nan, math.inf, 1e300, 10**400)],
    *[("request_timeout", v) for v in (0, 1e-300, math.nan, math.inf)],
    *[("shutdown_timeout", v) for v in (-1, math.nan, math.inf)],
    *[("log_interval", v) for v in (0, math.nan, math.inf)],
]


def refusal(kind: type, field: str, value: Any) -> ParameterError:
    """The error of a dataclass's field for a value that it must refuse."""
    with pytest.raises(ParameterError, match=f"^{field}=.* is not allowed: .+") as caught:
        pytest.fail(f"{field}={value!r} is allowed: {kind(**{field: value})}")
    return caught.value


@pytest.mark.parametrize("field", sorted({field for field, _ in BAD_SAMPLING}))
def test_a_bad_sampling_parameter_is_refused_by_name(field: str) -> None:
    for value in (value for name, value in BAD_SAMPLING if name == field):
        error = refusal(SamplingParams, field, value)
        assert error.field == field
        assert isinstance(error, ValueError)
        assert isinstance(error, PacelineError)


def test_a_bad_engine_option_is_refused_by_name() -> None:
    for field, value in BAD_ENGINE:
        refusal(EngineConfig, field, value)


def test_a_bad_server_option_is_refused_by_name() -> None:
    for field, value in BAD_SERVER:
        assert "secret" not in str(refusal(ServerConfig, field, value))


class Odd:
    """An object of a type that no parameter has."""

    def __repr__(self) -> str:
        raise RuntimeError("not even to be shown")


@pytest.mark.parametrize("kind", [SamplingParams, EngineConfig, ServerConfig, StructuredOutputs])
def test_every_field_refuses_every_wrong_type(kind: type) -> None:
    """Each field refuses values of other kinds than its default's. A new field without a rule fails here, too."""
    wrong: list[Any] = [Odd(), b"bytes", {"a": Odd()}, [Odd()], (None,), {1, 2}, 1j, math.nan, object, 10**5000]
    of_kind: dict[str, list[Any]] = {"number": [True, "1"], "flag": [1, 0, "false", None], "text": [True, "\ud800"]}
    for field in dataclasses.fields(kind):
        default = field.default if field.default is not dataclasses.MISSING else ()
        flag, text = isinstance(default, bool), isinstance(default, str)
        number = isinstance(default, (int, float)) and not flag
        more = of_kind["flag"] * flag + of_kind["text"] * text + of_kind["number"] * number
        for value in [*wrong, *more]:
            with pytest.raises(ParameterError) as caught:
                kind(**{field.name: value})
            assert field.name in caught.value.field.split("."), f"{field.name}={type(value)}"
            assert len(str(caught.value)) < LONGEST_SHOWN + 500


def test_a_field_that_states_no_range_is_a_programming_error() -> None:
    for hint in (int, float, dict[str, int], list[str], int | None):
        with pytest.raises(TypeError, match="annotate it with a rule"):
            rule_for(hint)


def test_a_message_shows_any_value_and_stays_short() -> None:
    for value in (10**5000, "x" * 10**6, Odd(), [Odd()], "\ud800\n"):
        text = str(ParameterError("name", value, "something else"))
        assert len(text) < LONGEST_SHOWN + 100
        assert "\n" not in text
        text.encode()


def test_half_a_character_is_no_text() -> None:
    assert check_text("prompt", "a\U0001f600\0") == "a\U0001f600\0"
    for value in ("\ud800", "a\udcffb", b"a", 5, None):
        with pytest.raises(ParameterError, match=r"^prompt=.*half a character"):
            check_text("prompt", value)


def test_a_structure_is_given_as_an_object_or_as_its_fields() -> None:
    wanted = StructuredOutputs(json={"type": "object"})
    assert SamplingParams(structured_outputs={"json": {"type": "object"}}).structured_outputs == wanted  # type: ignore[arg-type]
    with pytest.raises(
        ParameterError, match=r"^unknown parameter structured_outputs\.tag=.*known are json, json_object, regex"
    ):
        SamplingParams(structured_outputs={"tag": "x"})  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=r"^structured_outputs\.json="):
        SamplingParams(structured_outputs={"json": '{"const": "\\ud800"}'})  # type: ignore[arg-type]


def test_a_path_is_kept_as_text() -> None:
    assert EngineConfig(profile=pathlib.Path("a/b.json")).profile == "a/b.json"  # type: ignore[arg-type]


def test_parameters_come_from_json_over_others() -> None:
    base = SamplingParams(temperature=0.5, max_tokens=7)
    given = {
        "logit_bias": {"7": 1},
        "top_k": -1,
        "seed": -1,
        "stop": ["", "a"],
        "structured_outputs": {"regex": "a+"},
        "max_tokens": 9,
    }
    made = SamplingParams.from_mapping(given, base)
    assert made == SamplingParams(
        temperature=0.5, max_tokens=9, logit_bias={7: 1}, stop="a", structured_outputs=StructuredOutputs(regex="a+")
    )
    assert SamplingParams.from_mapping({}) == SamplingParams.from_mapping({"stop": ""}) == SamplingParams()


@pytest.mark.parametrize(
    "given",
    [
        {"temprature": 1},
        {"\ud800": 1},
        {"x" * 10**5: 1},
        {"logit_bias": {"07": 1}},
        {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {"\u0663": 1}},
        {"logit_bias": [1]},
        {"top_k": -1.0},
        {"structured_outputs": {"json": []}},
        {"stop": {"a": 1}},
    ],
)
def test_what_json_gets_wrong_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams.from_mapping(given)
    (name,) = given
    assert caught.value.field.startswith((name, "structured_outputs.", "'"))
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 100),
        ("max_tokens", 1),
        ("temperature", 0),
        ("temperature", 100),
        ("top_p", 0),
        ("top_p", 1),
        ("top_k", 10**9),
        ("min_p", 1),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("seed", -(2**63)),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("repetition_penalty", 0.01),
        ("logit_bias", {0: -100, 5: 100.0}),
        ("logprobs", 0),
        ("logprobs", 20),
        ("top_k", 2**31 - 1),
        ("max_tokens", 2**31 - 1),
        ("temperature", 1e-30),
        ("repetition_penalty", 100),
    ],
)
def test_the_ends_of_every_range_are_allowed(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(("drafter", "asks"), [(None, False), ("ngram", False), ("model", True), ("hybrid", True)])
def test_drafters_with_a_draft_model_are_known(drafter: DrafterName | None, asks: bool) -> None:
    assert EngineConfig(drafter=drafter).asks_draft_model == asks


def test_what_others_write_for_nothing_is_nothing() -> None:
    assert SamplingParams(top_k=-1, stop=None) == SamplingParams()  # type: ignore[arg-type]
    assert dataclasses.replace(SamplingParams(top_k=3), top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (SamplingParams, {"temprature": 1}, "temprature=1; .*did you mean temperature?"),
        (SamplingParams, {"max_new_tokens": 1}, "max_new_tokens=1; .*instead: max_tokens"),
        (SamplingParams, {"num_beams": 4}, "num_beams=4; .*no beam search.*rank_by"),
        (SamplingParams, {"zzzz": 1}, "zzzz=1; .*known are n, best_of"),
        (SamplingParams, {"mirostat_tau": 5.0}, "mirostat_tau=5.0; .*eta_cutoff or top_n_sigma; mirostat"),
        (SamplingParams, {"penalty_alpha": 0.6}, "penalty_alpha=0.6; .*contrastive search"),
        (EngineConfig, {"max_num_seqs": 4}, "max_num_seqs=4; .*instead: max_batch_size"),
        (EngineConfig, {"tensor_parallel_size": 2}, "tensor_parallel_size=2; .*instead: tensor_parallel$"),
        (EngineConfig, {"max_new_tokens": 2}, "max_new_tokens=2; .*known are"),
        (EngineConfig, {"speculative_config": {}}, "speculative_config={}; .*draft_model"),
        (EngineConfig, {"revision": "main"}, "revision='main'; .*ORG/NAME@REVISION"),
        (EngineConfig, {"max_batchsize": 4}, "max_batchsize=4; .*did you mean max_batch_size?"),
    ],
)
def test_an_unknown_option_says_what_does_the_same_or_the_nearest_one(
    kind: type, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ParameterError, match=f"^unknown parameter {said}"):
        kind(**given)
    with pytest.raises(ParameterError, match=f"^unknown parameter {said}"):
        dataclasses.replace(kind(), **given)


@pytest.mark.parametrize("kind", [SamplingParams, EngineConfig])
def test_what_others_call_options_are_no_fields_here_and_what_they_are_here_is(kind: Any) -> None:
    known = {field.name for field in dataclasses.fields(kind)}
    assert not known & kind.OTHER_NAMES.keys()
    words = {word for said in kind.OTHER_NAMES.values() for word in re.findall(r"\w+_\w+", said)}
    assert words - {"draft_model"} <= {
        each.name for of in (SamplingParams, EngineConfig) for each in dataclasses.fields(of)
    }


def test_names_that_mean_the_same_lead_to_options_and_have_no_second_entry() -> None:
    fields = {field.name for of in (SamplingParams, EngineConfig) for field in dataclasses.fields(of)}
    assert not SAME.keys() & (fields | ENGINE.keys() | SAMPLING.keys())
    assert set(SAME.values()) - {"draft_model", "system"} <= fields


def test_only_one_thing_says_which_tokens_may_come() -> None:
    for field, value in (("bad_words", "x"), ("allowed_token_ids", [1]), ("logits_processors", [max])):
        with pytest.raises(ParameterError, match=f"^{field}=.*structured_outputs"):
            SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **{field: value})
        assert SamplingParams(**{field: value}).restriction == field  # type: ignore[arg-type]
    assert SamplingParams().restriction == ""


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


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"drafter": None, "num_speculative_tokens": 4}, "a drafter: drafter other than None"),
        ({"drafter": None, "acceptance": "rejection"}, "a drafter: drafter other than None"),
        ({"drafter": "ngram", "draft_dtype": "float32"}, "a drafter with a draft model: "),
    ],
)
def test_an_option_without_effect_says_what_it_needs(options: EngineOptions, needed: str) -> None:
    with pytest.raises(ParameterError, match=f"it needs {needed}"):
        engine_config(options)


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


UNUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_speculative_tokens": 4, "drafter": None}, "num_speculative_tokens"),
    ({"num_speculative_tokens": "bass", "drafter": None}, "num_speculative_tokens"),
    ({"speculation_width": 2, "drafter": None}, "speculation_width"),
    ({"draft_vocab_size": 8192, "drafter": "ngram"}, "draft_vocab_size"),
    ({"draft_vocab_size": 8192, "drafter": None}, "draft_vocab_size"),
    ({"speculation_width": 2, "num_speculative_tokens": 0}, "speculation_width"),
    ({"acceptance": "rejection", "drafter": None}, "acceptance"),
    ({"profile": "p.json", "drafter": None}, "profile"),
    ({"profile": "p.json", "drafter": "ngram", "num_speculative_tokens": 4}, "profile"),
    ({"profile": "p.json", "drafter": "ngram", "num_speculative_tokens": "bass"}, "profile"),
    ({"draft_dtype": "float32"}, "draft_dtype"),
    ({"draft_quantization": "int8", "drafter": "ngram"}, "draft_quantization"),
    ({"draft_quantization": None}, "draft_quantization"),
    ({"draft_model": "a", "drafter": "ngram"}, "draft_model"),
    ({"draft_model": "a", "drafter": None}, "draft_model"),
    ({"reference_documents": ["a"], "drafter": None}, "reference_documents"),
    ({"reference_documents": ["a"], "num_speculative_tokens": 0}, "reference_documents"),
    ({"reference_documents": ["a"], "drafter": "ngram", "num_speculative_tokens": 0}, "reference_documents"),
    ({"reference_documents": ["a"], "draft_model": "a", "drafter": "model"}, "reference_documents"),
]


@pytest.mark.parametrize(("given", "name"), UNUSED)
def test_what_would_do_nothing_is_refused_by_name(given: dict[str, Any], name: str) -> None:
    options = dict(given)
    draft_model, documents = options.pop("draft_model", None), options.pop("reference_documents", ())
    with pytest.raises(ParameterError, match=f"^{name}=.*it needs (a drafter|a draft model|n-gram)"):
        engine_config(options, draft_model, documents)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"drafter": None, "num_speculative_tokens": 0},
        {"num_speculative_tokens": 4, "acceptance": "rejection", "reference_documents": ["a"]},
        {"num_speculative_tokens": "auto", "acceptance": "coupled", "draft_quantization": "same", "profile": None},
        {"draft_model": "a", "num_speculative_tokens": 4, "acceptance": "rejection", "draft_dtype": "float32"},
        {"draft_model": "a", "drafter": "hybrid", "reference_documents": ["a"], "draft_quantization": None},
        {"drafter": "ngram", "reference_documents": ["a"], "profile": "p.json"},
        {"drafter": "ngram", "profile": "p.json", "num_speculative_tokens": "profiled"},
        {"drafter": "ngram", "speculation_width": 8},
        {"drafter": None, "speculation_width": 1},
        {"drafter": None, "draft_vocab_size": 0},
        {"acceptance": "rejection", "speculation_width": 1},
    ],
)
def test_what_does_something_or_is_as_it_would_be_is_taken(given: dict[str, Any]) -> None:
    options = dict(given)
    engine_config(options, options.pop("draft_model", None), options.pop("reference_documents", []))  # type: ignore[arg-type]


def test_options_kept_from_before_may_rest() -> None:
    """An engine made plain for a comparison keeps the other's acceptance: only what is said anew must have a use."""
    plain = dataclasses.replace(EngineConfig(drafter="ngram", acceptance="rejection"), drafter=None)
    check_used(plain, {"drafter": None})
    with pytest.raises(ParameterError, match=r"^acceptance="):
        check_used(plain, {"acceptance": "rejection"})


@pytest.mark.parametrize(
    ("option", "choices"),
    [
        ("drafter", ("auto", "model", "ngram", "hybrid", "feature", "None")),
        ("quantization", ("int8", "int4", "fp8", "None")),
        ("draft_quantization", ("same", "int8", "int4", "fp8", "None")),
        ("threads", ("a whole number from 1 to 1024", "None")),
    ],
)
def test_a_wrong_choice_is_told_all_choices_none_among_them(option: str, choices: tuple[str, ...]) -> None:
    with pytest.raises(ParameterError) as caught:
        EngineConfig(**{option: "foo"})
    assert caught.value.field == option
    assert [choice for choice in choices if choice not in caught.value.allowed] == []


def test_the_names_of_fields_are_not_collected_again_for_each_request() -> None:
    """A server makes parameters in the thread that serves all requests."""
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    given = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 100, "seed": 3}
    SamplingParams.from_mapping(given)
    sys.setprofile(count)
    try:
        SamplingParams.from_mapping(given)
    finally:
        sys.setprofile(None)
    assert len(calls) < 20 * len(dataclasses.fields(SamplingParams)), Counter(calls).most_common(3)
