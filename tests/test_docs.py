"""Documentation cannot rot: the README's Python runs, its commands and flags exist, its links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import real_models
from paceline.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("paceline ")]


def test_the_pythons_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    real_models.find("smollm2-135m")
    (code,) = blocks(ROOT / "README.md", "python")
    exec(compile(code, "README.md", "exec"), {})
    assert "green" in capsys.readouterr().out


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_the_commands_of_the_documentation_exist_with_their_flags(command: list[str]) -> None:
    words = command[:2] if command[0] == "bench" else command[:1]
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    flags = [word for word in command if word.startswith("--")]
    assert [flag for flag in flags if flag not in result.output] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("line", re.findall(r"^make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
def test_the_make_targets_of_the_readme_exist(line: str) -> None:
    assert re.search(rf"^{line}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
