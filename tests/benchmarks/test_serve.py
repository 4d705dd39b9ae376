"""The server's benchmark: guidellm's report, the order of loads, and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.serve.load import Load, reduced
from benchmarks.serve.plot import draw
from benchmarks.serve.run import CONTENDERS, Course, _order
from benchmarks.serve.servers import ServerError, free_port, running


def report(successful: int) -> dict[str, Any]:
    summary = {"successful": {"mean": 2.0, "percentiles": {"p50": 10.0, "p99": 30.0}}}
    names = ("requests_per_second", "output_tokens_per_second", "output_token_count")
    latencies = ("time_to_first_token_ms", "inter_token_latency_ms")
    metrics = dict.fromkeys((*names, *latencies), summary)
    return {"benchmarks": [{"metrics": {**metrics, "request_totals": {"successful": successful}}}]}


def test_a_load_is_reduced_to_its_rate_and_its_percentiles() -> None:
    (entry,) = reduced(report(8), [Load(4, 8)])
    assert (entry["clients"], entry["requests_per_s"], entry["ttft_ms_p50"], entry["itl_ms_p99"]) == (
        4,
        2.0,
        10.0,
        30.0,
    )


def test_every_contender_comes_first_once() -> None:
    courses = [Course(contender, {}) for contender in CONTENDERS]
    first = [next(iter(_order(courses, repeat))) for repeat in range(len(courses))]
    assert [course.contender for course in first] == list(CONTENDERS)


def test_medians_and_failures_are_plotted(tmp_path: Path) -> None:
    samples = [
        {**entry, "ttft_ms_p50": value} for value in (1.0, 9.0, 5.0) for entry in reduced(report(8), [Load(4, 8)])
    ]
    measured = Course(CONTENDERS[0], {4: samples}).document()
    failed = Course(CONTENDERS[1], {4: []}, "out of memory").document()
    assert measured["loads"][0]["ttft_ms_p50"] == 5.0
    assert (failed["status"], failed["error"], failed["loads"]) == ("failed", "out of memory", [])
    machine, settings = {"cpu": "a processor"}, {"clients": [4]}
    document = {"model": "m", "dtype": "d", "machine": machine, "settings": settings, "contenders": [measured, failed]}
    draw(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_server_that_does_not_start_reports_its_last_line(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo starting; echo 'an error of its own' >&2; exit 1"]
    with pytest.raises(ServerError, match="an error of its own"), running(command, free_port(), tmp_path / "log"):
        pass
