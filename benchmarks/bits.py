"""Compare tokens bit for bit: they must not depend on the batch or on the way of speculating.

    python benchmarks/bits.py smollm2-135m --prompts 64 --max-tokens 128
    python benchmarks/bits.py qwen-coder-1.5b.gguf --draft-model qwen-coder-0.5b.gguf --prompts 16 --max-tokens 64
    python benchmarks/bits.py smollm2-135m --draft-model smollm2-135m-head --drafter hybrid --widths 1,2,4
    python benchmarks/bits.py smollm2-135m --precisions int8,int4 --sets avx2,avx512-bw,avx512-vnni

The reference is plain decoding, each prompt alone. It is compared with batches of random size in random order, each of
one of the widths, with a random speculation length every round (0 included), greedy and with coupled sampling at
temperature 0.8, in every precision given. `--precisions` and `--temperatures` split a long run into calls with the same
outcomes. `--sets` runs the comparison once on each of these instruction sets of the CPU kernels; the sequences of int8
and int4 must also be the same on all of them. The last line is one JSON document; the exit code is 1 if any sequence
differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import get_args

from paceline import LLM, SamplingParams
from paceline.config import QuantizationName
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.hardware import cpu_name
from paceline.kernels import native
from paceline.lengths import LengthPolicy
from paceline.tools.bench.prompts import COPYING, OPEN

LONGEST = 6
TEXTS = [*COPYING, *OPEN]


class RandomLength(LengthPolicy):
    """A random length every round, 0 included."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, batch: Batch) -> SpeculationPlan:
        return SpeculationPlan(self._random.randint(0, LONGEST))


@dataclass
class Outcome:
    """One instruction set, precision and sampling mode: sequences compared and equal, acceptance, their SHA-256."""

    kernels: str
    precision: str
    sampling: str
    sequences: int
    equal: int
    tokens: int
    acceptance_rate: float | None
    seconds: float
    digest: str


def _texts(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)]


def compare(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], seed: int, widths: Sequence[int] = (1,)
) -> tuple[int, float | None, str]:
    """Count sequences equal to plain decoding alone; also returns the acceptance rate and a digest of the sequences."""
    alone = llm.plain().with_options(max_batch_size=1)
    reference = [_texts(alone, [prompt], [p])[0] for prompt, p in zip(prompts, params, strict=True)]
    order = list(range(len(prompts)))
    chance = random.Random(seed)
    chance.shuffle(order)
    found: dict[int, list[int]] = {}
    drafted = accepted = 0
    while order:
        group = [order.pop() for _ in range(min(len(order), chance.randint(2, 16)))]
        mixed = llm.with_options(
            max_batch_size=max(1, len(group) - chance.randint(0, 2)),
            prefill_chunk=chance.choice([16, 64, 512]),
            speculation_width=chance.choice(widths),
        )
        mixed.engine.use_policy(RandomLength(chance.randrange(2**31)))
        results = mixed.generate([prompts[i] for i in group], [params[i] for i in group], use_tqdm=False)
        for i, result in zip(group, results, strict=True):
            found[i] = result.outputs[0].token_ids
            drafted += result.outputs[0].metrics.drafted
            accepted += result.outputs[0].metrics.accepted
    equal = sum(found[i] == reference[i] for i in range(len(prompts)))
    digest = hashlib.sha256(json.dumps(reference).encode()).hexdigest()[:16]
    return equal, accepted / drafted if drafted else None, digest


def different_between_sets(outcomes: Sequence[Outcome]) -> list[str]:
    """The precisions and sampling modes whose sequences differ between instruction sets; bfloat16 may."""
    digests: dict[str, set[str]] = {}
    for outcome in outcomes:
        if outcome.precision in get_args(QuantizationName):
            digests.setdefault(f"{outcome.precision}, {outcome.sampling}", set()).add(outcome.digest)
    return [name for name, found in digests.items() if len(found) > 1]


def _outcomes_of_sets(names: Sequence[str]) -> list[Outcome]:
    """The outcomes of this script's arguments on each set, in a process of its own."""
    done = []
    for name in names:
        command, environment = [sys.executable, *sys.argv, "--sets", ""], os.environ | {native.VARIABLE: name}
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False).stdout
        done += [Outcome(**outcome) for outcome in json.loads(output.splitlines()[-1])["outcomes"]]
    return done


def _outcomes(arguments: argparse.Namespace) -> list[Outcome]:
    done = []
    kernels = native.select()
    for precision in arguments.precisions.split(","):
        quantization = precision if precision in get_args(QuantizationName) else None
        llm = LLM(
            arguments.model,
            arguments.draft_model,
            drafter=arguments.drafter or ("model" if arguments.draft_model else "ngram"),
            num_speculative_tokens=LONGEST,
            dtype="float32" if precision == "float32" else "bfloat16",
            quantization=quantization,
            max_batch_size=16,
            max_model_len=1024,
        )
        print(llm.engine.describe(), file=sys.stderr)
        tokenizer = llm.requests.tokenizer
        prompts = [tokenizer.encode(TEXTS[i % len(TEXTS)] + " " * (i // len(TEXTS))) for i in range(arguments.prompts)]
        for temperature in map(float, arguments.temperatures.split(",")):
            params = [
                SamplingParams(temperature=temperature, seed=i, max_tokens=arguments.max_tokens, ignore_eos=True)
                for i in range(arguments.prompts)
            ]
            began = time.perf_counter()
            widths = [int(width) for width in arguments.widths.split(",")]
            equal, rate, digest = compare(llm, prompts, params, arguments.seed, widths)
            sampling = "greedy" if temperature == 0 else f"coupled, temperature {temperature}"
            seconds = round(time.perf_counter() - began, 1)
            tokens = len(prompts) * arguments.max_tokens
            name = kernels.name if kernels else "off"
            done.append(Outcome(name, precision, sampling, len(prompts), equal, tokens, rate, seconds, digest))
            print(done[-1], file=sys.stderr)
    return done


def main() -> None:
    """Parse, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft-model")
    parser.add_argument("--drafter", help="default: the draft model, or n-gram lookup without one")
    parser.add_argument("--widths", default="1", help="tree widths; batches take turns")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--precisions", default="int8,bfloat16")
    parser.add_argument("--temperatures", default="0,0.8", help="greedy, and sampled with seeds")
    parser.add_argument("--sets", default="", help="instruction sets (default: the one that PACELINE_KERNELS selects)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    done = _outcomes_of_sets(arguments.sets.split(",")) if arguments.sets else _outcomes(arguments)
    report = {"machine": cpu_name(), "model": arguments.model, "draft_model": arguments.draft_model}
    print(json.dumps(report | {"outcomes": [asdict(outcome) for outcome in done]}))
    if different := different_between_sets(done):
        print(f"the instruction sets' sequences differ: {different}", file=sys.stderr)
    sys.exit(bool(different) or any(outcome.equal < outcome.sequences for outcome in done))


if __name__ == "__main__":
    main()
