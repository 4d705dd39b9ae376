"""What one call of ``LLM.generate`` gives for its prompts, and what becomes of a prompt that cannot be served."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from paceline.config import SamplingParams
from paceline.config.inputs import Prompt, as_references_of_each
from paceline.config.ranges import OneOf
from paceline.core.outputs import CompletionOutput, RequestOutput
from paceline.engine.engine import Request
from paceline.errors import ParameterError, RequestError

T = TypeVar("T")
OnError = Literal["raise", "skip"]
Made: TypeAlias = Request | RequestOutput  # a request, or the finished result of a prompt that was refused
Maker: TypeAlias = Callable[[T, SamplingParams, Sequence[Prompt]], Request]
PARAMS = "SamplingParams, or a list of them, one a prompt; SamplingParams.from_mapping makes them from a dictionary"


@dataclass(frozen=True)
class Call:
    """The arguments of a call that belong to its prompts, one by one.

    arrival: when the call began, on the clock of time.monotonic.
    """

    params: SamplingParams | Sequence[SamplingParams] | None
    references: Sequence[Sequence[Prompt]] | None
    on_error: OnError = "raise"
    arrival: float = field(default_factory=lambda: time.monotonic())  # looked up late, for tests with a clock

    def made(self, prompts: Sequence[T], make: Maker[T]) -> list[Made]:
        """A request for each prompt. Raises ParameterError, RequestError; of several prompts they name the first that
        cannot be served. With on_error="skip" such a prompt has its finished result instead.
        """
        OneOf(("raise", "skip")).take("on_error", self.on_error)
        size = len(prompts)
        given = zip(prompts, self._params(size), as_references_of_each(self.references, size), strict=True)
        return [self._made(index, size, partial(make, *each)) for index, each in enumerate(given)]

    def _made(self, index: int, prompts: int, make: Callable[[], Request]) -> Made:
        try:
            return make()
        except (ParameterError, RequestError) as error:
            if self.on_error == "skip":
                return _refused(index, error)
            if prompts == 1:
                raise
            raise _at(f"prompts[{index}]", error) from error

    def _params(self, prompts: int) -> list[SamplingParams]:
        """One for each prompt. Raises ParameterError."""
        given = SamplingParams() if self.params is None else self.params
        if not isinstance(given, (SamplingParams, list, tuple)):
            raise ParameterError("params", given, PARAMS)
        each = [given] * prompts if isinstance(given, SamplingParams) else list(given)
        if len(each) != prompts:
            raise ParameterError("params", f"{len(each)} entries", f"one, or one a prompt ({prompts})")
        for params in each:
            check_params(params)
        return each


def check_params(params: object) -> None:
    """Raise ParameterError for what are no SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise ParameterError("params", params, PARAMS)


def _refused(index: int, error: Exception) -> RequestOutput:
    """The finished result of a prompt that was never queued."""
    return RequestOutput(f"refused-{index}", None, [], [CompletionOutput(0, finish_reason="error", error=error)])


def _at(place: str, error: ParameterError | RequestError) -> Exception:
    """The same error, naming the prompt that it is about."""
    if isinstance(error, ParameterError):
        field = place if error.field == "prompts" else f"{place}: {error.field}"
        return ParameterError(field, error.value, error.allowed)
    return type(error)(f"{place}: {error}")


def fields_of(template: object, add_generation_prompt: bool) -> dict[str, Any]:
    """What a chat template may name besides the messages. Raises ParameterError."""
    given = {} if template is None else template
    fixed = "messages", "add_generation_prompt"
    allowed = f"a dictionary from names in the chat template to values, without {' and '.join(fixed)}"
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given) or given.keys() & set(fixed):
        raise ParameterError("chat_template_kwargs", template, allowed)
    return {**given, "add_generation_prompt": add_generation_prompt}
