"""A live server for every file of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.llm import LLM
from paceline.params import ServerConfig
from server_support import Live, load, save_model, start


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("server") / "tiny")


@pytest.fixture(scope="module")
def live(tiny: str) -> Iterator[Live]:
    yield from start(ServerConfig(port=0, served_model_name="tiny", max_waiting=12), tiny)


@pytest.fixture(scope="module")
def offline(tiny: str) -> LLM:
    return load(tiny)
