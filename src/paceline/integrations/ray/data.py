"""A column of prompts or conversations in, columns of answers out: for the ``map_batches`` of Ray Data."""

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

    A row has either ``prompt`` (text or token ids) or ``messages`` (objects with role and content), and a name of its
    own: ``custom_id`` (text), else ``index`` (a whole number). Its seed comes from the job's and that name, as in
    ``paceline batch``: which worker answers it, beside which rows, in which order and how often again changes nothing.

    It gains ``answer`` and ``finish_reason`` (lists of them if ``params.n`` is not 1), ``output_tokens`` (of all of
    them) and ``error``: empty, or why the row could not be answered. Such a row ends nothing else.

    seed: the job's. params: how to continue, without a seed; a mapping is taken, too. draft_model, options: those of
    ``LLM``. Raises what ``LLM`` raises, and ParameterError for a seed in ``params``.
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
        replace(given, seed=seed)  # which checks it
        self._seed, self._params = seed, given
        self._llm = LLM(model, draft_model, **options)

    def __call__(self, batch: Columns) -> Columns:
        """The batch's columns and those of its answers. Raises ParameterError for columns that make no sense."""
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
        """A row as the engine takes it, or why it would not."""
        try:
            params = replace(self._params, seed=seed_of(self._seed, own_name(name)))
            request = self._llm.request(self._prompt(column, cell), params)
            self._llm.engine.check(request)
        except PacelineError as error:
            return error
        return request

    def _prompt(self, column: str, cell: object) -> Prompt:
        """Raises PacelineError for what is none."""
        given = cell.tolist() if isinstance(cell, np.ndarray) else cell
        if column == PROMPTS:
            return as_prompt(PROMPTS, given)
        if not isinstance(given, list) or not given:
            raise RequestError(f"a conversation is a list of messages, not {shown(cell)}")
        return self._llm.tokens_of_chat([check_message(message) for message in given])

    def _row(self, output: RequestOutput) -> tuple[object, ...]:
        """What it gains, in the order of GAINED."""
        texts, reasons = [each.text for each in output.outputs], [str(each.finish_reason) for each in output.outputs]
        tokens = sum(answer.metrics.output_tokens for answer in output.candidates)
        error = "" if output.error is None else str(output.error)
        return self._shown(texts), self._shown(reasons), tokens, error

    def _failed(self, error: PacelineError) -> tuple[object, ...]:
        """Likewise."""
        answers = self._params.n
        return self._shown([""] * answers), self._shown(["error"] * answers), 0, str(error)

    def _shown(self, values: list[str]) -> str | list[str]:
        return values if self._params.n > 1 else values[0]


def columns_of(batch: Mapping[str, object]) -> tuple[str, str]:
    """Which column has what is to be answered, and which one the rows' names. Raises ParameterError."""
    asked = [name for name in (PROMPTS, CONVERSATIONS) if name in batch]
    if len(asked) != 1:
        raise ParameterError("columns", list(batch), f"either {PROMPTS!r} or {CONVERSATIONS!r} among them")
    named = [name for name in (NAMES, PLACES) if name in batch]
    if not named:
        allowed = f"{NAMES!r} or {PLACES!r} among them: a row's seed comes from its name"
        raise ParameterError("columns", list(batch), allowed)
    if taken := [name for name in GAINED if name in batch]:
        raise ParameterError("columns", taken, "other names: those of answers are " + ", ".join(GAINED))
    return asked[0], named[0]


def own_name(cell: object) -> str:
    """What a row's seed is made from: what ``paceline batch`` makes that of its line from. Raises RequestError."""
    if isinstance(cell, str) and cell:
        return f"id {cell}"
    if isinstance(cell, (int, np.integer)) and not isinstance(cell, bool):
        return f"index {int(cell)}"
    raise RequestError(f"a row's custom_id is a text that is not empty, its index a whole number, not {shown(cell)}")


def _column(cells: list[object], name: str) -> NDArray[Any]:
    """Texts and lists as objects: numpy would make a matrix of lists that are equally long."""
    if name == "output_tokens":
        return np.array(cells, dtype=np.int64)
    column = np.empty(len(cells), dtype=object)
    column[:] = cells
    return column
