"""Adapters are served as models of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from adapter_support import write_adapter
from paceline.config import ServerConfig
from server_support import Live, save_model, start


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder: Path = tmp_path_factory.mktemp("adapted")
    model = save_model(folder / "model")
    write_adapter(folder / "red", AutoModelForCausalLM.from_pretrained(model), seed=1)
    config = ServerConfig(port=0, served_model_name="plain")
    yield from start(config, model, adapters={"red": folder / "red"})


def ask(live: Live, model: str | None, path: str = "/v1/completions") -> tuple[str, str]:
    """The text of an answer and the model that it names."""
    asked = {"prompt": "abcabc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "abc"}]}
    reply = live.post(path, {**asked, "model": model, "max_tokens": 12, "temperature": 0})
    assert reply.status_code == 200, reply.text
    document = reply.json()
    choice = document["choices"][0]
    return choice.get("text") or choice["message"]["content"], document["model"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_model_of_a_request_may_be_an_adapter(path: str, adapted: Live) -> None:
    plain, red = ask(adapted, "plain", path), ask(adapted, "red", path)
    assert plain[0] != red[0]
    assert (plain[1], red[1]) == ("plain", "red")
    assert ask(adapted, None, path) == plain


def test_adapters_are_listed_and_others_refused(adapted: Live) -> None:
    assert [card["id"] for card in adapted.get("/v1/models").json()["data"]] == ["plain", "red"]
    assert adapted.get("/v1/models/red").json()["id"] == "red"
    reply = adapted.post("/v1/completions", {"prompt": "a", "model": "green"})
    assert reply.status_code == 404
    assert "this server serves 'plain', 'red'" in reply.json()["error"]["message"]
