"""Every kernel compiles for sm_90 (H100, H200) without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("shapes", "kernels"), [("--few", 22), pytest.param("--all", 39, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_kernel_compiles_for_sm_90(shapes: str, kernels: int, tmp_path: Path) -> None:
    source = str(HERE.parent.parent / "src")
    own = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": source}
    command = [sys.executable, str(HERE / "compile_kernels.py"), shapes]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= kernels


def test_prompts_of_new_lengths_compile_nothing() -> None:
    """Thirty prompts after a warm-up of five, with tiles by shape and with fixed ones."""
    source = str(HERE.parent.parent / "src")
    command = [sys.executable, str(HERE / "count_compilations.py")]
    own = {"TRITON_INTERPRET": "0", "PYTHONPATH": source}
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0"], done.stderr
