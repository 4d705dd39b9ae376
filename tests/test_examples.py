"""Every script in examples/ runs as it stands, and says what it promises."""

import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import real_models
from paceline.cli.main import app

EXAMPLES = Path(__file__).parent.parent / "examples"
QUICK = {
    "first_answer": ["Paris", "tokens in", "rounds"],
    "batch_with_draft_model": ["Why is the sky blue?", "rounds instead of", "mean acceptance length"],
    "ranked_answers": ["1. mean log-probability", "3. mean log-probability"],
    "own_drafter": ["Paris", "draft tokens accepted"],
    "own_length_policy": ["Paris", "accepted of drafted by position"],
    "server_and_client": ["Paris"],
    "batch_file": ["q-0", "q-1"],
}
SLOW = {"train_head": ["Paris", "draft tokens accepted"], "transformers_generate": ["Paris", "blue"]}


def run_alone(name: str, folder: Path) -> str:
    found = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # where `paceline` is
    place = {**os.environ, "PATH": found, "TMPDIR": str(folder)}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, cwd=folder, env=place, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_here(command: list[str], *, check: bool) -> None:
    """``subprocess.run`` of a command of ours, in this process: starting another takes 4 s."""
    assert check
    assert command[:3] == [sys.executable, "-m", "paceline"]
    result = CliRunner().invoke(app, command[3:])
    assert result.exit_code == 0, result.output


@pytest.fixture(autouse=True)
def model(caches_of_the_run: None) -> None:
    real_models.find("smollm2-135m")


@pytest.mark.parametrize("name", QUICK)
def test_an_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In this process, with the command that it may run; only a server has a process of its own."""
    if name == "server_and_client":
        pytest.importorskip("openai", reason="the example's client")
    monkeypatch.setattr(subprocess, "run", run_here)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert [words for words in QUICK[name] if words not in said] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_an_example_that_takes_longer_runs(name: str, tmp_path: Path) -> None:
    """One trains; one has transformers read a GGUF file, which takes 20 seconds."""
    if name == "transformers_generate":
        pytest.importorskip("accelerate", reason="transformers needs accelerate to load GGUF files")
    said = run_alone(name, tmp_path)
    assert [words for words in SLOW[name] if words not in said] == []


def test_every_example_is_run_and_stands_on_both_pages() -> None:
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == {*QUICK, *SLOW}
    listed = re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert set(listed) == scripts
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    assert set(re.findall(r"^```\{literalinclude\} \.\./examples/(\w+)\.py$", page, re.MULTILINE)) == scripts
