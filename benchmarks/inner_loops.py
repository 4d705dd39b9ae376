"""Instructions and predicted cycles of the matrix products' inner loops: ``python -m benchmarks.inner_loops SET ...``.

For instruction sets that this machine does not have, and where nothing can be timed. Compiles the set's kernels, finds
    the loop of each block of rows that holds the products, and counts. Cycles are llvm-mca's, for data in the L1 cache;
    it models neither branch prediction nor memory. Needs objdump and llvm-mca of the set's kind of CPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.kernels import build


@dataclass(frozen=True)
class Target:
    """How to compile a set, and the processors to predict it for."""

    source: str
    machine: str
    cpus: tuple[str, ...]


TARGETS = {
    "avx2": Target("kernels_avx2.cpp", "x86_64", ("haswell", "skylake", "znver3")),
    "avx-vnni": Target("kernels_avxvnni.cpp", "x86_64", ("alderlake",)),
    "avx512-bw": Target("kernels_avx512bw.cpp", "x86_64", ("skylake-avx512",)),
    "avx512-vnni": Target("kernels_avx512.cpp", "x86_64", ("icelake-server", "znver4")),
    "avx512-vnni-bf16": Target("kernels_avx512bf16.cpp", "x86_64", ("znver4",)),
    "neon-dotprod": Target("kernels_dotprod.cpp", "aarch64", ("neoverse-n1", "neoverse-n2")),
    "neon-i8mm-bf16": Target("kernels_i8mm.cpp", "aarch64", ("neoverse-n2",)),
}
TOOLS = {"x86_64": ("g++", "objdump"), "aarch64": ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-objdump")}
# Multiply-adds of an instruction per byte of its register. Of several kinds in a loop the first one counts: a nibble's
# sums, for example, are widened by vpmaddwd.
PRODUCTS: tuple[dict[str, float], ...] = (
    {"vpdpbusd": 1, "usmmla": 2, "sdot": 1, "bfmmla": 1},
    {"vpmaddubsw": 1},
    {"vpmaddwd": 0.5, "vdpbf16ps": 0.5},
    {"vfmadd132ps": 0.25, "vfmadd213ps": 0.25, "vfmadd231ps": 0.25, "fmla": 0.25},
)
_BLOCK = re.compile(r"(Int8|Int4|Bf16)Block<(\d+), true>::run")
_JUMP = re.compile(r"^(?:j\w+|b\.\w+|cbn?z|tbn?z)\s+(?:[wx]\d+, )?(?:#\d+, )?(?:0x)?([0-9a-f]+)\b")


@dataclass(frozen=True)
class Loop:
    """An inner loop: its instructions and multiply-adds."""

    instructions: list[str]
    multiply_adds: float


def compiled(target: Target, folder: Path) -> Path:
    """The object file of a set's kernels."""
    source = build.SOURCES / target.source
    flags = {source: build.files_for(target.machine, newer=True)[source]}
    return Path(build.compile_files(TOOLS[target.machine][0], flags, folder, ())[0])


def functions(target: Target, code: Path) -> dict[str, list[tuple[int, str]]]:
    """Name of each block's function -> addresses and instructions."""
    command = [TOOLS[target.machine][1], "-d", "-C", "--no-show-raw-insn", str(code)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[tuple[int, str]]] = {}
    lines: list[tuple[int, str]] = []
    for line in listing.splitlines():
        if start := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            block = _BLOCK.search(start[1])
            lines = found.setdefault(f"{block[1]} {int(block[2]):2}", []) if block else []
        elif instruction := re.match(r"^\s+([0-9a-f]+):\s+(.*)$", line):
            text = re.sub(r"\s*(?:<.*>|#.*|//.*)$", "", instruction[2]).replace("\t", " ").replace("{vex} ", "")
            lines.append((int(instruction[1], 16), text.strip()))
    return found


def inner_loop(instructions: list[tuple[int, str]]) -> Loop:
    """The innermost loop with the most multiply-adds; only loops that prefetch are of a product."""
    index = {address: i for i, (address, _) in enumerate(instructions)}
    spans = []
    for i, (_, text) in enumerate(instructions):
        jump = _JUMP.match(text)
        start = index.get(int(jump[1], 16)) if jump else None
        if start is not None and start <= i:
            spans.append((start, i))
    inner = [a for a in spans if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
    texts = ([text for _, text in instructions[first : last + 1]] for first, last in inner)
    loops = [Loop(each, multiply_adds(each)) for each in texts if any("prf" in t or "prefetch" in t for t in each)]
    return max(loops, key=lambda loop: loop.multiply_adds, default=Loop([], 0))


def multiply_adds(instructions: list[str]) -> float:
    """Multiply-adds of a loop's products."""
    for kinds in PRODUCTS:
        counts = [kinds.get(text.split()[0], 0) * _register_bytes(text) for text in instructions]
        if any(counts):
            return sum(counts)
    return 0


def _register_bytes(text: str) -> int:
    return 64 if "zmm" in text else 32 if "ymm" in text else 16


def cycles(loop: Loop, machine: str, cpu: str) -> float:
    """Predicted cycles of one pass through the loop."""
    body = [text for text in loop.instructions if not _JUMP.match(text)]
    vex = machine == "x86_64" and not any("zmm" in text for text in body)
    assembly = "\n".join(text.replace("vpdpbusd", "{vex} vpdpbusd") if vex else text for text in body)
    command = ["llvm-mca", f"-mtriple={machine}", f"-mcpu={cpu}", "-iterations=200"]
    done = subprocess.run(command, input=assembly, capture_output=True, text=True, check=True)
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    assert total is not None
    return int(total[1]) / 200


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line per set and block."""
    parser = argparse.ArgumentParser(description="Instructions and predicted cycles of the inner loops.")
    parser.add_argument("sets", nargs="+", choices=TARGETS)
    for name in parser.parse_args(arguments).sets:
        target = TARGETS[name]
        with tempfile.TemporaryDirectory() as folder:
            blocks = functions(target, compiled(target, Path(folder)))
        for block, instructions in sorted(blocks.items()):
            loop = inner_loop(instructions)
            if not loop.multiply_adds:
                sys.exit(f"{name} {block}: no loop with products found")
            per_64 = 64 * len(loop.instructions) / loop.multiply_adds
            rates = (f"{loop.multiply_adds / cycles(loop, target.machine, cpu):.1f} on {cpu}" for cpu in target.cpus)
            print(
                f"{name:16} {block} rows: {per_64:5.1f} instructions per 64 multiply-adds; per cycle {', '.join(rates)}"
            )


if __name__ == "__main__":
    main()
