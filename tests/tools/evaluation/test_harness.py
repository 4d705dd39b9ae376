"""lm-evaluation-harness with paceline, compared with its own hf backend on generated tasks."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import real_models
from paceline.config import ServerConfig
from server_support import save_model, start

TASKS = {
    "choices": """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "texts": """
task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
    "answers": """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "x"
generation_kwargs: {until: ["q"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    data, folder = tmp_path / "data.jsonl", tmp_path / "tasks"
    folder.mkdir()
    lines = []
    for number in range(8):
        question = f"What comes after {number} and {number + 1}? " + "So it goes on. " * (number % 3)
        lines.append({"question": question, "choices": [f" {number + 2}", " none", f" {number} again", " all"]})
    data.write_text("\n".join(map(json.dumps, lines)))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    return folder


def evaluated(model: str, arguments: dict[str, Any], tasks: Path) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        batch_size=4,
        device="cpu",
        bootstrap_iters=0,
    )
    samples: dict[str, Any] = found["samples"]
    return {
        name: [(sample["doc_id"], sample["resps"]) for sample in sorted(samples[name], key=lambda s: s["doc_id"])]
        for name in TASKS
    }


@pytest.mark.slow
def test_paceline_measures_the_same_as_the_hf_backend(
    tmp_path: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason='pip install "paceline[eval]"')
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    import paceline.tools.evaluation.harness  # noqa: F401 - it registers the model

    model = save_model(tmp_path / "model")
    theirs = evaluated("hf", {"pretrained": model, "dtype": "float32"}, tasks)
    options = {"pretrained": model, "dtype": "float32", "drafter": "ngram", "num_speculative_tokens": 3}
    agree(evaluated("paceline", options, tasks), theirs)
    server = {"model": "tiny", "tokenizer_backend": "remote", "tokenized_requests": False, "max_length": 512}
    for live in start(ServerConfig(port=0, served_model_name="tiny"), model):
        agree(evaluated("local-completions", server | {"base_url": f"{live.url}/v1/completions"}, tasks), theirs)


@pytest.mark.slow
def test_the_command_runs_the_harness_with_paceline(tmp_path: Path, tasks: Path) -> None:
    pytest.importorskip("lm_eval", reason='pip install "paceline[eval]"')
    model = save_model(tmp_path / "model")
    command = [sys.executable, "-m", "paceline.cli.main", "eval", "lm-eval", "run", "--model", "paceline"]
    task = ["--model_args", f"pretrained={model},dtype=float32,drafter=ngram", "--tasks", "choices"]
    where = ["--include_path", str(tasks), "--device", "cpu", "--batch_size", "4"]
    offline = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *task, *where], capture_output=True, text=True, env=offline, check=False)
    assert done.returncode == 0, done.stderr
    assert "|choices|" in done.stdout


PAGE = Path(__file__).parents[3] / "docs" / "evaluation.md"
SHOWN = re.findall(r"^paceline (eval lm-eval .*)$", PAGE.read_text(), re.MULTILINE)
WITHOUT_NETWORK = """
import sys
import datasets
questions = [
    {"id": str(n), "question": f"What is {n} and {n}?", "answerKey": "A",
     "choices": {"text": [str(2 * n), "a tree", "none"], "label": ["A", "B", "C"]}}
    for n in range(3)
]
datasets.load_dataset = lambda **_: datasets.DatasetDict(
    {split: datasets.Dataset.from_list(questions) for split in ("train", "validation", "test")}
)
from paceline.cli.main import app
app()
"""


def test_the_documentation_shows_a_command() -> None:
    assert SHOWN


@pytest.mark.parametrize("shown", SHOWN)
def test_the_commands_in_the_documentation_run(shown: str, tmp_path: Path) -> None:
    """Only the questions are replaced, because the real ones would be downloaded."""
    pytest.importorskip("lm_eval", reason='pip install "paceline[eval]"')
    real_models.find("smollm2-135m")
    command = [sys.executable, "-c", WITHOUT_NETWORK, *shlex.split(shown)]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "|arc_easy|" in done.stdout


@pytest.mark.parametrize(("written", "refused"), [("", False), ("device: cuda:77\n", True)])
def test_the_device_in_a_configuration_file_is_used(written: str, refused: bool, tmp_path: Path, tasks: Path) -> None:
    pytest.importorskip("lm_eval", reason='pip install "paceline[eval]"')
    model, file = save_model(tmp_path / "model"), tmp_path / "run.yaml"
    file.write_text(
        f"model: paceline\nmodel_args: {{pretrained: {model}}}\ntasks: [choices]\ninclude_path: {tasks}\n{written}"
    )
    command = [sys.executable, "-m", "paceline.cli.main", "eval", "lm-eval", "run", "--config", str(file)]
    offline = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=offline, check=False)
    assert ("device='cuda:77'" in done.stderr) == refused, done.stderr
    assert (done.returncode == 0) != refused, done.stderr


def agree(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert [answer for _, answer in ours["answers"]] == [answer for _, answer in theirs["answers"]]
    assert len({str(answer) for _, answer in ours["answers"]}) > 1, "the answers are not all the same"
    for name in ("choices", "texts"):
        for (_, one), (_, other) in zip(ours[name], theirs[name], strict=True):
            assert _numbers(one) == pytest.approx(_numbers(other), abs=1e-3)


def _numbers(responses: Any) -> list[float]:
    """All numbers in nested responses; the flag for greedy becomes 0 or 1."""
    if isinstance(responses, (list, tuple)):
        return [number for part in responses for number in _numbers(part)]
    return [float(responses) if not isinstance(responses, str) else float(responses == "True")]


def test_importing_the_command_line_does_not_import_lm_eval() -> None:
    code = "import paceline.cli.main, sys; print('lm_eval' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
