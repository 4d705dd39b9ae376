"""Count the files entered, the functions and the Python calls of one streamed chat, from the ASGI call to its end.

    python -m benchmarks.request_trace [MODEL]

Calls of the package's own functions in all threads count: event loop, worker threads, engine. The chat is greedy, has
24 tokens and follows one with other words, so that everything is loaded. Rounds draft four tokens by n-gram lookup,
whatever the machine: ``auto`` would choose by measured times.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from starlette.types import ASGIApp, Message

import paceline
from paceline import LLM
from paceline.config import ServerConfig
from paceline.server.app import make_app

SOURCE = f"{Path(paceline.__file__).parent}/"
TOKENS = 24
TALK = {"role": "user", "content": "Name three rivers of Europe, three of Asia, and three of Africa."}
FIRST = {"role": "user", "content": "Hello."}
SHARED: dict[str, Any] = {"stream": True, "temperature": 0}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [TALK], "max_tokens": TOKENS, "ignore_eos": True, **SHARED},
    "/v1/responses": {"input": [TALK], "max_output_tokens": TOKENS, **SHARED},
    "/v1/messages": {"model": "model", "messages": [TALK], "max_tokens": TOKENS, **SHARED},
}


class CallCounter:
    """Counts calls of the package's functions in threads that are started within ``watching``, and in this one."""

    def __init__(self) -> None:
        self._by_thread: defaultdict[int, Counter[CodeType]] = defaultdict(Counter)
        self._counting = False

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self._counting and frame.f_code.co_filename.startswith(SOURCE):
            self._by_thread[threading.get_ident()][frame.f_code] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def counting(self) -> Iterator[Counter[CodeType]]:
        """Count the calls of the block; the counter is filled at its end."""
        total: Counter[CodeType] = Counter()
        self._by_thread.clear()
        self._counting = True
        try:
            yield total
        finally:
            self._counting = False
            for calls in self._by_thread.values():
                total.update(calls)


async def ask(app: ASGIApp, path: str, body: dict[str, Any]) -> bytes:
    """Send a request to an ASGI application and return the whole reply's body."""
    content, sent = json.dumps(body).encode(), bytearray()
    pending: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> Message:
        if not pending:
            await asyncio.Event().wait()  # the client stays
        return pending.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200, message
        sent.extend(message.get("body", b""))

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    await app(scope, receive, send)
    return bytes(sent)


async def counted(llm: LLM, requests: dict[str, dict[str, Any]]) -> dict[str, Counter[CodeType]]:
    """The calls that each request makes, by function."""
    counter, found = CallCounter(), {}
    with counter.watching():
        app = make_app(ServerConfig(served_model_name="model"), lambda: llm)
        async with app.router.lifespan_context(app):
            while app.state.context.service.is_loading:
                await asyncio.sleep(0.02)
            for path, body in requests.items():
                await ask(app, path, {**body, "input" if "input" in body else "messages": [FIRST]})
                with counter.counting() as found[path]:
                    await ask(app, path, body)
    return found


def described(path: str, calls: Counter[CodeType]) -> str:
    """One line of counts, then the files with the most calls."""
    files: Counter[str] = Counter()
    for code, count in calls.items():
        files[code.co_filename.removeprefix(SOURCE)] += count
    of_server = sum(name.startswith("server/") for name in files)
    largest = ", ".join(f"{name} {count}" for name, count in files.most_common(12))
    return (
        f"{path}: {len(files)} files (server {of_server}), {len(calls)} functions, {calls.total()} calls\n    {largest}"
    )


def main() -> None:
    """Print the counts of a chat by each of the three APIs."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    llm = LLM(model, drafter="ngram", num_speculative_tokens=4, max_batch_size=2, max_model_len=512)
    for path, calls in asyncio.run(counted(llm, REQUESTS)).items():
        sys.stdout.write(described(path, calls) + "\n")


if __name__ == "__main__":
    main()
