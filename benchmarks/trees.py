"""Trees compared with chains by time: the same drafter, ``auto`` choosing the length; the last line is one document.

    python -m benchmarks.trees qwen-coder-1.5b.gguf --draft-model qwen-coder-0.5b.gguf --quantization int8
    python -m benchmarks.trees smollm2-135m --quantization int8 --widths 1 2 4

Plain decoding, and speculation with each ``speculation_width``, take turns; medians count. All sides must give the same
answers. Times are of whole calls, whose prompts are already cached.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from benchmarks.references import timed

from paceline.cli.document import command_line, end
from paceline.config import SamplingParams
from paceline.llm import LLM
from paceline.tools.bench.measure import BatchRun, turns
from paceline.tools.bench.offline import machine, versions
from paceline.tools.bench.sets import SETS, SetName


def compared(llm: LLM, rows: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """For this number of rows: each side over plain decoding and over chains, turn by turn."""
    asked = [SETS[name][place] for place in range(rows) for name in options.sets][:rows]
    prompts = [llm.tokens_of_chat(each.messages) for each in asked]
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=True)
    each_own = [replace(params, seed=row) for row in range(rows)]

    def side(engine: LLM) -> Callable[[], BatchRun]:
        return lambda: timed(lambda: engine.generate(prompts, each_own, use_tqdm=False))

    llms = {"plain": llm.plain().with_options(max_batch_size=rows)}
    for width in options.widths:
        llms[f"width {width}"] = llm.with_options(speculation_width=width, max_batch_size=rows)
    runs: dict[str, list[BatchRun]] = {name: [] for name in llms}
    sides = [(name, side(engine)) for name, engine in llms.items()]
    for _, run in sides:  # the first run prefills the prompts and learns the costs
        run()
    for turn in turns(sides, options.repeats):
        for name, run in turn:
            runs[name].append(run())
    plain = runs["plain"]
    chains = runs[f"width {options.widths[0]}"]
    assert all(run.token_ids == plain[0].token_ids for each in runs.values() for run in each), "an answer has changed"
    return [{"rows": rows, **_summary(name, each, plain, chains)} for name, each in runs.items()]


def _summary(name: str, runs: Sequence[BatchRun], plain: Sequence[BatchRun], chains: Sequence[BatchRun]) -> Any:
    """spread: of the middle half of its runs, over their median. time_of_chains: below 1, trees are faster."""
    seconds = sorted(run.seconds for run in runs)
    middle = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    each = [metrics for run in runs for metrics in run.metrics]
    rounds = sum(metrics.rounds for metrics in each)
    return {
        "side": name,
        "seconds": statistics.median(seconds),
        "seconds_of_all": [run.seconds for run in runs],
        "spread": (middle[2] - middle[0]) / middle[1],
        "over_plain": statistics.median(a.seconds / b.seconds for a, b in zip(plain, runs, strict=True)),
        "time_of_chains": statistics.median(b.seconds / a.seconds for a, b in zip(chains, runs, strict=True)),
        "tokens_a_round": sum(run.tokens for run in runs) / rounds,
        "draft_tokens_a_round": sum(metrics.drafted for metrics in each) / rounds,
        "saved_by_sibling": sum(metrics.saved_by_sibling for metrics in each) / rounds,
    }


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft-model")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--draft-quantization", default="same")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 3], help="the first one is the baseline")
    parser.add_argument("--sets", nargs="+", default=["chat"], choices=get_args(SetName), help="prompts, in turn")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(given)


def main() -> None:
    """Measure, print, write."""
    options = arguments()
    llm = LLM(
        options.model,
        options.draft_model,
        drafter=options.drafter,
        quantization=options.quantization,
        draft_quantization=options.draft_quantization,
        max_batch_size=max(options.rows),
        max_model_len=1024,
    )
    results = []
    for rows in options.rows:
        found = compared(llm, rows, options)
        results += found
        for each in found:
            shown = {
                name: round(v, 3) if isinstance(v, float) else v for name, v in each.items() if name[-4:] != "_all"
            }
            print(shown, file=sys.stderr, flush=True)
    document = {
        "benchmark": "trees",
        "command": command_line("python -m benchmarks.trees"),
        "engine": llm.engine.describe(),
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
        "prompts": options.sets,
        "machine": machine(llm.engine.threads),
        "versions": versions(),
        "results": results,
    }
    end(document, options.output)


if __name__ == "__main__":
    main()
