"""The front door: help without waiting, errors, the small commands."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline as package
from paceline.models import hub


def test_version(paceline: Any) -> None:
    result = paceline("--version")
    assert (result.exit_code, result.stdout) == (0, f"paceline {package.__version__}\n")


@pytest.mark.parametrize(
    "command",
    ["", "generate", "batch", "chat", "pull", "demo", "verify", "bench", "bench offline", "eval", "train-draft"],
)
def test_every_command_explains_itself(paceline: Any, command: str) -> None:
    result = paceline(*command.split(), "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


def test_eval_says_what_it_does_with_programs(paceline: Any) -> None:
    result = paceline("eval", "humaneval", "--help")
    assert result.exit_code == 0
    assert "run in a sandbox" in result.stdout
    options = ("--n", "--budget-max", "--limit", "--resume", "--style", "--weak-sandbox", "--draft-model")
    assert [option for option in options if option not in result.stdout] == []


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from paceline.cli.main import app; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parent.parent)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


def test_pull_prints_where_the_model_is(paceline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "pull", lambda name: Path("/cache") / name)
    assert paceline("pull", "smollm2-135m").stdout == "/cache/smollm2-135m\n"


def test_pulling_nothing_known_is_an_error(paceline: Any) -> None:
    result = paceline("pull", "gpt-17")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: cannot pull 'gpt-17'")


def test_an_option_that_does_not_exist_is_refused(paceline: Any) -> None:
    assert paceline("generate", "--temprature", "1").exit_code == 2


@pytest.mark.parametrize("option", ["--dtype", "--draft-dtype"])
def test_float16_is_a_precision_that_a_cpu_refuses(paceline: Any, tiny: str, tiny_draft: str, option: str) -> None:
    result = paceline("generate", tiny, "-p", "x", "--draft-model", tiny_draft, "--device", "cpu", option, "float16")
    assert result.exit_code == 2
    refused = (
        f"{option.lstrip('-').replace('-', '_')}='float16' is not allowed: 'auto', 'float32' or 'bfloat16' on a CPU"
    )
    assert refused in result.stderr
