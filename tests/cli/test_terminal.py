"""The commands on a terminal: results are never written into a progress bar, and nothing is left of it."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from byte_model import byte_tokenizer, save_llama
from paceline.models.files import hub
from paceline.tools.evaluation.problems import Problem
from terminal import Terminal, run
from tools.training.conftest import SIZES, save_target

ENGINE = ("--dtype", "float32", "--max-batch-size", "2")
LETTERS = ("--structured-outputs", '{"regex": "[a-z]{8,12}"}')  # no answer moves the cursor
GREEDY = ("--temperature", "0", "--max-tokens", "12", *LETTERS, *ENGINE)
BARS = "━╸╺"  # what rich draws bars with


def left_clean(terminal: Terminal) -> bool:
    """Whether no line is wider than the terminal's, nothing is left of a bar, and the cursor is visible."""
    hidden, shown = terminal.seen.rfind(b"\x1b[?25l"), terminal.seen.rfind(b"\x1b[?25h")
    return not set(BARS) & set(terminal.text) and hidden <= shown


def test_generate_writes_answers_beside_its_bar_and_never_into_it(
    monkeypatch: pytest.MonkeyPatch, paceline: Any, tiny: str
) -> None:
    prompts = [option for text in ("one", "two", "three") for option in ("-p", text)]
    result = paceline("generate", tiny, *prompts, "--json", "--quiet", *GREEDY)
    answers = [json.loads(line)["outputs"][0]["text"] for line in result.stdout.splitlines()]
    code, terminal = run(monkeypatch, "generate", tiny, *prompts, *GREEDY)
    assert code == 0
    assert left_clean(terminal)
    assert "answers" in terminal.seen.decode(), "there was a bar"
    starts = [line.split(" ─")[0] for line in terminal.lines if line.startswith("prompt ")]
    assert starts == ["prompt 1", "prompt 2", "prompt 3"]
    assert [line for line in terminal.lines if line in answers] == answers
    code, terminal = run(monkeypatch, "generate", tiny, "-p", "one", "--quiet", *GREEDY)
    assert (code, terminal.text) == (0, answers[0])
    assert not set(BARS) & set(terminal.seen.decode()), "a single prompt has no bar"


def test_an_error_among_answers_is_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tiny: str, tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    entries = [{"prompt": "one"}, {"prompt": 3}, {"prompt": "two"}, {"prompt": "x" * 600}]
    lines.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    command = ("generate", tiny, "--prompts-file", str(lines), "--keep-going", *GREEDY)
    code, terminal = run(monkeypatch, *command)
    assert code == 2
    assert left_clean(terminal)
    assert [line.split(":")[1] for line in terminal.lines if line.startswith("error")] == [" line 2", " line 4"]


def test_batch_has_a_bar_of_one_line_and_leaves_its_summary(
    monkeypatch: pytest.MonkeyPatch, tiny: str, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    source.write_text("".join(json.dumps({"prompt": f"number {n}", "max_tokens": 8}) + "\n" for n in range(6)))
    code, terminal = run(monkeypatch, "batch", str(source), str(tmp_path / "out"), tiny, *ENGINE)
    assert code == 0
    assert left_clean(terminal)
    assert "tokens/s" in terminal.seen.decode()
    assert terminal.lines[-1].startswith("6 lines in ") or terminal.lines[-2].startswith("6 lines in ")
    assert b"\x1b[2K\x1b[1A" not in terminal.seen, "the bar never takes two lines"


@pytest.mark.parametrize(("command", "columns"), [("demo", 80), ("bench", 80), ("profile", 80), ("bench", 120)])
def test_measuring_commands_leave_their_tables_and_no_bar(
    monkeypatch: pytest.MonkeyPatch, tiny: str, tmp_path: Path, command: str, columns: int
) -> None:
    commands = {
        "demo": ("demo", tiny, "--max-tokens", "4", "--dtype", "float32"),
        "bench": ("bench", "offline", tiny, "--batch-sizes", "1,2", "--max-tokens", "4", "--repeats", "1"),
        "profile": ("profile", tiny, "--output", str(tmp_path / "profile.json"), "--quick", "--dtype", "float32"),
    }
    code, terminal = run(monkeypatch, *commands[command], columns=columns)
    assert code == 0, terminal.text
    assert left_clean(terminal)
    assert "token" in terminal.text
    assert "\u2026" not in terminal.text, "no word is cut"


def test_training_has_a_bar_for_each_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target, sizes = save_target(tmp_path / "target"), [option for option in SIZES if option != "-q"]
    code, terminal = run(monkeypatch, "train-draft", target, "--output", str(tmp_path / "head"), *sizes)
    assert code == 0, terminal.text
    assert left_clean(terminal)
    assert all(part in terminal.seen.decode() for part in ("data, tokens", "training, %", "loss"))


def test_an_evaluation_leaves_its_tables(monkeypatch: pytest.MonkeyPatch, tiny: str, tmp_path: Path) -> None:
    problems = [
        Problem(f"Test/{number}", "def f():\n    return ", "f", "def check(f):\n    f()\n", "") for number in (0, 1)
    ]
    monkeypatch.setattr("paceline.tools.evaluation.problems.human_eval", lambda: problems)
    monkeypatch.setattr("paceline.tools.evaluation.plot.draw", lambda *_: None)  # takes longer than the rest
    options = (
        "--n",
        "1",
        "--max-tokens",
        "4",
        "--weak-sandbox",
        "--dtype",
        "float32",
        "--output",
        str(tmp_path / "out"),
    )
    code, terminal = run(monkeypatch, "eval", "humaneval", tiny, *options)
    assert code == 0, terminal.text
    assert left_clean(terminal)
    assert "problems" in terminal.seen.decode()
    assert "Pass@First of 2 problems" in terminal.text


SLOWLY = """
import sys, time
with open(sys.argv[1] + "/model.gguf", "wb") as file:
    for _ in range(4):
        file.write(b"0" * 250_000)
        file.flush()
        time.sleep(0.15)
"""


def test_pull_has_a_bar_in_bytes_and_leaves_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"0" * 1_000_000).hexdigest()
    model = hub.EmbeddedModel("of-tests", "1.0", "*.gguf", digest, 1_000_000, {})
    monkeypatch.setattr(hub, "EMBEDDED", {"of-tests": model})
    monkeypatch.setattr(hub, "_fetching", lambda _, folder: [sys.executable, "-c", SLOWLY, str(folder)])
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    code, terminal = run(monkeypatch, "pull", "of-tests")
    assert code == 0, terminal.text
    assert left_clean(terminal)
    assert "MB" in terminal.seen.decode()
    assert terminal.text.replace("\n", "") == str(tmp_path / "of-tests-1.0.gguf")


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_PACKED_CACHE", "on")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


STAGES = ("reading and packing {}", "writing the packed weights of {} to the cache", "measuring what rounds cost")
LOADED = ("-p", "one", "--max-tokens", "4", "--quantization", "int8")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that the CPU kernels run."""
    path = tmp_path_factory.mktemp("models") / "native"
    return save_llama(path, byte_tokenizer(), seed=1, hidden_size=64, intermediate_size=96)


@pytest.mark.usefixtures("empty_cache")
def test_loading_shows_its_stages_on_a_terminal_and_leaves_the_start_line(
    monkeypatch: pytest.MonkeyPatch, native: str
) -> None:
    monkeypatch.setattr("paceline.progress._INTERVAL", 0.0)
    code, terminal = run(monkeypatch, "generate", native, *LOADED, columns=300)
    assert code == 0, terminal.text
    shown = terminal.seen.decode()
    assert all(stage.format(native) in shown for stage in STAGES)
    assert "100%" in shown
    assert terminal.lines[0].startswith(f"target {native} (int8 on the CPU kernels")
    assert left_clean(terminal)


@pytest.mark.usefixtures("empty_cache")
def test_loading_writes_a_line_for_each_stage_where_there_is_no_terminal(paceline: Any, native: str) -> None:
    said = paceline("generate", native, *LOADED).stderr.splitlines()
    first = [stage.format(native) for stage in STAGES]
    assert said[: len(first)] == first
    again = paceline("generate", native, *LOADED).stderr.splitlines()
    assert again[:2] == [f"reading the packed weights of {native}", STAGES[-1]]
    assert paceline("generate", native, *LOADED, "--quiet").stderr == ""
