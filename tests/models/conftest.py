"""Whatever loads a model in these tests finds it on this disk, and asks nobody else."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _nothing_goes_out(no_requests: None) -> None:
    """See ``no_requests``."""
