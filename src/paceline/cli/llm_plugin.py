"""paceline as models of the ``llm`` command line and library (PyPI ``llm``), which imports this by its entry point.

``llm -m paceline/smollm2-135m "..."``, or ``llm -m paceline -o model FILE.gguf "..."`` for any other model. Nothing
large is imported before the first prompt: ``llm --help`` loads all plugins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import llm
from llm.parts import TextPart
from pydantic import ConfigDict, Field, create_model

from paceline.cli.flags import flags_of, from_flags
from paceline.cli.options import EngineFlags
from paceline.config import DEFAULT_MODEL, SamplingParams, StructuredOutputs
from paceline.errors import ParameterError
from paceline.models.files.hub import EMBEDDED

if TYPE_CHECKING:
    from paceline.core.outputs import CompletionOutput
    from paceline.llm import LLM

T = TypeVar("T")

_NOT_HERE = {"n", "best_of", "rank_by", "logprobs"}  # llm shows one answer and no log-probabilities


class _Base(llm.Options):  # type: ignore[misc]
    """Options that take numbers for texts, such as ``num_speculative_tokens=4`` in Python."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


def _fields(kind: type) -> dict[str, Any]:
    """The options of the command line as pydantic's fields; None: the default. A list may be one value alone."""
    return {
        flag.name: (_with_items(flag.kind) | None, Field(None, description=flag.help.text))
        for flag in flags_of(kind)
        if flag.name not in _NOT_HERE
    }


def _with_items(kind: Any) -> Any:
    lists = [each for each in get_args(kind) if get_origin(each) is list]
    return kind | get_args(lists[0])[0] if lists else kind


_COMMON = _fields(EngineFlags) | _fields(SamplingParams)
_ANY_MODEL = Field(DEFAULT_MODEL, description="A hub name, a directory, a .gguf file or the name of a packaged model.")


class PacelineModel(llm.Model):  # type: ignore[misc]
    """One model, which stays loaded while prompts have the same engine options.

    source: the model's name; None: the option ``model`` has it.
    """

    can_stream = True
    supports_schema = True

    def __init__(self, model_id: str, source: str | None = None) -> None:
        self.model_id, self._source = model_id, source
        own: dict[str, Any] = {} if source is not None else {"model": (str, _ANY_MODEL)}
        self.Options = create_model("Options", __base__=_Base, **own, **_COMMON)
        self._engine: tuple[tuple[str, EngineFlags], LLM] | None = None
        self._loading = Lock()

    def execute(self, prompt: Any, stream: bool, response: Any, conversation: Any) -> Iterator[str]:
        """Yield the answer's text as it grows; llm joins the pieces without ``stream``. Raises PacelineError."""
        given = {name: value for name, value in prompt.options if value is not None}
        params = _chosen(SamplingParams, given)
        if prompt.schema is not None:
            params = dataclasses.replace(params, structured_outputs=StructuredOutputs(json=prompt.schema))
        engine = self._load(self._source or given["model"], _chosen(EngineFlags, given))
        params = engine.follow_recommendation(params, given)
        shown = ""
        for output in engine.stream(engine.tokens_of_chat(_conversation(prompt.messages)), params):
            answer = output.outputs[0]
            yield answer.text[len(shown) :]
            shown = answer.text
        if answer.error is not None:
            raise answer.error
        _note(response, engine, answer)

    def _load(self, source: str, flags: EngineFlags) -> LLM:
        """The loaded engine, replaced if the options differ; a replaced one lives until its last answer has ended."""
        with self._loading:
            if self._engine is None or self._engine[0] != (source, flags):
                self._engine = None
                self._engine = (source, flags), flags.load(source, quiet=True)
            return self._engine[1]


def _chosen(kind: type[T], given: dict[str, Any]) -> T:
    """The configuration that the options of this kind spell. Raises ParameterError."""
    flags = {flag.name: flag for flag in flags_of(kind)}  # type: ignore[arg-type]  # a class is hashable
    lists = {name for name, flag in flags.items() if _with_items(flag.kind) != flag.kind}
    chosen = {name: value for name, value in given.items() if name in flags}
    return from_flags(
        kind,
        {name: [value] if name in lists and not isinstance(value, list) else value for name, value in chosen.items()},
    )


def _conversation(messages: list[Any]) -> list[dict[str, str]]:
    """llm's messages as a chat template takes them. Raises ParameterError for parts other than text."""
    for part in [part for message in messages for part in message.parts if not isinstance(part, TextPart)]:
        raise ParameterError("messages", type(part).__name__, "text: this model reads nothing else")
    return [{"role": each.role, "content": "".join(part.text for part in each.parts)} for each in messages]


def _note(response: Any, engine: LLM, answer: CompletionOutput) -> None:
    """Report the cost of the answer for ``llm -u`` and ``llm logs``."""
    metrics = answer.metrics
    counts = ("cached_tokens", "rounds", "drafted", "accepted")
    details = {name: getattr(metrics, name) for name in counts}
    response.set_usage(input=metrics.prompt_tokens, output=metrics.output_tokens, details=details)
    response.response_json = {"finish_reason": answer.finish_reason, "engine": engine.engine.describe()}


@llm.hookimpl  # type: ignore[untyped-decorator]
def register_models(register: Callable[[llm.Model], None]) -> None:
    """Register the same models at each call, with their loaded engines."""
    for model in _models():
        register(model)


@cache
def _models() -> list[PacelineModel]:
    """A model for each packaged one by its name, and one with the option ``model``."""
    return [*(PacelineModel(f"paceline/{name}", name) for name in EMBEDDED), PacelineModel("paceline")]
