"""What references of one's own and siblings' answers bring n-gram lookup: tokens a round, and time.

    python benchmarks/references.py edits qwen-coder-1.5b.gguf --rows 4 --prompts 20 --quantization int8
    python benchmarks/references.py siblings qwen-coder-0.5b.gguf --rows 8 --prompts 4 --n 8 --quantization int8

edits: programs with a small change to be made (`paceline bench offline --prompts edits` has them), greedy: plain
decoding, lookup in the prompt (where the original stands, too), lookup with the original as reference.
siblings: n sampled answers of one prompt: as one request, the same with nobody copying from siblings, as n requests.
They copy from each other while they live side by side, so there have to be n rows.
Sides take turns, the median of the repeats counts. Prompts are read once per answer or request, as the engine does it.
The last line of the standard output is the result as one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.bench.measure import BatchRun, turns
from paceline.bench.offline import machine, versions
from paceline.bench.sets import SETS, Asked
from paceline.drafters import NgramDrafter
from paceline.outputs import RequestOutput

Side = tuple[str, Callable[[], BatchRun]]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("edits", "siblings"))
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="of the set: the first of the prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e6, help="no further repeat is begun that would end later")
    parser.add_argument("-k", default="auto", help="speculation length")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(given)
    if options.what == "siblings" and options.rows < options.n:
        parser.error(f"--rows {options.rows}: siblings need a row each, {options.n} of them (--n)")
    return options


def timed(run: Callable[[], list[RequestOutput]]) -> BatchRun:
    """A batch and its seconds."""
    started = time.perf_counter()
    outputs = run()
    return BatchRun(time.perf_counter() - started, outputs)


def edits(options: argparse.Namespace, llm: LLM, asked: Sequence[Asked]) -> list[Side]:
    """The three sides."""
    plain = llm.plain()
    prompts = [llm.tokens_of_chat(each.messages) for each in asked]
    originals = [each.references for each in asked]
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    return [
        ("plain", lambda: timed(lambda: plain.generate(prompts, params, use_tqdm=False))),
        ("lookup", lambda: timed(lambda: llm.generate(prompts, params, use_tqdm=False))),
        ("references", lambda: timed(lambda: llm.generate(prompts, params, references=originals, use_tqdm=False))),
    ]


def siblings(options: argparse.Namespace, llm: LLM, asked: Sequence[Asked]) -> list[Side]:
    """Likewise; each prompt is played alone."""
    alone = llm.with_options(max_batch_size=options.rows)
    alone.engine.parts.drafter = NgramDrafter(siblings=False)
    prompts = [llm.tokens_of_chat(each.messages) for each in asked]
    one = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=1)
    many = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=1, n=options.n)

    def play(engine: LLM, params: SamplingParams, times: int) -> list[RequestOutput]:
        rounds = [engine.generate([prompt] * times, _seeds(params, times), use_tqdm=False) for prompt in prompts]
        return [output for outputs in rounds for output in outputs]

    return [
        (f"{options.n} requests", lambda: timed(lambda: play(llm, one, options.n))),
        (f"n = {options.n}, no siblings", lambda: timed(lambda: play(alone, many, 1))),
        (f"n = {options.n}", lambda: timed(lambda: play(llm, many, 1))),
    ]


def _seeds(params: SamplingParams, times: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=params.temperature, max_tokens=params.max_tokens, seed=s, n=params.n)
        for s in range(times)
    ]


def summary(name: str, runs: Sequence[BatchRun], first: Sequence[BatchRun]) -> dict[str, Any]:
    """Of one side; speed-ups over the first side, turn by turn."""
    one = runs[0]
    drafted, accepted = (sum(getattr(m, kind) for m in one.metrics) for kind in ("drafted", "accepted"))
    return {
        "side": name,
        "seconds": statistics.median(run.seconds for run in runs),
        "seconds_of_all": [run.seconds for run in runs],
        "ms_per_token": statistics.median(run.ms_per_token for run in runs),
        "tokens": one.tokens,
        "rounds": sum(m.rounds for m in one.metrics),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "tokens_a_round": one.mean_acceptance_length,
        "speed_up": statistics.median(a.seconds / b.seconds for a, b in zip(first, runs, strict=True)),
        "speed_up_decoding": statistics.median(
            a.ms_per_token / b.ms_per_token for a, b in zip(first, runs, strict=True)
        ),
    }


def main() -> None:
    """Measure, print, write."""
    options = arguments()
    set_ = SETS["edits"] if options.what == "edits" else SETS["retrieval"]
    asked = set_[options.first : options.first + options.prompts]
    length = int(options.k) if options.k.isdigit() else options.k
    llm = LLM(
        options.model,
        drafter="ngram",
        num_speculative_tokens=length,
        max_batch_size=options.rows,
        quantization=options.quantization,
        max_model_len=1024,
        prefix_cache=False,  # what prompts take to read is part of what is measured
    )
    sides = (edits if options.what == "edits" else siblings)(options, llm, asked)
    runs: dict[str, list[BatchRun]] = {name: [] for name, _ in sides}
    llm.generate([llm.tokens_of_chat(asked[0].messages)], SamplingParams(max_tokens=8), use_tqdm=False)  # a warm-up
    started, longest = time.monotonic(), 0.0
    for turn in turns(sides, options.repeats):
        began = time.monotonic()
        if began - started + longest > options.seconds:
            break
        for name, play in turn:
            runs[name].append(play())
        longest = max(longest, time.monotonic() - began)
    first = next(iter(runs.values()))
    results = [summary(name, each, first) for name, each in runs.items()]
    if options.what == "edits":
        same = [run.token_ids == first[0].token_ids for each in runs.values() for run in each]
        assert all(same), "speculation changed an answer"
    document = {
        "benchmark": "references",
        "command": "python " + " ".join(sys.argv),
        "prompts": f"{len(asked)} of {options.what if options.what == 'edits' else 'retrieval'}",
        "engine": llm.engine.describe(),
        "machine": machine(llm.engine.threads),
        "versions": versions(),
        "results": results,
    }
    for each in results:
        print({name: round(v, 3) if isinstance(v, float) else v for name, v in each.items()}, file=sys.stderr)
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
