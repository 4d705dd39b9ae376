"""Command-line options made of the fields of configuration classes.

A command has a parameter whose annotation is such a class, for example ``sampling: SamplingParams``. ``with_flags``
replaces it by one option a field and hands the command the checked object.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import typer

from paceline.config import (
    CHAT_SAMPLING,
    RECOMMENDED_FIELDS,
    DraftData,
    DraftTraining,
    EngineConfig,
    SamplingParams,
    ServerConfig,
)
from paceline.config.help import Help, helps_of

T = TypeVar("T")

PANELS: Mapping[type, str] = {
    EngineConfig: "Engine",
    SamplingParams: "Sampling",
    ServerConfig: "Server",
    DraftData: "Data",
    DraftTraining: "Training",
}
KEPT_FILES = frozenset({"prefix_dir", "prefix_dir_size", "lookup_dir"})  # left out where times or texts are compared
_TUNED = "tuned once for all targets; Python can set it"
NOT_FLAGS: Mapping[type, Mapping[str, str]] = {
    EngineConfig: {"benchmark": "commands return real texts; benchmarks in Python set it"},
    SamplingParams: {
        "logits_processors": "functions cannot be written on a command line",
        "prompt_logprobs": "only LLM.generate, chat and stream read prompts for it",
        "cache_salt": "the prompts of a command come from one user; lines of a file may have their own",
        "num_speculative_tokens": "the engine's option of this name does the same for all prompts",
    },
    ServerConfig: {},
    DraftData: {},
    DraftTraining: dict.fromkeys(("warm_up", "clip", "decay", "alone", "total_variation"), _TUNED),
}
"""Fields that no command has as an option, and why."""


@dataclass(frozen=True)
class Flag:
    """A field as an option of a command.

    name: of the field. kind: the type that typer parses. default: what ``--help`` shows; None for none. words: whether
    the text may spell a number, JSON or "none".
    """

    name: str
    kind: Any
    default: Any
    words: bool
    help: Help
    panel: str

    @property
    def spellings(self) -> tuple[str, ...]:
        """The option's names: those of the help, or the field's with dashes; --no-... where True is the default."""
        own = "--" + self.name.replace("_", "-")
        return self.help.flags or (f"{own}/--no-{own[2:]}" if self.default is True else own,)

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter of a command."""
        option = typer.Option(*self.spellings, help=self.text, rich_help_panel=self.panel)
        kind = Annotated[self.kind, option]  # type: ignore[name-defined]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, default=self.default, annotation=kind)

    @property
    def text(self) -> str:
        """The description in ``--help``."""
        repeatable = get_origin(self.kind) is list or any(get_origin(each) is list for each in get_args(self.kind))
        return f"{self.help.text} Repeatable." if repeatable else self.help.text

    def value(self, given: Any) -> Any:
        """The field's value."""
        return from_text(given) if self.words and isinstance(given, str) else given


def from_text(text: str) -> Any:
    """The value that a text spells: None for "none", a number or JSON, else the text itself."""
    if text.lower() == "none":
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@cache
def flags_of(kind: type) -> tuple[Flag, ...]:
    """The options of a configuration class, the class's own fields before inherited ones."""
    hints, helps = get_type_hints(kind), helps_of(kind)
    known = next(each for each in kind.__mro__ if each in PANELS)
    fields = [field for field in dataclasses.fields(kind) if field.name not in NOT_FLAGS[known]]
    fields.sort(key=lambda field: field.name not in kind.__annotations__)
    return tuple(_flag(field, hints[field.name], helps[field.name], PANELS[known]) for field in fields)


def _flag(field: dataclasses.Field[Any], hint: Any, said: Help, panel: str) -> Flag:
    default = None if field.default in (dataclasses.MISSING, ()) else field.default
    if panel == PANELS[SamplingParams] and field.name in RECOMMENDED_FIELDS:
        chats = f", in chats {CHAT_SAMPLING[field.name]:g}" if field.name in CHAT_SAMPLING else ""
        text = f"{said.text} Default: as the model's files recommend, else {default:g}{chats}."
        said, default = Help(text, *said.flags, more=said.more), None
    kind, words = _kind(hint, default)
    shown = str(default) if words and default is not None else default
    return Flag(field.name, kind if default is not None else kind | None, shown, words, said, panel)


def _kind(hint: Any, default: Any) -> tuple[Any, bool]:
    """The type that typer parses, and whether the text may spell a number, JSON or "none".

    hint: the field's type without annotations.
    """
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [member for member in members if member is not NoneType]
    none = len(kinds) < len(members) and default is not None
    for kind in kinds:
        if get_origin(kind) is Sequence:
            return list[get_args(kind)[0]], False  # type: ignore[misc]
    if all(get_origin(kind) is Literal for kind in kinds):
        return Literal[(*(word for kind in kinds for word in get_args(kind)), *["none"] * none)], none
    if len(kinds) == 1 and kinds[0] in (bool, int, float, str) and not none:
        return kinds[0], False
    return str, True


def from_flags(kind: type[T], values: Mapping[str, Any]) -> T:
    """The configuration that options spell; what was not given has the field's default. Raises ParameterError."""
    flags = {flag.name: flag for flag in flags_of(kind)}  # type: ignore[arg-type]  # a class is hashable
    given = {name: flags[name].value(value) for name, value in values.items() if value is not None and value != []}
    if not issubclass(kind, SamplingParams):
        return kind(**given)
    spelled = {name: given.pop(name) for name in [*given] if flags[name].words}
    return cast(T, kind.from_mapping(spelled, kind(**given)))  # JSON has the token ids of logit_bias as strings


def with_flags(command: Callable[..., Any], without: Collection[str] = ()) -> Callable[..., Any]:
    """Give a command the fields of its configuration parameters as options of its own.

    without: fields that the command has no use for; they keep their defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += [flag.parameter for flag in flags_of(groups[parameter.name]) if flag.name not in without]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))
    names = {name: {flag.name for flag in flags_of(group)} - set(without) for name, group in groups.items()}

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        taken = {name: {each: values.pop(each) for each in names[name]} for name in groups}
        made = {name: from_flags(group, taken[name]) for name, group in groups.items()}
        return command(**values, **made)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
