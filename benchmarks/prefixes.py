"""Time to first token with and without prefix reuse, in turn: a chat's turns, and questions about one document.

    python benchmarks/prefixes.py --output benchmarks/results/prefixes-smollm2-int8.json

Both engines run the same weights, greedy, one request at a time, and get the same prompts: each turn of the chat
    continues the previous answer. Every prompt's answers are compared token by token, and their log-probabilities digit
    by digit. The last line reports for each set whether all were equal, and the medians; everything is in the JSON
    document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.config import QuantizationName
from paceline.core.outputs import RequestOutput
from paceline.tools.bench.offline import machine, versions

SIDES = {"reused": True, "read anew": False}
ASKED = (
    "What is a prefix?",
    "Can you give an example from everyday life?",
    "And one from programming?",
    "Why would anybody want to keep one?",
    "How much memory would that take?",
    "What if the memory is full?",
    "Which one would you throw away first?",
    "Is there a case in which that is wrong?",
    "Tell me more about that case.",
    "Now sum it all up in three sentences.",
    "And in one.",
    "Thank you. What should I read next?",
)
FACT = "Entry {0}: the keeper of lighthouse {0} wrote that the lamp burned {1} hours and the wind came from {2}. "
WINDS = ("the north", "the east", "the south-west", "the sea", "nowhere at all")


@dataclass
class Run:
    """One side's run: seconds to the first token, prompt by prompt, and the number of tokens that were copied."""

    seconds: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    told: list[object] = field(default_factory=list)  # answers and log-probabilities

    def add(self, output: RequestOutput) -> str:
        answer = output.outputs[0]
        assert answer.metrics.time_to_first_token is not None
        assert answer.logprobs is not None
        self.seconds.append(answer.metrics.time_to_first_token)
        self.cached.append(output.cached_tokens)
        self.sizes.append(len(output.prompt_token_ids))
        self.told.append((answer.token_ids, [entry.logprob for entry in answer.logprobs]))
        return answer.text


def ask_in_turn(llms: dict[str, LLM], prompts: Sequence[Sequence[int]], tokens: int) -> dict[str, Run]:
    """Run each prompt on one side, then on the other; both caches are empty at the beginning."""
    runs, params = {name: Run() for name in llms}, SamplingParams(temperature=0, max_tokens=tokens, logprobs=0)
    for llm in llms.values():
        llm.engine.clear()
    for prompt in prompts:
        for name, llm in llms.items():
            runs[name].add(llm.generate(list(prompt), params, use_tqdm=False)[0])
    return runs


def chat(llm: LLM, tokens: int) -> list[list[int]]:
    """The prompts of a chat: each turn continues the model's answer."""
    messages = [{"role": "system", "content": "You are a patient teacher. Answer in a few sentences."}]
    prompts = []
    for line in ASKED:
        messages.append({"role": "user", "content": line})
        prompts.append(llm.tokens_of_chat(messages))
        answer = llm.generate(prompts[-1], SamplingParams(temperature=0, max_tokens=tokens), use_tqdm=False)[0]
        messages.append({"role": "assistant", "content": answer.outputs[0].text})
    return prompts


def questions(llm: LLM, size: int, count: int) -> list[list[int]]:
    """Questions about one document of ``size`` tokens, which comes first."""
    text = "".join(FACT.format(i, 5 + i * 7 % 19, WINDS[i % len(WINDS)]) for i in range(size))
    encode = llm.requests.tokenizer.encode
    document = encode(text)[:size]
    return [[*document, *encode(f"\n\nQ: Which wind did keeper {7 * i} see?\nA:")] for i in range(count)]


def compare(llms: dict[str, LLM], prompts: Sequence[Sequence[int]], tokens: int, repeats: int) -> dict[str, Any]:
    """Run all prompts on both sides in turn, ``repeats`` times."""
    runs: dict[str, list[Run]] = {name: [] for name in llms}
    for _ in range(repeats):
        for name, run in ask_in_turn(llms, prompts, tokens).items():
            runs[name].append(run)
    told = [run.told for each in runs.values() for run in each]
    return {
        "prompts": len(prompts),
        "prompt_tokens": runs["reused"][0].sizes,
        "cached_tokens": runs["reused"][0].cached,
        "answers_and_logprobs_equal": all(each == told[0] for each in told),
        "seconds": {name: [run.seconds for run in each] for name, each in runs.items()},
        "summary": {name: summary(each) for name, each in runs.items()},
    }


def summary(runs: Sequence[Run]) -> dict[str, float]:
    """Milliseconds to the first token, medians of the repeats: of the first prompt, the last, and all but the first."""
    middle = [statistics.median(values) for values in zip(*(run.seconds for run in runs), strict=True)]
    found = {"first": middle[0], "last": middle[-1], "median_after_the_first": statistics.median(middle[1:])}
    return {name: round(1000 * seconds, 1) for name, seconds in found.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--document", type=int, default=2000, help="tokens")
    parser.add_argument("--questions", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=40, help="of a chat's answer")
    parser.add_argument("--repeats", type=int, default=3, help="of the chat; the questions are many")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    quantization: QuantizationName | None = None if options.quantization == "none" else options.quantization
    first = LLM(options.model, quantization=quantization, max_batch_size=8, max_model_len=4096, drafter=None)
    llms = {name: first.with_options(prefix_cache=kept) for name, kept in SIDES.items()}
    found = {
        "chat": compare(llms, chat(first, options.tokens), options.tokens, options.repeats),
        "document": compare(llms, questions(first, options.document, options.questions), 4, 1),
    }
    what = {"model": options.model, "engine": llms["reused"].engine.describe(), "repeats": options.repeats}
    text = json.dumps({**what, "machine": machine(first.engine.threads), "versions": versions(), **found})
    if options.output is not None:
        options.output.write_text(text + "\n")
    short = {name: [each["answers_and_logprobs_equal"], each["summary"]] for name, each in found.items()}
    print(json.dumps(short))


if __name__ == "__main__":
    main()
