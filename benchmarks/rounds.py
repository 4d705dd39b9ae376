"""The parts of a round's time: ``PYTHONPATH=src:. python -m benchmarks.rounds MODEL``; prints a JSON document last.

A batch of the built-in prompts is decoded, plainly or with n-gram drafts, and every part of the loop is timed without
the parts inside it. Rounds run on the host, where parts can be separated; the forward pass is divided by the kernels'
own clocks (of the first thread). Results are the mean of the faster half of the rounds, which other processes disturbed
least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, get_args

import torch

from paceline.config import DrafterName, QuantizationName, SamplingParams
from paceline.core.hardware import cpu_name
from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Engine, Request
from paceline.errors import ParameterError
from paceline.kernels import native
from paceline.llm import LLM
from paceline.models.native.model import NativeModel
from paceline.tools.bench.prompts import COPYING

PRODUCTS, ATTENTION = native.PHASES[2], native.PHASES[4]
HEAD, CALL = "matrix products (head)", "call of the forward pass"
WARM_UP_ROUNDS = 4
MOST_OUTSIDE = 0.15  # of a round's time, outside of matrix products and attention


class Clock:
    """Times nested calls, each without the calls inside it: ``seconds`` by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = [0.0]

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._inside.append(0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.add(name, took - self._inside.pop())
            self._inside[-1] += took

    def watch(self, owner: object, method: str, name: str) -> None:
        """Count all further calls of this object's method under ``name``."""
        inner: Callable[..., Any] = getattr(owner, method)

        @wraps(inner)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.part(name):
                return inner(*arguments, **options)

        setattr(owner, method, timed)


def watch_engine(engine: Engine, clock: Clock) -> None:
    """Time every part of an engine's loop."""
    parts, scheduler = engine.parts, engine.scheduler
    for owner, method, name in (
        (engine, "step", "engine and round"),
        (scheduler, "admit", "admit and prefill"),
        (scheduler, "process_outputs", "process outputs"),
        (parts.policy, "choose", "length policy"),
        (parts.policy, "observe", "length policy"),
        (parts.drafter, "propose", "draft"),
        (parts.drafter, "observe", "draft"),
        (parts, "accept", "accept"),
        (engine.batch, "commit", "commit"),
        (parts.target, "verify", "decoder"),
        (parts.target.model, "forward", CALL),
        (parts.target.model, "logits", HEAD),
    ):
        clock.watch(owner, method, name)


@dataclass(frozen=True)
class Profile:
    """Milliseconds per round, by part; tokens per round over all rows."""

    model: str
    kernels: str
    precision: str
    batch_size: int
    k: int
    temperature: float
    rounds: int
    tokens_a_round: float
    round_ms: float
    parts_ms: dict[str, float]

    @property
    def outside(self) -> float:
        """Fraction of a round's time outside of matrix products and attention."""
        inside = sum(self.parts_ms.get(name, 0.0) for name in (PRODUCTS, ATTENTION, HEAD))
        return 1 - inside / self.round_ms

    def as_json(self) -> dict[str, Any]:
        return self.__dict__ | {"outside_of_products_and_attention": round(self.outside, 4), "machine": cpu_name()}


def profile(llm: LLM, batch_size: int, k: int, params: SamplingParams) -> Profile:
    """Decode ``batch_size`` prompts; only rounds in which all of them decode count."""
    drafter: DrafterName | None = "ngram" if k else None
    engine = llm.with_options(drafter=drafter, num_speculative_tokens=k, max_batch_size=batch_size).engine
    engine.rounds.choice.kernels = None
    model = engine.models.target
    if not isinstance(model, NativeModel):
        raise ParameterError("model", model.name, "one that runs on the CPU kernels (dtype bfloat16, or quantized)")
    tokenizer = llm.requests.tokenizer
    outputs = [engine.add(Request(tokenizer.encode(COPYING[row % len(COPYING)]), params)) for row in range(batch_size)]
    warm_up(engine, outputs, WARM_UP_ROUNDS)
    before = sum(len(output.outputs[0].token_ids) for output in outputs)
    rounds = _run_rounds(engine, model, batch_size)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs) - before
    parts = _faster_half(rounds)
    return Profile(
        model=Path(model.name).name,
        kernels=model.kernels,
        precision=model.quantization or "bf16",
        batch_size=batch_size,
        k=k,
        temperature=params.temperature,
        rounds=len(rounds),
        tokens_a_round=round(tokens / len(rounds), 2),
        round_ms=round(sum(parts.values()), 3),
        parts_ms=dict(sorted(parts.items(), key=lambda part: -part[1])),
    )


def warm_up(engine: Engine, outputs: Sequence[RequestOutput], rounds: int) -> None:
    """Step until all rows decode, then ``rounds`` more times. Raises ParameterError if a row ends meanwhile."""
    while rounds or len(engine.scheduler.running) < len(outputs):
        rounds -= len(engine.scheduler.running) == len(outputs)
        engine.step()
        if any(output.finished for output in outputs):
            longest = max(len(output.outputs[0].token_ids) for output in outputs)
            raise ParameterError("max_tokens", longest, "more tokens; a row ended before the warm-up did")


def _run_rounds(engine: Engine, model: NativeModel, batch_size: int) -> list[dict[str, float]]:
    """Run rounds until the first row has finished: the seconds of each round's parts."""
    clock, rounds = Clock(), []
    watch_engine(engine, clock)
    model.timed = True
    while len(engine.scheduler.running) == batch_size:
        clock.seconds = {}
        model.seconds.zero_()
        engine.step()
        inside = dict(zip(native.PHASES, model.seconds.tolist(), strict=True))
        clock.add(CALL, -sum(inside.values()))
        rounds.append(clock.seconds | inside)
    model.timed = False
    engine.clear()
    return rounds


def _faster_half(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Mean milliseconds of every part."""
    fast = sorted(rounds, key=lambda parts: sum(parts.values()))[: (len(rounds) + 1) // 2]
    return {name: round(1e3 * statistics.fmean(parts[name] for parts in fast), 4) for name in fast[0]}


def table(profile: Profile) -> str:
    """One line per part: milliseconds per round and fraction."""
    head = (
        f"{profile.model} {profile.precision} on {profile.kernels}, {profile.batch_size} rows, k = {profile.k}, "
        f"temperature {profile.temperature:g}: {profile.round_ms:.2f} ms and {profile.tokens_a_round} tokens per round"
    )
    lines = [f"  {ms:9.3f} ms {ms / profile.round_ms:6.1%}  {name}" for name, ms in profile.parts_ms.items()]
    return "\n".join([head, *lines, f"  outside of matrix products and attention: {profile.outside:.1%}"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Load, decode, print; exit code 1 if more than 15 % of any round lies outside of products and attention."""
    parser = argparse.ArgumentParser(description="The parts of a round's time.")
    parser.add_argument("model")
    parser.add_argument("--quantization", choices=[*get_args(QuantizationName), "none"], default="int8")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[0, 2], help="speculation lengths; drafts by n-gram lookup"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    precision: QuantizationName | None = None if options.quantization == "none" else options.quantization
    llm = LLM(options.model, quantization=precision, dtype="bfloat16", max_model_len=1024, max_batch_size=1)
    profiles = []
    for temperature in options.temperatures:
        params = SamplingParams(temperature=temperature, seed=0, max_tokens=options.max_tokens, ignore_eos=True)
        for k in options.lengths:
            profiles.append(profile(llm, options.batch_size, k, params))
            _say(table(profiles[-1]))
    _say(json.dumps({"profiles": [one.as_json() for one in profiles]}))
    sys.exit(any(one.outside > MOST_OUTSIDE for one in profiles))


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
