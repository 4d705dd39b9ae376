"""The GPU path runs from the source tree with torch, triton, transformers and few other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"
SCRIPT = """
import importlib.metadata, sys

ABSENT = ("gguf", "psutil", "scipy", "accelerate", "uvicorn", "fastapi", "pydantic", "prometheus_client", "llguidance")
sys.modules.update(dict.fromkeys(ABSENT))  # None: importing them fails as if they were not installed
version = importlib.metadata.version
def no_paceline(name):
    if name == "paceline":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = no_paceline

import paceline.engine.engine, paceline.engine.rounds.program, paceline.engine.rounds.loop
import paceline.models.torch.transformer, paceline.models.description.weights
"""


def test_the_engine_runs_with_few_packages() -> None:
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
