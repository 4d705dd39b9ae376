"""Lines of ``paceline batch`` in the form of ``paceline generate``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paceline.chat.options import ChatOptions
from paceline.cli.document import as_text
from paceline.cli.jobs import PROMPT_KEYS, Failure, Job, JobResult, as_document, as_job
from paceline.config import SamplingParams
from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Request
from paceline.server import errors
from paceline.server.batch.answers import BatchContext, RefusedLine, answered, is_the_end, read_task
from paceline.server.batch.lines import CustomIds, InputLine, seed_of
from paceline.server.batch.window import LineResult, LineTask
from paceline.server.context import Context
from paceline.server.structures import AnswerForm


@dataclass(frozen=True)
class PlainTask:
    """A line with a prompt or messages."""

    batch: BatchContext
    line: InputLine
    job: Job

    async def run(self) -> LineResult:
        try:
            return _outcome(self.line, self.job.custom_id, await answered(self._answer))
        except errors.ApiError as error:
            if is_the_end(error):
                raise
            return _outcome(self.line, self.job.custom_id, Failure(self.line.where, error))

    async def _answer(self) -> RequestOutput:
        """The job's output. Raises ApiError."""
        dispatcher, job = self.batch.context.dispatcher, self.job
        dispatcher.check_answers(job.params.answers)
        request, form = await self._request(), AnswerForm(job.params.structured_outputs)
        async with dispatcher.generate([request], form, timeout=None, streaming=False) as generation:
            (output,) = await generation.finish()
        output.prompt = job.prompt if isinstance(job.prompt, str) else None
        return output

    async def _request(self) -> Request:
        """The engine's request. Its structure is compiled later, once a row is free. Raises ApiError."""
        context, job, arrival = self.batch.context, self.job, time.monotonic()
        references = [await _encoded(context, text, special=False) for text in job.references]
        params = replace(job.params, structured_outputs=None, seed=self._seed)
        tokens = await self._prompt(context)
        template = Request(
            [],
            params,
            client=self.batch.client,
            priority=self.batch.priority,
            arrival=arrival,
            references=references,
            budget_from_row=True,
        )
        (request,) = await context.dispatcher.requests([tokens], template)
        return request

    async def _prompt(self, context: Context) -> list[int]:
        if self.job.messages is not None:
            messages = [dict(message) for message in self.job.messages]
            return (await context.texts.chat_prompt(messages, ChatOptions())).token_ids
        assert self.job.prompt is not None, "a job has a prompt or messages"
        return await _encoded(context, self.job.prompt)

    @property
    def _seed(self) -> int:
        given = self.job.params.seed
        custom_id = self.job.custom_id
        name = f"index {self.line.index}" if custom_id is None else f"id {custom_id}"
        return seed_of(self.batch.seed, name) if given is None else given


def _outcome(line: InputLine, custom_id: str | None, result: JobResult) -> LineResult:
    document = {"id": line.name} | as_document(line.index, custom_id, result)
    return LineResult(as_text(document).encode(), failed=isinstance(result, Failure))


async def _encoded(context: Context, text: str | list[int], special: bool = True) -> list[int]:
    return await context.texts.encode(text, special) if isinstance(text, str) else text


@dataclass(frozen=True)
class LineReader:
    """Reader of lines in either form. params, chat_params: the defaults of plain lines, as in ``as_job``.

    refuse_params: called for lines in OpenAI's form, whose bodies have all parameters.
    """

    batch: BatchContext
    params: SamplingParams
    chat_params: SamplingParams
    refuse_params: Callable[[], None]
    names: CustomIds = field(default_factory=CustomIds)

    def read(self, line: InputLine, data: object) -> LineTask:
        """The work of a line. Raises ApiError for an invalid line, ParameterError for an invalid command."""
        if isinstance(data, dict) and any(key in data for key in PROMPT_KEYS):
            return self._plain(line, data)
        self.refuse_params()
        return read_task(self.batch, self.names, line, data)

    def _plain(self, line: InputLine, entry: dict[str, object]) -> LineTask:
        job = as_job(line.where, entry, self.params, self.chat_params)
        if job.custom_id is not None:
            try:
                self.names.take(job.custom_id)
            except errors.ApiError as error:
                job = Failure(line.where, error, job.custom_id)
        if isinstance(job, Failure):
            return RefusedLine(_outcome(line, job.custom_id, job))
        return PlainTask(self.batch, line, job)
