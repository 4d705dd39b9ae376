"""A client that sends ordinary requests in turn beside an attack: what it waits for, and whether answers change.

``HonestClient`` runs this file as a program of its own, so that the attack's threads do not slow it down.
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from collections import Counter
from typing import Any

ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The sea is", "max_tokens": 12, "seed": 7, "temperature": 1.0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 1},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 12, "seed": 3},
}
NEW_EACH_TIME = ("id", "created", "created_at", "usage")
ADDRESS = "127.0.0.3"  # places are shared between addresses, and the attacks come from others
TIMEOUT = 60.0  # seconds
COLUMNS = {  # of the table of all attacks: heading, and the figure below it
    "requests": "honest",
    "p50 ms": "honest_ms_p50",
    "p95 ms": "honest_ms_p95",
    "max ms": "honest_ms_max",
    "busy (429)": "refused_as_busy",
    "lost": "lost",
    "changed": "changed",
    "/health p99 ms": "health_ms_p99",
    "slowness": "slowness",
}
RETRY = 0.2  # seconds after which a request that was refused as busy is sent again


def content(document: Any) -> Any:
    """A reply without what is new in each one."""
    if isinstance(document, dict):
        return {name: content(value) for name, value in document.items() if name not in NEW_EACH_TIME}
    return [content(value) for value in document] if isinstance(document, list) else document


def ask(server: str, path: str, headers: dict[str, str]) -> tuple[int, Any]:
    """Status and content of one reply; status 0 if there is none."""
    connection = http.client.HTTPConnection(server, timeout=TIMEOUT, source_address=(ADDRESS, 0))
    try:
        connection.request("POST", path, json.dumps(ASKED[path]), {"content-type": "application/json", **headers})
        reply = connection.getresponse()
        return reply.status, content(json.loads(reply.read()))
    except (OSError, http.client.HTTPException, ValueError):
        return 0, None
    finally:
        connection.close()


def answered(server: str, path: str, headers: dict[str, str], counts: Counter[str]) -> tuple[float, int, Any]:
    """Seconds, status and content of one request, which is sent again while the server is busy (429)."""
    began = time.perf_counter()
    while True:
        status, found = ask(server, path, headers)
        if status != 429 or time.perf_counter() - began > TIMEOUT:
            return time.perf_counter() - began, status, found
        counts["refused_as_busy"] += 1
        time.sleep(RETRY)


def main(server: str, headers: dict[str, str]) -> None:
    """Ask until standard input is closed; print the seconds and the counts as JSON."""
    counts = Counter(dict.fromkeys(("changed", "lost", "server_errors", "refused_as_busy"), 0))
    expected = {path: answered(server, path, headers, counts)[2] for path in ASKED}
    print("ready", flush=True)
    seconds = []
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        for path in ASKED:
            waited, status, found = answered(server, path, headers, counts)
            seconds.append(waited)
            counts["lost"] += status != 200
            counts["server_errors"] += status >= 500
            counts["changed"] += status == 200 and found != expected[path]
    print(json.dumps({"seconds": seconds, **counts}))


class HonestClient:
    """Runs from its creation until ``figures``. headers: sent with each request, such as a key."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        command = [sys.executable, __file__, url.removeprefix("http://"), json.dumps(headers or {})]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def figures(self) -> dict[str, float]:
        """End the client; return milliseconds of its requests, and counts."""
        found = json.loads(self._process.communicate()[0])
        ordered = sorted(1000 * seconds for seconds in found.pop("seconds"))
        shares = {"p50": 0.5, "p95": 0.95, "max": 1.0}
        at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in shares.items()}
        times = {f"honest_ms_{name}": round(value, 1) for name, value in at.items()}
        return {"honest": len(ordered), **times, **found}


MEASURED: list[tuple[str, dict[str, float]]] = []  # attack and figures, of all tests of this run


def note(attack: str, figures: dict[str, float]) -> None:
    """Print the figures of one attack, and keep them for the table."""
    MEASURED.append((attack, figures))
    print(json.dumps({"attack": attack, **figures}))


def table() -> list[str]:
    """Markdown table of what the honest client waited for beside each attack."""
    lines = [["attack", *COLUMNS], ["---"] + ["---:"] * len(COLUMNS)]
    lines += [[attack, *(f"{figures[name]:g}" for name in COLUMNS.values())] for attack, figures in MEASURED]
    return [f"| {' | '.join(line)} |" for line in lines]


def check_honest(figures: dict[str, float]) -> None:
    """Every request of the honest client was answered, and as before the attack."""
    assert figures["honest"] > 0
    assert figures["changed"] == figures["lost"] == figures["server_errors"] == 0, figures


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
