"""The compared model pairs and peers, and how each is started. A new peer needs one entry and one worker."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENVS = ROOT / "benchmarks" / ".venvs"
RESULTS = ROOT / "benchmarks" / "results"
PLOT = ROOT / "docs" / "img" / "peers.png"

MODES = ("plain", "draft", "ngram")
OWN_MODES = (*MODES, "hybrid")  # paceline's


def models_directory() -> Path:
    """The directory of the GGUF files from get_models.sh, and of checkpoints in directories."""
    return Path(os.environ.get("PACELINE_TEST_MODELS") or "~/.cache/paceline-test-models").expanduser()


def model_source(name: str) -> Path:
    """The checkpoint or else the GGUF file of this name."""
    checkpoint = models_directory() / name
    return checkpoint if checkpoint.is_dir() else models_directory() / f"{name}.gguf"


def export_directory() -> Path:
    """The directory of the models in the peers' formats: $PACELINE_BENCH_CACHE or ~/.cache/paceline-bench."""
    return Path(os.environ.get("PACELINE_BENCH_CACHE") or "~/.cache/paceline-bench").expanduser()


@dataclass(frozen=True)
class Pair:
    """A target and optionally a draft model, by the names of their GGUF files or checkpoints."""

    target: str
    draft: str | None
    bf16_gib: dict[str, float]  # each model's weights, to plan the memory

    def modes(self) -> tuple[str, ...]:
        return OWN_MODES if self.draft is not None else ("plain", "ngram")


PAIRS = {
    "qwen": Pair("qwen-coder-1.5b", "qwen-coder-0.5b", {"qwen-coder-1.5b": 3.1, "qwen-coder-0.5b": 1.0}),
    # made by: python tests/gguf_support.py qwen-coder-1.5b.gguf qwen-coder-1.5b-q8_0.gguf Q8_0
    "qwen-q8_0": Pair("qwen-coder-1.5b-q8_0", None, {"qwen-coder-1.5b-q8_0": 3.1}),
    "smollm2": Pair("smollm2-135m", None, {"smollm2-135m": 0.3}),
    "gemma3": Pair("gemma3-270m", None, {"gemma3-270m": 0.6}),
    # made by: python -m benchmarks.random_models random-qwen3.5-0.8b --shape qwen3.5-0.8b (texts without meaning)
    "random-qwen3.5": Pair("random-qwen3.5-0.8b", None, {"random-qwen3.5-0.8b": 1.6}),
}


@dataclass(frozen=True)
class Peer:
    """An engine in one precision.

    name: in plots and results. venv: its virtual environment; None is this one. model_format: its worker's input
        ("gguf", "huggingface", "openvino", "any" of the first two). split: one worker per mode, for engines with one
        configuration per process.
    """

    name: str
    venv: str | None
    worker: str
    model_format: str
    precision: str
    split: bool = False
    modes: tuple[str, ...] = MODES
    environment: dict[str, str] = field(default_factory=dict)
    memory: float = 2.0  # memory while loading, in multiples of the weights in bf16

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.venv is None else VENVS / self.venv / "bin" / "python"

    @property
    def requirements(self) -> Path:
        return HERE / "requirements" / f"{self.venv}.txt"


OFFLINE = {"HF_HUB_OFFLINE": "1"}
PEERS = {
    "transformers": Peer(
        "transformers", "transformers", "transformers_worker.py", "huggingface", "bf16", environment=OFFLINE
    ),
    "vllm": Peer("vllm", "vllm", "vllm_worker.py", "huggingface", "bf16", split=True),
    "openvino": Peer("openvino", "openvino", "openvino_worker.py", "openvino", "int8", split=True, memory=1.5),
    "llamacpp": Peer("llamacpp", "llamacpp", "llamacpp_worker.py", "gguf", "gguf", split=True, memory=1.0),
}
PACELINE_PRECISIONS = ("bf16", "int8")
ALL_NAMES = ("paceline", *PEERS)


def chosen_peers(names: list[str], precisions: list[str]) -> list[Peer]:
    """The peers with these names; paceline once for each precision. Raises KeyError."""
    found: list[Peer] = []
    for name in names:
        found += [_paceline(precision) for precision in precisions] if name == "paceline" else [PEERS[name]]
    return found


def _paceline(precision: str) -> Peer:
    path = {"PYTHONPATH": str(ROOT / "src")}
    return Peer(
        f"paceline-{precision}", None, "paceline_worker.py", "any", precision, modes=OWN_MODES, environment=path
    )
