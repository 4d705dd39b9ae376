"""Real clients against a live server, with the code of docs/agents.md, each in an environment of its own.

The environments are made once, in $PACELINE_TEST_CLIENTS. A scripted model stands in for one that can call tools.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import scripted
from scripted import call
from server_support import Live

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(900)]

PAGE = Path(__file__).parent.parent.parent / "docs" / "agents.md"
HOME = Path(os.environ.get("PACELINE_TEST_CLIENTS") or "~/.cache/paceline-test-clients").expanduser()
PYTHON = (
    "openai",
    "ollama",
    "anthropic",
    "litellm",
    "langchain-openai",
    "instructor",
    "pydantic-ai-slim[openai]",
    "openai-agents",
)
NODE = ("openai", "ollama", "ai", "@ai-sdk/openai-compatible", "zod", "@openai/codex", "@anthropic-ai/claude-code")
SECONDS = 300


def made(name: str, packages: Sequence[str], commands: Sequence[Sequence[str]]) -> Path:
    """The folder of an environment, made by commands on the first use. Skips where the index cannot be reached."""
    folder = HOME / f"{name}-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:12]}"
    if not (folder / "ready").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for command in commands:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=SECONDS * 2)
            if done.returncode != 0:
                pytest.skip(f"NOT RUN: {' '.join(packages)} cannot be installed: {(done.stderr or done.stdout)[-500:]}")
        (folder / "ready").touch()
    return folder


@pytest.fixture(scope="module")
def python() -> Path:
    commands = [[sys.executable, "-m", "venv", "venv"], ["venv/bin/python", "-m", "pip", "install", "-q", *PYTHON]]
    return made("python", PYTHON, commands) / "venv" / "bin" / "python"


@pytest.fixture(scope="module")
def node() -> Path:
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("NOT RUN: node and npm are not installed")
    commands = [["npm", "init", "-y"], ["npm", "install", "--no-audit", "--no-fund", *NODE]]
    return made("node", NODE, commands)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return scripted.save_model(tmp_path_factory.mktemp("scripted") / "model")


ARGUMENTS = {"get_weather": {"city": "Oslo"}, "City": {"name": "Oslo", "country": "Norway"}}


def assistant(prompt: str, tools: Sequence[str]) -> str:
    """Calls the first tool once, then says what it returned."""
    asked = prompt.rsplit("<|im_start|>user", 1)[-1]
    if "<tool_response>" in asked:
        return "It is 4 degrees."
    if tools:
        return f"I look.\n{call(tools[0], **ARGUMENTS[tools[0]])}"
    return '{"name": "Oslo", "country": "Norway"}' if "capital" in asked else "Hello there."


@pytest.fixture(scope="module")
def live(model: str) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch, scripted.scripted(model, assistant, patch) as server:
        yield server


def recipe(section: str, language: str, live: Live) -> str:
    """The code of a section of docs/agents.md, for this server."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    (code,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return (
        str(code)
        .replace("http://127.0.0.1:8000", live.url)
        .replace('"coder"', '"scripted"')
        .replace("openai/coder", "openai/scripted")
    )


def run(command: Sequence[str | Path], code: str | None = None, **options: str | Path | dict[str, str]) -> str:
    """Run a client and return its output."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "NO_PROXY": "127.0.0.1"}
    environment |= dict(options.get("variables") or {})  # type: ignore[arg-type]
    done = subprocess.run(
        [*map(str, command)],
        input=code or "",
        cwd=options.get("cwd"),  # type: ignore[arg-type]
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_openai(python: Path, live: Live) -> None:
    said = run([python, "-"], recipe("openai", "python", live)).splitlines()
    assert said[:3] == ['get_weather {"city": "Oslo"}', '{"city": "Oslo"}', "It is 4 degrees."]
    assert int(said[3].split()[0]) > 50
    assert said[4] == "2 embeddings"


def test_ollama(python: Path, live: Live) -> None:
    said = run([python, "-"], recipe("ollama", "python", live)).splitlines()
    assert said[:2] == ["get_weather Oslo", "It is 4 degrees."]
    assert said[2:] == ['{"name": "Oslo", "country": "Norway"}', "2 embeddings of scripted"]


def test_ollama_in_javascript(node: Path, live: Live) -> None:
    command = ["node", "--input-type=module", "-"]
    assert run(command, recipe("ollama", "js", live), cwd=node) == "get_weather Oslo\nIt is 4 degrees.\n"


def test_anthropic(python: Path, live: Live) -> None:
    said = run([python, "-"], recipe("anthropic", "python", live)).splitlines()
    assert int(said[0].split()[0]) > 50
    assert said[1:3] == ["tool_use get_weather {'city': 'Oslo'}", "It is 4 degrees."]
    assert int(said[3].split()[0]) > 50


def test_litellm(python: Path, live: Live) -> None:
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    said = run([python, "-"], recipe("litellm", "python", live), variables=variables)
    assert said.splitlines() == ["Hello there.", "Hello there.1 embedding"]


def test_langchain(python: Path, live: Live) -> None:
    calls, city, embeddings = run([python, "-"], recipe("LangChain", "python", live)).splitlines()
    assert "'name': 'get_weather', 'args': {'city': 'Oslo'}" in calls
    assert (city, embeddings) == ("name='Oslo' country='Norway'", "2 embeddings")


def test_instructor(python: Path, live: Live) -> None:
    assert run([python, "-"], recipe("Instructor", "python", live)).strip() == "name='Oslo' country='Norway'"


@pytest.mark.parametrize("section", ["pydantic-ai", "OpenAI's Agents SDK"])
def test_agents_in_python(python: Path, live: Live, section: str) -> None:
    assert run([python, "-"], recipe(section, "python", live)).strip() == "It is 4 degrees."


def test_openai_in_javascript(node: Path, live: Live) -> None:
    command = ["node", "--input-type=module", "-"]
    said = run(command, recipe("openai in JavaScript", "js", live), cwd=node)
    assert said == '{"city": "Oslo"}\nHello there.'


def test_vercels_sdk(node: Path, live: Live) -> None:
    said = run(["node", "--input-type=module", "-"], recipe("Vercel's AI SDK", "js", live), cwd=node)
    assert said == "2 steps: It is 4 degrees.\nHello there."
