"""A batch file whose process is killed at random and resumed, compared with an unbroken run; and memory use.

    python -m benchmarks.batch_killed smollm2-135m --quantization int8 --lines 1000 --kills 5

Every line must be answered exactly once, with the unbroken run's answer. Memory is the process's resident set, sampled
once a second and reported for every tenth of the file: it must not grow with the number of finished lines. The first
seconds, in which weights are read, are not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from paceline.cli.document import command_line, end
from paceline.tools.bench.offline import machine, versions

TENTHS = 10
Measure = Callable[[str, list[str], int, int, Path], dict[str, Any]]  # model, options, lines, kills, folder -> results


def write_lines(path: Path, lines: int) -> None:
    """Requests of different lengths, every third one sampled; none has a seed of its own."""
    chance = random.Random(1)
    with path.open("w") as file:
        for number in range(lines):
            words = " ".join(chance.choices(("river", "stone", "seven", "green", "walks", "home", "early"), k=12))
            body = {
                "messages": [{"role": "user", "content": f"{number}. Continue: {words * chance.randrange(1, 6)}"}],
                "max_tokens": chance.randrange(4, 24),
                "temperature": 0.8 if number % 3 == 0 else 0,
            }
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def lines_in(path: Path) -> int:
    """Number of finished lines."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def answers(output: str) -> dict[str, str]:
    """The output's lines: custom_id -> the answer. Raises ValueError if one occurs twice."""
    entries = [json.loads(line) for line in output.splitlines()]
    twice = [name for name, times in Counter(entry["custom_id"] for entry in entries).items() if times > 1]
    if twice:
        raise ValueError(f"answered more than once: {twice[:5]}")
    return {e["custom_id"]: e["response"]["body"]["choices"][0]["message"]["content"] for e in entries}


class Run:
    """One process that answers the file. memory: (lines done, resident bytes), about once a second."""

    def __init__(self, command: list[str], output: Path) -> None:
        self._output, self.memory = output, list[tuple[int, int]]()
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def until(self, lines: int) -> None:
        """Wait until this number of lines is done, or the process has ended."""
        resident, looked = psutil.Process(self._process.pid), 0.0
        while self._process.poll() is None and lines_in(self._output) < lines:
            if time.monotonic() - looked >= 1:
                looked = time.monotonic()
                self.memory.append((lines_in(self._output), resident.memory_info().rss))
            time.sleep(0.02)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    def finish(self, lines: int) -> None:
        """Wait for the end. Raises RuntimeError if the process fails."""
        self.until(lines + 1)
        _, errors = self._process.communicate()
        if self._process.returncode != 0:
            raise RuntimeError(errors.decode()[-2000:])


def by_tenths(memory: list[tuple[int, int]], lines: int) -> list[int | None]:
    """The largest resident size in each tenth of the file, in bytes; None without a sample."""
    tenths = [[resident for done, resident in memory if done and done * TENTHS // lines == n] for n in range(TENTHS)]
    return [max(seen) if seen else None for seen in tenths]


def measure(model: str, options: list[str], lines: int, kills: int, folder: Path) -> dict[str, Any]:
    """An unbroken run, and one that is killed ``kills`` times."""
    source, whole, broken = (folder / name for name in ("lines.jsonl", "whole.jsonl", "broken.jsonl"))
    write_lines(source, lines)
    paceline = [sys.executable, "-m", "paceline.cli.main", "batch", str(source)]
    tail = [model, "--seed", "1", *options]
    started = time.monotonic()
    unbroken = Run([*paceline, str(whole), *tail], whole)
    unbroken.finish(lines)
    seconds = time.monotonic() - started
    chance, killed_at = random.Random(), list[int]()
    for _ in range(kills):
        run = Run([*paceline, str(broken), *tail, "--resume"], broken)
        run.until(lines_in(broken) + chance.randrange(1, lines // (kills + 1)))
        run.kill()
        killed_at.append(lines_in(broken))
    last = Run([*paceline, str(broken), *tail, "--resume"], broken)
    last.finish(lines)
    one, other = answers(whole.read_text()), answers(broken.read_text())
    return {
        "lines": lines,
        "seconds_unbroken": seconds,
        "killed_at": killed_at,
        "answered": len(other),
        "different_answers": sum(other.get(name) != text for name, text in one.items()),
        "resident_bytes_by_tenths": by_tenths(unbroken.memory, lines),
    }


def from_command_line(name: str, description: str | None, kills: int, options: list[str], measure: Measure) -> None:
    """The command line of a module of this kind. kills: default of the option. options: of ``paceline``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    options = ["--max-model-len", "512", "--max-batch-size", "16", *options]
    options += ["--quantization", asked.quantization] if asked.quantization else []
    with tempfile.TemporaryDirectory() as folder:
        found = measure(asked.model, options, asked.lines, asked.kills, Path(folder))
    about = {"command": command_line(f"python -m benchmarks.{name}"), "model": asked.model, "options": options}
    end(about | found | {"machine": machine(), "versions": versions()}, asked.output)


if __name__ == "__main__":
    from_command_line("batch_killed", __doc__, 5, ["--quiet"], measure)
