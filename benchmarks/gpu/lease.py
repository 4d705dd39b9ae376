"""All figures of a device that is lent for half an hour: parts that can be taken up again, what matters most first.

Each part is one of this package's commands (or the tests) in a process of its own, with its share of the time, and
leaves its document as it grows. A call plays what has not been played and fits; the next call goes on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.files import write_text

ROOT = Path(__file__).parents[2]
DONE = "done.json"  # in the folder: the exit codes of the parts that were played
CUT_OFF = 124  # the exit code of a part that was ended for want of time
_SPARE = 20.0  # seconds: a part's models are built before its own budget is looked at, and freed after it
_PYTEST = ("-c", "/dev/null", "--rootdir", ".", "--import-mode=importlib", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Part:
    """arguments: of python. budget: seconds that it takes at most; least: with fewer it is not begun.

    benchmark: whether it takes --device, --budget, --output and --tiny.
    """

    name: str
    arguments: tuple[str, ...]
    budget: float
    least: float
    benchmark: bool = True


def parts(*, tiny: bool) -> tuple[Part, ...]:
    """In the order of their importance. tiny: every part, but of almost nothing."""
    if tiny:
        return (
            _tests(("tests/kernels/gpu/test_rotary.py",), 120, 1, workers=0),
            _rounds("bf16", "--pairs gpt-7.8b --formats bf16 --lengths 1", 120, 1),
            _rounds("8-bit", "--pairs llama-8b --formats int8 --lengths 1", 120, 1),
            Part("attention", ("-m", "benchmarks.gpu.run", "attention"), 120, 1),
            Part("products", ("-m", "benchmarks.gpu.run", "products"), 120, 1),
        )
    return (
        _tests(("tests/kernels/gpu", "tests/kernels/attention"), 400, 240),
        _rounds("bf16", "--formats bf16 --rows 8,1,32,64", 450, 400),
        _rounds("8-bit", "--pairs llama-8b --formats int8,fp8 --rows 8,1,32,64", 450, 400),
        Part("attention", ("-m", "benchmarks.gpu.run", "attention"), 120, 80),
        Part("products", ("-m", "benchmarks.gpu.run", "products"), 80, 50),
    )


def _tests(where: Sequence[str], budget: float, least: float, workers: int = 8) -> Part:
    """In parallel, where there is what runs them so."""
    parallel = ("-n", str(workers)) if workers and importlib.util.find_spec("xdist") else ()
    return Part("tests", ("-m", "pytest", *_PYTEST, *parallel, *where), budget, least, benchmark=False)


def _rounds(name: str, options: str, budget: float, least: float) -> Part:
    return Part(f"rounds-{name}", ("-m", "benchmarks.gpu.run", "rounds", *options.split()), budget, least)


@dataclass
class Lease:
    """folder: where documents and logs go. device, tiny: as the other commands take them. seconds: of this call."""

    folder: Path
    device: str
    tiny: bool
    seconds: float
    say: Callable[[str], None]

    def play(self, wanted: Sequence[Part]) -> list[str]:
        """Play what has not been played -> the names of what is left for another call."""
        self.folder.mkdir(parents=True, exist_ok=True)
        began, done = time.monotonic(), self.done()
        for part in wanted:
            left = self.seconds - (time.monotonic() - began)
            if part.name not in done and left >= part.least:
                self._play(part, min(part.budget, left), done)
        return [part.name for part in wanted if part.name not in done]

    def done(self) -> dict[str, int]:
        """Exit codes of what was played: 0 where all is well."""
        path = self.folder / DONE
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    def _play(self, part: Part, seconds: float, done: dict[str, int]) -> None:
        """What was cut off has another try, unless it had the whole of its budget."""
        self.say(f"{part.name}: at most {seconds:.0f} s")
        with (self.folder / f"{part.name}.log").open("w", encoding="utf-8") as log:
            command = [sys.executable, *part.arguments, *self._options(part, seconds)]
            paths = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests", ROOT)))
            environment = {**os.environ, "PYTHONPATH": paths}
            try:
                code = subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=seconds
                ).returncode
            except subprocess.TimeoutExpired:
                code = CUT_OFF
        self.say(f"{part.name}: exit code {code}")
        if code != CUT_OFF or seconds >= part.budget:
            done[part.name] = code
            write_text(self.folder / DONE, json.dumps(done) + "\n")

    def _options(self, part: Part, seconds: float) -> Iterator[str]:
        if part.benchmark:
            yield from ("--device", self.device, "--budget", f"{max(1.0, seconds - _SPARE):.0f}")
            yield from ("--output", str(self.folder.resolve() / f"{part.name}.json"))
            yield from ("--tiny",) if self.tiny else ()
