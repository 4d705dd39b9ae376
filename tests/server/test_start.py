"""What the start does before the first request comes, and what it says of that."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from paceline.config import ServerConfig
from paceline.engine.engine import Engine
from paceline.errors import ParameterError
from paceline.kernels.gpu.ahead import Ahead
from paceline.kernels.gpu.graphs import Named
from paceline.server.context import Context
from server_support import load

CAPTURED = Ahead(3, 1.5, left=2, why="no more than 1.5 s were given")


def begun(config: ServerConfig, model: str) -> Context:
    """A server that has started, without network, and ended again."""
    context = Context(config, lambda: load(model), lambda: None)

    async def begin() -> None:
        context.service.start()
        while context.service.is_loading:
            await asyncio.sleep(0.01)
        await context.service.stop()

    asyncio.run(begin())
    return context


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What engines were given, each of which captures something."""
    given: list[float] = []

    def capture(engine: Engine, seconds: float, progress: Callable[[Sequence[Named]], Iterable[Named]]) -> Ahead:
        assert not engine.busy
        assert engine._step_seconds > 0, "the warm-up has taken the memory that prompts need"
        assert list(progress([])) == []
        given.append(seconds)
        return CAPTURED

    monkeypatch.setattr(Engine, "capture_ahead", capture)
    return given


@pytest.mark.parametrize("options", [{}, {"capture_seconds": 1.5}, {"capture_seconds": 0}])
def test_the_log_says_what_was_captured_and_what_is_left(
    tiny: str, asked: list[float], caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO, "paceline.server")
    config = ServerConfig(**options)
    assert begun(config, tiny).service.failure is None
    assert asked == [config.capture_seconds]
    lines = [record.getMessage() for record in caplog.records]
    assert lines.index(str(CAPTURED)) < lines.index("ready")


@pytest.mark.parametrize("seconds", [ServerConfig.capture_seconds, 0])
def test_where_nothing_is_captured_nothing_is_said(tiny: str, caplog: pytest.LogCaptureFixture, seconds: float) -> None:
    caplog.set_level(logging.INFO, "paceline.server")
    assert begun(ServerConfig(capture_seconds=seconds), tiny).service.failure is None
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-1] == "ready"
    assert not any("captured" in line for line in lines)


def test_seconds_for_what_is_not_captured_are_refused(tiny: str) -> None:
    failure = begun(ServerConfig(capture_seconds=5), tiny).service.failure
    assert isinstance(failure, ParameterError)
    assert (
        str(failure)
        == "capture_seconds=5 is not allowed: left out here; it needs rounds that a GPU plays as CUDA graphs"
    )


def test_garbage_is_looked_for_before_requests_come(
    tiny: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A look at all that was loaded holds up everything for 200 ms; the next comes when much more is there."""
    caplog.set_level(logging.INFO, "paceline.server")
    monkeypatch.setattr(gc, "collect", lambda: logging.getLogger("paceline.server").info("looked for"))
    begun(ServerConfig(), tiny)
    assert [record.getMessage() for record in caplog.records][-2:] == ["looked for", "ready"]
