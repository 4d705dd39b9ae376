"""Counts what is promised about the code.

    python benchmarks/count_code.py [MODEL]

``isinstance`` on concrete drafters and policies, which ought to be 0.
And the files in which something runs during some steps of the engine (admission, a round, settling), warmed up: with a
fixed length and a draft model, with ``auto`` and one, with ``auto`` and copies. Of these it tells those that decide
something about draft tokens (what to draft, to verify, to keep) from those that carry it out or go with any engine:
``CARRIES`` says which and why. MODEL is its own draft model.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import paceline
from paceline.config import SamplingParams
from paceline.engine.engine import Engine, Request

SOURCE = Path(paceline.__file__).parent
WARM_UP = 3  # steps
STEPS = 5
ROOTS = {"Drafter", "LengthPolicy"}
CARRIES = {
    "engine.py": "the loop of any engine",
    "scheduler.py": "who has a row",
    "sequences.py": "an answer's tokens and its end",
    "waiting.py": "whose turn it is",
    "chunks.py": "prompts",
    "outputs.py": "what is given back",
    "params/": "values",
    "ranges.py": "values",
    "hardware.py": "threads",
    "guard.py": "errors of one request",
    "cache.py": "where keys and values lie",
    "decoder.py": "the forward pass over a cache: it reads and keeps what it is told to",
    "rows.py": "the rows' parameters as tensors",
    "nodes.py": "what a pass reads, as a list",
    "sampling.py": "a draw from logits, of plain decoding, too",
    "models/": "the forward pass",
    "attention/": "the forward pass",
    "kernels/": "calls of the C++ library",
    "gpu/": "calls of Triton",
}


def concrete_classes(source: Path) -> set[str]:
    """Names of all classes of drafters and length policies."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = set(ROOTS)
    while new := {name for name, of in bases.items() if of & found} - found:
        found |= new
    return found - ROOTS


def questions(source: Path) -> Iterator[str]:
    """Places where ``isinstance`` is called with one of them."""
    concrete = concrete_classes(source)
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                asked = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                if asked & concrete:
                    yield f"{path.relative_to(source)}:{node.lineno}: {ast.unparse(node)}"


def files_of(run: Callable[[], Any]) -> dict[str, set[str]]:
    """The package's files in which functions run, and these."""
    files: dict[str, set[str]] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            files.setdefault(str(path.relative_to(SOURCE)), set()).add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return files


def files_of_steps(engine: Engine, prompt: list[int]) -> dict[str, set[str]]:
    """The files of some steps in which no row is added or removed."""
    engine.add(Request(prompt, SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)))
    for _ in range(WARM_UP):
        engine.step()
    files = files_of(lambda: [engine.step() for _ in range(STEPS)])
    engine.clear()
    return files


def carries(file: str) -> bool:
    """Whether a file makes no decision about draft tokens."""
    return any(file == known or (known.endswith("/") and file.startswith(known)) for known in CARRIES)


def describe_step(name: str, files: dict[str, set[str]]) -> str:
    """The files of both kinds, as text."""
    decide, other = ([file for file in sorted(files) if carries(file) == kind] for kind in (False, True))
    return f"{name}: {len(decide)} files decide ({', '.join(decide)}); {len(other)} carry out ({', '.join(other)})\n"


def describe_steps(model: str) -> Iterator[str]:
    """The descriptions for the three engines."""
    from paceline import LLM

    for name, options in {
        "k = 4, a draft model": {"draft_model": model, "drafter": "model", "num_speculative_tokens": 4},
        "auto, a draft model": {"draft_model": model, "drafter": "model", "num_speculative_tokens": "auto"},
        "auto, copies": {"drafter": "ngram", "num_speculative_tokens": "auto"},
    }.items():
        llm = LLM(model, max_batch_size=2, max_model_len=512, **options)  # type: ignore[arg-type]
        yield describe_step(name, files_of_steps(llm.engine, [5, 6, 7, 8] * 8))


def main() -> None:
    """Print the counts."""
    asked = list(questions(SOURCE))
    sys.stdout.write(
        "".join(f"{line}\n" for line in asked) + f"{len(asked)} isinstance on concrete drafters, policies\n"
    )
    for text in describe_steps(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"):
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
