"""Several models in one server: loaded on demand, unloaded when idle or in the way, each with its own answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from byte_model import byte_tokenizer, save_llama
from paceline import SamplingParams
from paceline.config import ServerConfig
from paceline.errors import CapacityError, ModelFormatError
from paceline.llm import LLM
from paceline.server.models import ModelSource
from polling import wait_until
from server_support import Live, load, start

pytestmark = pytest.mark.usefixtures("one_thread")

BODY = {"prompt": "hello", "max_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: save_llama(folder / name, byte_tokenizer(), seed=seed, head_dim=16) for seed, name in enumerate("ab", 7)
    }


@pytest.fixture
def loads() -> list[str]:
    """What was loaded, in this order."""
    return []


@pytest.fixture
def others(paths: dict[str, str], loads: list[str]) -> dict[str, ModelSource]:
    def loader(name: str) -> ModelSource:
        def build(memory_limit: int | None) -> LLM:
            loads.append(name)
            return load(paths[name], memory_limit=memory_limit)

        return ModelSource(paths[name], build)

    return {name: loader(name) for name in paths}


@contextmanager
def serving(
    model: str, others: Mapping[str, ModelSource], total_memory: int | None = None, **options: Any
) -> Iterator[Live]:
    config = ServerConfig(port=0, served_model_name="tiny", **options)
    yield from start(config, model, others=others, total_memory=total_memory)


def text(live: Live, model: str, **fields: Any) -> str:
    reply = live.post("/v1/completions", {**BODY, "model": model, **fields})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def test_a_request_loads_its_model_whose_answers_are_those_it_gives_alone(
    tiny: str, others: dict[str, ModelSource], paths: dict[str, str], loads: list[str]
) -> None:
    with serving(tiny, others) as live:
        cards = live.get("/v1/models").json()["data"]
        assert [(card["id"], "max_model_len" in card) for card in cards] == [("tiny", True), ("a", False), ("b", False)]
        assert loads == []
        with ThreadPoolExecutor(6) as pool:
            texts = [*pool.map(lambda model: text(live, model), ["a", "b", "a", "tiny", "b", "a"])]
        assert sorted(loads) == ["a", "b"], "each was loaded once"
        assert all("max_model_len" in card for card in live.get("/v1/models").json()["data"])
        assert live.get("/v1/models/b").json()["id"] == "b"
        assert 'paceline:generation_tokens_total{model="a"} 36.0' in live.get("/metrics").text
        assert live.get("/stats").json()["capacity"] == 12
        refused = live.post("/v1/completions", {**BODY, "model": "c"})
        assert (refused.status_code, "'tiny', 'a', 'b'" in refused.text) == (404, True)
    params = SamplingParams(max_tokens=12, seed=3)
    alone = {
        name: load(path).generate("hello", params, use_tqdm=False)[0].outputs[0].text for name, path in paths.items()
    }
    assert [texts[place] for place in (0, 2, 5, 1, 4)] == [alone["a"]] * 3 + [alone["b"]] * 2
    assert alone["a"] != alone["b"]


def test_an_idle_model_is_unloaded_and_loaded_again(
    tiny: str, others: dict[str, ModelSource], loads: list[str]
) -> None:
    with serving(tiny, others, unload_after=0.01) as live:
        first = text(live, "a")
        wait_until(lambda: live.served.others["a"].context is None)
        assert live.get("/stats").json()["capacity"] == 4
        assert text(live, "a") == first
        assert loads == ["a", "a"]
        assert live.metric("generation_tokens_total") == 24, "counters outlive a model"
        live.served.others["a"].unload_after = None
        with live.asking("/v1/completions", {**BODY, "model": "b"}):  # it leaves while its model loads
            wait_until(lambda: loads[-1] == "b")
        wait_until(lambda: live.served.others["b"].is_ready)
        wait_until(lambda: live.served.others["b"].users == 0)


def test_under_a_memory_limit_the_least_used_goes_once_it_is_idle(
    tiny: str, others: dict[str, ModelSource], loads: list[str]
) -> None:
    one = load(tiny).engine.memory_bytes  # all three are of one size
    with serving(tiny, others, total_memory=2 * one + 4096) as live:
        long = threading.Thread(target=text, args=(live, "a"), kwargs={"max_tokens": 400, "ignore_eos": True})
        long.start()
        wait_until(lambda: live.served.others["a"].users == 1)
        text(live, "b")  # waits for the long answer
        assert not long.is_alive() or long.join() is None
        assert live.served.others["a"].context is None
        assert loads == ["a", "b", "b"], "a load that does not fit is tried again"


def test_a_model_that_cannot_be_loaded_fails_its_requests_alone(tiny: str) -> None:
    def loader(error: Exception) -> ModelSource:
        def fail(_: int | None) -> LLM:
            raise error

        return ModelSource("nowhere", fail)

    with serving(tiny, {"a": loader(ModelFormatError("damaged")), "b": loader(CapacityError("too large"))}) as live:
        for model, status, said in (("a", 500, "damaged"), ("b", 503, "too large"), ("a", 500, "damaged")):
            refused = live.post("/v1/completions", {**BODY, "model": model})
            assert (refused.status_code, said in refused.text) == (status, True)
        assert text(live, "tiny")


def test_a_server_that_ends_while_it_loads_waits_for_nobody(tiny: str) -> None:
    begun, release = threading.Event(), threading.Event()

    def slow(_: int | None) -> LLM:
        begun.set()
        release.wait(30)
        raise ModelFormatError("given up")

    try:
        with (
            serving(tiny, {"a": ModelSource("nowhere", slow)}) as live,
            live.asking("/v1/completions", {**BODY, "model": "a"}),
        ):
            assert begun.wait(30)
            began = time.monotonic()
        assert time.monotonic() - began < 10
    finally:
        release.set()
