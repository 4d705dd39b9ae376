"""The playground over HTTP: its files and their headers."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from pathlib import Path

import pytest

from paceline.config import ServerConfig
from paceline.server.logs import WithoutPolling
from paceline.server.playground import HEADERS, MEDIA_TYPES, PAGES, STATIC
from server_support import Live, start
from web import client

pytestmark = pytest.mark.usefixtures("one_thread")
VENDOR = STATIC / "vendor"
ASSETS = sorted(path for path in STATIC.rglob("*") if path.is_file())
OURS = [path for path in ASSETS if path.parent == STATIC]


@pytest.mark.parametrize("asset", ASSETS, ids=lambda path: path.name)
def test_every_asset_has_its_media_type(live: Live, asset: Path) -> None:
    reply = live.get(f"/playground/{asset.relative_to(STATIC).as_posix()}")
    assert (reply.status_code, reply.content) == (200, asset.read_bytes())
    assert reply.headers["content-type"] == MEDIA_TYPES[asset.suffix]
    assert {name: reply.headers[name] for name in HEADERS} == HEADERS


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_no_inline_and_no_external_content(live: Live, path: str) -> None:
    reply = live.get(path)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert re.findall(r"<script[^>]*>([^<]+)</script>|\sstyle=|\son[a-z]+=", reply.text) == []
    for asset in OURS:
        addresses = re.findall(r"https?://[^\s\"']+", asset.read_text())
        assert [found for found in addresses if not found.startswith("http://www.w3.org/")] == [], asset.name


@pytest.mark.parametrize("path", PAGES)
def test_all_links_of_a_page_are_served(live: Live, path: str) -> None:
    named = set(re.findall(r'(?:src|href)="([^"]+)"', live.get(path).text))
    assert {"playground/style.css", "chat", "docs", "./"} <= named
    assert [name for name in named if live.get(f"/{name.removeprefix('./')}").status_code != 200] == []


def test_the_vendored_library_is_the_one_that_its_page_names() -> None:
    library, page = (VENDOR / name for name in ("markdown-it.min.js", "markdown-it.txt"))
    assert set(VENDOR.iterdir()) == {library, page}
    name, version = re.findall(r"^/\*! (\S+) (\S+) https:", library.read_text())[0]
    assert page.read_text().startswith(f"{name} {version}, https:")
    assert hashlib.sha256(library.read_bytes()).hexdigest() in page.read_text()


@pytest.mark.parametrize("path", ["/playground/", "/playground/none.js", "/playground/%2e%2e/app.py"])
def test_no_other_path_is_served_below_the_page(live: Live, path: str) -> None:
    reply = live.get(path)
    assert reply.status_code == 404
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_a_key_is_required_for_stats_but_not_for_the_page(tiny: str) -> None:
    for live in start(ServerConfig(port=0, api_keys=["secret"]), tiny):
        assert [live.get(path).status_code for path in PAGES] == [200, 200]
        assert live.get("/playground/main.js").status_code == 200
        assert live.get("/stats").status_code == 401
        assert live.get("/playground/../stats").status_code in (401, 404)


def test_the_page_can_be_disabled(tiny: str) -> None:
    for live in start(ServerConfig(port=0, playground=False), tiny):
        assert [client.get(live.url + path).status_code for path in PAGES] == [404, 404]
        assert client.head(f"{live.url}/").status_code == 200  # agents ask whether the server is there
        assert client.get(f"{live.url}/playground/main.js").status_code == 404


def test_one_stream_tells_the_state_and_the_figures(live: Live) -> None:
    with client.stream("GET", f"{live.url}/stats/stream") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in reply.iter_lines() if line)
        documents = [json.loads(next(lines).removeprefix("data: ")) for _ in range(2)]
    assert [document["status"] for document in documents] == ["ready", "ready"]
    assert documents[0]["stats"].keys() == live.get("/stats").json().keys()


def test_a_stream_of_figures_does_not_keep_the_server_from_ending(tiny: str) -> None:
    servers = start(ServerConfig(port=0), tiny)
    with client.stream("GET", f"{next(servers).url}/stats/stream") as reply:
        lines = reply.iter_lines()
        next(lines)
        began = time.monotonic()
        assert next(servers, None) is None
        assert time.monotonic() - began < 5
        assert [line for line in lines if line.startswith("event: error")] == []


@pytest.mark.parametrize(
    ("method", "target", "status", "kept"),
    [
        ("GET", "/stats", 200, False),
        ("GET", "/health?x=1", 503, False),
        ("HEAD", "/ping", 200, False),
        ("GET", "/stats", 401, True),
        ("POST", "/v1/completions", 200, True),
    ],
)
def test_polling_leaves_no_access_lines(method: str, target: str, status: int, kept: bool) -> None:
    arguments = ("127.0.0.1:9", method, target, "1.1", status)
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', arguments, None)
    assert WithoutPolling().filter(record) is kept
