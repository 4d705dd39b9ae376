"""Agents' own packages and 20-turn transcripts against a scripted model: tasks end, and prompts come from the cache."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import scripted
from scripted import call
from server.test_clients import node, recipe, run
from server_support import Live

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(1200)]
TURNS = 20
LEAST_SHARE = 0.95  # least share of prompt tokens from the cache, after the first turn
__all__ = ["node"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return scripted.save_model(tmp_path_factory.mktemp("scripted") / "model")


class Task:
    """A task of ``TURNS`` calls. It records the prompt tokens of each turn and those from the cache."""

    def __init__(self) -> None:
        self.folder = Path()

    def script(self, prompt: str, tools: Sequence[str]) -> str:
        """The answer after as many results as the prompt has."""
        done = prompt.count("<tool_response>")
        if done >= TURNS or not tools:
            return "All done."
        return f"Step {done}.\n{self._call(done, tools)}"

    def _call(self, done: int, tools: Sequence[str]) -> str:
        notes = str(self.folder / "notes.txt")
        if "exec_command" in tools:
            first, rest = "echo line0 > notes.txt", f"sed -i s/line{done - 1}/line{done}/ notes.txt"
            return call("exec_command", cmd=f"{first if done == 0 else rest}; cat notes.txt")
        if done == 0:
            return call("Write", file_path=notes, content="line0\n")
        if done % 5 == 0:
            return call("Read", file_path=notes)
        before = done - 2 if done % 5 == 1 and done > 1 else done - 1
        return call("Edit", file_path=notes, old_string=f"line{before}\n", new_string=f"line{done}\n")


@pytest.fixture(scope="module")
def task() -> Task:
    return Task()


@pytest.fixture(scope="module")
def live(model: str, task: Task) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch, scripted.scripted(model, task.script, patch) as server:
        yield server


def cached_share(live: Live, before: tuple[float, float], first: float) -> float:
    """Share of prompt tokens from the cache since ``before``, without the first prompt's ``first`` tokens."""
    asked, found = (now - then for now, then in zip(counted(live), before, strict=True))
    return found / (asked - first)


def counted(live: Live) -> tuple[float, float]:
    """Prompt tokens so far, and those from the cache."""
    return live.metric("prefix_cache_queries_total"), live.metric("prefix_cache_hits_total")


def first_prompt(live: Live, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that receives the number of tokens of every prompt."""
    sizes: list[int] = []
    compare_prompt = live.context.dispatcher._compare

    def compare(prompt: Sequence[int], client: str) -> None:
        sizes.append(len(prompt))
        compare_prompt(prompt, client)

    monkeypatch.setattr(live.context.dispatcher, "_compare", compare)
    return sizes


def test_codex_ends_a_task_of_20_turns(
    node: Path, live: Live, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, task.folder = tmp_path / "home", tmp_path / "work"
    (home / ".codex").mkdir(parents=True)
    task.folder.mkdir()
    (home / ".codex" / "config.toml").write_text(recipe("Codex", "toml", live))
    sizes, before = first_prompt(live, monkeypatch), counted(live)
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command = [node / "node_modules/.bin/codex", "exec", *flags, "Write notes."]
    assert "All done." in run(command, cwd=task.folder, variables={"HOME": str(home)})
    assert (task.folder / "notes.txt").read_text() == f"line{TURNS - 1}\n"
    assert len(sizes) == TURNS + 1
    assert cached_share(live, before, sizes[0]) >= LEAST_SHARE


def test_claude_code_ends_a_task_of_20_turns(
    node: Path, live: Live, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, task.folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    task.folder.mkdir()
    exports = re.findall(r"(\w+)=(\S+)", recipe("Claude Code", "sh", live).replace("=coder", "=scripted"))
    variables = {"HOME": str(home), "DISABLE_TELEMETRY": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    sizes, before = first_prompt(live, monkeypatch), counted(live)
    command = [node / "node_modules/.bin/claude", "-p", "Write notes.", "--allowedTools", "Read,Edit,Write"]
    assert "All done." in run(command, cwd=task.folder, variables=variables | dict(exports))
    assert (task.folder / "notes.txt").read_text() == f"line{TURNS - 1}\n"
    assert len(sizes) == TURNS + 1
    assert cached_share(live, before, sizes[0]) >= LEAST_SHARE


SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}


def chat(live: Live, turn: int, history: list[Any], k: int) -> tuple[int, int]:
    """One turn of a chat: returns prompt tokens and those from the cache."""
    tools = [{"type": "function", "function": {"name": "exec_command", "parameters": SCHEMA}}]
    history.append(_result(turn, "tool_call_id", "content", {"role": "tool"}))
    reply = live.post("/v1/chat/completions", {"messages": history, "tools": tools, "num_speculative_tokens": k}).json()
    history.append(reply["choices"][0]["message"])
    if calls := history[-1].get("tool_calls"):
        calls[0]["id"] = f"c{turn}"
    return reply["usage"]["prompt_tokens"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def messages(live: Live, turn: int, history: list[Any], k: int) -> tuple[int, int]:
    tools = [{"name": "exec_command", "input_schema": SCHEMA}]
    result = _result(turn, "tool_use_id", "content", {"type": "tool_result"})
    history.append(result if turn == 0 else {"role": "user", "content": [result]})
    system = f"x-anthropic-billing-header: cch={turn};\nYou are a careful engineer."
    body = {"model": "scripted", "max_tokens": 200, "system": system, "messages": history, "tools": tools}
    reply = live.post("/v1/messages", {**body, "num_speculative_tokens": k}).json()
    for block in reply["content"]:
        if block["type"] == "tool_use":
            block["id"] = f"c{turn}"
    history.append({"role": "assistant", "content": reply["content"]})
    usage = reply["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]


def responses(live: Live, turn: int, history: list[Any], k: int) -> tuple[int, int]:
    tools = [{"type": "function", "name": "exec_command", "parameters": SCHEMA}]
    history.append(_result(turn, "call_id", "output", {"type": "function_call_output"}))
    body = {"input": history, "tools": tools, "instructions": "You are a careful engineer.", "store": False}
    reply = live.post("/v1/responses", {**body, "num_speculative_tokens": k}).json()
    for item in reply["output"]:
        if item["type"] == "function_call":
            item["call_id"] = f"c{turn}"
    history += reply["output"]
    usage = reply["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def _result(turn: int, id_name: str, text_name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The first message, as long as those of agents (3,000 tokens), or the result of the last turn's call."""
    if turn == 0:
        return {"role": "user", "content": f"Write notes. {'Read the whole file first. ' * 600}"}
    return {**fields, id_name: f"c{turn - 1}", text_name: f"line {turn}\n" * 3}


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("api", [chat, messages, responses], ids=lambda api: api.__name__)
def test_a_transcript_of_20_turns_comes_from_the_cache(live: Live, task: Task, api: Any, k: int) -> None:
    history: list[Any] = []
    turns = [api(live, turn, history, k) for turn in range(TURNS)]
    total, cached = (sum(column) for column in zip(*turns[1:], strict=True))
    print(json.dumps({"api": api.__name__, "k": k, "prompt_tokens": total, "cached": cached, "turns": turns}))
    assert cached / total >= LEAST_SHARE
