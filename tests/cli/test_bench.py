"""``paceline bench offline``: a table for people, one JSON document for programs."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.tools.bench import offline
from paceline.tools.bench.sets import SETS, BenchPrompt


@pytest.mark.parametrize("how", [["--drafter", "none"], [], ["--drafter", "ngram", "--compare", "transformers"]])
def test_the_command_ends_with_one_json_document(paceline: Any, tiny: str, tmp_path: Path, how: list[str]) -> None:
    file = tmp_path / "result.json"
    options = ["--batch-sizes", "1,2", "--max-tokens", "6", "--repeats", "1", "--dtype", "float32"]
    result = paceline("bench", "offline", tiny, *options, *how, "--prompts", "open", "--output", str(file))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document == json.loads(file.read_text())
    sides = [
        "plain",
        *(["speculation"] if "none" not in how else []),
        *(["transformers, float32"] if "transformers" in how else []),
    ]
    assert [(r["batch_size"], r["side"]) for r in document["results"]] == [(b, s) for b in (1, 2) for s in sides]
    assert all(r["decode_seconds"] > 0 and r["output_tokens"] == 6 for r in document["results"])
    counted, peak = document["arithmetic"]["multiply_adds_a_token"], document["arithmetic"]["peak"]
    assert peak["source"].startswith("measured: torch's float32 product")
    assert peak["source"] in result.stderr
    for r in document["results"]:
        done = 2 * counted * r["tokens"] / r["decode_seconds"]
        theirs = r["side"] == "transformers, float32"
        assert r["utilisation"] == (None if theirs else pytest.approx(done / peak["operations_per_second"]))
        assert theirs or 0 < r["latency"]["first"] <= r["latency"]["all"] <= r["latency"]["last"]
    assert {"cpu", "cores"} <= document["machine"].keys()
    assert {"torch", "transformers", "paceline"} <= document["versions"].keys()
    assert document["dtype"] == "float32"


def test_answers_that_the_longest_sequence_ends_count_as_they_came(paceline: Any, tiny: str) -> None:
    options = ["--batch-sizes", "1", "--max-tokens", "400", "--repeats", "1", "--max-model-len", "80"]
    options += ["--drafter", "none"]
    result = paceline("bench", "offline", tiny, *options, "--prompts", "open", "--dtype", "float32")
    (measured,) = json.loads(result.stdout.splitlines()[-1])["results"]
    came = 80 - measured["prompt_tokens"]
    assert (measured["max_tokens"], measured["tokens"], measured["output_tokens"]) == (400, came, came)
    assert measured["tokens_per_second"] == pytest.approx(came / measured["decode_seconds"])
    assert "at most 400 tokens" in result.stderr


@pytest.mark.parametrize(
    ("how", "copied"), [([], True), (["--no-references"], False), (["-k", "0"], False), (["--drafter", "none"], False)]
)
def test_the_document_tells_whether_references_were_copied_from(
    paceline: Any, tiny: str, how: list[str], copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = (BenchPrompt("a b c", ("d e f",)),)
    monkeypatch.setattr("paceline.tools.bench.offline.SETS", {**SETS, "edits": short})
    given: list[Any] = []
    sides_for = offline.sides_for
    monkeypatch.setattr(offline, "sides_for", lambda *a: (given.append(a[5]), sides_for(*a))[1])
    options = ["--batch-sizes", "1", "--max-tokens", "2", "--repeats", "1", "--prompts", "edits"]
    result = paceline("bench", "offline", tiny, *options, *how)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["references"] is copied
    assert given == [[("d e f",)] if copied else None]
    draft_tokens = how in ([], ["--no-references"])
    assert [r["side"] for r in document["results"]] == ["plain", "speculation"][: 1 + draft_tokens], "never plain twice"


MEASURING = [
    ["bench", "offline", "no-model"],
    ["profile", "no-model"],
]


@pytest.mark.parametrize("command", MEASURING, ids=" ".join)
def test_output_paths_are_looked_at_before_anything_else(paceline: Any, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "there").write_text("kept")
    for path in (tmp_path / "absent" / "a.json", tmp_path, tmp_path / "there" / "a.json", tmp_path / ("x" * 300)):
        result = paceline(*command, "--output", str(path))
        assert result.exit_code == 2
        (error,) = result.stderr.splitlines()
        assert error.startswith("error: --output=")
    right = paceline(*command, "--output", str(tmp_path / "there"))
    assert "--output" not in right.stderr, "there was another fault, which is found next"
    assert (tmp_path / "there").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_document_is_not_overwritten_by_its_plot(paceline: Any, tmp_path: Path) -> None:
    result = paceline("profile", "no-model", "--output", str(tmp_path / "a.png"))
    assert "ends in .png" in result.stderr


@pytest.mark.parametrize(
    ("option", "value"), [("--batch-sizes", "1,none"), ("--batch-sizes", "0"), ("--max-tokens", "1")]
)
def test_bad_options_are_named(paceline: Any, tiny: str, option: str, value: str) -> None:
    result = paceline("bench", "offline", tiny, option, value)
    assert result.exit_code == 2
    assert option in result.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # bfloat16: on the CPU kernels, where there are any
def test_lengths_stand_side_by_side_and_draft_tokens_can_be_made_wrong(paceline: Any, tiny: str, dtype: str) -> None:
    options = ["--batch-sizes", "2", "--max-tokens", "16", "--repeats", "1", "--dtype", dtype, "--draft-model", tiny]
    right = paceline("bench", "offline", tiny, *options, "--lengths", "2,bass,auto")
    assert right.exit_code == 0, right.output
    rows = {r["side"]: r for r in json.loads(right.stdout.splitlines()[-1])["results"]}
    assert list(rows) == ["plain", "k=2", "k=bass", "k=auto"]
    assert rows["k=2"]["acceptance_rate"] > 0.9  # the model drafts for itself
    wrong = paceline("bench", "offline", tiny, *options, "--lengths", "2", "--wrong-drafts")
    rows = {r["side"]: r for r in json.loads(wrong.stdout.splitlines()[-1])["results"]}
    assert list(rows) == ["plain", "k=2, wrong drafts"]
    assert rows["k=2, wrong drafts"]["acceptance_rate"] == 0
    assert paceline("bench", "offline", tiny, "--lengths", "2,some").exit_code == 2


def test_own_prompts_and_drafters_are_timed_logged_and_compared(paceline: Any, tiny: str, tmp_path: Path) -> None:
    prompts, mine, log = (tmp_path / name for name in ("q.jsonl", "mine.py", "rounds.jsonl"))
    lines = [{"question_id": 1, "category": "x", "turns": ["first", "second"]}, {"prompt": "abcabcabc"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    mine.write_text("from paceline.drafters import NgramDrafter\nclass Mine(NgramDrafter):\n    name = 'mine'\n")
    options = ("--prompts-file", str(prompts), "--batch-sizes", "2", "--max-tokens", "8", "--repeats", "2", "-k", "2")
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for file in files:
        given = (*options, "--dtype", "float32", "--drafter", f"{mine}:Mine", "--output", str(file), "-q")
        result = paceline("bench", "offline", tiny, *given, "--round-log", str(log))
        assert result.exit_code == 0, result.output
    document = json.loads(files[0].read_text())
    assert (document["prompts"], "drafter mine, length fixed(2)" in document["engine"]) == (str(prompts), True)
    rounds = [json.loads(line) for line in log.read_text().splitlines()]
    assert {(made["side"], made["repeat"]) for made in rounds} == {
        (side, repeat) for side in ("plain", "speculation") for repeat in (0, 1)
    }
    measured = document["results"][1]
    last = [made for made in rounds if made["side"] == "speculation" and made["repeat"] == 1]
    assert [made["round"] for made in last] == [*range(len(last))]
    assert len(measured["drafted_per_position"]) <= 2
    assert sum(measured["drafted_per_position"]) <= sum(map(sum, (made["drafted"] for made in last)))
    compared = json.loads(paceline("bench", "compare", *map(str, files)).stdout.splitlines()[-1])["results"]
    assert [(each["side"], each["batch_size"]) for each in compared] == [("plain", 2), ("speculation", 2)]
    assert all(each["low"] <= each["ratio"] <= each["high"] for each in compared)
    refused = paceline("bench", "compare", str(files[0]), str(log))
    assert (refused.exit_code, "a JSON document of paceline bench offline" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("line", "said"),
    [('{"prompt": "x", "temperature": 1}', "nothing else"), ("{", "not JSON"), ("", "a prompt a line")],
)
def test_a_file_that_has_more_or_less_than_prompts_is_refused(
    paceline: Any, tiny: str, tmp_path: Path, line: str, said: str
) -> None:
    prompts = tmp_path / "q.jsonl"
    prompts.write_text(line + "\n")
    for command in (("bench", "offline"), ("verify",), ("profile",)):
        result = paceline(*command, tiny, "--prompts-file", str(prompts))
        assert (result.exit_code, said in result.stderr) == (2, True), result.stderr
