"""Work at the start of the server, before the first request, and its log lines."""

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
    """A server that was started without network and stopped again."""
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
    """Seconds that engines were given for capturing; each captures something."""
    given: list[float] = []

    def capture(engine: Engine, seconds: float, progress: Callable[[Sequence[Named]], Iterable[Named]]) -> Ahead:
        assert not engine.busy
        assert engine.chunks.rounds.last > 0, "the warm-up has allocated the memory for prefill"
        assert list(progress([])) == []
        given.append(seconds)
        return CAPTURED

    monkeypatch.setattr(Engine, "capture_ahead", capture)
    return given


@pytest.mark.parametrize("options", [{}, {"capture_seconds": 1.5}, {"capture_seconds": 0}])
def test_the_log_reports_captured_and_remaining_graphs(
    tiny: str, asked: list[float], caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO, "paceline.server")
    config = ServerConfig(**options)
    assert begun(config, tiny).service.failure is None
    assert asked == [config.capture_seconds]
    lines = [record.getMessage() for record in caplog.records]
    assert lines.index(str(CAPTURED)) < lines.index("ready")


@pytest.mark.parametrize("seconds", [ServerConfig.capture_seconds, 0])
def test_the_log_is_silent_if_nothing_is_captured(tiny: str, caplog: pytest.LogCaptureFixture, seconds: float) -> None:
    caplog.set_level(logging.INFO, "paceline.server")
    assert begun(ServerConfig(capture_seconds=seconds), tiny).service.failure is None
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-1] == "ready"
    assert not any("captured" in line for line in lines)


def test_capture_seconds_without_graphs_are_refused(tiny: str) -> None:
    failure = begun(ServerConfig(capture_seconds=5), tiny).service.failure
    assert isinstance(failure, ParameterError)
    assert (
        str(failure)
        == "capture_seconds=5 is not allowed: its default, because this engine does not run rounds as CUDA graphs"
    )


def test_garbage_is_collected_before_the_first_request(
    tiny: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A garbage collection over the loaded model takes 200 ms; afterwards the next full one is far away."""
    caplog.set_level(logging.INFO, "paceline.server")
    monkeypatch.setattr(gc, "collect", lambda: logging.getLogger("paceline.server").info("looked for"))
    begun(ServerConfig(), tiny)
    assert [record.getMessage() for record in caplog.records][-2:] == ["looked for", "ready"]
