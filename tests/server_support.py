"""A live server for tests: a small random model with one token per byte, behind uvicorn in a thread."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from fastapi.dependencies import models
from openai import OpenAI

from byte_model import byte_tokenizer as byte_tokenizer
from byte_model import save_llama
from paceline.config import ServerConfig
from paceline.llm import LLM
from paceline.server import service
from paceline.server.app import make_app
from paceline.server.context import Context
from paceline.server.models import ModelSource, ServedModels
from paceline.server.run import Server
from polling import PATIENCE, wait_until
from web import client

service._PEAK_SECONDS = 0.0  # seconds in which each server measures the processor: no test depends on the result


def save_model(path: Path, special: Sequence[str] = ()) -> str:
    """Save the model. special: spellings of further special tokens."""
    return save_llama(path, byte_tokenizer(special), seed=1, head_dim=16)  # the native kernels require this width


def load(model: str, **options: Any) -> LLM:
    torch.set_num_threads(1)  # the tensors are tiny
    plain = {"dtype": "float32", "attention": "padded", "device": "cpu", "drafter": "ngram", "max_batch_size": 4}
    return LLM(model, **{"num_speculative_tokens": 4} | plain | options)  # type: ignore[arg-type]


@contextmanager
def asking(url: str, path: str, body: Any) -> Iterator[None]:
    """Send a request and wait in the background; leaving the block disconnects."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as made:
        made.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


@dataclass
class Live:
    """A running server and access to its state."""

    url: str
    context: Context
    served: ServedModels

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, http_client=client)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return client.post(self.url + path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return client.get(self.url + path, **options)

    def metric(self, name: str) -> float:
        """Sum of a metric's values over its labels."""
        lines = re.findall(rf"^paceline:{name}(?:{{.*}})? (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return sum(map(float, lines))

    def asking(self, path: str, body: Any) -> AbstractContextManager[None]:
        return asking(self.url, path, body)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Pause the engine for the block. Requests queue meanwhile and are all taken at once afterwards."""
        begun, release = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            release.wait(PATIENCE)

        self.context.service._inbox.put(hold)
        assert begun.wait(PATIENCE)
        try:
            yield
        finally:
            release.set()

    @property
    def waiting(self) -> int:
        """Commands that the engine has not taken yet; while it is paused, one per prompt."""
        return self.context.service._inbox.qsize()

    def wait_until_idle(self) -> None:
        """Wait until nothing of any request is left.

        The engine clears its queues one by one: this waits for the last.
        """
        engine, service, admission = self.context.llm.engine, self.context.service, self.context.dispatcher.admission
        wait_until(
            lambda: not (admission.inside or self.waiting or engine.busy or engine._requests or service._live),
            "rows are still taken",
        )
        engine.scheduler.check_integrity()


def start(
    config: ServerConfig,
    model: str,
    *,
    others: Mapping[str, ModelSource] | None = None,
    total_memory: int | None = None,
    **options: Any,
) -> Iterator[Live]:
    app = make_app(config, lambda: load(model, **options), others=others, memory_limit=total_memory)
    server = Server(app, config, app.state.served.fail_all)
    thread = threading.Thread(target=server.run)
    thread.start()
    context: Context = app.state.context
    try:
        wait_until(lambda: (server.started and context.service.state == "ready") or not thread.is_alive())
        assert thread.is_alive(), context.service.failure
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Live(f"http://127.0.0.1:{port}", context, app.state.served)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        for value in vars(models).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()  # FastAPI remembers routes, hence apps, which slow every garbage collection down
    assert not thread.is_alive()
    assert context.service.state == "stopped"
