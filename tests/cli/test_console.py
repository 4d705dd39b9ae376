"""Tables fit, whatever the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from paceline.cli.bench import _table
from paceline.cli.console import Sheet, latency_table
from paceline.cli.document import as_text
from paceline.core.outputs import Latency
from paceline.tools.bench.offline import OfflineResult, Timing


def drawn(renderable: object, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue().splitlines()


def offline(side: str, seconds: float) -> OfflineResult:
    return OfflineResult(side, 128, 512, 4000, Timing(seconds, seconds, 446, 512_000, 1.0), [seconds], 12.34)


TABLES = {
    "bench offline": _table([offline("plain", 12.345), offline("speculation, wrong drafts", 123.456)], 4000, "mixed"),
    "a word too long for any column": Sheet("t", ["", "count"], [["a" * 30, "1"], ["b c d", "2"]]),
    "profile --max-k 32": Sheet(
        "ms", ["batch", *(f"k={k}" for k in range(33)), "best k", "fit's k"], [["16", *(["1234.5"] * 33), "32", "31"]]
    ),
    "quality": Sheet(
        "beside the first precision",
        ["", "perplexity", "change", "top token\nequal", "greedy tokens\nequal", "weights MB"],
        [["bfloat16", "12345.678", "+12.34% \u00b1 0.12%", "100.0%", "100.0%", "123456"]],
    ),
}


@pytest.mark.parametrize("width", [60, 80, 100, 300])
@pytest.mark.parametrize("name", TABLES)
def test_no_heading_and_no_number_is_cut(name: str, width: int) -> None:
    sheet = TABLES[name]
    lines = drawn(sheet, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "\u2026" not in text
    for heading in sheet.columns:
        assert all(word in text for word in heading.split())
    for row in sheet.rows:
        assert all(number in text for number in row[1:])


def test_a_table_that_fits_is_one() -> None:
    for name in ("bench offline", "quality"):
        assert sum(line.startswith("\u2500") for line in drawn(TABLES[name], 80)) == 1


def test_what_is_no_number_is_null() -> None:
    document = {"a": [float("nan"), 1.5, (float("inf"),)], "b": {"c": -float("inf"), "d": None}}
    assert as_text(document) == '{"a": [null, 1.5, [null]], "b": {"c": null, "d": null}}'


def test_latencies_are_those_of_the_first_the_last_and_all_sequences() -> None:
    lines = drawn(latency_table([("plain", Latency(1.04, 3.0, 2.06)), ("other", None)]), 80)
    assert next(line.split() for line in lines if "plain" in line) == ["plain", "1.0", "3.0", "2.1"]
    assert next(line.split() for line in lines if "other" in line) == ["other"]
    assert "utilisation" not in " ".join(lines)
    lines = drawn(latency_table([("plain", Latency(1.0, 3.0, 2.0), 0.0467), ("other", None, None)]), 80)
    assert next(line.split() for line in lines if "plain" in line) == ["plain", "1.0", "3.0", "2.0", "4.7%"]
    assert next(line.split() for line in lines if "other" in line) == ["other"]
