"""Create the peers' virtual environments from their requirement files, and the models in the peers' formats, once.

Comments in a requirement file can express what pip cannot: ``# uninstall: NAMES`` (afterwards), ``# optional:
    REQUIREMENT`` (may fail) and ``# environment: NAME=VALUE`` (for the installation).
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import config
from benchmarks.peers.config import Pair, Peer

DIRECTIVE = re.compile(r"#\s*(uninstall|optional|environment):\s*(.+)")
EXPORT = config.HERE / "export.py"
Say = Callable[[str], None]


class SetupError(Exception):
    """An environment or a model could not be created; the text is the tool's last line."""


@dataclass(frozen=True)
class Directives:
    """The directives in a requirement file's comments."""

    uninstall: tuple[str, ...]
    optional: tuple[str, ...]
    environment: dict[str, str]

    @classmethod
    def of(cls, text: str) -> Directives:
        found: dict[str, list[str]] = {"uninstall": [], "optional": [], "environment": []}
        for line in text.splitlines():
            if match := DIRECTIVE.fullmatch(line.strip()):
                found[match[1]].append(match[2].strip())
        names = tuple(name for line in found["uninstall"] for name in line.split())
        pairs = [(name, value) for name, _, value in (line.partition("=") for line in found["environment"])]
        return cls(names, tuple(found["optional"]), dict(pairs))


def ensure_environment(peer: Peer, say: Say) -> None:
    """Create the peer's environment unless it was made from this requirement file. Raises SetupError."""
    if peer.venv is None:
        return
    text = peer.requirements.read_text(encoding="utf-8")
    directory = config.VENVS / peer.venv
    stamp, mark = directory / ".installed", hashlib.sha256(text.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == mark:
        return
    say(f"installing {peer.requirements.name} into {directory}: this takes minutes, once")
    _install(peer, directory, Directives.of(text), say)
    stamp.write_text(mark + "\n", encoding="utf-8")


def _install(peer: Peer, directory: Path, directives: Directives, say: Say) -> None:
    if not peer.python.exists():
        shutil.rmtree(directory, ignore_errors=True)
        _tool([sys.executable, "-m", "venv", "--without-pip", str(directory)])
    pip = [sys.executable, "-m", "pip", "--python", str(peer.python)]
    install = [*pip, "install", "--quiet", *shlex.split(os.environ.get("PIP_FLAGS", ""))]
    _tool([*install, "-r", str(peer.requirements)], directives.environment)
    if directives.uninstall:
        _tool([*pip, "uninstall", "--quiet", "--yes", *directives.uninstall])
    for requirement in directives.optional:
        try:
            _tool([*install, requirement], directives.environment)
        except SetupError as error:
            say(f"optional {requirement} was not installed: {error}")


def ensure_model(name: str, peer: Peer, say: Say) -> Path:
    """The model in the peer's format, exported if it does not exist yet. Raises SetupError."""
    source = config.model_source(name)
    if not source.exists():
        raise SetupError(f"{source} is missing: put the GGUF file or the checkpoint there")
    checkpoint = source.is_dir()
    if checkpoint and peer.model_format == "gguf":
        raise SetupError(f"{source} is not a GGUF file")
    if peer.model_format in ("gguf", "any"):
        return source
    transformers = config.PEERS["transformers"]
    huggingface = source if checkpoint else _exported("huggingface", name, source, transformers, say)
    if peer.model_format == "huggingface":
        return huggingface
    return _exported("openvino", name, huggingface, config.PEERS["openvino"], say)


def _exported(kind: str, name: str, source: Path, exporter: Peer, say: Say) -> Path:
    target = config.export_directory() / kind / name
    if not target.is_dir():
        ensure_environment(exporter, say)
        say(f"exporting {name} to {target}: this takes minutes, once")
        _tool([str(exporter.python), str(EXPORT), kind, str(source), str(target)])
    return target


def ensure_models(pair: Pair, peer: Peer, say: Say) -> dict[str, Path]:
    """All models of the pair in the peer's format."""
    names = [pair.target] if pair.draft is None else [pair.target, pair.draft]
    return {name: ensure_model(name, peer, say) for name in names}


def _tool(command: list[str], environment: dict[str, str] | None = None) -> None:
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **(environment or {})},
        )
    except OSError as error:
        raise SetupError(str(error)) from error
    if result.returncode:
        raise SetupError(_telling_line(result.stdout) or f"{command[0]} ended with status {result.returncode}")


def _telling_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1][:400]
