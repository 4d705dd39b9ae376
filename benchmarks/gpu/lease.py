"""All figures of a device that is available for 13 minutes: resumable parts, the most important first.

Each part is one of this package's commands (or the tests) in a process of its own, with a time budget, and updates its
document as it runs. A call runs the parts that have not run and fit; the next call continues.
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
DONE = "done.json"  # in the folder: exit codes of the parts that have run
CUT_OFF = 124  # exit code of a part that was stopped for lack of time
_SPARE = 20.0  # seconds: a part builds its models before its own budget starts, and frees them after it
_PYTEST = ("-c", "/dev/null", "--rootdir", ".", "--import-mode=importlib", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Part:
    """arguments: of python. budget: longest time in seconds; least: it does not start with fewer seconds left.

    benchmark: whether it takes --device, --budget, --output and --tiny.
    """

    name: str
    arguments: tuple[str, ...]
    budget: float
    least: float
    benchmark: bool = True


def parts(*, tiny: bool) -> tuple[Part, ...]:
    """The parts in order of importance. tiny: every part with minimal work."""
    if tiny:
        return (
            _tests(("tests/kernels/gpu/test_rotary.py",), 120, 1, workers=0),
            Part("sampling", ("-m", "benchmarks.gpu.run", "sampling"), 120, 1),
            _rounds("bf16", "--pairs gpt-7.8b --formats bf16 --lengths 1", 120, 1),
            _rounds("8-bit", "--pairs llama-8b --formats int8 --lengths 1", 120, 1),
            Part("attention", ("-m", "benchmarks.gpu.run", "attention"), 120, 1),
            Part("products", ("-m", "benchmarks.gpu.run", "products"), 120, 1),
            _cores("0.01", 120, 1),
        )
    return (
        _tests(("tests/kernels/gpu/test_device.py", "tests/kernels/attention"), 120, 80),
        Part("sampling", ("-m", "benchmarks.gpu.run", "sampling"), 50, 40),
        _rounds("bf16", "--pairs llama-8b --formats bf16 --rows 8,1,32,64", 200, 120),
        _rounds("8-bit", "--pairs llama-8b --formats fp8,int4,int8 --rows 8,1,32,64", 200, 120),
        Part("attention", ("-m", "benchmarks.gpu.run", "attention"), 60, 40),
        Part("products", ("-m", "benchmarks.gpu.run", "products"), 60, 40),
        _cores("1.0", 90, 60),
    )


def _tests(where: Sequence[str], budget: float, least: float, workers: int = 8) -> Part:
    """Tests, in parallel if pytest-xdist is installed."""
    parallel = ("-n", str(workers)) if workers and importlib.util.find_spec("xdist") else ()
    return Part("tests", ("-m", "pytest", *_PYTEST, *parallel, *where), budget, least, benchmark=False)


def _cores(seconds: str, budget: float, least: float) -> Part:
    """The CPU kernels on 1, 2, 4, ... threads; the table is in the part's log."""
    arguments = ("-m", "benchmarks.cores", "measure", "--shapes", "smollm2-135m", "--seconds", seconds)
    return Part("cores", arguments, budget, least, benchmark=False)


def _rounds(name: str, options: str, budget: float, least: float) -> Part:
    return Part(f"rounds-{name}", ("-m", "benchmarks.gpu.run", "rounds", *options.split()), budget, least)


@dataclass
class Lease:
    """folder: for documents and logs. device, tiny: options of the commands. seconds: budget of this call."""

    folder: Path
    device: str
    tiny: bool
    seconds: float
    say: Callable[[str], None]

    def run(self, wanted: Sequence[Part]) -> list[str]:
        """Run the parts that have not run -> the names of those left for another call."""
        self.folder.mkdir(parents=True, exist_ok=True)
        began, done = time.monotonic(), self.done()
        for part in wanted:
            left = self.seconds - (time.monotonic() - began)
            if part.name not in done and left >= part.least:
                self._run_part(part, min(part.budget, left), done)
        return [part.name for part in wanted if part.name not in done]

    def done(self) -> dict[str, int]:
        """Exit codes of the parts that have run; 0 means success."""
        path = self.folder / DONE
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

    def _run_part(self, part: Part, seconds: float, done: dict[str, int]) -> None:
        """Run one part. A part that was stopped is retried in another call, unless it had its whole budget."""
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
