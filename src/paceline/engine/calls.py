"""The arguments of one ``LLM.generate`` call, applied to each prompt: a request, or the result of a refused prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias, TypeVar

from paceline.config import SamplingParams
from paceline.config.inputs import Prompt, as_references_of_each
from paceline.config.ranges import OneOf
from paceline.core.outputs import CompletionOutput, RequestOutput
from paceline.engine.engine import Request
from paceline.errors import ParameterError, RequestError

T = TypeVar("T")
OnError = Literal["raise", "skip"]
Prepared: TypeAlias = Request | RequestOutput  # a request, or the finished result of a refused prompt
Prepare: TypeAlias = Callable[[T, SamplingParams, Sequence[Prompt]], Request]
PARAMS = "SamplingParams, or a list of one per prompt; SamplingParams.from_mapping makes them from a dictionary"


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a call that apply to its prompts one by one.

    params: one for all prompts, or one per prompt.
    references: per prompt, the texts that n-gram lookup may copy from.
    on_error: "raise", or "skip" to give a refused prompt a finished result with its error.
    arrival: start of the call, in seconds on the clock of time.monotonic.
    """

    params: SamplingParams | Sequence[SamplingParams]
    references: Sequence[Sequence[Prompt]] | None
    on_error: OnError = "raise"
    arrival: float = field(default_factory=lambda: time.monotonic())  # looked up late, for tests with a clock

    def prepare_all(self, prompts: Sequence[T], make: Prepare[T], argument: str = "prompts") -> list[Prepared]:
        """Return a request for each prompt; with on_error="skip" a finished result for a refused one.

        argument: name of the argument that the errors number.
        Raises ParameterError or RequestError. With several prompts the error names the first one that is refused.
        """
        OneOf(("raise", "skip")).take("on_error", self.on_error)
        size = len(prompts)
        arguments = zip(prompts, self._params(size), as_references_of_each(self.references, size), strict=True)
        name = None if size == 1 else argument
        return [self._prepare(index, name, partial(make, *own)) for index, own in enumerate(arguments)]

    def _prepare(self, index: int, argument: str | None, make: Callable[[], Request]) -> Prepared:
        """Make one request. argument: the name that an error numbers; None for errors without a number."""
        try:
            return make()
        except (ParameterError, RequestError) as error:
            if self.on_error == "skip":
                return _refused(index, error)
            if argument is None:
                raise
            raise _at(argument, index, error) from error

    def _params(self, prompts: int) -> list[SamplingParams]:
        """Return the SamplingParams of each prompt. Raises ParameterError."""
        value = self.params
        if not isinstance(value, (SamplingParams, list, tuple)):
            raise ParameterError("params", value, PARAMS)
        per_prompt = [value] * prompts if isinstance(value, SamplingParams) else list(value)
        if len(per_prompt) != prompts:
            raise ParameterError("params", f"{len(per_prompt)} entries", f"one, or one per prompt ({prompts})")
        for params in per_prompt:
            check_params(params)
        return per_prompt


def check_params(params: object) -> None:
    """Raise ParameterError unless ``params`` is a SamplingParams."""
    if not isinstance(params, SamplingParams):
        raise ParameterError("params", params, PARAMS)


def _refused(index: int, error: Exception) -> RequestOutput:
    """Return the finished result of a prompt that was never queued."""
    return RequestOutput(f"refused-{index}", None, [], [CompletionOutput(0, finish_reason="error", error=error)])


def _at(argument: str, index: int, error: ParameterError | RequestError) -> Exception:
    """Return the same error, with the place of the prompt in its text."""
    place = f"{argument}[{index}]"
    if isinstance(error, ParameterError):
        field = place if error.field == argument else f"{place}: {error.field}"
        return ParameterError(field, error.value, error.allowed)
    return type(error)(f"{place}: {error}")
