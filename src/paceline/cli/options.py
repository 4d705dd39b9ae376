"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import typer

from paceline.cli.console import note, stage_notes, working
from paceline.cli.flags import from_text
from paceline.config import (
    DEFAULT_MODEL,
    RECOMMENDED_FIELDS,
    EngineConfig,
    EngineOptions,
    SamplingParams,
    engine_config,
)
from paceline.config.files import read_text
from paceline.config.help import Help, described
from paceline.config.limits import MAX_BYTES, MAX_COUNT, Name
from paceline.config.ranges import Texts, names_of, rules_of
from paceline.errors import ParameterError

N = TypeVar("N", int, float)
MAX_ADAPTERS = 1024

if TYPE_CHECKING:
    from paceline.integrations.ray.cluster import Recipe
    from paceline.llm import LLM

Model = Annotated[str, typer.Argument(help="A hub name, a directory, a .gguf file or the name of a packaged model.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Runs, of which the median is reported.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no start line and no progress bar.")]


@described
@dataclass(frozen=True)
class EngineFlags(EngineConfig):
    """An engine and the files that it reads besides the model, as options of commands."""

    draft_model: Annotated[
        Name | None,
        Help(
            "What drafts tokens: a smaller model with the target's vocabulary, a trained head or Gemma 4's assistant."
        ),
    ] = None
    reference_document: Annotated[
        Sequence[str], Texts(MAX_COUNT, MAX_BYTES), Help("Text files from which n-gram lookup may copy.")
    ] = ()

    def options(self) -> EngineOptions:
        """The keyword arguments of ``LLM``."""
        return cast(EngineOptions, {name: getattr(self, name) for name in names_of(EngineConfig)})

    def check(self) -> None:
        """Raise ParameterError for options that would have no effect, before anything is loaded."""
        engine_config(self.options(), self.draft_model, self.reference_document)

    def _documents(self) -> list[str]:
        return [read_text("--reference-document", path) for path in self.reference_document]

    def _adapters(self) -> dict[str, str]:
        """The adapters' directories by name; commands that use none have no option for them."""
        return {}

    def recipe(self, model: str) -> Recipe:
        """The models and options for engines in other processes. Raises ParameterError."""
        from paceline.integrations.ray.cluster import Recipe

        if adapters := self._adapters():
            raise ParameterError("--adapter", min(adapters), "left out with --replicas")
        return Recipe(model, self.draft_model, self._documents(), self.options())

    def load(self, model: str, quiet: bool = False) -> LLM:
        """Load the models and describe the engine on stderr unless ``quiet``. Raises PacelineError."""
        self.check()
        documents = self._documents()
        with working(f"loading {model}"):
            from paceline.llm import LLM  # with torch, which takes seconds

        with stage_notes(quiet):
            llm = LLM(
                model,
                self.draft_model,
                reference_documents=documents,
                adapters=self._adapters(),
                use_tqdm=not quiet,
                **self.options(),
            )
        if not quiet:
            note(llm.engine.describe())
        return llm


@described
@dataclass(frozen=True)
class AdaptedEngineFlags(EngineFlags):
    """An engine whose target may have adapters, which requests name."""

    adapters: Annotated[
        Sequence[str],
        Texts(MAX_ADAPTERS, MAX_BYTES),
        Help("A LoRA adapter as NAME=DIRECTORY; may be given several times.", "--adapter"),
    ] = ()

    def _adapters(self) -> dict[str, str]:
        """The adapters' directories by name. Raises ParameterError."""
        pairs = [text.partition("=") for text in self.adapters]
        for name, _, path in pairs:
            if not name or not path:
                raise ParameterError("--adapter", f"{name}{path}", "NAME=DIRECTORY")
        names = [name for name, *_ in pairs]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ParameterError("--adapter", repeated, "a name that is given once")
        return {name: path for name, _, path in pairs}


def given_fields(context: typer.Context) -> frozenset[str]:
    """Those of ``RECOMMENDED_FIELDS`` that the running command's options gave."""
    return frozenset(name for name in RECOMMENDED_FIELDS if context.params[name] is not None)


def follow_recommendation(
    context: typer.Context, llm: LLM, params: SamplingParams, quiet: bool, *, chat: bool = False
) -> SamplingParams:
    """``LLM.follow_recommendation`` for the running command, described on stderr unless ``quiet``.

    Raises ModelFormatError.
    """
    followed = llm.follow_recommendation(params, given_fields(context), chat=chat)
    changed = [name for name in RECOMMENDED_FIELDS if getattr(followed, name) != getattr(params, name)]
    if changed and not quiet:
        values = ", ".join(f"{name} {getattr(followed, name)}" for name in changed)
        recommended = "sampling as the model's files recommend"
        note(f"{recommended if llm.recommends_sampling else 'sampling of chats'}: {values}")
    return followed


def speculation_length(text: str) -> int | str:
    """A number or the name of a length policy. Raises ParameterError."""
    length: int | str = rules_of(EngineConfig)["num_speculative_tokens"].take("num_speculative_tokens", from_text(text))
    return length


def numbers(name: str, text: str, kind: Callable[[str], N], ok: Callable[[N], bool], allowed: str) -> list[N]:
    """The numbers of a list such as 1,2,4. kind: int or float. Raises ParameterError."""
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(map(ok, values)):
        raise ParameterError(name, text, allowed)
    return values


def whole_numbers(name: str, text: str) -> list[int]:
    """The whole numbers of a list such as 1,2,4. Raises ParameterError."""
    return numbers(name, text, int, lambda number: number >= 1, "whole numbers of at least 1, separated by commas")


def refuse_given(context: typer.Context, allowed: str, *names: str) -> None:
    """Raise ParameterError for options of the running command that were given although they would do nothing."""
    spellings = {each.name: each.opts[0] for each in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ParameterError(spellings[name], context.params[name], allowed)


def check_draft_tokens(llm: LLM, drafter: object) -> None:
    """Raise ParameterError if a loaded engine drafts nothing, which "auto" may have chosen. drafter: the option."""
    if not llm.config.draft_tokens:
        allowed = "one that drafts: 'ngram', or with a draft model 'model' or 'hybrid'"
        raise ParameterError("--drafter", drafter, allowed)


__all__ = ["DEFAULT_MODEL", "AdaptedEngineFlags", "EngineFlags", "Model", "Quiet", "whole_numbers"]
