"""Python's share of a round: ``PYTHONPATH=src:. python -m benchmarks.python_share MODEL``; prints a JSON document last.

A batch of the built-in prompts is decoded with n-gram drafts and ``auto`` lengths. A round's time is that of
``Engine.step``; time outside of calls of the CPU kernels' library is Python's (torch's operators included). Only rounds
in which every row decodes count, and of these only the faster half, which other processes disturbed least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from benchmarks.rounds import warm_up

from paceline.config import QuantizationName, SamplingParams
from paceline.core.hardware import cpu_name
from paceline.engine.engine import Request
from paceline.errors import ParameterError
from paceline.kernels import native
from paceline.kernels.abi import SIGNATURES
from paceline.llm import LLM
from paceline.tools.bench.prompts import COPYING

WARM_UP_ROUNDS = 8
NOT_OF_A_ROUND = ("pl_pool_new", "pl_model_new", "pl_model_free", "pl_pool_free")


class NativeTime:
    """Seconds inside the library, by function."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function so that its calls are timed."""

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return timed


@contextmanager
def timed_library() -> Iterator[NativeTime]:
    """Within the context, functions looked up in the library are timed."""
    kernels = native.select()
    if kernels is None:
        raise ParameterError("PACELINE_KERNELS", "off", f"the CPU kernels; {native.why_none() or 'they are off'}")
    clock, library = NativeTime(), kernels.library
    functions = {name: getattr(library, name) for name in SIGNATURES if name not in NOT_OF_A_ROUND}
    for name, function in functions.items():
        setattr(library, name, clock.around(name, function))
    try:
        yield clock
    finally:
        for name, function in functions.items():
            setattr(library, name, function)


@dataclass(frozen=True)
class Share:
    """Per round of a run: milliseconds in the library by function and outside; tokens per round, all rows."""

    rows: int
    rounds: int
    tokens_a_round: float
    round_ms: float
    python_ms: float
    native_ms: dict[str, float]

    @property
    def python(self) -> float:
        return self.python_ms / self.round_ms

    def __str__(self) -> str:
        inside = ", ".join(f"{name} {ms:.3f}" for name, ms in self.native_ms.items())
        return (
            f"{self.rows} rows: Python's share {self.python:.1%} ({self.python_ms:.3f} of {self.round_ms:.3f} ms), "
            f"{self.tokens_a_round} tokens per round, {self.rounds} rounds ({inside})"
        )


def share_of(llm: LLM, rows: int, params: SamplingParams, clock: NativeTime) -> Share:
    """Decode ``rows`` prompts until the first has ended. Raises ParameterError if one ends too early."""
    engine = llm.with_options(drafter="ngram", num_speculative_tokens="auto", max_batch_size=rows).engine
    assert llm.tokenizer is not None
    outputs = [engine.add(Request(llm.tokenizer.encode(COPYING[row % len(COPYING)]), params)) for row in range(rows)]
    warm_up(engine, outputs, WARM_UP_ROUNDS)
    before = sum(len(output.outputs[0].token_ids) for output in outputs)
    rounds: list[dict[str, float]] = []
    while len(engine.scheduler.running) == rows:
        clock.seconds.clear()
        began = time.perf_counter()
        engine.step()
        rounds.append(clock.seconds | {"step": time.perf_counter() - began})
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs) - before
    engine.clear()
    return _mean(rows, rounds, tokens)


def _mean(rows: int, rounds: list[dict[str, float]], tokens: int) -> Share:
    """The mean over the half of the rounds with the least time outside of the library."""
    quiet = sorted(rounds, key=lambda parts: 2 * parts["step"] - sum(parts.values()))[: (len(rounds) + 1) // 2]
    mean = {
        name: round(1e3 * statistics.fmean(parts.get(name, 0.0) for parts in quiet), 4) for name in set().union(*quiet)
    }
    step = mean.pop("step")
    outside = round(step - sum(mean.values()), 4)
    return Share(rows, len(rounds), round(tokens / len(rounds), 2), step, outside, mean)


def main(arguments: Sequence[str] | None = None) -> None:
    """Load, decode, print."""
    parser = argparse.ArgumentParser(description="Python's share of a round's time.")
    parser.add_argument("model")
    parser.add_argument("--quantization", choices=[*get_args(QuantizationName), "none"], default="int8")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--max-tokens", type=int, default=384)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    precision: QuantizationName | None = None if options.quantization == "none" else options.quantization
    params = SamplingParams(temperature=options.temperature, seed=0, max_tokens=options.max_tokens, ignore_eos=True)
    shares = []
    with timed_library() as clock:
        llm = LLM(options.model, quantization=precision, dtype="bfloat16", max_model_len=1024, max_batch_size=1)
        for rows in options.rows:
            runs = [share_of(llm, rows, params, clock) for _ in range(options.repeats)]
            shares.append(sorted(runs, key=lambda run: run.python)[len(runs) // 2])
            print(shares[-1], flush=True)
    document = [asdict(share) | {"python": round(share.python, 4)} for share in shares]
    print(json.dumps({"machine": cpu_name(), "threads": torch.get_num_threads(), "shares": document}))


if __name__ == "__main__":
    main()
