"""Requests generated from the OpenAPI document: the server never responds with 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.errors import InvalidSchema

from paceline.config import ServerConfig
from server_support import Live, start

pytestmark = pytest.mark.usefixtures("one_thread")

GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
BOUNDED = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def live(tiny: str) -> Iterator[Live]:
    yield from start(ServerConfig(port=0, served_model_name="tiny"), tiny)


def check(case: Any) -> None:
    """504 is the expected response to a short ``timeout``."""
    if isinstance(case.body, dict):
        case.body.pop("timeout", None)
        if case.operation.path in GENERATING:  # any length is allowed
            case.body.setdefault("deadline_ms", 20)
    response = case.call(timeout=30)
    assert response.status_code < 500, (response.status_code, response.text, case.body)


@pytest.mark.parametrize(
    "examples", [4, pytest.param(10, marks=pytest.mark.wide), pytest.param(500, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("mode", GenerationMode)
def test_no_generated_request_causes_a_server_error(live: Live, mode: GenerationMode, examples: int) -> None:
    document = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    cut_short = []  # paths whose examples end early, because schemathesis makes a schema that it cannot fulfil
    for found in document.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.POSITIVE or operation.body:
            strategy = operation.as_strategy(generation_mode=mode)
            try:
                settings(BOUNDED, max_examples=examples)(given(case=strategy)(check))()
            except InvalidSchema:
                cut_short.append(operation.path)
    assert len(cut_short) <= 2, cut_short
