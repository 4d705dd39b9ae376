"""``paceline demo``: both sides, a table, and an honest verdict."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline import LLM
from paceline.cli.demo import compare, show, verdict
from paceline.tools.bench.measure import BatchRun

README = Path(__file__).parent.parent.parent / "README.md"


@pytest.fixture(scope="module")
def llm(tiny: str) -> LLM:
    return LLM(tiny, drafter="ngram", dtype="float32", max_batch_size=8)


def test_the_demo_shows_its_table_and_at_most_ten_lines_around_it(paceline: Any, tiny: str) -> None:
    result = paceline("demo", tiny, "--max-tokens", "8", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    words = ("tokens/s", "speed-up", "plain", "speculation", "equal, token by token")
    assert all(word in result.stdout for word in words)
    assert "copy, correct or edit a text" in " ".join(result.stdout.split())
    lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    table = [
        line for line in lines if re.search("prompts in one batch|ms/token|tokens/s|──|plain  |speculation  ", line)
    ]
    assert len(table) == 6
    assert len(lines) - len(table) <= 10


def test_the_readme_shows_the_demo_as_it_is(paceline: Any, tiny: str) -> None:
    said = paceline("demo", tiny, "--max-tokens", "4", "--dtype", "float32").stdout
    shown = README.read_text().split("```sh\nmake demo")[1].split("```")[2]
    heads = [line.split() for line in shown.splitlines() if re.search("a sequence|acceptance  mean", line)]
    words = {word for head in heads for word in head}
    assert {"tokens/s", "speed-up", "rounds"} <= words
    table = said[said.index("prompts in one batch") :]
    assert {word for word in words if word not in table} == set()
    assert {word for word in re.findall(r"[a-z/-]+", table.split("plain")[0]) if word not in shown} == set()


def test_the_table_fits_a_terminal_of_80_columns(llm: LLM) -> None:
    out = io.StringIO()
    show(Console(file=out, width=80), llm, *compare(llm, max_tokens=4, repeats=1))
    lines = out.getvalue().splitlines()
    text = "\n".join(lines[next(number for number, line in enumerate(lines) if "tokens/s" in line) - 2 :])
    assert "\u2026" not in text
    assert all(word in text for word in ("tokens/s", "ms/token", "acceptance", "length", "rounds", "speed-up"))


def test_both_sides_decode_the_same_tokens(llm: LLM) -> None:
    speculative, plain = compare(llm, max_tokens=8)
    assert speculative.token_ids == plain.token_ids
    assert plain.acceptance_rate is None
    assert plain.mean_acceptance_length == 1.0
    assert speculative.rounds <= plain.rounds
    assert speculative.tokens == sum(map(len, plain.token_ids))


def test_a_difference_is_told(llm: LLM) -> None:
    speculative, plain = compare(llm, max_tokens=4)
    altered = BatchRun(plain.seconds, [replace(plain.outputs[0], outputs=[]), *plain.outputs[1:]])
    altered.outputs[0].outputs.append(replace(plain.outputs[0].outputs[0], token_ids=[1, 2, 3]))
    text = verdict(llm, speculative, altered)
    assert "7 of 8 outputs are equal" in text
    assert "prompts 1 part" in text
