"""Decoding after long prompts with caches of 16 and of 8 bits, beside llama.cpp with f16 and q8_0 caches.

    PYTHONPATH=src:. python -m benchmarks.long_decoding qwen-coder-0.5b.gguf --rows 4 --positions 16384
    PYTHONPATH=src:. python -m benchmarks.long_decoding qwen-coder-0.5b.gguf --sides f16 q8_0

Plain decoding, greedy, the same random prompt in all rows, which share its pages here; llama.cpp reads it once a row.
paceline runs the file in int8, llama.cpp (the package xllamacpp, installed beside the project) in the file's own
blocks. Each side runs in a process of its own. Decoding is timed from the last row's first token to the end; the time
before is shown beside it. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import torch

from paceline import LLM, SamplingParams
from paceline.models.files.hub import resolve
from paceline.tools.bench.offline import machine, versions

OURS = ("auto", "int8")
SIDES = (*OURS, "f16", "q8_0")
ROOM = 64  # tokens of a row beyond its prompt and answer


def random_prompt(tokens: int) -> list[int]:
    """Return the tokens of the prompt, the same for all sides."""
    chance = random.Random(0)
    return [chance.randrange(1000, 20000) for _ in range(tokens)]


def run_paceline(options: argparse.Namespace) -> dict[str, float]:
    """Run one side in this process."""
    llm = LLM(
        options.model,
        quantization="int8",
        drafter=None,
        kv_cache_dtype=options.sides[0],
        max_model_len=options.positions + options.tokens + ROOM,
        max_batch_size=options.rows,
        use_tqdm=False,
    )
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate([random_prompt(options.positions)] * options.rows, params, use_tqdm=False)
    whole = time.perf_counter() - began
    prefill = max(output.outputs[0].metrics.time_to_first_token or 0.0 for output in outputs)
    return {"prefill_s": prefill, "decoding_s": whole - prefill}


def run_llama(options: argparse.Namespace) -> dict[str, float]:
    """Run one side in this process, by the worker of ``benchmarks.peers``. Raises ImportError without xllamacpp."""
    sys.path.insert(0, str(Path(__file__).parent / "peers" / "workers"))
    from common import Setup  # type: ignore[import-not-found,unused-ignore]
    from llamacpp_worker import LlamaCpp  # type: ignore[import-not-found,unused-ignore]

    setup = Setup(
        target=str(resolve(options.model)),
        draft=None,
        modes=("plain",),
        precision="gguf",
        k=0,
        max_batch=options.rows,
        max_tokens_of_row=options.positions + options.tokens + ROOM,
        threads=torch.get_num_threads(),
        options={"cache_type": options.sides[0]},
    )
    run = LlamaCpp(setup).run("plain", [random_prompt(options.positions)] * options.rows, options.tokens, 0)
    return {"prefill_s": run.prefill_s, "decoding_s": run.total_s - run.prefill_s}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--positions", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["auto", "int8"])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_paceline(options) if options.sides[0] in OURS else run_llama(options)))
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in options.sides}
    command = [sys.executable, "-m", "benchmarks.long_decoding", options.model, "--child"]
    command += [f"--{name}={getattr(options, name)}" for name in ("rows", "positions", "tokens")]
    for _ in range(options.repeats):
        for side in options.sides:
            child = subprocess.run([*command, "--sides", side], stdout=subprocess.PIPE, text=True, check=True)
            run = json.loads(child.stdout.splitlines()[-1])
            found[side].append(run)
            speed = options.rows * (options.tokens - 1) / run["decoding_s"]
            print(f"{side:5} prompt {run['prefill_s']:7.1f} s   decoding {speed:6.1f} tokens/s", flush=True)
    what = {"model": options.model, "rows": options.rows, "positions": options.positions, "tokens": options.tokens}
    what |= {"machine": machine(), "versions": versions(), "sides": found}
    if options.output is not None:
        options.output.write_text(json.dumps(what) + "\n")
    print(json.dumps(what))


if __name__ == "__main__":
    main()
