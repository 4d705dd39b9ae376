"""Long prompts: what reading them takes and what of that is attention; the first token with parts of them in the store.

    PYTHONPATH=src:. python -m benchmarks.long_prompts read --layers 4 --positions 4096 16384
    PYTHONPATH=src:. python -m benchmarks.long_prompts reuse qwen-coder-0.5b.gguf --positions 4096 16384

``read``: RANDOM WEIGHTS in int8, some layers of a shape, chunks of 512 tokens. The floor of a prompt is the products of
its tokens at an empty cache, and attention's multiply-adds at the speed of torch's bfloat16 product on these threads.
The last layer only stores keys and values, as in an engine's prefill.
``reuse``: the engine, greedy, one prompt at a time; the part in the store is the beginning of an earlier prompt.
The last line of stdout is every repeat's seconds, as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.kernels import SHAPES, Shape, random_spec

from paceline import LLM, SamplingParams
from paceline.core.nodes import Nodes
from paceline.models.base import cache_of
from paceline.models.native.model import NativeModel
from paceline.tools.bench.offline import machine, versions

CHUNK = 512
IN_STORE = (0.0, 0.5, 0.95)


def torch_product_speed() -> float:
    """Return the multiply-adds a second of torch's bfloat16 product of square matrices: the best of ten."""
    left, right = (torch.randn(2048, 2048).bfloat16() for _ in range(2))
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - start)
    return 2048**3 / min(seconds)


def read_prompt(model: NativeModel, tokens: int) -> dict[str, float]:
    """Return the seconds of reading a prompt: in all, of attention, and of a chunk's products at an empty cache."""
    cache = cache_of(model, 1, tokens)
    model.timed, found = True, {"products_of_first_chunk": 0.0}
    model.seconds.zero_()
    began = time.perf_counter()
    for start in range(0, tokens, CHUNK):
        chunk = torch.arange(start, min(start + CHUNK, tokens))
        model.fill(Nodes(chunk % model.vocab_size, torch.zeros_like(chunk), chunk), cache)
        if start == 0:
            found["products_of_first_chunk"] = model.seconds[:-1].sum().item()
    return found | {"all": time.perf_counter() - began, "attention": model.seconds[-1].item()}


def read(options: argparse.Namespace) -> dict[str, Any]:
    """Measure ``read``."""
    whole = SHAPES[options.shape]
    shape = Shape(**vars(whole) | {"layers": options.layers, "vocab_size": 4096})
    model = NativeModel(random_spec(shape, max(options.positions)), "random weights", quantization="int8")
    peak, found = torch_product_speed(), []
    read_prompt(model, 2 * CHUNK)  # touches the weights
    print(f"torch's bfloat16 product: {peak / 1e9:.0f} G multiply-adds a second")
    print("tokens  seconds  tokens/s  attention  over the floor, attention over its own")
    for tokens in options.positions:
        repeats = [read_prompt(model, tokens) for _ in range(options.repeats if tokens < 32768 else 1)]
        middle = sorted(repeats, key=lambda each: each["all"])[len(repeats) // 2]
        pairs = tokens * (tokens + 1) / 2
        attention_floor = 2 * (shape.layers - 1) * shape.heads * shape.head_dim * pairs / peak
        floor = middle["products_of_first_chunk"] * tokens / CHUNK + attention_floor
        share, over = middle["attention"] / middle["all"], middle["all"] / floor
        own = middle["attention"] / attention_floor
        print(
            f"{tokens:6} {middle['all']:8.2f} {tokens / middle['all']:9.0f} {share:10.0%} {over:10.2f} {own:13.2f}",
            flush=True,
        )
        found.append({"tokens": tokens, "seconds": repeats, "floor": floor, "attention_floor": attention_floor})
    return {"shape": options.shape, "layers": options.layers, "peak": peak, "prompts": found}


def reuse(options: argparse.Namespace) -> dict[str, Any]:
    """Measure ``reuse``."""
    llm = LLM(
        options.model, quantization="int8", max_model_len=max(options.positions) + 64, max_batch_size=2, use_tqdm=False
    )
    params, found, chance = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), [], random.Random(0)
    print("tokens   in the store: first token in seconds")
    for tokens in options.positions:
        seconds: dict[float, list[float]] = {share: [] for share in IN_STORE}
        for _ in range(options.repeats):
            earlier: list[int] = []
            for share in IN_STORE:
                kept = int(share * tokens)
                fresh = [chance.randrange(1000, 20000) for _ in range(tokens - kept)]
                output = llm.generate([earlier[:kept] + fresh], params, use_tqdm=False)[0]
                seconds[share].append(output.outputs[0].metrics.time_to_first_token or 0.0)
                assert output.cached_tokens >= kept - 64, "the beginning was not in the store"  # whole pages are
                earlier = earlier or fresh
        told = "   ".join(f"{share:.0%}: {statistics.median(each):.2f}" for share, each in seconds.items())
        print(f"{tokens:6}   {told}", flush=True)
        found.append({"tokens": tokens, "first_token_seconds": {str(share): each for share, each in seconds.items()}})
    llm.close()
    return {"model": options.model, "prompts": found}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("read", "reuse"))
    parser.add_argument("model", nargs="?", help="of reuse")
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=4, help="of read, at least 2")
    parser.add_argument("--positions", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--repeats", type=int, default=3, help="of prompts shorter than 32,768 tokens")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = read(options) if options.what == "read" else reuse(options)
    what = {"machine": machine(), "versions": versions()} | found
    if options.output is not None:
        options.output.write_text(json.dumps(what) + "\n")
    print(json.dumps(what))


if __name__ == "__main__":
    main()
