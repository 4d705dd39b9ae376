"""``paceline serve`` in its own process: signals, log lines, metrics, and recovery after abuse."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from polling import PATIENCE, wait_until
from served import HealthProbe, Served, check_health, resident
from web import client

LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "seed": 1}


@pytest.fixture
def served(tiny: str, tmp_path: Path) -> Iterator[Served]:
    server = Served(tiny, tmp_path / "log", "--shutdown-timeout", "20", "--max-waiting", "12")
    with server.ready():
        yield server


def ask_with_ids(served: Served) -> dict[str, str]:
    """Send 120 requests, each with an id; return the access log's line of each id."""
    asked = [("/version", "first", 200), ("/v1/models?a=%22%0a", "second", 200), ("/nowhere", "third", 404)] * 40
    for number, (path, name, _) in enumerate(asked):
        client.get(served.url + path, headers={"X-Request-Id": f"{name}-{number}"})
    return {f"{name}-{number}": f'"GET {path} HTTP/1.1" {status}' for number, (path, name, status) in enumerate(asked)}


def test_one_signal_lets_requests_finish_and_logs_and_metrics_report_all(served: Served) -> None:
    reply = served.post({"prompt": "abcabcabc", "max_tokens": 20, "ignore_eos": True, "user": "me", "seed": 1})
    assert reply.status_code == 200
    assert served.post({"prompt": "a", "n": "x"}).status_code == 400
    assert served.metric("generation_tokens_total") == 20
    assert served.metric("prompt_tokens_total") == 9
    assert served.metric("request_success_total") == 1
    assert served.metric("request_errors_total") == 1
    assert served.metric("time_to_first_token_seconds_count") == 1
    assert served.metric("inter_token_latency_seconds_count") < 20
    assert served.metric("spec_decode_num_accepted_tokens_total") <= served.metric("spec_decode_num_draft_tokens_total")
    wait_until(lambda: served.metric("num_requests_running") == served.metric("num_requests_waiting") == 0)
    expected = ask_with_ids(served)
    with client.stream("POST", f"{served.url}/v1/completions", json={**LONG, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        assert list(lines)[-2] == "data: [DONE]"
    assert served.process.wait(PATIENCE) == 0
    (answered,) = [line for line in served.log if line["message"] == "answered" and line["user"] == "me"]
    assert (answered["prompt_tokens"], answered["output_tokens"]) == (9, 20)
    assert {"time", "level", "logger"} <= answered.keys()
    assert answered["request_id"].startswith("req-")
    (refused,) = [line for line in served.log if line["message"] == "refused" and line["status"] == 400]
    assert "n" in refused["why"]
    assert any("shutting down" in line["message"] for line in served.log)
    logged = {line.get("request_id"): line["message"] for line in served.log if line["logger"] == "uvicorn.access"}
    assert [name for name, line in expected.items() if line not in logged[name]] == []


def read_until_cut(stream: httpx.Response, served: Served) -> None:
    """Signals that follow each other closely may merge, so the second is sent once the first is logged."""
    lines = stream.iter_lines()
    next(lines)
    served.process.send_signal(signal.SIGTERM)
    wait_until(lambda: any("shutting down" in line["message"] for line in served.log))
    served.process.send_signal(signal.SIGTERM)
    list(lines)


def test_a_second_signal_ends_at_once(served: Served) -> None:
    """The queue is full, with four times as many requests as rows: no answer is complete before the second signal."""
    body = {**LONG, "n": 16, "stream": True, "num_speculative_tokens": 0}
    url = f"{served.url}/v1/completions"
    with client.stream("POST", url, json=body) as stream, pytest.raises(httpx.TransportError):
        read_until_cut(stream, served)
    assert served.process.wait(PATIENCE) == 130


# --- abuse ------------------------------------------------------------------------------------------------------------


def request(served: Served, number: int) -> tuple[str, int]:
    """One request: three in ten disconnect in mid-stream, one is invalid, one is far too long."""
    kind = {0: "invalid", 1: "left", 2: "left", 3: "left", 4: "oversized"}.get(number % 10, "good")
    if kind == "invalid":
        return kind, served.post({"prompt": "a", "n": "many"}).status_code
    if kind == "oversized":
        return kind, served.post({"prompt": "a" * 5000}).status_code
    if kind == "left":
        body = {**LONG, "stream": True}
        with client.stream("POST", f"{served.url}/v1/completions", json=body) as stream:
            next(stream.iter_lines())
            return kind, stream.status_code
    reply = served.post({"prompt": f"number {number}", "max_tokens": 24, "seed": number, "ignore_eos": True})
    if reply.status_code == 200:
        assert reply.json()["usage"]["completion_tokens"] == 24
    return kind, reply.status_code


def abuse(served: Served, requests: int) -> Counter[tuple[str, int]]:
    """32 clients for 4 rows and a queue of 12, twice as many as fit."""
    with ThreadPoolExecutor(32) as pool:
        return Counter(pool.map(lambda number: request(served, number), range(requests)))


def idle(served: Served) -> bool:
    stats = client.get(f"{served.url}/stats").json()
    return stats["running"] == stats["waiting"] == 0


@pytest.mark.slow
def test_a_thousand_abusive_requests_leave_nothing_behind(served: Served) -> None:
    abuse(served, 300)
    wait_until(lambda: idle(served))
    before, probe = resident(served), HealthProbe(served)
    outcomes, figures = abuse(served, 1000), probe.figures()
    wait_until(lambda: idle(served))
    grown = resident(served) / before - 1
    counts = {f"{kind} {status}": count for (kind, status), count in sorted(outcomes.items())}
    print(json.dumps({"outcomes": counts, **figures, "resident_mib_before": before / 2**20, "grown": grown}))
    assert {status for kind, status in outcomes if kind in ("invalid", "oversized")} == {400}
    assert {status for kind, status in outcomes if kind in ("good", "left")} == {200, 429}
    assert served.metric("round_failures_total") == 0
    check_health(figures)
    assert grown < 0.05
