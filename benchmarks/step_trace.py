"""Count the files entered, the Python calls and the native calls of one steady step of the engine.

    python -m benchmarks.step_trace [MODEL] [HEAD]

A steady step is one in which no row joins or leaves: length policy, draft, verify, accept, commit, bookkeeping. Only
steps that verify draft tokens are counted, apart from plain decoding's. MODEL is its own draft model, HEAD a trained
head of it. ``auto`` reads a fixed table in which drafts cost little, so that it drafts. Device rounds run uncaptured,
in torch; what their program calls is not counted, because a GPU replays it without Python.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import paceline
from paceline.config import EngineOptions, SamplingParams
from paceline.engine.engine import Engine, Request
from paceline.engine.rounds.program import RoundProgram
from paceline.kernels import native
from paceline.kernels.abi import SIGNATURES
from paceline.lengths.auto import AutoLength
from paceline.lengths.cost import CostModel, CostTable

SOURCE = f"{Path(paceline.__file__).parent}/"
WARM_UP = 4  # steps; the first one gives the first token, without a round
STEPS = 8
PROMPT = [5, 6, 7, 8] * 8

ENGINES: dict[str, EngineOptions] = {
    "plain": {"drafter": None, "num_speculative_tokens": 0},
    "draft model, k = 4": {"drafter": "model", "num_speculative_tokens": 4},
    "draft model, auto": {"drafter": "model", "num_speculative_tokens": "auto"},
    "n-gram, auto": {"drafter": "ngram", "num_speculative_tokens": "auto"},
    "head, k = 4": {"drafter": "feature", "num_speculative_tokens": 4},
    "head, auto": {"drafter": "feature", "num_speculative_tokens": "auto"},
    "device round, k = 4": {
        "drafter": "model",
        "num_speculative_tokens": 4,
        "rounds": "device",
        "attention": "padded",
    },
}

# Drafts that cost little beside a plain round; in milliseconds, see CostTable.
CHEAP_DRAFTS = CostTable((1,), (0, 8), 256, ((10.0, 10.8),), (0.0,), (0.1,))


class FixedCosts(CostModel):
    """Costs of a table that real rounds do not correct, so that counts do not depend on the machine."""

    def observe(self, rows: int, draft_tokens: int, context: float, ms: float, kind: Hashable = None) -> None:
        pass

    def observe_draft(self, rows: int, passes: int, ms: float) -> None:
        pass


class Trace(NamedTuple):
    """Calls of the package's own functions by file, and calls of the CPU kernels' library by function."""

    python: Counter[str]
    native: Counter[str]

    def __add__(self, other: object) -> Trace:
        assert isinstance(other, Trace)
        return Trace(self.python + other.python, self.native + other.native)


@contextmanager
def _counted_library(calls: Counter[str]) -> Iterator[None]:
    """Within the context, count the calls of the functions of the CPU kernels' library."""
    kernels = native.select()
    library = None if kernels is None else kernels.library
    functions = {} if library is None else {name: getattr(library, name) for name in SIGNATURES}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return call

    for name, function in functions.items():
        setattr(library, name, counted(name, function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(library, name, function)


def trace_of(run: Callable[[], Any]) -> Trace:
    """Count the calls that are made while ``run`` runs."""
    trace = Trace(Counter(), Counter())

    inside = [False]

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code is RoundProgram.run.__code__ and event in ("call", "return"):
            inside[0] = event == "call"
        if event == "call" and not inside[0] and code.co_filename.startswith(SOURCE):
            trace.python[code.co_filename.removeprefix(SOURCE)] += 1

    with _counted_library(trace.native):
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
    return trace


def traces_of_steps(engine: Engine, prompt: list[int], steps: int = STEPS) -> list[Trace]:
    """Return a trace of each of some steady steps of one greedy request; without plain rounds if any step drafts."""
    engine.add(Request(prompt, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)))
    for _ in range(WARM_UP):
        engine.step()
    traces: list[Trace] = []
    drafting: list[Trace] = []
    for _ in range(steps):
        trace = trace_of(engine.step)
        traces.append(trace)
        if engine.last_verdict is not None and max(engine.last_verdict.drafted) > 0:
            drafting.append(trace)
    engine.clear()
    return drafting or traces


def described(name: str, traces: list[Trace]) -> str:
    """One line: files, Python calls and native calls of a step, on average."""
    total = sum(traces[1:], traces[0])
    python, library = sum(total.python.values()) / len(traces), sum(total.native.values()) / len(traces)
    functions = ", ".join(f"{name} {count / len(traces):.1f}" for name, count in total.native.items())
    files = ", ".join(f"{name} {count / len(traces):.0f}" for name, count in total.python.most_common())
    return (
        f"{name}: {len(total.python)} files, {python:.0f} calls, {library:.1f} native calls a step"
        f" ({functions or 'none'}; {len(traces)} steps; {files})"
    )


def main() -> None:
    """Print a line of counts and the files for each kind of engine."""
    from paceline import LLM

    model, head = [*sys.argv[1:], *("smollm2-135m", "smollm2-135m-head")[len(sys.argv) - 1 :]]
    drafts = {"model": model, "feature": head}
    loaded: dict[tuple[object, object], LLM] = {}
    for name, options in ENGINES.items():
        sized: EngineOptions = {**options, "max_batch_size": 2, "max_model_len": 512}
        draft = drafts.get(str(options["drafter"]))
        key = draft, options.get("attention")
        if key not in loaded:
            loaded[key] = LLM(model, draft, **sized)
        engine = loaded[key].with_options(**sized).engine
        if isinstance(engine.parts.policy, AutoLength):
            engine.parts.policy.costs = FixedCosts(CHEAP_DRAFTS)
        sys.stdout.write(described(name, traces_of_steps(engine, PROMPT)) + "\n")


if __name__ == "__main__":
    main()
