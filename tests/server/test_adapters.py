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


SAID = [{"role": "user", "content": "abc"}]
ROUTES = {
    "/v1/completions": {"prompt": "abcabc", "max_tokens": 12},
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 12},
    "/v1/messages": {"messages": SAID, "max_tokens": 12},
    "/v1/responses": {"input": "abc", "max_output_tokens": 12},
}


def ask(live: Live, model: str | None, path: str) -> tuple[str, str]:
    """The answer and the model that it names."""
    reply = live.post(path, {**ROUTES[path], "model": model, "temperature": 0})
    assert reply.status_code == 200, reply.text
    document = reply.json()
    answer = next(document[name] for name in ("choices", "content", "output") if name in document)[0]
    return str(answer.get("message") or answer.get("content") or answer["text"]), document["model"]


@pytest.mark.parametrize("path", ROUTES)
def test_the_model_of_a_request_may_be_an_adapter(path: str, adapted: Live) -> None:
    plain, red = ask(adapted, "plain", path), ask(adapted, "red", path)
    assert plain[0] != red[0]
    assert (plain[1], red[1]) == ("plain", "red")
    if path != "/v1/messages":  # its model is required
        assert ask(adapted, None, path) == plain


def test_embeddings_of_adapters_are_refused(adapted: Live) -> None:
    body = {"input": "abc"}
    assert adapted.post("/v1/embeddings", {**body, "model": "plain"}).status_code == 200
    reply = adapted.post("/v1/embeddings", {**body, "model": "red"})
    assert reply.status_code == 400
    assert "'plain'" in reply.json()["error"]["message"]


def test_a_prompt_is_scored_by_its_adapter(adapted: Live) -> None:
    body = {"prompt": "abcabc", "echo": True, "logprobs": 1, "max_tokens": 0}
    replies = [adapted.post("/v1/completions", {**body, "model": name}) for name in ("plain", "red")]
    plain, red = (reply.json()["choices"][0]["logprobs"]["token_logprobs"] for reply in replies)
    assert len(plain) == len(red) > 1
    assert plain[0] is red[0] is None
    assert plain[1:] != red[1:]


def test_adapters_are_listed_and_others_refused(adapted: Live) -> None:
    assert [card["id"] for card in adapted.get("/v1/models").json()["data"]] == ["plain", "red"]
    assert adapted.get("/v1/models/red").json()["id"] == "red"
    reply = adapted.post("/v1/completions", {"prompt": "a", "model": "green"})
    assert reply.status_code == 404
    assert "this server serves 'plain', 'red'" in reply.json()["error"]["message"]
