"""Forced calls of real models: valid, and the same bytes with and without speculation, streamed and not.

``python tests/test_tool_calls.py smollm2-135m 25 [FIRST]`` makes 25 calls of each tool from FIRST on and prints counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest

import real_models
from call_schemas import TOOLS
from paceline.chat.options import ChatOptions
from paceline.chat.values import ToolChoice, ToolDefinition, message_of
from paceline.config import SamplingParams
from paceline.core.outputs import CompletionOutput
from paceline.llm import LLM

pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")

PARSERS = {"smollm2-135m": "json", "qwen-coder-0.5b": None}


def asked(tool: ToolDefinition) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Call {tool.name} with a good example."}]


def calls_of(llm: LLM, tool: ToolDefinition, name: str, samples: int) -> Sequence[CompletionOutput]:
    """Answers that have to call a tool: one greedy, the others at temperature 1 with penalties and a bias."""
    draws = SamplingParams(n=max(1, samples - 1), seed=7, max_tokens=400, presence_penalty=0.2, logit_bias={5: -1.0})
    greedy = SamplingParams(temperature=0, max_tokens=400)
    fields: dict[str, Any] = {"tools": [tool], "tool_choice": ToolChoice("required", tool.name)}
    outputs = llm.chat(
        [asked(tool)] * (2 if samples > 1 else 1),
        [greedy, draws][: 2 if samples > 1 else 1],
        use_tqdm=False,
        tool_parser=PARSERS[name],
        **fields,
    )
    return [answer for output in outputs for answer in output.outputs]


def check(answer: CompletionOutput, tool: ToolDefinition) -> None:
    assert answer.finish_reason == "stop", answer.text
    assert answer.message is not None
    (call,) = answer.message.tool_calls
    assert (call.name, call.complete, answer.message.text) == (tool.name, True, "")
    jsonschema_rs.validate(dict(tool.parameters), json.loads(call.arguments))


def check_streamed(llm: LLM, answer: CompletionOutput, tool: ToolDefinition, name: str) -> None:
    """The pieces of text that each token added give the same call."""
    options = ChatOptions([tool], ToolChoice("required", tool.name), tool_parser=PARSERS[name])
    parser = llm.requests.chat_prompt(asked(tool), options).parser()
    events = [event for piece in answer.pieces for event in parser.feed(piece)]
    message = message_of([*events, *parser.finish()])
    assert answer.message is not None
    found, expected = message.tool_calls[0], answer.message.tool_calls[0]
    assert (found.name, found.arguments) == (expected.name, expected.arguments)


def run(name: str, tools: Sequence[ToolDefinition], samples: int, drafter: str = "ngram") -> dict[str, int]:
    """Make all calls and check them. Returns counts of calls, tokens and accepted draft tokens."""
    llm = LLM(str(real_models.find(name)), drafter=drafter, max_batch_size=16, max_model_len=1024, use_tqdm=False)  # type: ignore[arg-type]
    plain, counts = llm.plain(), {"calls": 0, "tokens": 0, "accepted": 0}
    for tool in tools:
        found, expected = calls_of(llm, tool, name, samples), calls_of(plain, tool, name, samples)
        assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
        assert [answer.text for answer in found] == [answer.text for answer in expected]
        for answer in found:
            check(answer, tool)
            counts["calls"] += 1
            counts["tokens"] += len(answer.token_ids)
            counts["accepted"] += answer.metrics.accepted
        check_streamed(llm, found[0], tool, name)
        if __name__ == "__main__":
            print(tool.name, counts, flush=True)
    return counts


@pytest.mark.wide
def test_twenty_forced_calls_of_smollm2_are_valid_and_lossless() -> None:
    assert run("smollm2-135m", [TOOLS[n] for n in (2, 12, 14, 30)], 5)["calls"] == 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "samples"), [("smollm2-135m", 25), ("qwen-coder-0.5b", 25)])
def test_a_thousand_forced_calls_are_valid_and_lossless(name: str, samples: int) -> None:
    assert run(name, TOOLS, samples)["calls"] == 40 * samples


if __name__ == "__main__":
    run(sys.argv[1], TOOLS[int(sys.argv[3]) if len(sys.argv) > 3 else 0 :], int(sys.argv[2]))
