"""Requests generated from the OpenAPI document: the server never responds with 5xx.

``PYTHONPATH=src:tests:. python tests/server/test_openapi.py 500`` makes 500 requests to each route in each mode and
prints how many got which status.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.errors import InvalidSchema

from paceline.config import ServerConfig
from server_support import Live, save_model, start

pytestmark = pytest.mark.usefixtures("one_thread")

GENERATING = (
    "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/api/generate",
)  # fmt: skip
BOUNDED = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def config(batches: Path) -> ServerConfig:
    """All routes are on. batches: directory of files and batches."""
    return ServerConfig(port=0, served_model_name="tiny", batch_dir=str(batches))


@pytest.fixture(scope="module")
def live(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    yield from start(config(tmp_path_factory.mktemp("batches")), tiny)


def status_of(case: Any) -> int:
    """Status of one request. 504 is the expected response to a short ``timeout``; other models give 404 at once."""
    if isinstance(case.body, dict):
        case.body.pop("timeout", None)
        if isinstance(case.body.get("model"), str):
            case.body["model"] = "tiny"
        if case.operation.path in GENERATING:  # any length is allowed
            case.body.setdefault("deadline_ms", 20)
    response = case.call(timeout=30)
    assert response.status_code < 500, (response.status_code, response.text, case.body)
    return int(response.status_code)


def attack(operation: Any, mode: GenerationMode, examples: int) -> tuple[Counter[int], bool]:
    """Statuses of the requests to one route, and whether schemathesis could make all of them."""
    statuses = Counter[int]()

    def check(case: Any) -> None:
        statuses[status_of(case)] += 1

    try:
        settings(BOUNDED, max_examples=examples)(given(case=operation.as_strategy(generation_mode=mode))(check))()
    except InvalidSchema:  # schemathesis makes a schema that it cannot fulfil
        return statuses, False
    return statuses, True


def operations(live: Live, mode: GenerationMode) -> Iterator[Any]:
    """Routes that have requests of this mode."""
    found = schemathesis.openapi.from_url(f"{live.url}/openapi.json").get_all_operations()
    return (each for each in (result.ok() for result in found) if mode is GenerationMode.POSITIVE or each.body)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("examples", [4, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", GenerationMode)
def test_no_generated_request_causes_a_server_error(live: Live, mode: GenerationMode, examples: int) -> None:
    cut_short = [each.path for each in operations(live, mode) if not attack(each, mode, examples)[1]]
    assert len(cut_short) <= 2, cut_short


def main(examples: int) -> None:
    """Attack every route; print a line of JSON for each."""
    with tempfile.TemporaryDirectory() as folder:
        for live in start(config(Path(folder) / "batches"), save_model(Path(folder) / "tiny")):
            for mode in GenerationMode:
                for each in operations(live, mode):
                    statuses, whole = attack(each, mode, examples)
                    route = {"mode": mode.value, "route": f"{each.method.upper()} {each.path}", "all_made": whole}
                    print(json.dumps({**route, "statuses": dict(sorted(statuses.items()))}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
