"""Sampling options that were not given: as the model's files recommend, in every command that samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import SamplingParams
from paceline.config import CHAT_SAMPLING, RECOMMENDED_FIELDS
from paceline.engine.engine import Engine

RECOMMENDED = {"temperature": 0.25, "top_p": 0.5, "top_k": 3, "repetition_penalty": 1.25}
GIVEN = {"temperature": 0.0, "top_k": 0}  # the second one is the usual value, and wins, too
FLAGS = ("--temperature", "0", "--top-k", "0")
ENGINE = ("--dtype", "float32", "--max-batch-size", "2", "--quiet")
Asked = Callable[[], list[SamplingParams]]


def copy_that_recommends(model: str, folder: Path, **values: Any) -> str:
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.fixture(scope="module")
def advised(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return copy_that_recommends(tiny, tmp_path_factory.mktemp("models") / "advised", **RECOMMENDED)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The parameters of all requests that have been added, without those of the warm-up."""
    found, add = list[SamplingParams](), Engine.add
    monkeypatch.setattr(Engine, "add", lambda self, request: (found.append(request.params), add(self, request))[1])
    return lambda: [params for params in found if params.max_tokens == 5]


def check(params: SamplingParams, **expected: Any) -> None:
    wanted = SamplingParams(**{**RECOMMENDED, **expected})
    assert {name: getattr(params, name) for name in RECOMMENDED_FIELDS} == {
        name: getattr(wanted, name) for name in RECOMMENDED_FIELDS
    }


@pytest.mark.parametrize(("flags", "given"), [((), {}), (FLAGS, GIVEN)], ids=["nothing", "flags"])
@pytest.mark.parametrize("command", ["generate", "chat", "trace"])
def test_an_option_that_was_not_given_is_as_recommended(
    paceline: Any, advised: str, tmp_path: Path, asked: Asked, command: str, flags: tuple[str, ...], given: Any
) -> None:
    how = {"generate": ["-p", "hi"], "chat": [], "trace": ["-p", "hi"]}[command]
    places = [str(tmp_path / "page.html")] * (command == "trace")
    options = (*how, *flags, "--max-tokens", "5", "--dtype", "float32")
    result = paceline(command, *places, advised, *options, stdin="hi\n")
    assert result.exit_code == 0, result.stderr
    (params,) = asked()
    check(params, **given)
    followed = ", ".join(f"{name} {value}" for name, value in RECOMMENDED.items() if name not in given)
    assert f"sampling as the model's files recommend: {followed}\n" in result.stderr


def sampled_as(params: SamplingParams, values: dict[str, Any]) -> bool:
    """Whether the parameters have these values, and the usual ones in all other recommended fields."""
    wanted = SamplingParams(**values)
    return all(getattr(params, name) == getattr(wanted, name) for name in RECOMMENDED_FIELDS)


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("flags", [(), ("--temperature", "1")], ids=["nothing", "named"])
@pytest.mark.parametrize("command", [("chat",), ("generate", "--chat", "-p", "hi"), ("generate", "-p", "hi")])
def test_a_chat_whose_model_recommends_nothing_has_the_default_of_chats_unless_sampling_is_named(
    paceline: Any, tiny: str, asked: Asked, command: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    name, *how = command
    result = paceline(name, tiny, *how, *flags, "--max-tokens", "5", "--dtype", "float32", stdin="hi\n")
    assert result.exit_code == 0, result.stderr
    (params,) = asked()
    by_default = "--chat" in how or name == "chat"
    expected = dict(CHAT_SAMPLING) if by_default and not flags else {}
    assert sampled_as(params, expected)
    said = "sampling of chats: temperature 0.8, top_p 0.95, top_k 40, min_p 0.05\n"
    assert (said in result.stderr) == bool(expected)


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_messages_in_a_file_have_the_default_of_chats_and_prompts_do_not(
    paceline: Any, tiny: str, tmp_path: Path, asked: Asked, command: str
) -> None:
    entries: list[dict[str, Any]] = [{"messages": MESSAGES}, {"messages": MESSAGES, "top_p": 0.5}, {"prompt": "a"}]
    lines = tmp_path / "lines"
    lines.write_text("".join(json.dumps(entry | {"max_tokens": 5}) + "\n" for entry in entries))
    how = ["generate", tiny, "--prompts-file", str(lines)]
    if command == "batch":
        how = ["batch", str(lines), str(tmp_path / "out"), tiny]
    assert paceline(*how, *ENGINE).exit_code == 0
    expected: list[dict[str, Any]] = [dict(CHAT_SAMPLING), {"top_p": 0.5}, {}]
    assert all(sampled_as(*pair) for pair in zip(asked(), expected, strict=True))


def test_a_line_s_own_parameter_wins_over_the_recommendation(
    paceline: Any, advised: str, tmp_path: Path, asked: Asked
) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a"}\n{"prompt": "b", "temperature": 1.0}\n')
    options = ("--top-p", "1", "--max-tokens", "5", *ENGINE)
    result = paceline("generate", advised, "--prompts-file", str(lines), *options)
    assert (result.exit_code, result.stderr) == (0, "")
    first, second = asked()
    check(first, top_p=1.0)
    check(second, top_p=1.0, temperature=1.0)


def test_plain_lines_of_a_batch_follow_the_recommendation_as_those_in_openais_form(
    paceline: Any, advised: str, tmp_path: Path, asked: Asked
) -> None:
    plain = {"prompt": "a", "max_tokens": 5}
    body = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"model": "m", **plain}}
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text(f"{json.dumps(plain)}\n{json.dumps(body)}\n")
    command = ("batch", str(source), str(output), advised, "--served-model-name", "m", *ENGINE)
    result = paceline(*command)
    assert result.exit_code == 0, result.stderr
    assert len(asked()) == 2
    for params in asked():
        check(params)
    kept = json.loads((tmp_path / "out.job").read_text())["params"]
    assert {name: kept[name] for name in RECOMMENDED} == RECOMMENDED
    resumed = paceline(*command, "--resume", "--temperature", "1")
    assert resumed.exit_code == 2
    assert "--resume: temperature=1.0" in resumed.stderr


def test_an_impossible_recommendation_is_refused_unless_the_option_is_given(
    paceline: Any, tiny: str, tmp_path: Path
) -> None:
    model = copy_that_recommends(tiny, tmp_path / "wrong", temperature=-1)
    command = ("generate", model, "-p", "hi", "--max-tokens", "5", *ENGINE)
    refused = paceline(*command)
    assert refused.exit_code == 2
    assert "recommend sampling that is impossible: temperature=-1" in refused.stderr
    assert paceline(*command, "--temperature", "0.5").exit_code == 0


@pytest.mark.parametrize("command", ["generate", "chat", "batch", "trace"])
def test_help_says_where_a_default_comes_from(paceline: Any, command: str) -> None:
    text = " ".join(paceline(command, "--help", "all").stdout.replace("│", " ").split())
    assert "0 is greedy. Default: as the model's files recommend, else 1, in chats 0.8." in text
    assert text.count("as the model's files recommend, else") == len(RECOMMENDED_FIELDS)
