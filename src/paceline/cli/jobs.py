"""Prompts from the command line and from JSON lines, run as one batch and shown in their order."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.config import RECOMMENDED_FIELDS, SamplingParams
from paceline.core.outputs import CompletionOutput, RequestOutput
from paceline.errors import PacelineError, RequestError
from paceline.progress import Bar, hidden
from paceline.server.limits import MAX_LABEL

if TYPE_CHECKING:
    from paceline.engine.engine import Request
    from paceline.llm import LLM

PROMPT_KEYS = ("prompt", "messages")


@dataclass(frozen=True)
class Job:
    """A prompt or a conversation with its parameters and references.

    where: its place for errors, such as "line 3". custom_id: its name in the file of answers, if it has one.
    """

    where: str
    params: SamplingParams
    prompt: str | list[int] | None = None
    messages: list[Mapping[str, str]] | None = None
    references: Sequence[str | list[int]] = ()
    custom_id: str | None = None


@dataclass(frozen=True)
class Failure:
    """A prompt that cannot be served. error: the reason, without the place."""

    where: str
    error: Exception
    custom_id: str | None = None

    @property
    def located(self) -> RequestError:
        """The error with its place in front."""
        return RequestError(f"{self.where}: {self.error}")


JobResult = RequestOutput | Failure


def parse_lines(
    lines: Iterable[str], params: SamplingParams, chat_params: SamplingParams | None = None
) -> Iterator[Job | Failure]:
    """The jobs of JSON lines; empty lines are skipped. params, chat_params: as in ``as_job``."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield Failure(f"line {number}", RequestError(f"not JSON: {error}"))
            else:
                yield as_job(f"line {number}", entry, params, chat_params)


def as_job(
    where: str, entry: object, params: SamplingParams, chat_params: SamplingParams | None = None
) -> Job | Failure:
    """The job of one parsed line of ``paceline generate --prompts-file`` or ``paceline batch``.

    entry: {"prompt": ...} or {"messages": [...]}, with references, custom_id and sampling parameters if any.
    params: the sampling parameters that it does not name. chat_params: the same for messages that name none of
        ``RECOMMENDED_FIELDS``.
    """
    from paceline.config.inputs import as_references, check_message  # which import torch: --help does not wait for it

    custom_id = None
    try:
        if not isinstance(entry, dict) or sum(key in entry for key in PROMPT_KEYS) != 1:
            raise RequestError('a line is an object with either "prompt" or "messages"')
        fields = dict(entry)
        prompt, messages, name = (fields.pop(key, None) for key in (*PROMPT_KEYS, "custom_id"))
        if name is not None and not (isinstance(name, str) and 0 < len(name) <= MAX_LABEL):
            raise RequestError(f'"custom_id" is a string of 1 to {MAX_LABEL} characters')
        custom_id = name
        references = as_references("references", fields.pop("references", []))
        if messages is None and not isinstance(prompt, str) and not _are_tokens(prompt):
            raise RequestError('"prompt" is a string or a list of token ids')
        if messages is not None and not isinstance(messages, list):
            raise RequestError('"messages" is a list of objects with role and content')
        for message in messages or ():
            check_message(message)
        if messages is not None and chat_params is not None and not fields.keys() & set(RECOMMENDED_FIELDS):
            params = chat_params
        return Job(where, SamplingParams.from_mapping(fields, params), prompt, messages, references, custom_id)
    except (ValueError, PacelineError) as error:
        return Failure(where, error, custom_id)


def _are_tokens(prompt: object) -> bool:
    return isinstance(prompt, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)


def run_jobs(
    llm: LLM,
    entries: Sequence[Job | Failure],
    show: Callable[[int, JobResult], None],
    *,
    keep_going: bool = False,
    progress: bool = True,
) -> int:
    """Run all jobs in one batch and show their results in order, each as soon as all before it are shown.

    A job that cannot be served is an error before anything runs, unless ``keep_going``: then it is shown as a Failure.
    Returns how many failed, those whose answers ended in an error included. After an interrupt, everything that had
    finished is shown.
    """
    engine, order, broken = llm.engine, _InOrder(show), 0
    try:
        served = [_add(llm, number, entry, keep_going) for number, entry in enumerate(entries)]
        failed = [(number, result) for number, result in enumerate(served) if isinstance(result, Failure)]
        for number, failure in failed:
            order.add(number, failure)
        engine.expect(final=True)
        with Bar("answers", len(served) - len(failed), shown=progress) as bar:
            while engine.busy:
                for output in engine.step():
                    if output.finished:
                        bar.change(advance=1)
                        broken += output.error is not None
                        order.add(int(output.request_id), output)
    except KeyboardInterrupt:
        order.show_rest()
        raise
    finally:
        engine.expect(final=False)
        engine.clear()
    return len(failed) + broken


def _add(llm: LLM, number: int, entry: Job | Failure, keep_going: bool) -> JobResult:
    failure = entry
    if isinstance(entry, Job):
        try:
            return llm.engine.add(_request(llm, entry, str(number)))
        except PacelineError as error:
            failure = Failure(entry.where, error, entry.custom_id)
    assert isinstance(failure, Failure)
    if not keep_going:
        raise failure.located from failure.error
    return failure


@dataclass
class _InOrder:
    """Shows results in the order of their numbers."""

    show: Callable[[int, JobResult], None]
    next: int = 0
    early: dict[int, JobResult] = field(default_factory=dict)

    def add(self, number: int, result: JobResult) -> None:
        self.early[number] = result
        if self.next not in self.early:
            return
        with hidden():
            while self.next in self.early:
                self.show(self.next, self.early.pop(self.next))
                self.next += 1

    def show_rest(self) -> None:
        for number in sorted(self.early):
            self.show(number, self.early[number])


def _request(llm: LLM, job: Job, request_id: str) -> Request:
    prompt = llm.tokens_of_chat(job.messages) if job.messages is not None else job.prompt
    assert prompt is not None, "a job has a prompt or messages"
    return llm.request(prompt, job.params, request_id=request_id, references=job.references)


# Results as JSON


def as_document(number: int, custom_id: str | None, result: JobResult) -> dict[str, Any]:
    """One prompt's results as a JSON document."""
    about: dict[str, Any] = {} if custom_id is None else {"custom_id": custom_id}
    about["index"] = number
    if isinstance(result, Failure):
        return about | {"error": {"where": result.where, "message": str(result.error)}}
    return about | {
        "prompt": result.prompt,
        "prompt_tokens": len(result.prompt_token_ids),
        "outputs": [_answer(output) for output in result.outputs],
    }


_METRICS = (
    "cached_tokens", "output_tokens", "preempted", "recomputed_tokens", "rounds", "drafted", "accepted",
    "acceptance_rate", "mean_acceptance_length",
    "drafted_per_position", "accepted_per_position", "saved_by_sibling", "time_to_first_token", "ms_per_token",
)  # fmt: skip


def _answer(output: CompletionOutput) -> dict[str, Any]:
    document: dict[str, Any] = {
        "index": output.index,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "metrics": {name: getattr(output.metrics, name) for name in _METRICS},
    }
    if output.cumulative_logprob is not None:
        document["cumulative_logprob"] = output.cumulative_logprob
        document["mean_logprob"] = output.mean_logprob
    if output.logprobs is not None:
        document["logprobs"] = [dataclasses.asdict(entry) for entry in output.logprobs]
    if output.error is not None:
        document["error"] = str(output.error)
    return document
