"""``paceline generate``: continue prompts, all in one batch."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

import typer
from rich.rule import Rule
from rich.text import Text

from paceline.cli.console import json_is_ascii, note, report_error, stdout
from paceline.cli.jobs import Failure, Job, JobResult, as_document, parse_lines, run_jobs
from paceline.cli.options import DEFAULT_MODEL, AdaptedEngineFlags, Model, Quiet, follow_recommendation, refuse_given
from paceline.config import SamplingParams
from paceline.config.files import read_stdin, read_text
from paceline.core.outputs import CompletionOutput
from paceline.errors import ParameterError, RequestError


def generate(
    context: typer.Context,
    engine: AdaptedEngineFlags,
    sampling: SamplingParams,
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt. Repeatable.")] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            "--prompts-file",
            help='JSON lines, or - for stdin: {"prompt": ...} or {"messages": [...]}, with sampling parameters, '
            '"references" (texts to copy from) and "custom_id" if any.',
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat every --prompt as a user's message.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document a prompt, one a line.")] = False,
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", help="Run the valid lines of a file although others are invalid (exit code 2)."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Continue prompts, all in one batch."""
    if not prompt and prompts_file is None:
        raise ParameterError("--prompt", prompt, "at least one, or --prompts-file")
    if not prompt:
        refuse_given(context, "left out without --prompt: lines of a file have prompt or messages", "chat")
    if not as_json:
        refuse_given(context, "left out without --json, whose documents show them", "logprobs")
    lines = () if prompts_file is None else _read_lines(prompts_file)

    def entries(params: SamplingParams, chat_params: SamplingParams) -> list[Job | Failure]:
        given = [_from_option(text, chat_params if chat else params, chat) for text in prompt or ()]
        return [*given, *parse_lines(lines, params, chat_params)]

    checked = entries(sampling, sampling)  # before the model is loaded
    bad = next((entry for entry in checked if isinstance(entry, Failure)), None)
    if bad is not None and not keep_going:
        raise bad.located
    show = _show_titled if len(checked) * sampling.n > 1 else _show_bare
    if as_json:
        show = partial(_show_json, [entry.custom_id for entry in checked])
    llm = engine.load(model, quiet)
    context.call_on_close(llm.close)
    chats = [isinstance(entry, Job) and entry.messages is not None for entry in checked]
    chat_params = follow_recommendation(context, llm, sampling, quiet or not any(chats), chat=True)
    params = follow_recommendation(context, llm, sampling, quiet or any(chats))
    if run_jobs(llm, entries(params, chat_params), show, keep_going=keep_going, progress=not quiet):
        raise typer.Exit(2)


def _read_lines(prompts_file: str) -> list[str]:
    """Lines of ``--prompts-file``. Raises ParameterError."""
    stdin = prompts_file == "-"
    return (read_stdin("--prompts-file") if stdin else read_text("--prompts-file", prompts_file)).split("\n")


def _from_option(text: str, params: SamplingParams, chat: bool) -> Job:
    if chat:
        return Job("--prompt", params, messages=[{"role": "user", "content": text}])
    return Job("--prompt", params, prompt=text)


def _show_json(custom_ids: list[str | None], number: int, result: JobResult) -> None:
    _warn(number, result)
    typer.echo(json.dumps(as_document(number, custom_ids[number], result), ensure_ascii=json_is_ascii()))


def _show_bare(number: int, result: JobResult) -> None:
    for output in _answers(number, result):
        if output.finish_reason == "deadline":
            note(f"cut by --time-budget after {len(output.token_ids)} tokens")
        typer.echo(output.text)


def _show_titled(number: int, result: JobResult) -> None:
    answers = _answers(number, result)
    for output in answers:
        sample = f", answer {output.index + 1}" if len(answers) > 1 else ""
        stdout().print(Rule(Text(f"prompt {number + 1}{sample}{_standing(output)}"), align="left", style="dim"))
        typer.echo(output.text)


def _standing(output: CompletionOutput) -> str:
    """The log-probability that ranks the answer, and whether the time budget cut it."""
    mean = output.mean_logprob
    rank = "" if mean is None else f", mean log-probability {mean:.3f}"
    return rank + (", cut by the time budget" if output.finish_reason == "deadline" else "")


def _answers(number: int, result: JobResult) -> list[CompletionOutput]:
    _warn(number, result)
    return [] if isinstance(result, Failure) else result.outputs


def _warn(number: int, result: JobResult) -> None:
    if isinstance(result, Failure):
        report_error(result.located)
    elif result.error is not None:
        report_error(RequestError(f"prompt {number + 1}: the answer could not be completed: {result.error}"))
