"""``pool.cpp``: the pool of threads without Python, with 1 to 64 threads; pools on NUMA nodes; ranks' exchange."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.kernels import build

PROGRAM = Path(__file__).with_name("pool.cpp")

pytestmark = pytest.mark.skipif(build.compiler() is None, reason=build.what_is_missing())


def run(folder: Path, *flags: str) -> None:
    """Build the program with these flags and run it; fails with what it prints."""
    program = folder / "pool"
    sources = [PROGRAM, *(build.SOURCES / name for name in ("pool.cpp", "ranks.cpp", "system.cpp"))]
    command = [build.compiler() or "", "-std=c++17", "-O1", "-pthread", f"-I{build.SOURCES}", *flags, *sources]
    subprocess.run([*command, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_threads_share_items_wait_for_a_slow_one_and_sleep(tmp_path: Path) -> None:
    run(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("-DPL_WITHOUT_FUTEX",), id="portable"),
        pytest.param(("-fsanitize=thread", "-g"), id="tsan"),
        pytest.param(("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"), id="asan"),
    ],
)
def test_the_same_without_futexes_and_under_sanitizers(flags: tuple[str, ...], tmp_path: Path) -> None:
    run(tmp_path, *flags)
