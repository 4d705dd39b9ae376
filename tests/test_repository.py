"""The files that other tools read: valid, and true of the commands, versions and paths that they name."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from paceline.cli.main import app

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = ROOT / ".github" / "workflows"
OTHERS = [WORKFLOWS / "other-systems.yml", *FORMS]
YAML = [WORKFLOWS / "check.yml", ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff", *OTHERS]


def load(path: Path) -> dict[Any, Any]:
    document = yaml.safe_load(path.read_text())
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_the_file_is_yaml(path: Path) -> None:
    assert load(path)


def test_the_workflow_calls_what_contributors_call_on_the_oldest_and_the_newest_python() -> None:
    jobs = load(YAML[0])["jobs"]
    job = jobs["check"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make check"]
    commands = [step["run"] for each in jobs.values() for step in each["steps"] if "run" in step]
    for target in re.findall(r"make (\w+)", " ".join(commands)):
        assert re.search(f"^{target}:", MAKEFILE, re.MULTILINE)
    for path in re.findall(r"tests/[\w/.]+", " ".join(commands)):
        assert (ROOT / path).exists()
    promised = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert job["strategy"]["matrix"]["python"] == [promised[0], promised[-1]]


def test_the_hooks_are_the_checks_of_make_check() -> None:
    recipe = MAKEFILE.split("\ncheck:")[1].split("\n\n")[0]
    (local,) = load(YAML[1])["repos"]
    entries = [hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude") for hook in local["hooks"]]
    assert entries == [line.split("$(BIN)/")[1].removesuffix(" .") for line in recipe.splitlines() if "$(BIN)" in line]


def test_the_hooks_have_what_they_need() -> None:
    for hook in load(YAML[1])["repos"][0]["hooks"]:
        tool = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert tool in PROJECT["optional-dependencies"]["dev"]
        assert hook["language"] == "system"


def test_the_citation_is_of_this_version_and_licence() -> None:
    cited = load(ROOT / "CITATION.cff")
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_has_what_github_asks_for(path: Path) -> None:
    form = load(path)
    assert {"name", "description", "body"} <= form.keys()
    names = [field.get("id") for field in form["body"] if field["type"] != "markdown"]
    assert None not in names
    assert len(names) == len(set(names))
    assert all(field["attributes"].get("label") for field in form["body"] if field["type"] != "markdown")


@pytest.mark.parametrize("path", [*FORMS, ROOT / "SECURITY.md"], ids=lambda path: path.name)
def test_the_commands_that_reporters_are_asked_for_exist(path: Path) -> None:
    commands = re.findall(r"`paceline ([^`]+)`", path.read_text().replace("\n", " "))
    for command in map(shlex.split, commands):
        words = [word for word in command if not word.startswith("-")][: 2 if command[0] in ("bench", "eval") else 1]
        shown = CliRunner().invoke(app, [*words, "--help", "all"], env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert shown.exit_code == 0, shown.output
        assert [flag for flag in command if flag.startswith("--") and flag not in shown.output] == []


def test_the_links_of_the_security_policy_lead_to_files() -> None:
    targets = re.findall(r"\]\((?!\w+:)([^)#\s]+)", (ROOT / "SECURITY.md").read_text())
    assert targets
    assert [to for to in targets if not (ROOT / to).is_file()] == []
