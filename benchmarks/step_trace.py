"""Count the files entered and the Python calls made by one steady step of the engine.

    python -m benchmarks.step_trace [MODEL]

A steady step is one in which no row joins or leaves: length policy, draft, verify, accept, commit, bookkeeping. It is
counted after a warm-up, for plain decoding, a draft model with k = 4, the same with ``auto``, and n-gram lookup with
``auto``. MODEL is its own draft model. Counts do not depend on the clock, except that ``auto`` times its rounds.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import paceline
from paceline.config import EngineOptions, SamplingParams
from paceline.engine.engine import Engine, Request

SOURCE = Path(paceline.__file__).parent
WARM_UP = 3  # steps
STEPS = 5

ENGINES: dict[str, EngineOptions] = {
    "plain": {"drafter": None, "num_speculative_tokens": 0},
    "draft model, k = 4": {"drafter": "model", "num_speculative_tokens": 4},
    "draft model, auto": {"drafter": "model", "num_speculative_tokens": "auto"},
    "n-gram, auto": {"drafter": "ngram", "num_speculative_tokens": "auto"},
}


def calls_of(run: Callable[[], Any]) -> Counter[str]:
    """Calls of the package's own functions while ``run`` runs, by file."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            calls[str(path.relative_to(SOURCE))] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def calls_of_steps(engine: Engine, prompt: list[int], steps: int = STEPS) -> Counter[str]:
    """Calls by file of some steady steps of one greedy request."""
    engine.add(Request(prompt, SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)))
    for _ in range(WARM_UP):
        engine.step()
    calls = calls_of(lambda: [engine.step() for _ in range(steps)])
    engine.clear()
    return calls


def main() -> None:
    """Print a line of counts and the files for each kind of engine."""
    from paceline import LLM

    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    for name, options in ENGINES.items():
        draft = model if options["drafter"] == "model" else None
        sized: EngineOptions = {**options, "max_batch_size": 2, "max_model_len": 512}
        llm = LLM(model, draft, **sized)
        calls = calls_of_steps(llm.engine, [5, 6, 7, 8] * 8)
        per_step = sum(calls.values()) / STEPS
        sys.stdout.write(f"{name}: {len(calls)} files, {per_step:.0f} calls a step ({', '.join(sorted(calls))})\n")


if __name__ == "__main__":
    main()
