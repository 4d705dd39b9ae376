"""Embeddings over HTTP equal those of the offline API, in both encodings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import ServerConfig
from paceline.llm import LLM
from paceline.server.limits import MAX_EMBEDDINGS
from server_support import Live, save_model, start

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["a", "once upon a time", "x" * 300]


def close(one: Any, other: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(one), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_those_of_the_offline_api(live: Live, offline: LLM, pooling: Any, encoding: Any) -> None:
    wanted = offline.embed(TEXTS, pooling=pooling, use_tqdm=False)
    extra = {} if encoding == "base64" else {"encoding_format": "float"}  # the client asks for base64 by itself
    reply = live.openai.embeddings.create(model="tiny", input=TEXTS, extra_body={"pooling": pooling}, **extra)
    assert [item.index for item in reply.data] == [0, 1, 2]
    close([item.embedding for item in reply.data], wanted)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, TEXTS))


def test_one_text_token_ids_and_several_lists_of_them(live: Live, offline: LLM) -> None:
    ids = [5, 6, 7]
    wanted = offline.embed([ids, [8]], use_tqdm=False)
    close(live.openai.embeddings.create(model="tiny", input=ids).data[0].embedding, wanted[0])
    close([item.embedding for item in live.openai.embeddings.create(model="tiny", input=[ids, [8]]).data], wanted)
    width = wanted.shape[1]
    body = {"input": "a", "user": "me", "metadata": {}, "store": True}
    whole = live.post("/v1/embeddings", body).json()["data"][0]["embedding"]
    assert live.post("/v1/embeddings", body | {"dimensions": width}).json()["data"][0]["embedding"] == whole
    short = live.post("/v1/embeddings", body | {"dimensions": 7}).json()["data"][0]["embedding"]
    close(short, torch.nn.functional.normalize(torch.tensor(whole[:7]), dim=0))


def test_a_request_without_pooling_gets_the_models_own(
    live: Live, offline: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.context.llm, "_pooling", "last")
    found = live.openai.embeddings.create(model="tiny", input=TEXTS)
    close([item.embedding for item in found.data], offline.embed(TEXTS, pooling="last", use_tqdm=False))
    monkeypatch.setattr(live.context.llm, "_pooling", "cls")
    refused = live.post("/v1/embeddings", {"input": "a"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pooling")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, None),
        ({"input": ""}, None),
        ({"input": ["a", ""]}, None),
        ({"input": "x" * 600}, "input"),
        ({"input": [10**6]}, "token_ids"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 10**6}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"tools": [{}]}, "tools"),
        ({"colour": 1}, "colour"),
        ({"input": ["a"] * (MAX_EMBEDDINGS + 1)}, "input"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(live: Live, change: Any, param: str | None) -> None:
    reply = live.post("/v1/embeddings", {"input": "a", **change})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    live.wait_until_idle()


@pytest.fixture(scope="module")
def keyed(tiny: str) -> Iterator[Live]:
    keys = ("free", "few max_tokens_per_minute=20")
    yield from start(ServerConfig(port=0, served_model_name="tiny", api_keys=keys), tiny)


def test_keys_and_their_quotas_hold(keyed: Live) -> None:
    def status(key: str, size: int) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return keyed.post("/v1/embeddings", {"input": "x" * size}, headers=headers).status_code

    assert status("wrong", 1) == 401
    assert (status("few", 15), status("few", 15)) == (200, 429)
    assert status("free", 30) == 200


def test_many_texts_share_passes_and_are_answered_beside_a_stream(live: Live, offline: LLM) -> None:
    texts = [f"text {number}" for number in range(200)]
    body = {"prompt": "a", "max_tokens": 64, "ignore_eos": True}
    with live.asking("/v1/completions", body):
        reply = live.openai.embeddings.create(model="tiny", input=texts)
    close([item.embedding for item in reply.data], offline.embed(texts, use_tqdm=False))
    live.wait_until_idle()


def test_a_timeout_ends_it(live: Live) -> None:
    with pytest.raises(openai.InternalServerError, match="did not finish within"):
        live.openai.embeddings.create(model="tiny", input=["x" * 400] * 15, extra_body={"timeout": 1e-6})
    live.wait_until_idle()


def test_a_model_without_an_output_head_is_served_for_embeddings(offline: LLM, tmp_path: Path) -> None:
    path, file = save_model(tmp_path), tmp_path / "model.safetensors"
    save_file({name: weight for name, weight in load_file(file).items() if name != "lm_head.weight"}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    for live in start(ServerConfig(port=0), path):
        reply = live.openai.embeddings.create(model=path, input=TEXTS)
        close([item.embedding for item in reply.data], offline.embed(TEXTS, use_tqdm=False))
        refused = [
            live.post("/v1/completions", {"prompt": "a"}),
            live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ]
        for answer in refused:
            assert answer.status_code == 400
            assert "no output head" in answer.json()["error"]["message"]
