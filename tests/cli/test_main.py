"""The front door: help without waiting, errors, the small commands."""

import io
import json
import os
import subprocess
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import pytest
import typer

import paceline as package
from paceline.cli.main import app
from paceline.models.files import hub

ROOT = Path(__file__).parents[2]


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
    assert subprocess.run([sys.executable, "-c", code], check=False, env=_environment()).returncode == 0


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


# Standard output that cannot be written


def run_into(stream: TextIO | None, *arguments: str) -> tuple[object, str]:
    """Exit code and stderr of a command whose standard output is ``stream``."""
    told = io.StringIO()
    with redirect_stdout(stream), redirect_stderr(told), pytest.raises(SystemExit) as left:  # type: ignore[type-var]
        typer.main.get_command(app).main([*arguments], prog_name="paceline")
    return left.value.code, told.getvalue()


WRITERS = [
    "--version",
    "--help",
    "",
    "generate --help",
    "bench offline --help",
    "pull smollm2-135m-head",
    "generate TINY -q -p x --max-tokens 2",
    "generate TINY -q -p x --max-tokens 2 --json",
    "generate TINY -q -p x -n 2 --max-tokens 2",
    "verify TINY -q --max-tokens 2 --samples 0 --batch-sizes 1 --lengths 1",
    "bench offline TINY -q --drafter none --batch-sizes 1 --max-tokens 2 --repeats 1 --prompts open",
]


@pytest.mark.parametrize("line", WRITERS)
def test_a_full_disk_behind_standard_output_is_one_line_and_an_exit_code(line: str, tiny: str) -> None:
    with Path("/dev/full").open("w") as full:
        code, told = run_into(full, *line.replace("TINY", tiny).split())
    assert code == 2
    assert told.splitlines()[-1] == "error: standard output cannot be written: No space left on device"


def test_a_full_disk_behind_standard_output_shows_no_traceback_at_the_end_either() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "paceline", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False, env=_environment())
    assert (done.returncode, done.stderr) == (2, b"error: standard output cannot be written: No space left on device\n")


@pytest.mark.parametrize("line", ["--version", "--help", "generate TINY -q -p x --max-tokens 2 --json"])
def test_a_closed_standard_output_is_one_line_and_an_exit_code(line: str, tiny: str) -> None:
    code, told = run_into(None, *line.replace("TINY", tiny).split())
    assert (code, told) == (2, "error: standard output cannot be written: it is closed\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_text_that_an_encoding_lacks_is_one_line_that_names_the_way_out(
    encoding: str, tiny: str, tmp_path: Path
) -> None:
    with (tmp_path / "out").open("w", encoding=encoding) as stream:
        code, told = run_into(stream, "generate", tiny, "-q", "-p", "x", "-n", "4", "--seed", "1", "--max-tokens", "40")
    assert code == 2
    (line,) = told.splitlines()
    assert line.startswith(f"error: standard output cannot be written: its encoding, {encoding}, has no '")
    assert line.endswith("'; set PYTHONIOENCODING=utf-8")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_the_same_document_in_every_encoding(encoding: str, tiny: str, tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding=encoding) as stream:
        code, told = run_into(stream, "generate", tiny, "-q", "-p", "日本", "--max-tokens", "40", "--json")
    assert (code, told) == (0, "")
    text = (tmp_path / "out").read_bytes().decode(encoding)
    assert json.loads(text)["prompt"] == "日本"
    assert ("日本" in text) is (encoding == "utf-8")


# Ctrl-C


@pytest.mark.parametrize("interrupted", ["typer", "paceline.cli.main"])
def test_ctrl_c_while_modules_are_imported_is_silent(interrupted: str, tmp_path: Path) -> None:
    code = f"""
import os, runpy, signal, sys, time
class Interrupting:
    def find_spec(self, name, *_):
        if name == {interrupted!r}:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may inherit "ignore"
sys.meta_path.insert(0, Interrupting())
sys.argv = ["paceline", "--version"]
runpy.run_module("paceline", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=_environment())
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_the_command_that_is_installed_is_the_one_that_is_silent() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"paceline": "paceline.__main__:main"}


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(package.__file__).parent.parent)}
