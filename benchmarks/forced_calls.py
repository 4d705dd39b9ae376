"""Forced tool calls of a real model: valid, and the same bytes with and without speculation, streamed and not.

    PYTHONPATH=src:. python -m benchmarks.forced_calls qwen-coder-0.5b.gguf --samples 25 --output FILE

Each of forty tools is called by one greedy answer and ``samples - 1`` sampled ones, on four sides: plain and
speculative decoding, each read as a whole and while it grows. A call counts as valid if it is complete and its
arguments obey the tool's schema, and as different if text or arguments on any side differ from those of the plain whole
answer. ``--tools FIRST LAST`` makes a part of the calls; FILE keeps the parts that were made before with the same
settings.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jsonschema_rs
from benchmarks.call_schemas import TOOLS
from benchmarks.parts import Parts, engine_line, sums

from paceline.chat.options import ChatOptions
from paceline.chat.values import AssistantMessage, ToolChoice, ToolDefinition, message_of
from paceline.config import SamplingParams
from paceline.config.limits import ToolParserName
from paceline.core.outputs import CompletionOutput
from paceline.llm import LLM
from paceline.tools.bench.offline import machine, versions

DRAFT_TOKENS = 4  # a fixed number: ``auto`` would draft by the clock, and hardly ever with sixteen rows
ROWS = 16
MAX_TOKENS = 400
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
SAMPLED = {"seed": 7, "max_tokens": MAX_TOKENS, "presence_penalty": 0.2, "logit_bias": {5: -1.0}}


@dataclass(frozen=True)
class Call:
    """An answer that has to be a call, and the message that it was read as."""

    answer: CompletionOutput
    message: AssistantMessage

    def same(self, other: Call) -> bool:
        """Whether tokens, text and message are equal but for the calls' ids, which are random."""
        return bool(self._content() == other._content())

    def _content(self) -> Any:
        calls = [(call.name, call.arguments, call.complete) for call in self.message.tool_calls]
        return self.answer.token_ids, self.answer.text, self.message.text, self.message.reasoning, calls

    def fault(self, tool: ToolDefinition) -> str | None:
        """The reason why this is no valid call of the tool; None if it is one."""
        if self.answer.finish_reason != "stop" or len(self.message.tool_calls) != 1 or self.message.text:
            return f"{self.answer.finish_reason}: {self.answer.text!r}"
        (call,) = self.message.tool_calls
        if call.name != tool.name or not call.complete:
            return f"incomplete or of another tool: {self.answer.text!r}"
        try:
            jsonschema_rs.validate(dict(tool.parameters), json.loads(call.arguments))
        except (jsonschema_rs.ValidationError, json.JSONDecodeError) as error:
            return f"{call.arguments!r}: {error}"
        return None


def load(model: str, drafter: str = "ngram", draft_model: str | None = None) -> LLM:
    """The speculative side."""
    options: dict[str, Any] = {"drafter": drafter, "num_speculative_tokens": DRAFT_TOKENS, "quantization": "int8"}
    return LLM(model, draft_model, max_batch_size=ROWS, max_model_len=1024, use_tqdm=False, **options)


def params(samples: int) -> list[SamplingParams]:
    """One greedy answer; all others at temperature 1 with a penalty and a bias."""
    return [GREEDY, SamplingParams(n=samples - 1, **SAMPLED)] if samples > 1 else [GREEDY]  # type: ignore[arg-type]


def messages(tool: ToolDefinition) -> list[dict[str, str]]:
    """Return the request that has to end in a call of the tool."""
    return [{"role": "user", "content": f"Call {tool.name} with a good example."}]


def whole(llm: LLM, tool: ToolDefinition, samples: int, parser: ToolParserName | None) -> list[Call]:
    """Calls that are read when the answers have ended."""
    wanted, given = params(samples), {"tools": [tool], "tool_choice": ToolChoice("required", tool.name)}
    outputs = llm.chat([messages(tool)] * len(wanted), wanted, use_tqdm=False, tool_parser=parser, **given)  # type: ignore[arg-type]
    return [Call(answer, cast(AssistantMessage, answer.message)) for output in outputs for answer in output.outputs]


def streamed(llm: LLM, tool: ToolDefinition, samples: int, parser: ToolParserName | None) -> list[Call]:
    """Calls that are read piece by piece after each round, as a server's stream does."""
    options = ChatOptions([tool], ToolChoice("required", tool.name), tool_parser=parser)
    prompt, engine, arrival = llm.requests.chat_prompt(messages(tool), options), llm.engine, time.monotonic()
    outputs = [engine.add(llm.requests.chat_request(prompt, wanted, arrival, ())) for wanted in params(samples)]
    answers = [answer for output in outputs for answer in output.outputs]
    readers = [(answer, prompt.parser()) for answer in answers]
    read, events = [0] * len(readers), [list[Any]() for _ in readers]
    while engine.busy:
        engine.step()
        for i, (answer, reader) in enumerate(readers):
            events[i] += [event for piece in answer.pieces[read[i] :] for event in reader.feed(piece)]
            read[i] = len(answer.pieces)
    return [
        Call(answer, message_of([*seen, *reader.finish()]))
        for (answer, reader), seen in zip(readers, events, strict=True)
    ]


def call(llm: LLM, plain: LLM, tool: ToolDefinition, samples: int, parser: ToolParserName | None) -> dict[str, Any]:
    """Make the calls of one tool on all sides. Returns counts, and the reasons why calls are not valid."""
    expected = whole(plain, tool, samples, parser)
    sides = [
        whole(llm, tool, samples, parser),
        streamed(plain, tool, samples, parser),
        streamed(llm, tool, samples, parser),
    ]
    return {
        "calls": len(expected),
        "invalid": [fault for side in [expected, *sides] for made in side if (fault := made.fault(tool))],
        "different": sum(not all(map(first.same, others)) for first, *others in zip(expected, *sides, strict=True)),
        **sums([made.answer for made in sides[0]]),
    }


def main(words: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Forced tool calls over forty schemas.")
    parser.add_argument("model")
    parser.add_argument("--draft-model")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--tool-parser", help="needed for models whose chat template has no tools: json or hermes")
    parser.add_argument("--samples", type=int, default=25, help="calls of each tool")
    parser.add_argument("--tools", type=int, nargs=2, metavar=("FIRST", "LAST"), default=[0, len(TOOLS) - 1])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(words)
    llm = load(options.model, options.drafter, options.draft_model)
    settings = {
        "model": Path(options.model).name,
        "samples": options.samples,
        "draft_tokens": DRAFT_TOKENS,
        "engine": engine_line(llm),
    }
    plain = llm.plain()
    parts = Parts(options.output, settings, {"machine": machine(llm.engine.threads), "versions": versions()})
    for tool in TOOLS[options.tools[0] : options.tools[1] + 1]:
        parts.add(tool.name, call(llm, plain, tool, options.samples, options.tool_parser))
        print(tool.name, parts.results[tool.name], flush=True)


if __name__ == "__main__":
    main()
