"""Pauses of a stream, and the waiting time of short requests, while long prompts are prefilled; in one process.

    python benchmarks/pauses.py --quantization int8 --prompts 4 --tokens 6000

One request decodes. A second later the long prompts arrive together, and from then on a short request every two
seconds, until the long ones have their first token. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from paceline import LLM, SamplingParams
from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Request


def percentile(values: list[float], share: float) -> float:
    """The value below which this fraction of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Run:
    """An engine run step by step; records when the watched request gains tokens."""

    def __init__(self, llm: LLM, seed: int = 0) -> None:
        self.engine, self.rng = llm.engine, random.Random(seed)
        self.gaps: list[float] = []
        self._last = 0.0

    def add(self, size: int, tokens: int, client: str) -> RequestOutput:
        prompt = [self.rng.randrange(100, 20000) for _ in range(size)]
        params = SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True)
        return self.engine.add(Request(prompt, params, client=client))

    def step(self, watched: RequestOutput) -> None:
        before = len(watched.outputs[0].token_ids)
        self.engine.step()
        if len(watched.outputs[0].token_ids) > before:
            now = time.perf_counter()
            self.gaps.append(now - self._last)
            self._last = now


def warm_up(run: Run) -> None:
    """Warm up as the server does: a row's first token touches all of the row's memory, which takes 0.2 s here."""
    for _ in range(run.engine.config.rows):
        run.add(2, 2, "warm-up")
    while run.engine.busy:
        run.engine.step()


def measure(llm: LLM, options: argparse.Namespace) -> dict[str, object]:
    """Measure pauses in milliseconds and waits in seconds."""
    run = Run(llm)
    warm_up(run)
    stream = run.add(64, llm.engine.max_model_len - 64, "stream")
    began = time.perf_counter()
    while time.perf_counter() < began + 1 or len(run.gaps) < 20:
        run.step(stream)
    quiet, run.gaps = run.gaps[1:], []
    longs = [run.add(options.tokens, 16, f"long {number}") for number in range(options.prompts)]
    began = asked = time.perf_counter()
    shorts: list[RequestOutput] = []
    while not all(output.outputs[0].token_ids for output in longs):
        if time.perf_counter() > asked + 2:
            asked = time.perf_counter()
            shorts.append(run.add(64, 8, "short"))
        run.step(stream)
        assert not stream.finished, "the stream ended before the prompts were read"
    seconds = time.perf_counter() - began
    while not all(output.finished for output in shorts):
        run.step(stream)
    first = [waited for output in shorts if (waited := output.outputs[0].metrics.time_to_first_token) is not None]
    llm.engine.clear()
    return {
        "quiet_ms": {"p50": 1000 * percentile(quiet, 0.5), "p99": 1000 * percentile(quiet, 0.99)},
        "beside_prefill_ms": {str(share): 1000 * percentile(run.gaps, share) for share in (0.5, 0.99, 1.0)},
        "short_first_token_ms": {str(share): 1000 * percentile(first, share) for share in (0.5, 1.0)}
        if first
        else None,
        "shorts": len(shorts),
        "long_prompts_read_s": seconds,
        "long_first_tokens_s": sorted(output.outputs[0].metrics.time_to_first_token or 0.0 for output in longs),
    }


def main() -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--longest-pause", type=float, default=None, help="default: the engine's")
    options = parser.parse_args()
    more = {} if options.longest_pause is None else {"longest_pause": options.longest_pause}
    llm = LLM(
        options.model,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
        max_batch_size=8,
        prefix_cache=False,
        **more,
    )
    print(llm.engine.describe())
    found = measure(llm, options)
    for name, value in found.items():
        print(f"{name}: {value}")
    print(json.dumps({"options": vars(options), **found}))


if __name__ == "__main__":
    main()
