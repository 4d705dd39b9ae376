"""What deploy/ says about the server is true: its metrics, its flags, its files."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.config import ServerConfig
from paceline.server.metrics import Meter

DEPLOY = Path(__file__).parent.parent / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def exported() -> Iterator[str]:
    """The names of all series that /metrics has, whether or not a label has been seen."""
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    for family in Meter(log_interval=1).registry.collect():
        yield from (family.name + ending for ending in endings[family.type])


def labels_of(name: str) -> set[str]:
    """The labels of a series besides those that Prometheus adds."""
    meter = Meter(log_interval=1)
    kinds = [("position", meter._accepted_at), ("position", meter._drafted_at), ("finished_reason", meter._answers)]
    kinds += [("status", meter._errors), ("sequence", meter._tpot)]
    kinds += [("held_for", meter._bytes_gauge), ("runner", meter._rounds_by), ("event", meter._prefix_events)]
    return {label for label, metric in kinds if re.fullmatch(f"{metric._name}(_(total|sum|count))?", name)}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel['id']}-{panel['title']}")
def test_the_dashboard_asks_only_for_metrics_that_the_server_has(panel: dict[str, Any]) -> None:
    known = set(exported())
    for target in panel["targets"]:
        names = re.findall(r"paceline:\w+", target["expr"])
        assert names
        assert [name for name in names if name not in known] == []
        wanted = set(re.findall(r"by \((\w+)\)", target["expr"])) - {"le"}
        assert wanted <= labels_of(names[0]), target["expr"]
        assert target["expr"].count("(") == target["expr"].count(")")


def test_the_dashboard_shows_every_metric_of_the_server() -> None:
    text = json.dumps(DASHBOARD)
    families = list(Meter(log_interval=1).registry.collect())
    assert [family.name for family in families if family.name not in text] == []


def test_the_panels_of_the_dashboard_have_ids_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) == 23


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "paceline.service")
    return parser


def image_commands() -> list[str]:
    found = re.findall(r"^(?:ENTRYPOINT|CMD) (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    return [word for part in found for word in json.loads(part)]


@pytest.mark.parametrize(
    "command", [shlex.split(unit()["Service"]["ExecStart"]), image_commands()], ids=["unit", "image"]
)
def test_the_commands_have_only_flags_that_exist(command: list[str]) -> None:
    shown = CliRunner().invoke(app, ["serve", "--help", "all"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    assert "serve" in command
    assert [word for word in command if word.startswith("--") and word not in shown] == []


def test_systemd_waits_longer_than_the_server_takes_to_end() -> None:
    assert float(unit()["Service"]["TimeoutStopSec"]) > ServerConfig.shutdown_timeout


def test_the_image_copies_only_what_is_there_and_what_is_not_ignored() -> None:
    root, text = DEPLOY.parent, (DEPLOY / "Dockerfile").read_text()
    sources = [word for line in re.findall(r"^COPY (?!--)(.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    let_in = set(re.findall(r"^!(.*)$", (root / ".dockerignore").read_text(), re.MULTILINE))
    assert {source.split("/")[0] for source in sources} == let_in
    assert [source for source in sources if not (root / source).exists()] == []
    assert "USER 10001" in text


def test_the_proxies_pass_events_on_at_once_and_bodies_as_long_as_the_server_takes() -> None:
    nginx = (DEPLOY / "nginx.conf").read_text()
    assert "proxy_buffering off;" in nginx
    assert "gzip off;" in nginx
    assert f"client_max_body_size {ServerConfig.max_body_bytes >> 20}m;" in nginx
    assert f"client_max_body_size {ServerConfig.max_upload_bytes >> 20}m;" in nginx
    assert "limit_conn_status 429;" in nginx
    caddy = (DEPLOY / "Caddyfile").read_text()
    assert "flush_interval -1" in caddy
    assert f"max_size {ServerConfig.max_body_bytes >> 20}MiB" in caddy
    assert f"max_size {ServerConfig.max_upload_bytes >> 20}MiB" in caddy


def test_all_that_the_server_can_do_is_installed() -> None:
    wanted = "[serve,structured]"
    assert wanted in (DEPLOY / "Dockerfile").read_text()
    installs = re.findall(r"pip install '?paceline(\[[a-z,]+\])", (DEPLOY.parent / "docs" / "serving.md").read_text())
    assert installs
    assert set(installs) == {wanted}


def test_the_dashboard_and_stats_divide_by_the_same_thing() -> None:
    (panel,) = [panel for panel in PANELS if panel["title"] == "Acceptance length"]
    (target,) = panel["targets"]
    assert re.findall(r"paceline:(\w+)", target["expr"]) == [
        "spec_decode_num_accepted_tokens_total",
        "decode_num_row_rounds_total",
    ]
