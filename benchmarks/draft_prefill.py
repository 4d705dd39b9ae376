"""The cost of prefill with a trained head: prefill with the head over prefill without, in turn.

    python -m benchmarks.draft_prefill smollm2-135m smollm2-135m-head

Random prompts of each length run one at a time, each for the first time; one token is drawn. The last line is one JSON
document: milliseconds of both sides, medians, and the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time

from paceline import LLM, SamplingParams
from paceline.config import EngineOptions
from paceline.tools.bench.offline import machine, versions

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def milliseconds(llm: LLM, prompt: list[int]) -> float:
    """Milliseconds for one prompt."""
    began = time.perf_counter()
    llm.generate([prompt], ONE, use_tqdm=False)
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("head")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 900])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    shared: EngineOptions = {"quantization": options.quantization, "max_model_len": 1024, "max_batch_size": 1}
    both = LLM(options.model, options.head, drafter="feature", num_speculative_tokens=4, **shared)
    alone, chance, found = both.plain(), random.Random(0), []
    for tokens in options.tokens:
        times: list[tuple[float, float]] = []
        for repeat in range(options.repeats):
            prompt = [chance.randrange(both.engine.batch.vocab_size) for _ in range(tokens)]
            sides = [milliseconds(llm, prompt) for llm in ((alone, both) if repeat % 2 else (both, alone))]
            times.append((sides[0], sides[1]) if repeat % 2 else (sides[1], sides[0]))
        without, along = (statistics.median(side) for side in zip(*times, strict=True))
        ratio = statistics.median(b / a for a, b in times)
        found.append({"tokens": tokens, "without_ms": without, "with_ms": along, "ratio": ratio})
        print(found[-1], file=sys.stderr)
    about = {"engine": both.engine.describe(), "machine": machine(both.engine.threads), "versions": versions()}
    print(json.dumps({"benchmark": "draft_prefill", "command": " ".join(sys.argv), **about, "results": found}))


if __name__ == "__main__":
    main()
