"""``paceline generate``: prompts in, texts or JSON out, each mistake one clear error."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from adapter_support import write_adapter
from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Engine

GREEDY = ("--temperature", "0", "--max-tokens", "12", "--dtype", "float32", "--ignore-eos")


def documents(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def texts(result: Result) -> list[str]:
    return [entry["outputs"][0]["text"] for entry in documents(result)]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def test_one_prompt_gives_one_bare_text(paceline: Any, tiny: str) -> None:
    bare = paceline("generate", tiny, "--prompt", "hello", *GREEDY)
    (document,) = documents(paceline("generate", tiny, "--prompt", "hello", *GREEDY, "--json"))
    assert bare.exit_code == 0
    assert bare.stdout == document["outputs"][0]["text"] + "\n"
    assert document["outputs"][0]["finish_reason"] == "length"
    assert document["outputs"][0]["metrics"]["output_tokens"] == 12


def test_the_start_line_says_what_runs_and_quiet_silences_it(paceline: Any, tiny: str) -> None:
    loud = paceline("generate", tiny, "--prompt", "hello", "--drafter", "ngram", *GREEDY)
    assert "float32" in loud.stderr
    assert "ngram" in loud.stderr
    assert paceline("generate", tiny, "--prompt", "hello", "--quiet", *GREEDY).stderr == ""


@pytest.mark.parametrize(
    "how", [["--drafter", "ngram"], ["--drafter", "hybrid"], ["-k", "bass"], ["--acceptance", "rejection"]]
)
def test_speculation_changes_no_text(paceline: Any, tiny: str, tiny_draft: str, how: list[str]) -> None:
    prompts = ["--prompt", "abcabcabc", "--prompt", "x"]
    plain = texts(paceline("generate", tiny, *prompts, *GREEDY, "--json"))
    draft = [] if "ngram" in how else ["--draft-model", tiny_draft]
    assert texts(paceline("generate", tiny, *prompts, *GREEDY, *draft, *how, "--json")) == plain


def test_several_prompts_and_answers_are_titled(paceline: Any, tiny: str) -> None:
    result = paceline("generate", tiny, "-p", "a", "-p", "b", "--n", "2", "--seed", "1", "--max-tokens", "3")
    assert result.exit_code == 0
    assert [line for line in result.stdout.splitlines() if line.startswith("prompt ")]
    assert "prompt 2, answer 2" in result.stdout


def test_a_file_of_prompts_is_answered_in_its_order_with_parameters_of_each_line(
    paceline: Any, tiny: str, lines: Path
) -> None:
    entries = [
        {"prompt": "first", "max_tokens": 9},
        {"messages": [{"role": "user", "content": "second"}], "max_tokens": 2, "custom_id": "two"},
        {"prompt": [3, 4, 5], "n": 2, "seed": 7, "temperature": 1.0, "logit_bias": {"65": 1.5}, "max_tokens": 4},
    ]
    lines.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    found = documents(paceline("generate", tiny, "--prompts-file", str(lines), "--json", *GREEDY))
    assert [entry["index"] for entry in found] == [0, 1, 2]
    assert [entry.get("custom_id") for entry in found] == [None, "two", None]
    assert [len(entry["outputs"]) for entry in found] == [1, 1, 2]
    assert [len(entry["outputs"][0]["token_ids"]) for entry in found] == [9, 2, 4]


def test_prompts_come_from_stdin_too(paceline: Any, tiny: str) -> None:
    result = paceline("generate", tiny, "--prompts-file", "-", "--json", *GREEDY, stdin='{"prompt": "hello"}\n')
    assert texts(result) == texts(paceline("generate", tiny, "-p", "hello", "--json", *GREEDY))


def test_logprobs_are_in_the_document(paceline: Any, tiny: str) -> None:
    (document,) = documents(paceline("generate", tiny, "-p", "hello", "--logprobs", "2", "--json", *GREEDY))
    (answer,) = document["outputs"]
    assert len(answer["logprobs"]) == 12
    assert len(answer["logprobs"][0]["top"]) == 2
    assert answer["cumulative_logprob"] == pytest.approx(sum(entry["logprob"] for entry in answer["logprobs"]))


def test_chat_sends_prompts_through_the_template(paceline: Any, tiny: str) -> None:
    chat = texts(paceline("generate", tiny, "-p", "hi", "--chat", "--json", *GREEDY))
    assert chat == texts(paceline("generate", tiny, "-p", "[user]hi[bot]", "--json", *GREEDY))


def test_a_line_may_ask_for_a_structure(paceline: Any, tiny: str, lines: Path) -> None:
    pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")
    lines.write_text('{"prompt": "x", "structured_outputs": {"regex": "(yes|no){2}"}}\n{"prompt": "x"}\n')
    held = ("--temperature", "0", "--max-tokens", "12", "--dtype", "float32")
    first, second = texts(paceline("generate", tiny, "--prompts-file", str(lines), "--json", *held))
    assert re.fullmatch("(yes|no){2}", first)
    assert second != first


@pytest.mark.parametrize("how", ["--prompts-file", "stdin", "--reference-document"])
def test_a_byte_order_mark_is_no_text(paceline: Any, tiny: str, lines: Path, how: str) -> None:
    lines.write_bytes("\ufeff".encode() + b'{"prompt": "hello"}\n')
    if how == "--reference-document":
        given = ["--prompt", "hello", "--drafter", "ngram", how, str(lines)]
    else:
        given = ["--prompts-file", "-" if how == "stdin" else str(lines)]
    stdin = lines.read_text(encoding="utf-8") if how == "stdin" else None
    assert len(texts(paceline("generate", tiny, *given, "--json", *GREEDY, stdin=stdin))) == 1


@pytest.mark.parametrize("given", [["--prompts-file"], ["--prompt", "a", "--drafter", "ngram", "--reference-document"]])
def test_a_file_that_is_no_text_is_named(paceline: Any, tiny: str, lines: Path, given: list[str]) -> None:
    lines.write_bytes(b"\xff\xfe\x00\x80")
    for path in (lines, lines.parent, lines.with_name("absent")):
        result = paceline("generate", tiny, *given, str(path))
        assert result.exit_code == 2
        (error,) = result.stderr.splitlines()
        assert error.startswith(f"error: {given[-1]}=")


def test_bytes_on_stdin_that_are_no_text_are_one_clear_error(paceline: Any, tiny: str) -> None:
    result = paceline("generate", tiny, "--prompts-file", "-", stdin=b'{"prompt": "\xff"}')
    assert result.exit_code == 2
    assert "--prompts-file='-'" in result.stderr


# Mistakes

BAD_LINES = {
    "no JSON": ("{prompt: 1}", "not JSON"),
    "no object": ("[1, 2]", "a line is an object"),
    "no prompt": ('{"text": "x"}', "a line is an object"),
    "both": ('{"prompt": "x", "messages": []}', "either"),
    "wrong type": ('{"prompt": 5}', "a string or a list of token ids"),
    "unknown key": ('{"prompt": "x", "temprature": 1}', "unknown parameter temprature=1; did you mean temperature?"),
    "bad value": ('{"prompt": "x", "top_p": 2}', "top_p=2"),
    "wrong value type": ('{"prompt": "x", "max_tokens": "many"}', "max_tokens='many'"),
    "empty": ('{"prompt": ""}', "no tokens"),
    "too long": (json.dumps({"prompt": "x" * 600}), "600 tokens"),
    "no such token": ('{"prompt": [100000]}', "prompt_token_ids=100000"),
    "no message": ('{"messages": [{"role": "user"}]}', "role and content"),
    "no text in it": ('{"messages": [{"role": "user", "content": 5}]}', "both strings"),
    "no name": ('{"prompt": "x", "custom_id": 5}', '"custom_id" is a string'),
    "half a character": (r'{"prompt": "a\ud800"}', "half a character"),
    "half a character to stop": (r'{"prompt": "a", "stop": ["\udfff"]}', "stop="),
    "half a character said": (r'{"messages": [{"role": "user", "content": "\ud800"}]}', "messages.content="),
    "half a character for a key": (r'{"prompt": "a", "\ud800": 1}', "unknown parameter"),
    "half a character in a schema": (r'{"prompt": "a", "structured_outputs": {"regex": "\ud800"}}', "regex="),
    "endless": ('{"prompt": ' + "[" * 100_000, "not JSON"),
    "a long number": ('{"prompt": "a", "top_k": ' + "9" * 5000 + "}", "not JSON"),
    "a large number": ('{"prompt": "a", "max_tokens": 1' + "0" * 22 + "}", "max_tokens="),
    "an unknown structure": ('{"prompt": "a", "structured_outputs": {"choice": []}}', "structured_outputs.choice="),
    "a broken structure": ('{"prompt": "a", "ignore_eos": false, "structured_outputs": {"regex": "("}}', "is broken"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_a_bad_line_is_named_and_nothing_runs(paceline: Any, tiny: str, lines: Path, line: str, message: str) -> None:
    lines.write_text('{"prompt": "good"}\n' + line + "\n")
    result = paceline("generate", tiny, "--prompts-file", str(lines), "--quiet", *GREEDY)
    assert result.exit_code == 2
    assert result.stdout == ""
    (error,) = result.stderr.splitlines()
    assert error.startswith("error: line 2: ")
    assert message in error


def test_keep_going_runs_the_good_lines(paceline: Any, tiny: str, lines: Path) -> None:
    """One between any two bad ones."""
    lines.write_text("".join(f'{line}\n{{"prompt": "good"}}\n' for line, _ in BAD_LINES.values()))
    result = paceline("generate", tiny, "--prompts-file", str(lines), "--keep-going", "--json", "--quiet", *GREEDY)
    assert result.exit_code == 2
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == 2 * len(BAD_LINES)
    for number, (bad, good, (_, message)) in enumerate(zip(found[::2], found[1::2], BAD_LINES.values(), strict=True)):
        assert message in bad["error"]["message"]
        assert bad["error"]["where"] == f"line {2 * number + 1}"
        assert good["outputs"][0]["token_ids"]
        assert f"line {2 * number + 1}: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--prompt"),
        (["-p", "x", "--temperature", "-1"], "temperature=-1.0 is not allowed"),
        (["-p", "x", "--num-speculative-tokens", "many"], "num_speculative_tokens='many' is not allowed"),
        (["-p", "x", "--max-batch-size", "0"], "max_batch_size=0 is not allowed"),
        (["-p", "x", "--drafter", "model"], "needs a draft_model"),
        (["-p", "x", "--drafter", "hybrid"], "needs a draft_model"),
        (["-p", "x", "--reference-document", "absent.txt"], "absent.txt"),
        (["--prompts-file", "absent.jsonl"], "absent.jsonl"),
        (["-p", "", "--quiet"], "no tokens"),
        (["-p", "\udcff", "--quiet"], "half a character"),
        (["-p", "x", "--stop", "\udcff", "--quiet"], "stop="),
    ],
)
def test_a_bad_option_is_one_clear_error(paceline: Any, tiny: str, arguments: list[str], message: str) -> None:
    result = paceline("generate", tiny, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (error,) = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert message in error


def test_an_unknown_model_is_one_clear_error(paceline: Any) -> None:
    result = paceline("generate", "smollm2-135", "-p", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "did you mean 'smollm2-135m'" in result.stderr


def test_a_draft_model_with_another_vocabulary_is_refused(paceline: Any, tiny: str, stranger: str) -> None:
    result = paceline("generate", tiny, "--draft-model", stranger, "-p", "x")
    assert result.exit_code == 2
    assert tiny in result.stderr
    assert stranger in result.stderr


def test_ctrl_c_shows_what_had_finished(paceline: Any, tiny: str, lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = Engine.step, []

    def interrupted(engine: Engine) -> object:
        steps.append(engine)
        if len(steps) > 5:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    lines.write_text('{"prompt": "long", "max_tokens": 100}\n{"prompt": "short", "max_tokens": 2}\n')
    result = paceline("generate", tiny, "--prompts-file", str(lines), "--json", "--ignore-eos")
    assert result.exit_code == 130
    (document,) = [json.loads(line) for line in result.stdout.splitlines()]
    assert document["prompt"] == "short"


def test_an_answer_that_ends_in_an_error_is_reported_and_counted(
    paceline: Any, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def failing(engine: Engine) -> list[RequestOutput]:
        outputs = step(engine)
        for output in outputs:
            if output.finished and output.request_id == "1":
                output.outputs[0].finish_reason, output.outputs[0].error = "error", ValueError("out of states")
        return outputs

    monkeypatch.setattr(Engine, "step", failing)
    for form in ([], ["--json"]):
        result = paceline("generate", tiny, "-p", "a", "-p", "b", *GREEDY, *form)
        assert result.exit_code == 2
        assert "prompt 2: the answer could not be completed: out of states" in result.stderr
    first, second = [json.loads(line)["outputs"][0] for line in result.stdout.splitlines()]
    assert "error" not in first
    assert second["error"] == "out of states"


def test_the_best_answers_come_first_and_say_what_their_rank_comes_from(paceline: Any, tiny: str) -> None:
    many = ("generate", tiny, "-p", "hello", "--n", "2", "--best-of", "5", "--seed", "1", "--max-tokens", "6")
    (document,) = documents(paceline(*many, "--rank", "logprob", "--json"))
    totals = [answer["cumulative_logprob"] for answer in document["outputs"]]
    assert len(totals) == 2
    assert totals == sorted(totals, reverse=True)
    assert document["outputs"][0]["mean_logprob"] == pytest.approx(totals[0] / 6)
    assert "mean log-probability" in paceline(*many).stdout


def test_a_budget_of_time_is_honoured_and_said(paceline: Any, tiny: str) -> None:
    short = ("generate", tiny, "-p", "hello", "--time-budget", "0.000001")
    (document,) = documents(paceline(*short, "--json"))
    assert document["outputs"][0]["finish_reason"] == "deadline"
    assert "cut by --time-budget after 0 tokens" in paceline(*short, "--quiet").stderr
    assert "cut by the time budget" in paceline(*short, "--n", "2").stdout


def test_lines_bring_references_along(paceline: Any, tiny: str, lines: Path) -> None:
    answer = texts(paceline("generate", tiny, "--prompt", "hello", *GREEDY, "--json"))[0]
    entries = [{"prompt": "hello", "references": copied} for copied in ([], [f"hello{answer}", [1, 2]])]
    lines.write_text("\n".join(map(json.dumps, entries)))
    run = ("generate", tiny, "--prompts-file", str(lines), *GREEDY, "--json")
    without, with_them = documents(paceline(*run, "--drafter", "ngram", "-k", "4"))
    assert with_them["outputs"][0]["text"] == without["outputs"][0]["text"] == answer
    assert with_them["outputs"][0]["metrics"]["rounds"] < without["outputs"][0]["metrics"]["rounds"]
    refused = paceline(*run, "--drafter", "none")
    assert refused.exit_code == 2
    assert "line 2: references=" in refused.stderr


@pytest.mark.parametrize("references", ["text", [1.5], [[True]], {"a": 1}, None, ["a", ""]])
def test_a_line_with_broken_references_is_named(paceline: Any, tiny: str, lines: Path, references: Any) -> None:
    lines.write_text(json.dumps({"prompt": "hello", "references": references}))
    result = paceline("generate", tiny, "--prompts-file", str(lines), "--drafter", "ngram", *GREEDY)
    assert result.exit_code == 2
    assert "line 1: references=" in result.stderr


def test_a_drafter_that_is_none_of_them_is_told_all_choices(paceline: Any) -> None:
    result = paceline("generate", "no-such-model", "-p", "x", "--drafter", "foo")
    assert result.exit_code == 2
    assert "one of 'auto', 'model', 'ngram', 'hybrid', 'feature'" in result.stderr
    assert result.stderr.strip().endswith("or None")


def test_an_adapter_answers_where_it_is_named(paceline: Any, tiny: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_adapter(tmp_path / "red", AutoModelForCausalLM.from_pretrained(tiny), seed=1)
    line = ("generate", tiny, "--prompt", "hello", *GREEDY, "--adapter", f"red={tmp_path / 'red'}", "--json")
    assert texts(paceline(*line, "--use-adapter", "red")) != texts(paceline(*line))
    refused = paceline(*line, "--use-adapter", "green")
    assert refused.exit_code != 0
    assert "one of red" in refused.stderr


@pytest.mark.parametrize("adapter", ["red", "=x", "red="])
def test_an_adapter_is_a_name_with_a_directory(adapter: str, paceline: Any, tiny: str) -> None:
    result = paceline("generate", tiny, "-p", "x", "--adapter", adapter)
    assert result.exit_code != 0
    assert "NAME=DIRECTORY" in result.stderr
