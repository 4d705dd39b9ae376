"""Files of prompts for commands that measure or verify: JSON lines, also those of Spec-Bench and MT-Bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.jobs import PROMPT_KEYS, Failure, Job, as_job
from paceline.config import SamplingParams
from paceline.config.files import read_text
from paceline.errors import ParameterError, RequestError

if TYPE_CHECKING:
    from paceline.llm import LLM

PromptsFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts-file",
        help='JSON lines in place of the built-in prompts: {"prompt": ...}, {"messages": [...]} or, as in Spec-Bench '
        'and MT-Bench, {"turns": [...]}, of which the first is asked.',
    ),
]


def questions_in(path: Path) -> list[Job]:
    """The prompts of a file of JSON lines for commands that sample each in their own ways. Raises ParameterError.

    A line has a prompt or messages as in ``as_job``, or, as in Spec-Bench and MT-Bench, "turns", of which the first one
    is asked. Those benchmarks' other fields are passed over; sampling parameters and references are refused.
    """
    jobs = []
    for number, line in enumerate(read_text("--prompts-file", path).split("\n"), 1):
        if line.strip():
            entry = _question(f"line {number}", line)
            if isinstance(entry, Failure):
                raise entry.located
            jobs.append(entry)
    if not jobs:
        raise ParameterError("--prompts-file", str(path), "a file with a prompt a line")
    return jobs


def _question(where: str, line: str) -> Job | Failure:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Failure(where, RequestError(f"not JSON: {error}"))
    turns = entry.get("turns") if isinstance(entry, dict) else None
    if isinstance(turns, list) and turns:
        entry = {"messages": [{"role": "user", "content": turns[0]}]}
    if isinstance(entry, dict) and entry.keys() - {*PROMPT_KEYS, "custom_id"}:
        allowed = "lines with a prompt, messages or turns and nothing else: each is sampled in several ways"
        raise ParameterError("--prompts-file", where, allowed)
    return as_job(where, entry, SamplingParams())


def tokens_of(llm: LLM, job: Job) -> list[int]:
    """The token ids of a job's prompt. Raises RequestError."""
    if job.messages is not None:
        return llm.tokens_of_chat(job.messages)
    return llm.requests.tokenizer.encode(job.prompt) if isinstance(job.prompt, str) else list(job.prompt or ())
