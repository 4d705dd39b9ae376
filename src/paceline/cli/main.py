"""``paceline``: the commands, and the handling of errors and Ctrl-C."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated, Any, TextIO, cast

import typer
from typer.core import TyperGroup

from paceline.cli.batch import batch
from paceline.cli.bench import app as bench_app
from paceline.cli.chat import chat
from paceline.cli.command import Command
from paceline.cli.console import Stdout, report_error
from paceline.cli.conversation import WITHOUT as NOT_SET_IN_CHATS
from paceline.cli.demo import demo
from paceline.cli.evaluate import app as eval_app
from paceline.cli.flags import KEPT_FILES, with_flags
from paceline.cli.generate import generate
from paceline.cli.models import list_models, ps, rm, show
from paceline.cli.plan import WITHOUT as NOT_PLANNED
from paceline.cli.plan import plan
from paceline.cli.profile import profile
from paceline.cli.pull import pull
from paceline.cli.serve import serve
from paceline.cli.trace import WITHOUT as NOT_TRACED
from paceline.cli.trace import trace
from paceline.cli.train_draft import WITHOUT, train_draft
from paceline.cli.verify import verify
from paceline.errors import PacelineError
from paceline.version import __version__

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


class Commands(TyperGroup):
    """A group that turns PacelineError into one line on stderr and exit code 2, and Ctrl-C into exit code 130."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            with redirect_stdout(cast(TextIO, Stdout(sys.stdout))):
                return super().main(*args, **options)
        except PacelineError as error:  # the help could not be shown
            report_error(error)
            sys.exit(EXIT_ERROR)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PacelineError as error:
            report_error(error)
            raise typer.Exit(EXIT_ERROR) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from interrupt


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Batched speculative decoding for language models, without changing the output.",
)
for command in (generate, batch, serve, pull, demo):
    app.command(cls=Command)(with_flags(command))
for name in ("chat", "run"):
    app.command(name, cls=Command)(with_flags(chat, without=NOT_SET_IN_CHATS))
app.command("list", cls=Command)(list_models)
app.command(cls=Command)(with_flags(plan, without=NOT_PLANNED))
for shown in (show, rm, ps):
    app.command(cls=Command)(shown)
app.command(cls=Command)(
    with_flags(verify, without={"num_speculative_tokens", "acceptance", *KEPT_FILES})
)  # it has --lengths and tries both rules
app.command(cls=Command)(
    with_flags(profile, without={"num_speculative_tokens", "max_batch_size", "profile", *KEPT_FILES})
)  # it varies them
app.command(cls=Command)(with_flags(trace, without={*NOT_TRACED, *KEPT_FILES}))
app.command(cls=Command)(with_flags(train_draft, without={*WITHOUT, *KEPT_FILES}))
app.add_typer(bench_app, name="bench")
app.add_typer(eval_app, name="eval")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    app()
