"""The cost of sampling parameters per round, each compared with temperature alone, in turn in one process.

    python benchmarks/sampling.py smollm2-135m --rows 1,8,64
    python benchmarks/sampling.py qwen-coder-0.5b.gguf --rows 1,8 --drafters ngram --out results.json

Other parameters sample other tokens, which are predicted better or worse; therefore rounds are compared, not answers. A
round's time is the time between the ends of two acceptance steps while all rows decode, none leaves and none joins; the
median of a run counts, and the median of a side's runs. With n-gram drafts `auto` verifies more or fewer tokens per
round, depending on the text; `tokens` is the mean number of logits per round, and `judging` the time of the call that
sampled and accepted (log-probabilities included), without the rest of the round. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.cli.document import end
from paceline.core.acceptance import AcceptanceRule
from paceline.core.batch import Batch
from paceline.core.draft_tensors import DraftTensors
from paceline.core.hardware import cpu_name
from paceline.core.values import Accepted
from paceline.tools.bench.measure import turns
from paceline.tools.bench.prompts import COPYING, OPEN

TEXTS = [*OPEN, *COPYING]
ALONE = "temperature 0.8"
SIDES: dict[str, dict[str, Any]] = {
    ALONE: {},
    "temperature 1": {"temperature": 1.0},
    "top-p 0.95": {"top_p": 0.95},
    "temperature 1, top-p 0.99": {"temperature": 1.0, "top_p": 0.99},
    "top-k 40": {"top_k": 40},
    "min-p 0.05": {"min_p": 0.05},
    "repetition penalty 1.1": {"repetition_penalty": 1.1},
    "ranked": {"rank_by": "mean_logprob"},
    "5 log-probabilities": {"logprobs": 5},
    "all together": {"top_p": 0.95, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "logprobs": 5},
}


@dataclass
class Timer:
    """Wraps an acceptance rule and records the times of its calls."""

    rule: AcceptanceRule
    rows: int
    rounds: list[float] = field(default_factory=list)
    judging: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _last: float | None = None

    def __call__(self, draft: DraftTensors, logits: Tensor, batch: Batch) -> Accepted:
        began = time.perf_counter()
        accepted = self.rule(draft, logits, batch)
        now = time.perf_counter()
        full = batch.rows == self.rows
        if full and self._last is not None:
            self.rounds.append(now - self._last)
            self.judging.append(now - began)
            self.tokens.append(batch.rows + int(draft.counts.sum()))
        self._last = now if full else None
        return accepted


@dataclass
class Run:
    """Medians of a run: a round and its acceptance step in ms; tokens: mean number of logits per round."""

    round_ms: float
    judging_ms: float
    tokens: float


@dataclass
class Result:
    """One side. ratio: its round over that of temperature alone (of 0.8).

    by_judging: the ratio if everything but the acceptance step took the same time, which is steadier on a busy machine.
    """

    rows: int
    drafter: str
    side: str
    round_ms: float
    judging_ms: float
    tokens: float
    ratio: float
    by_judging: float
    runs: list[Run]


def run_batch(llm: LLM, rows: int, side: str, max_tokens: int) -> Run:
    """Run all rows, from prompt to end."""
    engine = llm.engine
    watch = Timer(engine.parts.accept, rows)
    engine.parts.accept = watch
    given = {"temperature": 0.8, "max_tokens": max_tokens, "ignore_eos": True} | SIDES[side]
    params = [SamplingParams(seed=row, **given) for row in range(rows)]
    prompts = [TEXTS[row % len(TEXTS)] + " " * (row // len(TEXTS)) for row in range(rows)]
    llm.generate(prompts, params, use_tqdm=False)
    engine.parts.accept = watch.rule
    rounds, judging = 1000 * statistics.median(watch.rounds), 1000 * statistics.median(watch.judging)
    return Run(rounds, judging, statistics.fmean(watch.tokens))


def compare(llm: LLM, rows: int, drafter: str, arguments: argparse.Namespace) -> list[Result]:
    """Run all sides, in turn."""
    sides = [side for side in SIDES if not arguments.sides or side in (ALONE, *arguments.sides.split(";"))]
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    run_batch(llm, rows, ALONE, arguments.max_tokens)
    for order in turns(sides, arguments.repeats):
        for side in order:
            runs[side].append(run_batch(llm, rows, side, arguments.max_tokens))

    def median(side: str, name: str) -> float:
        return float(statistics.median(getattr(run, name) for run in runs[side]))

    alone, judged = median(ALONE, "round_ms"), median(ALONE, "judging_ms")
    return [
        Result(
            rows,
            drafter,
            side,
            round_ms=round(median(side, "round_ms"), 4),
            judging_ms=round(median(side, "judging_ms"), 4),
            tokens=round(median(side, "tokens"), 4),
            ratio=round(median(side, "round_ms") / alone, 4),
            by_judging=round(1 + (median(side, "judging_ms") - judged) / alone, 4),
            runs=runs[side],
        )
        for side in sides
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,8")
    parser.add_argument("--drafters", default="plain,ngram", help="of plain, ngram")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sides", default="", help=f"any of these, separated by semicolons: {'; '.join(SIDES)}")
    parser.add_argument("--out", type=Path, help="file for the JSON document")
    arguments = parser.parse_args(argv)
    results = []
    rows = [int(number) for number in arguments.rows.split(",")]
    # All prompts are prefilled at once: rows that join late would leave few rounds with all of them.
    options: dict[str, Any] = {"max_batch_size": max(rows), "max_model_len": 512, "longest_pause": None}
    llm = LLM(arguments.model, drafter="ngram", lookup_tokens=0, quantization="int8", **options)
    for drafter in arguments.drafters.split(","):
        engine = llm.plain() if drafter == "plain" else llm
        for number in rows:
            for result in compare(engine, number, drafter, arguments):
                results.append(result)
                print(
                    f"{number:3} rows {drafter:6} {result.side:28} round {result.round_ms:8.3f} ms = {result.ratio:.3f}"
                    f" ({result.by_judging:.3f} by judging)"
                    f"  judging {result.judging_ms:.3f} ms  of {result.tokens:.1f} tokens",
                    file=sys.stderr,
                )
    name = Path(arguments.model).name
    report = {"machine": cpu_name(), "model": name, "precision": "int8", "max_tokens": arguments.max_tokens}
    end(report | {"results": [asdict(result) for result in results]}, arguments.out)


if __name__ == "__main__":
    main()
