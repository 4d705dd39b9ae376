"""A command of the shell: what its --help shows, and what it understands."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from typer.core import TyperCommand

from paceline.cli.familiar import own_options

COMMON = frozenset({
    "max_tokens", "temperature", "seed", "draft_model", "drafter", "num_speculative_tokens", "quantization",
    "max_model_len", "max_batch_size", "host", "port", "api_keys", "tokens", "kind", "minutes", "epochs",
})  # fmt: skip
"""Options in groups that --help shows without being asked for a group."""
_HELP = {"-h", "--help"}


class Command(TyperCommand):
    """A command that takes other engines' names, and whose --help is short where it has groups of options.

    ``--help GROUP`` and ``--help all`` show the rest.
    """

    _topic: str | None = None  # while help is written: the group, "all", or "" for the common options

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = own_options(args, self.params)
        after = {word.lower() for before, word in pairwise(args) if before in _HELP}
        ctx.meta[__name__] = next((topic for topic in ("all", *map(str.lower, self._groups)) if topic in after), "")
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    @property
    def _groups(self) -> list[str]:
        """The titles of the groups of options, in their order."""
        titles = (getattr(param, "rich_help_panel", None) for param in self.params)
        return list(dict.fromkeys(title for title in titles if title))

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters; while help is written, those that it shows."""
        params: list[Any] = super().get_params(ctx)
        return [param for param in params if self._is_shown(param)]

    def _is_shown(self, param: Any) -> bool:
        group = getattr(param, "rich_help_panel", None)
        if self._topic in (None, "all") or group is None:
            return True
        return bool(group.lower() == self._topic or (self._topic == "" and param.name in COMMON))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._topic = ctx.meta.get(__name__, "")
        hidden = len(super().get_params(ctx)) - len(self.get_params(ctx))
        try:
            super().format_help(ctx, formatter)
        finally:
            self._topic = None
        if hidden:
            groups = ", ".join(f"--help {group.lower()}" for group in self._groups)
            formatter.write(f" {hidden} more options: {groups}, or --help all\n")
