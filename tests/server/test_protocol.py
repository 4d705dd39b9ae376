"""Request bodies: every sampling parameter is a field of requests, or it is said how requests spell it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config import SamplingParams
from paceline.config.help import helps_of
from paceline.config.ranges import names_of
from paceline.server import limits
from paceline.server.chat_protocol import ChatRequest
from paceline.server.protocol import SPELLED_OTHERWISE, CompletionRequest, SamplingFields

SENT: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "rank_by": "logprob",
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.5,
    "eta_cutoff": 0.5,
    "top_n_sigma": 0.5,
    "seed": 4,
    "stop": ["a"],
    "stop_token_ids": [1],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1.0},
    "bad_words": ["b"],
    "allowed_token_ids": [5, 6],
    "skip_special_tokens": False,
    "num_speculative_tokens": 0,
    "keep_prefix": False,
    "cache_salt": "salt",
}


def test_every_sampling_parameter_is_a_field_or_has_a_reason_not_to_be() -> None:
    assert sorted([*SamplingFields.model_fields, *SPELLED_OTHERWISE]) == sorted(names_of(SamplingParams))
    assert all(SPELLED_OTHERWISE.values())


def test_every_field_reaches_the_engine() -> None:
    assert SENT.keys() | {"max_tokens"} == SamplingFields.model_fields.keys()
    params = CompletionRequest.model_validate({"prompt": "a", "max_tokens": 8, **SENT}).sampling(SamplingParams(), 1)
    assert params == SamplingParams.from_mapping(SENT | {"max_tokens": 8})
    for name in SENT:
        assert getattr(params, name) != getattr(SamplingParams(), name)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_the_schema_describes_every_parameter_and_its_range(kind: Any) -> None:
    fields = kind.model_json_schema()["properties"]
    for name, said in helps_of(SamplingParams).items():
        if name not in SPELLED_OTHERWISE:
            assert fields[name]["description"].startswith(said.text)
    assert "in [0, 100]" in fields["temperature"]["description"].replace("1e-30", "0")


@pytest.mark.parametrize(
    "extra",
    [
        {"bad_words": ["a"] * (limits.MAX_STOP_STRINGS + 1)},
        {"bad_words": "a" * (limits.MAX_STOP_CHARACTERS + 1)},
        {"allowed_token_ids": [1] * (limits.MAX_ALLOWED_TOKEN_IDS + 1)},
        {"allowed_token_ids": ["1"]},
        {"logits_processors": []},
        {"skip_special_tokens": 0},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_what_is_too_large_or_of_another_type_is_refused_by_name(extra: dict[str, Any]) -> None:
    (name,) = extra
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "a", **extra})
    assert any(name in (*error["loc"], error.get("ctx", {}).get("field")) for error in caught.value.errors())
