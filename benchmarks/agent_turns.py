"""An agent's transcript, turn by turn: prompt tokens from the cache, and the time to the first token.

    python -m benchmarks.agent_turns --model qwen-coder-0.5b.gguf --output benchmarks/results/agent-turns-qwen-0.5b.json

Each turn has to call a tool, and repeats all turns before. The same conversation is held with speculation and without,
greedy, on the same weights; each side has a prefix cache of its own, and they take turns at being first. A call of
another tool warms both up. The table has some turns: tokens of
the prompt, those from the cache, and milliseconds to the first token. The last line has the share of prompt tokens that
came from the cache after the first turn, whether all answers were equal, and medians; everything is in the JSON
document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from benchmarks.parts import engine_line

from paceline import LLM, SamplingParams
from paceline.chat.values import AssistantMessage
from paceline.config import DrafterName, QuantizationName
from paceline.config.limits import ToolParserName
from paceline.core.outputs import RequestOutput
from paceline.tools.bench.offline import machine, versions

RULES = (
    "Read a file before you change it. Change one place at a time. Quote the old text exactly as it stands. "
    "Run the tests after each change, and read what they print. Never guess the name of a file: list the folder. "
)
FUNCTION = (
    "def area_{0}(width: float, height: float) -> float:\n"
    '    """Area of shape {0}, in square metres."""\n'
    "    if width < 0 or height < 0:\n"
    '        raise ValueError("shape {0} has a negative side")\n'
    "    return {0} * width * height\n"
)


def tool(name: str, description: str, *arguments: str) -> dict[str, Any]:
    """A tool whose arguments are all short texts."""
    properties = {argument: {"type": "string", "maxLength": 80} for argument in arguments}
    schema = {"type": "object", "properties": properties, "required": [*arguments], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("read_file", "Returns the text of a file.", "path"),
    tool("edit_file", "Replaces a text that occurs once in a file.", "path", "old", "new"),
    tool("run_tests", "Runs the tests below a folder and returns what they print.", "folder"),
]

SHOWN = (1, 2, 5, 10, 15, 20)  # turns of the table


@dataclass
class Side:
    """One side's turns: seconds to the first token, tokens of the prompts and from the cache, rounds, answers."""

    llm: LLM
    seconds: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    answers: list[Sequence[int]] = field(default_factory=list)

    def add(self, output: RequestOutput) -> None:
        metrics, answer = output.outputs[0].metrics, output.outputs[0]
        assert metrics.time_to_first_token is not None
        self.seconds.append(metrics.time_to_first_token)
        self.prompt_tokens.append(len(output.prompt_token_ids))
        self.cached_tokens.append(output.cached_tokens)
        self.rounds.append(metrics.rounds)
        self.answers.append(answer.token_ids)

    @property
    def share(self) -> float:
        """Share of the prompt tokens after the first turn that came from the cache."""
        return sum(self.cached_tokens[1:]) / sum(self.prompt_tokens[1:])

    def document(self) -> dict[str, Any]:
        return {
            "cached_share_after_the_first_turn": round(self.share, 4),
            "seconds_to_first_token": self.seconds,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "rounds": self.rounds,
            "answer_tokens": [len(answer) for answer in self.answers],
        }


def hold(sides: Mapping[str, Side], turns: int, functions: int, parser: ToolParserName | None) -> None:
    """Hold the conversation on all sides. functions: how many the file has that the agent works on."""
    source = "\n".join(FUNCTION.format(number) for number in range(functions))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful engineer. " + RULES * 8},
        {"role": "user", "content": f"Give each function of shapes.py a default height of 1.\n\n{source}"},
    ]
    params = SamplingParams(temperature=0, max_tokens=200)
    warm_up = [{"role": "user", "content": "Warm up."}], [tool("warm_up", "Does nothing.", "why")]
    for side in sides.values():
        one_call(side.llm, *warm_up, replace(params, cache_salt="warm-up"), parser)
    for turn in range(turns):
        for side in list(sides.values())[:: 1 if turn % 2 else -1]:
            output = one_call(side.llm, messages, TOOLS, params, parser)
            side.add(output)
        message = output.outputs[0].message
        assert message is not None
        messages += next_messages(message, turn)


def one_call(
    llm: LLM,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    params: SamplingParams,
    parser: ToolParserName | None,
) -> RequestOutput:
    """The answer to a conversation that has to call one of the tools."""
    (output,) = llm.chat(
        messages, params, use_tqdm=False, tools=tools, tool_choice="required", parallel_tool_calls=False,
        tool_parser=parser,
    )  # fmt: skip
    return output


def next_messages(message: AssistantMessage, turn: int) -> list[dict[str, Any]]:
    """The assistant's turn, and the result of its call."""
    (call,) = message.tool_calls
    said = {"role": "assistant", "content": message.text, "tool_calls": [{**call.as_openai(), "id": f"call_{turn}"}]}
    result = f"done in turn {turn}\n{FUNCTION.format(turn)}"
    return [said, {"role": "tool", "tool_call_id": f"call_{turn}", "content": result}]


def summary(sides: Mapping[str, Side]) -> dict[str, Any]:
    """Shares and milliseconds to the first token: of the first turn, the last, and the median of all but the first."""

    def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
        found = {"first": seconds[0], "last": seconds[-1], "median_after_the_first": statistics.median(seconds[1:])}
        return {name: round(1000 * value, 1) for name, value in found.items()}

    answers = [side.answers for side in sides.values()]
    return {
        "answers_equal": all(each == answers[0] for each in answers),
        "cached_share_after_the_first_turn": {name: round(side.share, 4) for name, side in sides.items()},
        "rounds": {name: sum(side.rounds) for name, side in sides.items()},
        "ms_to_first_token": {name: milliseconds(side.seconds) for name, side in sides.items()},
    }


def table(document: Mapping[str, Any]) -> list[str]:
    """The table of turns from the JSON document: one line for each of ``SHOWN``."""
    plain, speculative = (document["sides"][name] for name in ("plain", "speculative"))
    return [
        f"| {turn} | {plain['prompt_tokens'][turn - 1]} | "
        + " | ".join(str(side["cached_tokens"][turn - 1]) for side in (plain, speculative))
        + " | "
        + " | ".join(f"{1000 * side['seconds_to_first_token'][turn - 1]:.0f}" for side in (plain, speculative))
        + " |"
        for turn in SHOWN
        if turn <= len(plain["prompt_tokens"])
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="ngram", help="of the side with speculation")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--tool-parser", help="needed for models whose chat template has no tools: json or hermes")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--functions", type=int, default=24, help="of the file in the first prompt, 70 tokens each")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    quantization = None if options.quantization == "none" else cast("QuantizationName", options.quantization)
    drafter = cast("DrafterName", options.drafter)
    llm = LLM(options.model, quantization=quantization, drafter=drafter, max_batch_size=2, max_model_len=8192)
    sides = {"speculative": Side(llm), "plain": Side(llm.plain())}
    hold(sides, options.turns, options.functions, cast("ToolParserName | None", options.tool_parser))
    found = summary(sides)
    document = {
        "model": Path(options.model).name,
        "engine": engine_line(llm),
        "machine": machine(llm.engine.threads),
        "versions": versions(),
        "sides": {name: side.document() for name, side in sides.items()},
        "summary": found,
    }
    print("\n".join(table(document)))
    if options.output is not None:
        options.output.write_text(json.dumps(document) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
