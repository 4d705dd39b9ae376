"""Random requests join, leave, are cancelled and time out under every drafter for minutes: texts equal, memory flat.

    python -m benchmarks.random_models DIRECTORY --shape qwen3.5-tiny
    python -m benchmarks.soak DIRECTORY --drafters none,ngram,mtp,hybrid --minutes 30

Requests are drawn from a pool, with the parameters and references of ``fuzz.py``. Plain decoding of each alone, without
prefix reuse, gives their answers beforehand. One engine per drafter, width and number of rows lives through the whole
run, so slots, prefixes and states are reused thousands of times. An answer that was cut short must be a beginning of
the whole one. Resident memory is read after the engines' first turns and then once a turn. Linux only. The last line is
one JSON document; the exit code is 1 if any answer differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.bits import LONGEST, RandomLength
from benchmarks.fuzz import Case, random_case, shrink_caches
from benchmarks.memory_rows import resident

from paceline import LLM
from paceline.core.hardware import cpu_name
from paceline.core.outputs import CompletionOutput, RequestOutput

CUT_SHORT = ("abort", "deadline", "outranked")
BUDGETS = (0.001, 0.02, 0.1)  # seconds: some pass before the prompt is read, some within the answer
MIB = 2**20


@dataclass
class Soak:
    """A run. expected: samples of each case, decoded plainly. counts: of answers and of what became of them."""

    llm: LLM
    cases: list[Case]
    expected: list[list[CompletionOutput]]
    chance: random.Random
    counts: Counter[str] = field(default_factory=lambda: Counter(different=0))

    def turn(self, llm: LLM, requests: int) -> None:
        """Run some requests on one engine, each of which joins after a random number of rounds."""
        engine, left = llm.engine, requests
        if self.chance.random() < 0.8:  # else the length policy of the command line
            engine.use_policy(RandomLength(self.chance.randrange(2**31)))
        live: dict[str, tuple[int, RequestOutput]] = {}
        while left or engine.busy:
            if left and (not engine.busy or self.chance.random() < 0.5):
                left -= 1
                number, output = self._join(llm)
                live[output.request_id] = number, output
            if live and self.chance.random() < 0.02:
                engine.abort(self.chance.choice(list(live)))
            engine.step()
        engine.scheduler.check_integrity()
        for number, output in live.values():
            self._check(number, output)

    def _join(self, llm: LLM) -> tuple[int, RequestOutput]:
        number = self.chance.randrange(len(self.cases))
        case = self.cases[number]
        params = case.params
        if self.chance.random() < 0.1:
            params = replace(params, time_budget=self.chance.choice(BUDGETS))
        references = case.references if llm.config.looks_up else ()
        priority, client = self.chance.randint(-1, 1), self.chance.choice("ab")
        request = llm.requests.request(case.prompt, params, references=references, priority=priority, client=client)
        return number, llm.engine.add(request)

    def _check(self, number: int, output: RequestOutput) -> None:
        self.counts["cached_tokens"] += output.cached_tokens
        self.counts["prompt_tokens"] += len(output.prompt_token_ids)
        for answer, whole in zip(output.candidates, self.expected[number], strict=True):
            reason, found, expected = str(answer.finish_reason), answer.token_ids, whole.token_ids
            self.counts["answers"] += 1
            self.counts[f"ended by {reason}"] += 1
            self.counts["tokens"] += len(found)
            self.counts["drafted"] += answer.metrics.drafted
            self.counts["accepted"] += answer.metrics.accepted
            size = max(len(found), len(expected))
            if not {answer.finish_reason, whole.finish_reason}.isdisjoint(CUT_SHORT):
                size = min(len(found), len(expected))
            if found[:size] != expected[:size]:
                self.counts["different"] += 1
                print(f"differs: {self.cases[number]}\n  {answer}\n  {whole}", file=sys.stderr)


def pool_of(llm: LLM, size: int, tokens: int, chance: random.Random) -> tuple[list[Case], list[list[CompletionOutput]]]:
    """Random cases, and the answers of plain decoding to each alone."""
    cases = [random_case(chance, llm, tokens) for _ in range(size)]
    alone = llm.plain().with_options(max_batch_size=1, prefix_cache=False)
    results = alone.generate([case.prompt for case in cases], [case.params for case in cases], use_tqdm=False)
    return cases, [result.candidates for result in results]


def engines_of(llm: LLM, drafters: Sequence[str], widths: Sequence[int]) -> dict[str, LLM]:
    """Engines on the same weights: each drafter, each width, two rows and eight, of which three of any length fit."""
    found = {}
    for drafter, width, rows in itertools.product(drafters, widths, (2, 8)):
        made = llm.plain() if drafter == "none" else llm.with_options(drafter=drafter, speculation_width=width)
        if drafter != "none" or width == widths[0]:
            name = f"{drafter}, width {width}, {rows} rows"
            found[name] = made.with_options(max_batch_size=rows, prefill_chunk=64)
            if rows == 8:
                shrink_caches(found[name].engine, 3)
    return found


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--draft-model")
    parser.add_argument("--drafters", default="none,ngram")
    parser.add_argument("--widths", default="1,3")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--pool", type=int, default=96, help="different requests")
    parser.add_argument("--requests", type=int, default=24, help="of a turn of one engine")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    drafters = options.drafters.split(",")
    first = next((drafter for drafter in drafters if drafter not in ("none", "ngram")), "ngram")
    llm = LLM(
        options.model,
        options.draft_model,
        drafter=first,
        quantization=options.quantization,
        num_speculative_tokens=LONGEST,
        max_batch_size=8,
        max_model_len=options.max_model_len,
    )
    chance = random.Random(options.seed)
    soak = Soak(llm, *pool_of(llm, options.pool, options.max_tokens, chance), chance)
    engines = engines_of(llm, drafters, [int(width) for width in options.widths.split(",")])
    memory: list[int] = []
    end = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end or not memory:
        for engine in engines.values():
            soak.turn(engine, options.requests)
        memory.append(round(resident() / MIB))
        print(f"turn {len(memory)}: {dict(soak.counts)}, {memory[-1]} MiB resident", file=sys.stderr)
    report = {"command": sys.argv[1:], "cpu": cpu_name(), "engines": list(engines), "turns": len(memory)}
    memories = {"first": memory[0], "middle": memory[len(memory) // 2], "last": memory[-1], "most": max(memory)}
    print(json.dumps({**report, "resident_mib": memories, **soak.counts}))
    sys.exit(soak.counts["different"] > 0)


if __name__ == "__main__":
    main()
