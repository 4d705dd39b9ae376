"""A server whose engine or loading hangs, run in a process of its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from paceline.config import ServerConfig
from paceline.core.outputs import RequestOutput
from paceline.llm import LLM
from paceline.server import ending, run
from paceline.server.sockets import listen

FATAL_TOKENS = 7  # the engine hangs once a request wants so many


def serve(model: str, hangs: str, port: Path) -> None:
    """Serve until a signal. hangs: "loading" or "engine". port: the file that gets the number."""
    assert min(run.LAST_WORDS, run.LAST_STEP) > 0.5
    run.LAST_WORDS = run.LAST_STEP = 0.5  # type: ignore[assignment]  # seconds after the limit
    ending._ALARM = 30  # long, for a loaded machine: this tests the process's end, not the kernel's alarm

    def told(config: ServerConfig) -> Any:
        sockets = listen(config)
        port.write_text(str(sockets[0].getsockname()[1]))
        return sockets

    run.listen = told  # type: ignore[attr-defined]
    config = ServerConfig(port=0, shutdown_timeout=0.5, stall_timeout=0.5, log_format="json")
    run.serve(config, lambda: _load(model, hangs))


def _load(model: str, hangs: str) -> LLM:
    for _ in range(100):
        print(100 * "a warning of some library ", file=sys.stderr, flush=True)
    if hangs == "loading":
        time.sleep(1000)
    llm = LLM(model, drafter="ngram", num_speculative_tokens=4, dtype="float32", device="cpu", max_batch_size=4)
    step, add, fatal = llm.engine.step, llm.engine.add, list[bool]()

    def watched(request: Any) -> Any:
        fatal.append(request.params.max_tokens == FATAL_TOKENS)
        return add(request)

    def hanging() -> list[RequestOutput]:
        if any(fatal):
            time.sleep(1000)  # as native code does: without the interpreter's lock
        return step()

    llm.engine.add, llm.engine.step = watched, hanging  # type: ignore[method-assign]
    return llm
