"""Decoding after long prompts with caches of 16 and of 8 bits, beside llama.cpp with f16 and q8_0 caches.

    PYTHONPATH=src:. python -m benchmarks.long_decoding qwen-coder-0.5b.gguf --rows 4 --positions 16384
    PYTHONPATH=src:. python -m benchmarks.long_decoding qwen-coder-0.5b.gguf --sides f16 q8_0

Plain decoding, greedy, the same random prompt in all rows (here they share its pages; llama.cpp reads it once a row).
paceline runs the file in int8, llama.cpp (the package xllamacpp, which is not among the project's own) in the file's
own blocks. Each side runs in a process of its own. Seconds are
those between the last row's first token and the end, so reading the prompt is not in them; it is shown beside. The last
line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paceline import LLM, SamplingParams
from paceline.models.files.hub import resolve
from paceline.tools.bench.offline import machine, versions

SIDES = ("auto", "int8", "f16", "q8_0")


def random_prompt(tokens: int) -> list[int]:
    """Return the tokens of the prompt, the same for all sides."""
    chance = random.Random(0)
    return [chance.randrange(1000, 20000) for _ in range(tokens)]


def run_paceline(options: argparse.Namespace) -> dict[str, float]:
    """Run one side in this process."""
    longest = options.positions + options.tokens + 64
    llm = LLM(
        options.model,
        quantization="int8",
        drafter=None,
        kv_cache_dtype=options.sides[0],
        max_model_len=longest,
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
    """Run llama.cpp's server in this process. Raises ImportError without xllamacpp."""
    sys.path.insert(0, str(Path(__file__).parent / "peers" / "workers"))
    import llamacpp_worker as worker  # type: ignore[import-not-found,unused-ignore]
    import xllamacpp as native  # type: ignore[import-not-found,unused-ignore]

    given = native.CommonParams()
    given.model.path = str(resolve(options.model))
    given.n_parallel, given.n_ctx = options.rows, options.rows * (options.positions + options.tokens + 64)
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = torch.get_num_threads()
    kind = {"f16": native.ggml_type.GGML_TYPE_F16, "q8_0": native.ggml_type.GGML_TYPE_Q8_0}[options.sides[0]]
    given.cache_type_k = given.cache_type_v = kind
    given.flash_attn_type = native.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED  # q8_0 values need it
    given.cache_prompt, given.cache_ram_mib, given.ui, given.fit_params = False, 0, False, False
    given.n_threads_http, given.port, given.verbosity = options.rows + 2, worker._free_port(), 1
    server = native.Server(given)
    worker._wait_until_up(given.port, None)
    rows, first = [random_prompt(options.positions)] * options.rows, worker.FirstTokens()
    with worker.ThreadPoolExecutor(options.rows) as pool:
        jobs = [
            pool.submit(_llama_row, worker, given.port, row, prompt, options.tokens, first)
            for row, prompt in enumerate(rows)
        ]
        for job in jobs:
            job.result()
    del server
    return {"prefill_s": first.prefill(), "decoding_s": first.total() - first.prefill()}


def _llama_row(worker: Any, port: int, row: int, prompt: list[int], tokens: int, first: Any) -> None:
    for event in worker._completion(port, row, prompt, tokens):
        if event.get("tokens"):
            first.seen(row)


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
        run = run_paceline if options.sides[0] in ("auto", "int8") else run_llama
        print(json.dumps(run(options)))
        return
    found: dict[str, list[dict[str, float]]] = {side: [] for side in options.sides}
    sizes = [f"--{name}={getattr(options, name)}" for name in ("rows", "positions", "tokens")]
    for _ in range(options.repeats):
        for side in options.sides:
            command = [
                sys.executable,
                "-m",
                "benchmarks.long_decoding",
                options.model,
                *sizes,
                "--sides",
                side,
                "--child",
            ]
            child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[side].append(json.loads(child.stdout.splitlines()[-1]))
            run = found[side][-1]
            speed = options.rows * (options.tokens - 1) / run["decoding_s"]
            print(f"{side:5} prompt {run['prefill_s']:7.1f} s   decoding {speed:6.1f} tokens/s", flush=True)
    what = {"model": options.model, "rows": options.rows, "positions": options.positions, "tokens": options.tokens}
    what |= {"machine": machine(), "versions": versions(), "sides": found}
    if options.output is not None:
        options.output.write_text(json.dumps(what) + "\n")
    print(json.dumps(what))


if __name__ == "__main__":
    main()
