"""Fixtures: a live server for all files whose tests need no other, and the same model offline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import honest
from chat_support import save_chat_model
from paceline.config import ServerConfig
from paceline.core.outputs import RequestOutput
from paceline.llm import LLM
from server_support import Live, load, save_model, start

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the honest client waited for beside each attack, if attacks were run."""
    if honest.MEASURED:
        terminalreporter.section("an honest client beside each attack")
        terminalreporter.write_line("\n".join(honest.table()))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("server") / "tiny")


@pytest.fixture(scope="session")
def live(tiny: str) -> Iterator[Live]:
    """A server whose model calls tools in the Hermes syntax."""
    yield from start(ServerConfig(port=0, served_model_name="tiny", tool_parser="hermes", max_waiting=12), tiny)


@pytest.fixture(scope="module")
def keyed(tiny: str) -> Iterator[Live]:
    """A server with two API keys; the second may use few tokens a minute."""
    keys = ("free", "few max_tokens_per_minute=600")
    yield from start(ServerConfig(port=0, served_model_name="tiny", api_keys=keys), tiny)


@pytest.fixture(scope="session")
def offline(tiny: str) -> LLM:
    return load(tiny)


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose model has tools and thoughts."""
    path = save_chat_model(tmp_path_factory.mktemp("talker") / "tiny")
    yield from start(ServerConfig(port=0, served_model_name="tiny", max_waiting=12), path)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the whole session: while it lives, this thread has an event loop that runs."""
    from browser_support import chromium  # where playwright is missing, other tests run

    with chromium() as browser:
        yield browser


@pytest.fixture
def unhurried(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow rounds down to those of a large model: a request that is not ended early takes many seconds."""
    engine = live.context.llm.engine
    engine_step = engine.step

    def step() -> list[RequestOutput]:
        time.sleep(0.05)
        return engine_step()

    monkeypatch.setattr(engine, "step", step)
