"""``paceline chat``: talk to a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import note, report_error, stderr
from paceline.cli.options import DEFAULT_MODEL, AdaptedEngineFlags, Model, Quiet, follow_recommendation
from paceline.config import SamplingParams
from paceline.config.ranges import check_text
from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline.llm import LLM

Messages = list[dict[str, str]]


def chat(
    context: typer.Context,
    engine: AdaptedEngineFlags,
    sampling: SamplingParams,
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    quiet: Quiet = False,
) -> None:
    """Talk to a model. /clear starts a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer."""
    if system is not None:
        check_text("--system", system)
    llm = engine.load(model, quiet)
    params = follow_recommendation(context, llm, sampling, quiet)
    start: Messages = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    while (line := _read_line()) is not None and line != "/exit":
        if line == "/clear":
            messages = list(start)
        elif line:
            messages = _turn(llm, messages, line, params, quiet)


def _read_line() -> str | None:
    """The next line without its end; None at the end of the input."""
    if sys.stdin.isatty():
        stderr().print("[bold]> [/bold]", end="")
    line = sys.stdin.buffer.readline()
    try:
        return line.decode("utf-8-sig").strip() if line else None
    except UnicodeDecodeError as error:
        report_error(RequestError(f"this line is not UTF-8 ({error})"))
        return ""


def _turn(llm: LLM, messages: Messages, line: str, params: SamplingParams, quiet: bool) -> Messages:
    asked = [*messages, {"role": "user", "content": line}]
    try:
        prompt = llm.tokens_of_chat(asked)
        answer = _stream(llm, prompt, params, quiet)
    except RequestError as error:  # this turn cannot be served (too long, perhaps): the conversation goes on without it
        report_error(error)
        return messages
    return [*asked, {"role": "assistant", "content": answer}]


def _stream(llm: LLM, prompt: list[int], params: SamplingParams, quiet: bool) -> str:
    """Write the answer as it grows and return it; Ctrl-C ends it and keeps the text so far. Raises RequestError."""
    shown = ""
    try:
        for output in llm.stream(prompt, params):
            answer = output.outputs[0]
            typer.echo(answer.text[len(shown) :], nl=False)
            shown = answer.text
        typer.echo()
        if not quiet:
            metrics = answer.metrics
            rate = metrics.acceptance_rate
            accepted_share = "" if rate is None else f", {rate:.0%} of the draft tokens accepted"
            known = metrics.cached_tokens
            cached_share = f", {known} of the prompt's {metrics.prompt_tokens} tokens from the cache" if known else ""
            note(f"{metrics.output_tokens} tokens in {metrics.rounds} rounds{accepted_share}{cached_share}")
    except KeyboardInterrupt:
        typer.echo()
        return shown
    if answer.error is not None:
        raise RequestError(f"the answer could not be completed: {answer.error}") from answer.error
    return shown
