"""Ollama's API by its own client and by bare requests: whole and streamed, with and without speculation, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import ollama
import pytest
from typer.testing import CliRunner

from byte_model import byte_tokenizer, save_llama
from chat_support import ADD, save_chat_model
from paceline.cli.main import app
from paceline.config import ServerConfig
from paceline.server.models import ModelSource
from polling import wait_until
from server_support import Live, load, start
from web import client

pytestmark = pytest.mark.usefixtures("one_thread")

MESSAGES = [{"role": "user", "content": "hello"}]
OPTIONS = {"seed": 3, "num_predict": 40, "temperature": 1.0}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose model has tools and thoughts, beside one that is loaded on demand."""
    folder = tmp_path_factory.mktemp("ollama")
    first = save_chat_model(folder / "first")
    second = save_llama(folder / "second", byte_tokenizer(), seed=9, head_dim=16)
    others = {"second": ModelSource(second, lambda limit: load(second, memory_limit=limit))}
    yield from start(ServerConfig(port=0, served_model_name="tiny"), first, others=others)


@pytest.fixture(scope="module")
def native(live: Live) -> Iterator[ollama.Client]:
    made = ollama.Client(live.url)
    yield made
    made._client.close()


def lines(live: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    reply = live.post(path, {"model": "tiny", **body})
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-ndjson"), reply.text
    return [json.loads(line) for line in reply.text.splitlines()]


def openai(live: Live, path: str, **body: Any) -> dict[str, Any]:
    sampled = {"model": "tiny", "seed": 3, "max_tokens": 40, "temperature": 1.0}
    found: dict[str, Any] = live.post(path, {**sampled, **body}).json()["choices"][0]
    return found


@pytest.mark.parametrize("k", [0, 4])
def test_a_chat_gives_what_openai_s_gives_whole_and_streamed(live: Live, native: ollama.Client, k: int) -> None:
    said = openai(live, "/v1/chat/completions", messages=MESSAGES)["message"]
    whole = native.chat("tiny", MESSAGES, options=OPTIONS)
    assert whole.message.content == said["content"]
    parts = lines(live, "/api/chat", messages=MESSAGES, options=OPTIONS, num_speculative_tokens=k)
    assert "".join(part["message"]["content"] for part in parts) == said["content"]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    counts = last["done_reason"], last["eval_count"], last["prompt_eval_count"]
    assert counts == ("length", 40, whole.prompt_eval_count)
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] > 1000


def test_generate_frames_a_prompt_or_continues_it(live: Live, native: ollama.Client) -> None:
    system = {"role": "system", "content": "be brief"}
    chat = openai(live, "/v1/chat/completions", messages=[system, *MESSAGES])["message"]["content"]
    assert native.generate("tiny", "hello", system="be brief", options=OPTIONS).response == chat
    plain = openai(live, "/v1/completions", prompt="hello")["text"]
    assert native.generate("tiny", "hello", raw=True, options=OPTIONS).response == plain
    parts = native.generate("tiny", "hello", raw=True, options=OPTIONS, stream=True)
    assert "".join(part.response for part in parts) == plain


def test_tools_thoughts_and_formats(live: Live, native: ollama.Client) -> None:
    pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    for form in (schema, "json"):
        made = native.chat("tiny", MESSAGES, format=form, options={**OPTIONS, "num_predict": 200, "temperature": 0})
        assert made.done_reason == "length" or isinstance(json.loads(made.message.content), dict)
    thought = native.chat("tiny", MESSAGES, think=True, options=OPTIONS)
    assert thought.message.thinking
    assert not native.chat("tiny", MESSAGES, think=False, options=OPTIONS).message.thinking
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 4, "b": "x"}}}]}
    result = {"role": "tool", "tool_name": "add", "content": "five"}
    assert native.chat("tiny", [*MESSAGES, called, result], tools=[ADD], options=OPTIONS).prompt_eval_count > 100


def test_options_mean_what_they_say(live: Live, native: ollama.Client) -> None:
    def text(**options: Any) -> str:
        return str(native.generate("tiny", "hello", raw=True, options={**OPTIONS, **options}).response)

    penalised = openai(live, "/v1/completions", prompt="hello", repetition_penalty=1.7)["text"]
    assert text(repeat_penalty=1.7, repeat_last_n=-1) == penalised != text()
    assert text(repeat_penalty=1.7, repeat_last_n=0) == text(num_gpu=3, num_thread=2, mirostat=0) == text()
    whole = native.generate("tiny", "hello", raw=True, options={**OPTIONS, "num_predict": -1, "num_ctx": 30})
    assert whole.prompt_eval_count + whole.eval_count == 30
    scored = native.generate("tiny", "hello", raw=True, options=OPTIONS, logprobs=True, top_logprobs=2)
    assert [len(entry.top_logprobs) for entry in scored.logprobs] == [2] * 40
    parts = lines(live, "/api/generate", prompt="hello", raw=True, options=OPTIONS, logprobs=True)
    assert sum(len(part.get("logprobs", ())) for part in parts) == 40


REFUSED: list[tuple[Callable[[ollama.Client], Any], int, str]] = [
    (lambda it: it.chat("none", MESSAGES), 404, "'tiny', 'second'"),
    (lambda it: it.chat("tiny", [{**MESSAGES[0], "images": ["aGk="]}]), 400, "reads text only"),
    (lambda it: it.chat("tiny", MESSAGES, options={"mirostat": 2}), 400, "mirostat is not supported"),
    (lambda it: it.chat("tiny", MESSAGES, options={"repeat_last_n": 64}), 400, "repeat_last_n"),
    (lambda it: it.chat("tiny", MESSAGES, options={"num_ctx": 9999}), 400, "--max-model-len"),
    (lambda it: it.chat("tiny", MESSAGES, options={"num_ctx": 5}), 400, "num_ctx = 5"),
    (lambda it: it.chat("tiny", MESSAGES, keep_alive="soon"), 400, "1h30m"),
    (lambda it: it.chat("second", MESSAGES, think=True), 400, "does not support thinking"),
    (lambda it: it.generate("tiny", "x", suffix="y"), 400, "no tokens for filling a gap"),
    (lambda it: it.generate("tiny", "x", raw=True, system="y"), 400, "raw"),
    (lambda it: it.generate("tiny", keep_alive=0), 400, "stays loaded"),
    (lambda it: it.embed("tiny", "x" * 2000, truncate=False), 400, "tokens"),
    (lambda it: it.delete("tiny"), 403, "paceline rm"),
    (lambda it: it.pull("none"), 404, "does not exist"),
]


@pytest.mark.parametrize(("ask", "status", "said"), REFUSED)
def test_what_is_not_possible_is_refused_by_name(
    native: ollama.Client, ask: Callable[[ollama.Client], Any], status: int, said: str
) -> None:
    with pytest.raises(ollama.ResponseError) as refused:
        ask(native)
    assert (refused.value.status_code, said in refused.value.error) == (status, True), refused.value.error


def test_the_library_tells_of_models_loaded_or_not(live: Live, native: ollama.Client) -> None:
    assert [model.model for model in native.list().models] == ["tiny", "second"]
    assert all(model.details.family == "llama" and model.size > 1000 for model in native.list().models)
    shown = native.show("second")
    assert (shown.capabilities, shown.modelinfo["llama.context_length"]) == (["completion", "embedding"], 512)
    assert native.pull("tiny:latest").status == "success"
    assert native.generate("second:latest", keep_alive="1h").done_reason == "load"
    first, second = native.ps().models
    assert (first.model, second.model, second.context_length) == ("tiny", "second", 512)
    assert 3500 < (second.expires_at - shown.modified_at.now(second.expires_at.tzinfo)).total_seconds() <= 3600
    assert native.generate("second", keep_alive=0).done_reason == "unload"
    wait_until(lambda: len(native.ps().models) == 1)
    assert live.get("/api/version").json()["version"]


def test_ps_lists_what_a_server_has_loaded(live: Live) -> None:
    heading, line = CliRunner().invoke(app, ["ps", "--url", live.url]).stdout.splitlines()
    assert heading.split() == ["NAME", "SIZE", "CONTEXT", "UNTIL"]
    assert (line.split()[0], line.split()[3:]) == ("tiny", ["512", "stays", "loaded"])
    gone = CliRunner().invoke(app, ["ps", "--url", "http://127.0.0.1:9"])
    assert (gone.exit_code, "no server of paceline answers at" in gone.stderr) == (2, True)


def test_embeddings_are_those_of_openai_s_api(live: Live, native: ollama.Client) -> None:
    wanted = live.post("/v1/embeddings", {"model": "tiny", "input": ["a", "bc"]}).json()["data"]
    made = native.embed("tiny", ["a", "bc"])
    assert made.embeddings == [entry["embedding"] for entry in wanted]
    assert native.embeddings("tiny", "a").embedding == made.embeddings[0]
    assert len(native.embed("tiny", "x" * 2000, dimensions=4).embeddings[0]) == 4, "a long text is cut"


def test_no_content_type_is_needed_except_by_web_pages(live: Live) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x", "options": {"num_predict": 1}, "stream": False})
    for headers, status in (({}, 200), ({"content-type": "text/plain"}, 200), ({"origin": "http://a.example"}, 415)):
        reply = client.post(f"{live.url}/api/generate", content=body, headers=headers)
        assert reply.status_code == status, reply.text
    assert "Content-Type" in reply.json()["error"]
    broken = client.post(f"{live.url}/api/generate", content="{")
    assert (broken.status_code, "not valid JSON" in broken.json()["error"]) == (400, True)
