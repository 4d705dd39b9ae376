"""Tests of models run without network access."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _without_network(no_requests: None) -> None:
    """Apply ``no_requests`` to every test here."""
