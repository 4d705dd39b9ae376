"""``paceline eval humaneval``: on a model with random weights, and problems that its words cannot spoil."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paceline.llm import LLM
from paceline.tools.evaluation import problems as module
from paceline.tools.evaluation.problems import Problem
from paceline.tools.evaluation.sandbox import Sandbox

CHECK = "def check(f):\n    assert f(1) == 2\n"
PROBLEMS = [
    Problem(f"Test/{number}", f"def f(x):\n    return {2 + number % 2}  # {number} ", "f", CHECK, "")
    for number in range(3)
]
OPTIONS = ("--n", "1,2", "--max-tokens", "12", "--weak-sandbox", "--budgets", "1,2,5", "--dtype", "float32", "-q")
PLAIN = (*OPTIONS, "--drafter", "none")  # equal to the last bit: torch's sums depend on how many tokens a round has


@pytest.fixture(autouse=True)
def _problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "human_eval", lambda: list(PROBLEMS))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the plot out, which takes longer than the run."""
    monkeypatch.setattr("paceline.tools.evaluation.plot.draw", lambda *_: None)


def journal(directory: Path) -> list[Any]:
    """Without the times."""
    lines = [json.loads(line) for line in (directory / "journal.jsonl").read_text().splitlines()[1:]]
    for line in lines:
        for answer in (answer for configuration in line["sides"].values() for answer in configuration):
            for name in ("seconds", "drafted", "accepted"):
                del answer[name]
    return lines


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that plots were given."""
    texts: list[str] = []
    monkeypatch.setattr("matplotlib.axes.Axes.text", lambda *given, **_: texts.append(given[3]))
    return texts


def test_one_run_writes_document_samples_journal_and_plot(
    paceline: Any, tiny: str, tmp_path: Path, drawn: list[str]
) -> None:
    out = tmp_path / "out"
    result = paceline("eval", "humaneval", tiny, "--drafter", "ngram", "-k", "2", *OPTIONS, "--output", str(out))
    assert result.exit_code == 0, result.output
    assert "no answer passed" not in result.stderr
    assert drawn == []
    document = json.loads(result.stdout.splitlines()[-1])
    assert document == json.loads((out / "humaneval.json").read_text())
    assert document["sandbox"]["holds"]
    assert document["texts_changed_by_speculation"] == 0
    assert document["machine"]["cores"] >= 1
    assert [(configuration["mode"], configuration["n"]) for configuration in document["results"]] == [
        ("plain", 1), ("k=2", 1), ("plain", 2), ("k=2", 2),
    ]  # fmt: skip
    for configuration in document["results"]:
        assert [reading["budget"] for reading in configuration["at"]] == [1, 2, 5, None]
        assert 0 < configuration["at"][-1]["all"]["mean"] <= 2 / 3, "the second problem's prompt is wrong"
        assert configuration["curve"]["all"] == sorted(configuration["curve"]["all"])
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [sample["task_id"] for sample in samples] == [p.task_id for p in PROBLEMS for _ in range(2)]
    assert {type(sample["completion"]) for sample in samples} == {str}
    assert (out / "humaneval.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("undrawn")
def test_every_side_reads_the_prompt_itself(
    paceline: Any, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget includes prefill, so no configuration may reuse a prompt that another one has computed."""
    copied = []
    generate = LLM.generate

    def counted(*arguments: Any, **options: Any) -> Any:
        outputs = generate(*arguments, **options)
        copied.extend(output.cached_tokens for output in outputs)
        return outputs

    monkeypatch.setattr(LLM, "generate", counted)
    assert paceline("eval", "humaneval", tiny, *PLAIN, "--output", str(tmp_path / "out")).exit_code == 0
    assert copied == [0] * 2 * (1 + len(PROBLEMS)), "two configurations, each warmed up with the first problem"


@pytest.mark.usefixtures("undrawn")
def test_an_interrupted_run_is_gone_on_with_and_equals_an_unbroken_one(
    paceline: Any, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    line = ("eval", "humaneval", tiny, *PLAIN, "--n", "2")
    assert paceline(*line, "--output", str(whole)).exit_code == 0
    run, runs = Sandbox.run, 0

    def interrupted(*arguments: Any) -> Any:
        nonlocal runs
        runs += "# 2 " in arguments[1]
        if runs == 2:
            raise KeyboardInterrupt
        return run(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "run", interrupted)
        assert paceline(*line, "--output", str(broken)).exit_code == 130
    assert journal(broken) == journal(whole)[:2]
    with (broken / "journal.jsonl").open("a") as file:
        file.write('{"task_id": "Test/2", "si')  # as a kill while writing leaves it
    again = paceline(*line, "--output", str(broken))
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    assert paceline(*line, "--output", str(broken), "--resume").exit_code == 0
    assert journal(broken) == journal(whole)
    assert (broken / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    other = paceline(*line, "--seed", "5", "--output", str(broken), "--resume")
    assert other.exit_code == 2
    assert "seed" in other.stderr


@pytest.mark.usefixtures("undrawn")
def test_without_draft_tokens_there_is_one_side(paceline: Any, tiny: str, tmp_path: Path) -> None:
    result = paceline("eval", "humaneval", tiny, *OPTIONS, "-k", "0", "--limit", "1", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert [(configuration["mode"], configuration["n"]) for configuration in document["results"]] == [
        ("plain", 1),
        ("plain", 2),
    ]


@pytest.mark.usefixtures("undrawn")
def test_a_run_with_other_documents_or_another_sandbox_is_not_gone_on_with(
    paceline: Any, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = tmp_path / "first.txt", tmp_path / "other.txt"
    first.write_text("one document")
    other.write_text("another one")
    line = ["eval", "humaneval", tiny, *OPTIONS, "--n", "1", "--limit", "1", "--output", str(tmp_path / "out")]
    begun = paceline(*line, "--reference-document", str(first))
    assert begun.exit_code == 0, begun.output
    for documents in ([], ["--reference-document", str(other)]):
        again = paceline(*line, *documents, "--resume")
        assert again.exit_code == 2
        assert again.stderr.splitlines()[-1].startswith("error: --resume: reference_documents=")
    monkeypatch.setattr("paceline.tools.evaluation.sandbox._LIMITED", ("less than before",))
    monkeypatch.setattr("paceline.tools.evaluation.sandbox._ENCLOSED", ("less than before",))
    again = paceline(*line, "--reference-document", str(first), "--resume")
    assert again.exit_code == 2
    assert again.stderr.splitlines()[-1].startswith("error: --resume: isolation=")


@pytest.mark.usefixtures("undrawn")
def test_answers_that_the_budget_cuts_do_not_count_and_are_not_run(paceline: Any, tiny: str, tmp_path: Path) -> None:
    options = [*OPTIONS, "--budget-max", "0.000001", "--output", str(tmp_path)]
    result = paceline("eval", "humaneval", tiny, *options)
    assert result.exit_code == 0, result.output
    for configuration in json.loads(result.stdout.splitlines()[-1])["results"]:
        assert configuration["cut"] == 1
        assert configuration["pass_at"]["1"]["mean"] == 0
    answers = [
        answer for line in journal(tmp_path) for configuration in line["sides"].values() for answer in configuration
    ]
    assert {answer["result"] for answer in answers} == {"cut by the budget"}


def test_it_is_said_when_no_answer_passed(
    paceline: Any, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[str]
) -> None:
    """Else the plot's curves lie on its axis, and it looks as if nothing had been drawn."""
    only = Problem("Test/0", "def f(x):\n    return 3  # ", "f", CHECK, "")
    monkeypatch.setattr(module, "human_eval", lambda: [only])
    result = paceline("eval", "humaneval", tiny, *PLAIN, "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "no answer passed its problem's tests; of 3: 3 AssertionError" in result.stderr
    assert drawn == ["no answer passed"] * 2


@pytest.mark.usefixtures("undrawn")
def test_the_tables_fit_80_columns(paceline: Any, tiny: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from paceline.cli.main import app

    line = ["eval", "humaneval", tiny, *OPTIONS, "--limit", "1", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, [*line, "--drafter", "ngram"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    tables = result.stderr.splitlines()
    assert max(map(len, tables)) <= 80
    assert any(row.startswith("Pass@First of 1 problems") for row in tables)
    heads = [row for row in tables if "end" in row.split()]
    assert all(row.split()[-3:] == ["5", "s", "end"] for row in heads[:2])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--n", "0"), "--n"),
        (("--budgets", "x"), "--budgets"),
        (("--budgets", "0"), "--budgets"),
        (("--budget-max", "0"), "time_budget"),
        (("--temperature", "-1"), "temperature"),
        (("--output", "/dev/null"), "--output"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    paceline: Any, options: tuple[str, str], named: str
) -> None:
    result = paceline("eval", "humaneval", "no-model", *options)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: {named}=")


PROGRAM = """
import sys
from paceline.cli.main import app
from paceline.tools.evaluation import problems
problems.human_eval = lambda: [
    problems.Problem(f"Test/{n}", f"def f(x):\\n    return {2 + n % 2}  # {n} ", "f", CHECK, "") for n in range(4)
]
app(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_run_is_gone_on_with(paceline: Any, tiny: str, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    line = ["eval", "humaneval", tiny, *PLAIN, "--max-tokens", "150"]
    assert paceline(*line, "--output", str(whole)).exit_code == 0
    started = [sys.executable, "-c", PROGRAM.replace("CHECK", repr(CHECK)), *line, "--output", str(broken)]
    run = subprocess.Popen(started, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        if (broken / "journal.jsonl").exists() and (broken / "journal.jsonl").read_text().count("\n") >= 2:
            break
        time.sleep(0.001)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert 1 <= len(journal(broken)) < 4
    assert paceline(*line, "--output", str(broken), "--resume").exit_code == 0
    assert journal(broken) == journal(whole)


HARNESS = ("run", "--model", "paceline", "--tasks", "arc_easy")


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        (HARNESS, ["--device", "auto"]),
        (HARNESS[1:], ["--device", "auto"]),
        ((*HARNESS, "--device", "cuda:1"), []),
        ((*HARNESS, "--device=cpu"), []),
        (("ls", "tasks"), []),
        (("run",), []),
    ],
    ids=" ".join,
)
def test_lm_eval_chooses_the_device_here_unless_one_is_named(
    paceline: Any, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], device: list[str]
) -> None:
    """Its own default, cuda:0, is refused by a machine without CUDA."""
    seen: list[list[str]] = []
    main = ModuleType("lm_eval.__main__")
    main.cli_evaluate = lambda: seen.append(sys.argv[1:])  # type: ignore[attr-defined]
    for module_ in (main, ModuleType("lm_eval"), ModuleType("paceline.tools.evaluation.harness")):
        monkeypatch.setitem(sys.modules, module_.__name__, module_)
    monkeypatch.setattr(sys, "argv", ["paceline"])
    result = paceline("eval", "lm-eval", *arguments)
    assert result.exit_code == 0, result.output
    assert seen == [[*arguments, *device]]
