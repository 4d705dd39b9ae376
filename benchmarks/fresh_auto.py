"""``auto`` against every fixed length on the real engine, in fresh processes that take turns.

    PYTHONPATH=src:. python -m benchmarks.fresh_auto MODEL [--draft-model DRAFT] --batch-sizes 4,8 --output FILE

A user's process begins without experience: it loads the kept cost table or measures one, and its first call is what
counts. So each length of each turn is a process of its own, which runs the same prompts ``--calls`` times. All seconds,
rounds and tokens are kept; ratios are of totals over the turns, so no lucky repeat is picked. Where the machine's speed
changes from process to process, tokens per row and round tell lengths apart and seconds do not.

Prompts: the built-in sets of ``paceline bench offline``; greedy, no end-of-text token ends an answer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.config import SamplingParams
from paceline.llm import LLM
from paceline.tools.bench.measure import run_batch, turns
from paceline.tools.bench.offline import machine, prompts_for, versions


def run_one(options: argparse.Namespace, rows: int, length: str) -> dict[str, Any]:
    """Run the calls in this process."""
    speculation: dict[str, Any] = {"drafter": None}
    if length != "0":
        speculation = {
            "drafter": options.drafter,
            "num_speculative_tokens": int(length) if length != "auto" else length,
        }
        if options.draft_model:
            speculation |= {"draft_model": options.draft_model, "draft_quantization": options.draft_quantization}
    llm = LLM(
        options.model,
        quantization=options.quantization,
        max_batch_size=rows,
        max_model_len=1024,
        prefix_cache=False,
        **speculation,
    )
    prompts, _ = prompts_for(llm, options.prompts, rows)
    params = [
        SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=True, seed=row)
        for row in range(rows)
    ]
    calls = []
    for _ in range(options.calls):
        run = run_batch(llm, prompts, params)
        prefill, decode = run.prefill_and_decode_seconds
        calls.append(
            {
                "seconds": run.seconds,
                "prefill_seconds": prefill,
                "decode_seconds": decode,
                "rounds": run.rounds,
                "tokens_per_row_and_round": run.mean_acceptance_length,
                "drafted_a_round": run.drafted_a_round,
                "acceptance_rate": run.acceptance_rate,
            }
        )
    return {"rows": rows, "length": length, "calls": calls}


def totals(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By length: decoding seconds of all calls of all turns, and of first calls; mean tokens per row and round."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        entry = found.setdefault(run["length"], {"first": 0.0, "all": 0.0, "tokens_per_row_and_round": []})
        entry["first"] += run["calls"][0]["decode_seconds"]
        entry["all"] += sum(call["decode_seconds"] for call in run["calls"])
        entry["tokens_per_row_and_round"] += [round(call["tokens_per_row_and_round"], 2) for call in run["calls"]]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all processes in turn, or with ``--one`` a single one's part."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft-model")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--quantization", help="default: as the model is loaded")
    parser.add_argument("--draft-quantization")
    parser.add_argument("--batch-sizes", default="1,4,8")
    parser.add_argument("--lengths", default="0,1,2,4,auto")
    parser.add_argument("--prompts", default="stubs")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--one", help="ROWS:LENGTH, in this process; prints its JSON (the command calls itself so)")
    options = parser.parse_args(given)
    if options.one:
        rows, length = options.one.split(":")
        print(json.dumps(run_one(options, int(rows), length)))
        return
    runs: list[dict[str, Any]] = []
    for rows in map(int, options.batch_sizes.split(",")):
        for turn in turns(options.lengths.split(","), options.turns):
            for length in turn:
                command = [sys.executable, "-m", "benchmarks.fresh_auto", *given, "--one", f"{rows}:{length}"]
                printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                runs.append(json.loads(printed.splitlines()[-1]))
        here = totals([run for run in runs if run["rows"] == rows])
        best = min((length for length in here if length != "auto"), key=lambda length: here[length]["all"])
        for length, total in here.items():
            print(
                f"{rows} rows, k = {length}: {total['all']:.2f} s ({total['first']:.2f} in first calls), "
                f"tokens a row and round {total['tokens_per_row_and_round']}, "
                f"speed over k = {best} {here[best]['all'] / total['all']:.3f}",
                flush=True,
            )
    if options.output:
        document = {
            "command": " ".join(["python -m benchmarks.fresh_auto", *given]),
            "machine": machine(),
            "versions": versions(),
            "runs": runs,
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
