"""Answers for columns of prompts or conversations, for the ``map_batches`` of Ray Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias, Unpack

import numpy as np
from numpy.typing import NDArray

from paceline.config import DEFAULT_MODEL, EngineOptions, SamplingParams
from paceline.config.inputs import Prompt, as_prompt, check_message
from paceline.core.outputs import RequestOutput
from paceline.engine.engine import Request
from paceline.errors import PacelineError, ParameterError, RequestError, shown
from paceline.llm import LLM
from paceline.server.batch.lines import seed_of

Columns: TypeAlias = dict[str, NDArray[Any]]

PROMPTS, CONVERSATIONS = "prompt", "messages"
NAMES, PLACES = "custom_id", "index"
GAINED = ("answer", "finish_reason", "output_tokens", "error")


class Answers:
    """A model in a worker of Ray Data; called with a batch of rows, it adds the columns of their answers.

    A row has either ``prompt`` (text or token ids) or ``messages`` (objects with role and content), and a name:
    ``custom_id`` (text), else ``index`` (a whole number). Its seed comes from the job's seed and that name, as in
    ``paceline batch``: the answer does not depend on the worker, on the rows beside it, on the order or on repetitions.

    The row gains ``answer`` and ``finish_reason`` (lists of them if ``params.n`` is not 1), ``output_tokens`` (of all
    answers together) and ``error``: empty, or the reason why the row could not be answered. Such a row does not affect
    the others.

    seed: the job's seed.
    params: sampling parameters without a seed, also as a mapping; by default ``LLM``'s.
    draft_model, options: those of ``LLM``.

    Raises what ``LLM`` raises, and ParameterError for a seed in ``params``.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        seed: int,
        params: SamplingParams | Mapping[str, Any] | None = None,
        draft_model: str | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        given = params if isinstance(params, SamplingParams) else SamplingParams.from_mapping(params or {})
        if given.seed is not None:
            raise ParameterError("params.seed", given.seed, "left out: each row has its own, from the job's seed")
        replace(given, seed=seed)  # replace validates it
        self._llm = LLM(model, draft_model, **options)
        self._seed, self._params, self._chat_params = seed, given, given
        if params is None:
            self._params = self._llm.get_default_sampling_params()
            self._chat_params = self._llm.get_default_sampling_params(chat=True)

    def __call__(self, batch: Columns) -> Columns:
        """The batch's columns and those of its answers. Raises ParameterError if columns are missing or ambiguous."""
        prompts, names = columns_of(batch)
        asked = [self._request(prompts, *row) for row in zip(batch[prompts], batch[names], strict=True)]
        good = [each for each in asked if isinstance(each, Request)]
        made = self._llm.generate(
            [each.prompt_token_ids for each in good], [each.params for each in good], use_tqdm=False
        )
        outputs = iter(made)
        rows = [self._row(next(outputs)) if isinstance(each, Request) else self._failed(each) for each in asked]
        return batch | {name: _column([row[place] for row in rows], name) for place, name in enumerate(GAINED)}

    def _request(self, column: str, cell: object, name: object) -> Request | PacelineError:
        """The row as a request, or the error that explains why it cannot be one."""
        try:
            usual = self._params if column == PROMPTS else self._chat_params
            params = replace(usual, seed=seed_of(self._seed, own_name(name)))
            request = self._llm.request(self._prompt(column, cell), params)
            self._llm.engine.check(request)
        except PacelineError as error:
            return error
        return request

    def _prompt(self, column: str, cell: object) -> Prompt:
        """A cell as a prompt. Raises PacelineError if it is not one."""
        value = cell.tolist() if isinstance(cell, np.ndarray) else cell
        if column == PROMPTS:
            return as_prompt(PROMPTS, value)
        if not isinstance(value, list) or not value:
            raise RequestError(f"a conversation is a list of messages, not {shown(cell)}")
        return self._llm.tokens_of_chat([check_message(message) for message in value])

    def _row(self, output: RequestOutput) -> tuple[object, ...]:
        """The answer's columns, in the order of GAINED."""
        texts, reasons = [each.text for each in output.outputs], [str(each.finish_reason) for each in output.outputs]
        tokens = sum(answer.metrics.output_tokens for answer in output.candidates)
        error = "" if output.error is None else str(output.error)
        return self._shown(texts), self._shown(reasons), tokens, error

    def _failed(self, error: PacelineError) -> tuple[object, ...]:
        """The columns of a row that failed, in the order of GAINED."""
        answers = self._params.n
        return self._shown([""] * answers), self._shown(["error"] * answers), 0, str(error)

    def _shown(self, values: list[str]) -> str | list[str]:
        return values if self._params.n > 1 else values[0]


def columns_of(batch: Mapping[str, object]) -> tuple[str, str]:
    """Names of the column to be answered and of the column with the rows' names. Raises ParameterError."""
    asked = [name for name in (PROMPTS, CONVERSATIONS) if name in batch]
    if len(asked) != 1:
        raise ParameterError("columns", list(batch), f"either {PROMPTS!r} or {CONVERSATIONS!r} as a column")
    named = [name for name in (NAMES, PLACES) if name in batch]
    if not named:
        allowed = f"{NAMES!r} or {PLACES!r} as a column: a row's seed comes from its name"
        raise ParameterError("columns", list(batch), allowed)
    if taken := [name for name in GAINED if name in batch]:
        raise ParameterError("columns", taken, "other names: these are reserved for answers: " + ", ".join(GAINED))
    return asked[0], named[0]


def own_name(cell: object) -> str:
    """The name that a row's seed is derived from, as ``paceline batch`` does from a line's. Raises RequestError."""
    if isinstance(cell, str) and cell:
        return f"id {cell}"
    if isinstance(cell, (int, np.integer)) and not isinstance(cell, bool):
        return f"index {int(cell)}"
    raise RequestError(f"a row's custom_id must be non-empty text, its index a whole number, not {shown(cell)}")


def _column(cells: list[object], name: str) -> NDArray[Any]:
    """Texts and lists as an object array: numpy would turn lists of equal length into a matrix."""
    if name == "output_tokens":
        return np.array(cells, dtype=np.int64)
    column = np.empty(len(cells), dtype=object)
    column[:] = cells
    return column
