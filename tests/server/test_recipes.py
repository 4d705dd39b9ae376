"""The recipes of docs/recipes.md, against a running server, each where its package is installed.

Nothing is fetched: the tools that want a tokenizer get the model's own directory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import ServerConfig
from server_support import Live, start

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

PAGE = Path(__file__).parent.parent.parent / "docs" / "recipes.md"
HERE, MODEL = "http://127.0.0.1:8000", "smollm2-135m"
SECONDS = 240


@pytest.fixture(scope="module")
def live(tiny: str) -> Iterator[Live]:
    yield from start(ServerConfig(port=0, served_model_name=MODEL, max_waiting=64), tiny)


def need(package: str, module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"the package {package} is not installed: pip install {package}")


def recipe(section: str, language: str) -> str:
    """Return the code of a section of docs/recipes.md."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    (code,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(code)


def run_python(section: str, live: Live, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a section's Python code and return its output."""
    code = recipe(section, "python").replace(HERE, live.url)
    exec(compile(code, section, "exec"), {})
    return capsys.readouterr().out


def run(section: str, live: Live, tmp_path: Path, changes: dict[str, str], **variables: str) -> str:
    """Run a section's commands in an empty directory without network and return their output."""
    code = recipe(section, "sh").replace(HERE, live.url)
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HOME": str(tmp_path), "PATH": path}
    done = subprocess.run(
        ["bash", "-ec", code], cwd=tmp_path, env=os.environ | offline | variables, capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def answered(live: Live) -> str:
    """The greedy answer to the recipes' question."""
    body = {"messages": [{"role": "user", "content": "Name three rivers."}], "temperature": 0}
    text: str = live.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    return text


def test_openai(live: Live) -> None:
    reply = live.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Name three rivers."}], temperature=0
    )
    assert reply.choices[0].message.content == answered(live)


def test_langchain(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    need("langchain-openai", "langchain_openai")
    said, answer = run_python("LangChain", live, capsys), answered(live)
    assert said == f"{answer}\n{answer}"


def test_litellm(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    need("litellm", "litellm")
    assert run_python("LiteLLM", live, capsys) == answered(live) + "\n"


TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

@task
def rivers():
    return Task(dataset=[Sample(input="Name three rivers.", target="e") for _ in range(3)], scorer=includes())
"""


def test_inspect_ai(live: Live, tmp_path: Path) -> None:
    need("inspect-ai", "inspect_ai")
    (tmp_path / "task.py").write_text(TASK)
    before = live.metric("request_success_total")
    run("inspect-ai", live, tmp_path, {"--temperature 0": "--temperature 0 --display plain --log-format json"})
    (log,) = (tmp_path / "logs").glob("*.json")
    found = json.loads(log.read_text())
    assert found["status"] == "success"
    assert [sample["output"]["completion"] for sample in found["samples"]] == [answered(live)] * 3
    assert live.metric("request_success_total") == before + 4


def test_guidellm(live: Live, tiny: str, tmp_path: Path) -> None:
    need("guidellm", "guidellm")
    run("guidellm", live, tmp_path, {"TOKENIZER": tiny, "count=40": "count=8"})
    (result,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    requests = result["requests"]
    assert (len(requests["successful"]), len(requests["errored"])) == (8, 0)
    assert {request["output_tokens"] for request in requests["successful"]} == {32}


def aiperf_figures(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("profile_export_aiperf.json")
    figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def test_aiperf(live: Live, tiny: str, tmp_path: Path) -> None:
    """aiperf divides by the rounds with draft tokens only."""
    need("aiperf", "aiperf")
    assert shutil.which("aiperf", path=str(Path(sys.executable).parent))
    changes = {"TOKENIZER": tiny, "--request-count 40": "--request-count 8 --isl 40 --osl 32 --ui none"}
    before = {
        name: live.metric(name)
        for name in ("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total")
    }
    # With these variables aiperf looks for tokenizers in the hub's cache only.
    run("aiperf", live, tmp_path, changes, HF_HUB_OFFLINE="", TRANSFORMERS_OFFLINE="")
    after = {name: live.metric(name) - count for name, count in before.items()}
    figures = aiperf_figures(tmp_path)
    assert figures["request_count"]["avg"] == 8
    told = {name: figures[name]["avg"] for name in figures if name.startswith(("spec_decode", "total_spec_decode"))}
    assert told, "aiperf found no acceptance figures"
    rate = told["spec_decode_overall_draft_acceptance_rate"]
    accepted, drafted = after.values()
    assert drafted > 0
    assert rate in (pytest.approx(accepted / drafted, abs=0.05), pytest.approx(100 * accepted / drafted, abs=5))
