"""BASS's two ways to attend to ragged rows, PAD and SPLIT (2404.15778, section 3.2), beside kernels that pad nothing.

    PYTHONPATH=src:. python -m benchmarks.pad_split qwen-coder-0.5b.gguf --json FILE

Rounds of n-gram lookup with three draft tokens, on HumanEval's prompts, whose lengths are the spread of the rows. PAD
    and SPLIT run in torch, the ragged kernel within the CPU kernels' one call, which is faster for other reasons, too:
    compare PAD with SPLIT. All three are in bfloat16, take turns, and run the same number of rounds but for near-ties.
    ``padded`` is the arithmetic of PAD's attention over that of the rows' own lengths, in the middle of the answers.
    The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.cli.document import end
from paceline.config import AttentionName
from paceline.core.hardware import cpu_name
from paceline.tools.evaluation.problems import human_eval, style_of, tokens_of

WAYS: Sequence[AttentionName] = ("padded", "split", "native")
DRAFT_TOKENS = 3


@dataclass(frozen=True)
class Result:
    """Milliseconds of a round, medians of the repeats, and rounds of the longest row."""

    rows: int
    padded: float
    shortest: int
    longest: int
    ms: dict[str, float]
    rounds: dict[str, int]


def round_ms(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[float, int]:
    """Milliseconds per decoding round of the batch, after the last row's first token, and its rounds."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
    metrics = [output.outputs[0].metrics for output in outputs]
    began, ended = (max(getattr(m, name) for m in metrics) for name in ("first_token", "finished"))
    rounds = max(m.rounds for m in metrics)
    return 1000 * (ended - began) / rounds, rounds


def measure(engines: dict[str, LLM], prompts: Sequence[Sequence[int]], repeats: int, max_tokens: int) -> Result:
    """All ways in turn, in an order that rotates."""
    times: dict[str, list[float]] = {way: [] for way in engines}
    rounds = {}
    for repeat in range(repeats + 1):  # the first one warms up
        order = [*engines][repeat % len(engines) :] + [*engines][: repeat % len(engines)]
        for way in order:
            ms, rounds[way] = round_ms(engines[way], prompts, max_tokens)
            if repeat:
                times[way].append(ms)
    lengths = [len(prompt) + max_tokens / 2 for prompt in prompts]
    padded = len(prompts) * max(lengths) / sum(lengths)
    sizes = [len(prompt) for prompt in prompts]
    medians = {way: statistics.median(values) for way, values in times.items()}
    return Result(len(prompts), padded, min(sizes), max(sizes), medians, rounds)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="PAD and SPLIT attention beside the CPU kernels.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    given = arguments(words)
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "drafter": "ngram",
        "num_speculative_tokens": DRAFT_TOKENS,
        "prefix_cache": False,
    }
    most = max(given.rows)
    loaded = {
        way: LLM(given.model, attention=way, max_batch_size=most, max_model_len=1024, **options)
        for way in ("padded", "native")
    }
    engines = {"padded": loaded["padded"], "split": loaded["padded"].with_options(attention="split")}
    engines["native"] = loaded["native"]
    tokenizer = engines["native"].requests.tokenizer
    problems = human_eval()
    random.Random(1).shuffle(problems)
    prompts = [tokens_of(problem, tokenizer, style_of(tokenizer)) for problem in problems[:most]]
    results = []
    for rows in given.rows:
        results.append(measure(engines, prompts[:rows], given.repeats, given.max_tokens))
        print(results[-1], file=sys.stderr, flush=True)
    document = {
        "machine": cpu_name(),
        "model": given.model.name,
        "draft_tokens": DRAFT_TOKENS,
        "max_tokens": given.max_tokens,
        "repeats": given.repeats,
        "results": [asdict(result) for result in results],
    }
    end(document, given.json)


if __name__ == "__main__":
    main()
