"""One live server whose model calls tools in the Hermes syntax."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.config import ServerConfig
from server_support import Live, start

KEYS = ("free", "few max_tokens_per_minute=600")


@pytest.fixture(scope="module")
def live(tiny: str) -> Iterator[Live]:
    yield from start(ServerConfig(port=0, served_model_name="tiny", tool_parser="hermes", max_waiting=12), tiny)


@pytest.fixture(scope="module")
def keyed(tiny: str) -> Iterator[Live]:
    yield from start(ServerConfig(port=0, served_model_name="tiny", api_keys=KEYS), tiny)
