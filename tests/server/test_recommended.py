"""Requests without sampling fields: what the model's files recommend, on every route; turned off by an option."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import SamplingParams
from paceline.config import CHAT_SAMPLING, RECOMMENDED_FIELDS, ServerConfig
from paceline.errors import ModelFormatError
from paceline.server import context
from server_support import Live, load, save_model, start

RECOMMENDED = {"temperature": 0.25, "top_p": 0.5, "top_k": 3, "repetition_penalty": 1.25}
SAID = {"role": "user", "content": "hello"}
ROUTES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [SAID], "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": [SAID], "max_tokens": 3},
}


def model_that_recommends(folder: Path, **values: Any) -> str:
    model = save_model(folder / "model")
    (folder / "model" / "generation_config.json").write_text(json.dumps(values))
    return model


@pytest.fixture(scope="module", params=["auto", "off"])
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = model_that_recommends(tmp_path_factory.mktemp("recommends"), **RECOMMENDED)
    config = ServerConfig(port=0, served_model_name="tiny", generation_config=request.param)
    yield from start(config, model)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("given", [{}, {"temperature": 0.0}, {"top_p": 0.75, "temperature": 2.0}], ids=str)
def test_a_request_is_sampled_as_recommended_where_it_does_not_say(
    serving: Live, route: str, given: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams] = []
    engine = serving.context.llm.engine
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda request: (asked.append(request.params), add(request))[1])
    assert serving.post(route, {"model": "tiny", **ROUTES[route], **given}).status_code == 200
    (params,) = asked
    expected = (RECOMMENDED if serving.context.config.generation_config == "auto" else {}) | given
    usual = SamplingParams()
    assert {name: getattr(params, name) for name in RECOMMENDED} == {
        name: expected.get(name, getattr(usual, name)) for name in RECOMMENDED
    }


@pytest.fixture(scope="module", params=["auto", "off"])
def silent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    model = save_model(tmp_path_factory.mktemp("silent") / "model")
    yield from start(ServerConfig(port=0, served_model_name="tiny", generation_config=request.param), model)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("given", [{}, {"temperature": None}, {"temperature": 1.0}, {"top_p": 0.75}], ids=str)
def test_a_chat_that_names_no_sampling_has_the_default_of_chats_where_the_model_recommends_nothing(
    silent: Live, route: str, given: dict[str, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams] = []
    engine = silent.context.llm.engine
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda request: (asked.append(request.params), add(request))[1])
    assert silent.post(route, {"model": "tiny", **ROUTES[route], **given}).status_code == 200
    (params,) = asked
    named = {name: value for name, value in given.items() if value is not None}
    is_chat, auto = route != "/v1/completions", silent.context.config.generation_config == "auto"
    expected = SamplingParams(**(CHAT_SAMPLING if is_chat and auto and not named else named))
    assert all(getattr(params, name) == getattr(expected, name) for name in RECOMMENDED_FIELDS)


def test_the_model_s_card_has_the_default_sampling(serving: Live, silent: Live) -> None:
    cards = [live.get("/v1/models").json()["data"][0]["default_sampling"] for live in (serving, silent)]
    usual = {"temperature": 1.0}
    recommended = RECOMMENDED if serving.context.config.generation_config == "auto" else usual
    chats = CHAT_SAMPLING if silent.context.config.generation_config == "auto" else usual
    assert cards == [{"completions": recommended, "chats": recommended}, {"completions": usual, "chats": chats}]


def test_the_shortest_context_can_be_served(tiny: str) -> None:
    for live in start(ServerConfig(port=0, served_model_name="tiny"), tiny, max_model_len=2):
        body = {"model": "tiny", "prompt": [65], "max_tokens": 1}
        assert live.post("/v1/completions", body).status_code == 200


def test_an_impossible_recommendation_ends_the_start_unless_it_is_turned_off(tmp_path: Path) -> None:
    model = model_that_recommends(tmp_path, temperature=-1)
    config = ServerConfig(port=0, served_model_name="tiny")
    with pytest.raises(ModelFormatError, match="temperature"):
        context._loaded(lambda: load(model), config)
    for live in start(replace(config, generation_config="off"), model):
        assert live.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 1}).status_code == 200
