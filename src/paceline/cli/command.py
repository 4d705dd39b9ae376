"""A command of the shell, which understands other engines' names of its options."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from paceline.cli.familiar import own_options


class Command(TyperCommand):
    """A command that takes other engines' names of its options, or says which of its own there is instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest: list[str] = super().parse_args(ctx, own_options(args, self.params))
        return rest
