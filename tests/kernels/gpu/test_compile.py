"""Every kernel compiles without a GPU, and its registers and memory are in a committed table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from kernels.gpu.compile_kernels import overwritten_operands

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TABLE = ROOT / "docs" / "gpu-kernels.md"
CODES = HERE / "compiled.txt"
MAY_SPILL = "*fp32"  # float32 is for comparisons; its products have no tensor cores


def run(script: str, *arguments: str, **environment: str) -> str:
    """Its standard output, with kernels compiled instead of interpreted."""
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))
    own = {"TRITON_INTERPRET": "0", "PYTHONPATH": paths, **environment}
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def committed() -> dict[str, list[str]]:
    """A kernel's cells, architecture by architecture."""
    lines = re.findall(r"^\| `(.+?)` \| (.+) \|$", TABLE.read_text(), re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in lines}


def spilled(cell: str) -> int:
    """Bytes."""
    return 0 if cell == "-" else int(cell.split(" / ")[1])


def spills(cell: str) -> bool:
    return spilled(cell) > 0


def test_every_kernel_compiles_for_sm_90_and_is_in_the_table(tmp_path: Path) -> None:
    """One or two shapes of each. What is as it was when the table was written is not compiled to the end again."""
    lines = run("compile_kernels.py", "--few", TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert len(lines) >= 29
    names = {line.removeprefix("sm_90 ").rsplit(": ", 1)[0] for line in lines}
    assert names <= committed().keys(), "write the table anew: its first lines say how"
    spilling = [line.removeprefix("sm_90 ").split(": ")[0] for line in lines if spills(line.rsplit(": ", 1)[1])]
    assert set(spilling) <= {"draw"}, "see below"


LOOP = """
.L_x_0:
        /*0010*/                   LDSM.16.M88.4 R8, [R3+UR4] ;
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0 ;
        /*0040*/                   {}
        /*0050*/              @!P4 BRA `(.L_x_0) ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   IMAD.MOV.U32 R8, RZ, RZ, R2 ;
"""


@pytest.mark.parametrize(
    ("instruction", "spoilt"),
    [
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0 ;", []),
        ("BAR.SYNC 0x0 ;", ["LDSM.16.M88.4 R8, [R3+UR4]"]),  # in the loop's second pass
        (
            "@P1 IMAD.MOV.U32 R11, RZ, RZ, R2 ;",
            ["IMAD.MOV.U32 R11, RZ, RZ, R2", "LDSM.16.M88.4 R8, [R3+UR4]", "IMAD.MOV.U32 R11, RZ, RZ, R2"],
        ),
    ],
)
def test_registers_that_are_written_before_a_product_has_read_them_are_found(
    instruction: str, spoilt: list[str]
) -> None:
    """Triton 3.6 compiled such code for tiles of 128 x 128 numbers (docs/log.md)."""
    assert overwritten_operands(LOOP.format(instruction)) == spoilt


@pytest.mark.slow
def test_the_table_equals_the_compilers_output(tmp_path: Path) -> None:
    table, codes = tmp_path / "table.md", tmp_path / "compiled.txt"
    arguments = ["--all", "--arch", "80,89,90,100", "--table", str(table), "--codes", str(codes)]
    run("compile_kernels.py", *arguments, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert table.read_text() == TABLE.read_text(), "write the table anew: its first lines say how"
    assert codes.read_text() == CODES.read_text(), "write the table anew: its first lines say how"


def test_in_16_and_8_bits_four_kernels_spill_at_most_16_bytes() -> None:
    """With 147 registers ``draw`` would not spill on sm_90, but half as many programs would fit a multiprocessor.

    Attention stores its few once before the loop over keys and reads them once behind it.
    """
    found = committed()
    assert len(found) > 100
    assert {len(cells) for cells in found.values()} == {4}, "sm_80, sm_89, sm_90, sm_100"
    spilling = {name: cells for name, cells in found.items() if MAY_SPILL not in name and any(map(spills, cells))}
    may = re.compile(r"linear \*(bf|fp)16 \*|walk chunks|draw$|attend \*bf16 .* tree=ancestors$")
    assert [name for name in spilling if not may.match(name)] == []
    assert max(spilled(cell) for cells in spilling.values() for cell in cells) <= 16
    assert {name: spilled(cells[2]) for name, cells in spilling.items() if spills(cells[2])} == {
        "attend *bf16 D=64 tile=16 tree=ancestors": 4,
        "attend *bf16 D=256 tile=32 tree=ancestors": 12,
        "draw": 4,
    }, "on sm_90"


def test_prompts_and_drafts_of_new_lengths_compile_nothing() -> None:
    """Thirty prompts after a warm-up of five, with tiles by shape (8 and 4 bits) and with fixed ones;
    drafts of 0 to 16 tokens after
    0, 1, 3, 7, 15 and 16.
    """
    assert run("count_compilations.py").split() == ["0"] * 4
