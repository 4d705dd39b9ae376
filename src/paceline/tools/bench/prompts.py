"""Prompts that come with paceline, for the demo, for ``verify`` and for benchmarks. Their texts are files in ``data``.

COPYING: the answer repeats much of the prompt (rewriting, correcting, extracting, editing code), where n-gram drafts
    work best. OPEN: questions whose answer does not stand in the prompt.
"""

from __future__ import annotations

import json
from pathlib import Path


def read_lines(name: str) -> list[dict[str, str]]:
    """The lines of a data file of this package."""
    path = Path(__file__).with_name("data") / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def texts(name: str, chosen: str) -> tuple[str, ...]:
    """The texts of one set in a data file, in the file's order."""
    return tuple(line["text"] for line in read_lines(name) if line["set"] == chosen)


COPYING = texts("prompts", "copying")
# The prompt's last words stand in it twice with different sequels: n-gram drafts are there, and often wrong.
(FORKED,) = texts("prompts", "forked")
OPEN = texts("prompts", "open")
