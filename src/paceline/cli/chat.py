"""``paceline chat``: talk to a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.console import note, report_error
from paceline.cli.conversation import Conversation
from paceline.cli.options import DEFAULT_MODEL, AdaptedEngineFlags, Model, Quiet, follow_recommendation
from paceline.config import SamplingParams
from paceline.config.aliases import full_name
from paceline.config.ranges import check_text
from paceline.errors import RequestError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History


def chat(
    context: typer.Context,
    engine: AdaptedEngineFlags,
    sampling: SamplingParams,
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="A message: it is answered, and the command ends.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    quiet: Quiet = False,
) -> None:
    """Talk to a model. /help lists the commands, /exit or Ctrl-D leaves, Ctrl-C stops an answer."""
    if system is not None:
        check_text("--system", system)
    from paceline.models.files import hub

    if full_name(model) in hub.EMBEDDED:
        hub.pull(model, progress=not quiet)
    llm = engine.load(model, quiet)
    context.call_on_close(llm.close)
    params = follow_recommendation(context, llm, sampling, quiet, chat=True)
    typed = sys.stdin.isatty() and sys.stderr.isatty()
    conversation = Conversation(llm, params, system, quiet=quiet, confirm=_confirm if typed else None)
    if prompt is not None:
        if not conversation.say(" ".join(prompt)):
            raise typer.Exit(2)
        return
    if typed and not quiet:
        note("/help lists the commands, Ctrl-D leaves")
    for line in _typed_lines() if typed else _piped_lines():
        if not conversation.take(line):
            break


def _piped_lines() -> Iterator[str]:
    """The lines of stdin."""
    while line := sys.stdin.buffer.readline():
        try:
            yield line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            report_error(RequestError(f"this line is not UTF-8 ({error})"))


def _typed_lines() -> Iterator[str]:
    """Messages that a person types at a terminal, with a line editor on stderr."""
    session = _line_editor()
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            note("Ctrl-D or /exit leaves")
        except EOFError:
            return


def _line_editor() -> PromptSession[str]:
    """An editor of messages of several lines, whose history outlives the process."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.input import create_input
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        multiline=True,
        key_bindings=keys,
        prompt_continuation="  ",
        history=_history(),
        input=create_input(sys.stdin),
        output=create_output(sys.stderr),
    )


def _history() -> History:
    """The messages of earlier conversations, in a file of the cache that only its owner reads; else in memory."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    from paceline.models.files.hub import cache_directory

    path = cache_directory() / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _confirm(question: str) -> bool:
    try:
        return typer.confirm(question, default=True, err=True)
    except typer.Abort:
        return False
