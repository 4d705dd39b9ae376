"""Scoring ten continuations of each of fifty prompts: with prefix reuse, and every text from its beginning.

    python -m benchmarks.scoring smollm2-135m --quantization int8

The sides take turns; the last line is one JSON document. Scores must be equal, on the CPU kernels to the bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from paceline.cli.document import command_line, end
from paceline.core.outputs import Score
from paceline.llm import LLM
from paceline.tools.bench.offline import machine, versions

FEW_SHOT = "\n".join(f"Question: What comes after {n}?\nAnswer: {n + 1}" for n in range(12))


def texts(prompts: int, choices: int) -> tuple[list[str], list[str]]:
    """Prompts that all begin with the same examples, each with ``choices`` continuations."""
    asked = [f"{FEW_SHOT}\nQuestion: What comes after {37 * n % 1000}?\nAnswer:" for n in range(prompts)]
    pairs = [(text, f" {37 * n % 1000 + c}") for n, text in enumerate(asked) for c in range(choices)]
    return [prompt for prompt, _ in pairs], [text for _, text in pairs]


def one_by_one(llm: LLM, prompts: list[str], continuations: list[str]) -> list[Score]:
    """Score each continuation in a call of its own."""
    pairs = zip(prompts, continuations, strict=True)
    return [score for pair in pairs for score in llm.score([pair[0]], [pair[1]], use_tqdm=False)]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--choices", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    llm = LLM(
        asked.model,
        quantization=asked.quantization,
        drafter=None,
        num_speculative_tokens=0,
    )
    prompts, continuations = texts(asked.prompts, asked.choices)
    sides: dict[str, tuple[bool, Callable[[LLM], list[Score]]]] = {
        "shared": (True, lambda fresh: fresh.score(prompts, continuations, use_tqdm=False)),
        "one by one": (False, lambda fresh: one_by_one(fresh, prompts, continuations)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    scores: dict[str, list[Score]] = {}
    for _ in range(asked.repeats):
        for name, (reuse, run) in sides.items():
            fresh = llm.with_options(prefix_cache=reuse)  # starts with an empty cache
            started = time.perf_counter()
            scores[name] = run(fresh)
            seconds[name].append(time.perf_counter() - started)
    ratios = [slow / fast for fast, slow in zip(seconds["shared"], seconds["one by one"], strict=True)]
    document = {
        "command": command_line("python -m benchmarks.scoring"),
        "machine": machine(llm.engine.threads),
        "versions": versions(),
        "texts": len(prompts),
        "engine": llm.engine.describe(),
        "equal": scores["shared"] == scores["one by one"],
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "ratio": statistics.median(ratios),
        "repeats": asked.repeats,
    }
    end(document, None)


if __name__ == "__main__":
    main()
