"""``benchmarks.drafters``: every drafter of a target, counted and timed, in one document."""

import json
from pathlib import Path

import pytest
from benchmarks.drafters import PROMPTS, TASKS, app, mixed_batches
from typer.testing import CliRunner

from byte_model import byte_tokenizer, save_llama
from paceline.errors import ParameterError

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = ("--dtype", "float32", "--max-model-len", "200", "--prompts", "2", "--max-tokens", "6", "--draft-tokens", "2")
SHORT = (*OPTIONS, "--tasks", "maths,questions", "--repeats", "1", "--batch-sizes", "1,2")


def test_every_task_has_twenty_prompts_that_differ() -> None:
    assert {task: len(set(texts)) for task, texts in PROMPTS.items()} == dict.fromkeys(TASKS, 20)


@pytest.mark.parametrize("size", [4, 16])
def test_batches_have_equally_many_prompts_of_every_task(size: int) -> None:
    batches = mixed_batches(PROMPTS, size, len(TASKS))
    assert {len(batch) for batch in batches} == {size}
    texts = [text for batch in batches for text in batch]
    of_task = [sum(text in PROMPTS[task] for text in texts) for task in TASKS]
    assert len(set(of_task)) == 1
    assert len(set(texts)) == len(texts)


def test_one_task_is_timed_on_as_many_prompts_as_asked() -> None:
    batches = mixed_batches({"chat": PROMPTS["chat"]}, 2, 19)
    assert [text for batch in batches for text in batch] == [*PROMPTS["chat"]]


def test_the_document_has_every_drafter_on_every_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.drafters.COST_SECONDS", 0.02)
    target = save_llama(tmp_path / "tiny", byte_tokenizer(), seed=1)
    draft = save_llama(tmp_path / "tiny-draft", byte_tokenizer(), seed=2, hidden_size=16, intermediate_size=32)
    file = tmp_path / "drafters.json"
    options = (*SHORT, "--draft-model", draft, "--draft-vocab-size", "64", "--output", str(file))
    result = CliRunner().invoke(app, [target, *options])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document == json.loads(file.read_text())
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    names = ["ngram", "siblings", "model", "model or copies"]
    counted = [(each["drafter"], each["task"], each["temperature"]) for each in document["acceptance"]]
    assert set(counted) == {
        (name, task, heat)
        for name in names
        for task in ("maths", "questions")
        for heat in (0, 0.8)
        if (name, heat) != ("siblings", 0)
    }
    for each in document["acceptance"]:
        assert each["mean_acceptance_length"] == 1 + each["accepted"] / each["rounds"]
        assert 0 <= each["accepted"] <= each["drafted"] <= 2 * each["rounds"]
    model = [each for each in document["acceptance"] if each["drafter"] == "model"]
    assert all(each["drafted"] > each["rounds"] for each in model), "it drafts two tokens wherever two have room"
    timed = {(each["drafter"], each["batch_size"], each["temperature"]) for each in document["speeds"]}
    assert timed == {(name, size, heat) for name in names if name != "siblings" for size in (1, 2) for heat in (0, 0.8)}
    assert all(each["speed_up"] > 0 for each in document["speeds"])
    assert all(each["share"] >= 0 and (each["ms"] > 0) == (each["share"] > 0) for each in document["costs"])
    assert any(each["ms"] > 0 for each in document["costs"])


@pytest.mark.parametrize(
    "wrong",
    [("--tasks", "cooking"), ("--temperatures", "3"), ("--temperatures", "warm"), ("--draft-quantization", "int8")],
)
def test_wrong_options_are_refused_by_name(wrong: tuple[str, str]) -> None:
    with pytest.raises(ParameterError, match=f"^{wrong[0]}="):
        CliRunner().invoke(app, ["no-model", *SHORT, *wrong], catch_exceptions=False)


def test_a_drafter_of_ones_own_is_compared_on_the_prompts_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.drafters.COST_SECONDS", 0.02)
    target, prompts, mine = (
        save_llama(tmp_path / "tiny", byte_tokenizer(), seed=1),
        tmp_path / "q.jsonl",
        tmp_path / "m.py",
    )
    lines = [{"question_id": 1, "category": "maths", "turns": ["1 + 1?", "2 + 2?"]}, {"prompt": "hello"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    mine.write_text("from paceline.drafters import NgramDrafter\nclass Mine(NgramDrafter):\n    name = 'mine'\n")
    options = (
        *OPTIONS,
        "--repeats",
        "1",
        "--batch-sizes",
        "1",
        "--temperatures",
        "0",
        "--output",
        str(tmp_path / "o.json"),
    )
    result = CliRunner().invoke(app, [target, *options, "--also", f"{mine}:Mine", "--prompts-file", str(prompts)])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    counted = [(each["drafter"].rpartition(":")[2], each["task"]) for each in document["acceptance"]]
    assert counted == [(name, task) for name in ("ngram", "Mine") for task in ("maths", "q")]
    assert document["plan"]["tasks"] == ["maths", "q"]
    pairs = [[each for each in document["acceptance"] if each["task"] == task] for task in ("maths", "q")]
    assert all(own["accepted"] == lookup["accepted"] for lookup, own in pairs)
    refused = CliRunner().invoke(app, [target, *options, "--also", "model"])
    assert "given beside --draft-model" in str(refused.exception)
