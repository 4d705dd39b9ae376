"""guidellm, the load generator: run as a program in its own environment; its report, reduced."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.config import OFFLINE, Peer
from benchmarks.serve.servers import last_line

GUIDELLM = Peer("guidellm", "guidellm", "", "", "")
LIMIT = 600  # seconds for all loads of one call


class LoadError(Exception):
    """The load generator failed; the text is its last line."""


@dataclass(frozen=True)
class Load:
    """clients: concurrent requests. requests: total number of requests."""

    clients: int
    requests: int


@dataclass(frozen=True)
class Target:
    """Where to send the load. model: its name on the server. body: further fields of every request."""

    url: str
    model: str
    body: Mapping[str, Any]


def command(target: Target, loads: Sequence[Load], max_tokens: int, prompts: Path, report: Path) -> list[str]:
    """guidellm's command line."""
    options: dict[str, dict[str, Any]] = {
        "backend": {
            "kind": "openai_http",
            "target": target.url,
            "model": target.model,
            "max_tokens": max_tokens,
            "http2": False,
            "extras": {"body": dict(target.body)},
        },
        "profile": {"kind": "concurrent", "streams": [load.clients for load in loads]},
        "constraint": {"kind": "max_requests", "count": [load.requests for load in loads]},
        "data": {"kind": "json_file", "path": str(prompts)},
        "metrics": {"kind": "generative", "sample_size": 0},
        "output": {"kind": "json", "path": str(report)},
    }
    words = [word for name, value in options.items() for word in (f"--{name}", json.dumps(value))]
    return [str(GUIDELLM.python.with_name("guidellm")), "run", *words, "--disable-console-interactive"]


def run_loads(
    target: Target, loads: Sequence[Load], max_tokens: int, prompts: Path, scratch: Path
) -> list[dict[str, Any]]:
    """Run the loads; one entry per load. Raises LoadError."""
    report, log = scratch / "report.json", scratch / "guidellm.log"
    report.unlink(missing_ok=True)
    with log.open("wb") as output:
        try:
            subprocess.run(
                command(target, loads, max_tokens, prompts, report),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **OFFLINE},
                timeout=LIMIT,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            raise LoadError(f"not finished within {LIMIT} s") from error
        except (subprocess.CalledProcessError, OSError) as error:
            raise LoadError(last_line(log) or str(error)) from error
    return reduced(json.loads(report.read_text()), loads)


def reduced(report: Mapping[str, Any], loads: Sequence[Load]) -> list[dict[str, Any]]:
    """The figures of each load. Raises LoadError if requests failed: their latencies would flatter the server."""
    return [_entry(benchmark["metrics"], load) for benchmark, load in zip(report["benchmarks"], loads, strict=True)]


def _entry(metrics: Mapping[str, Any], load: Load) -> dict[str, Any]:
    totals = metrics["request_totals"]
    if totals["successful"] != load.requests:
        raise LoadError(f"{totals['successful']} of {load.requests} requests succeeded with {load.clients} clients")
    return {
        "clients": load.clients,
        "requests": load.requests,
        "requests_per_s": metrics["requests_per_second"]["successful"]["mean"],
        "output_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "output_tokens_per_request": metrics["output_token_count"]["successful"]["mean"],
        **_percentiles("ttft_ms", metrics["time_to_first_token_ms"]),
        **_percentiles("itl_ms", metrics["inter_token_latency_ms"]),
    }


def _percentiles(name: str, summary: Mapping[str, Any]) -> dict[str, float]:
    found = summary["successful"]["percentiles"]
    return {f"{name}_p50": found["p50"], f"{name}_p99": found["p99"]}
