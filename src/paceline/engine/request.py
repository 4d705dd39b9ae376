"""Requests: checked against the engine's limits, then turned into sequences that wait for rows."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from paceline.chat.values import AssistantMessage
from paceline.config import LOOKS_UP, MAX_REFERENCE_TOKENS, MAX_REFERENCES, EngineConfig, SamplingParams
from paceline.config.ranges import is_number, is_whole
from paceline.core.batch import ParallelSample, RequestGroup
from paceline.core.outputs import CompletionOutput, Metrics, RequestOutput
from paceline.core.rows import Constraint
from paceline.core.sampling import sequence_seed
from paceline.drafters.lookup import LONGEST_SUFFIX as CONTEXT
from paceline.engine.guard import FaultIsolatedConstraint
from paceline.engine.prefixes import LEAST, WORTH_WAITING, Scope
from paceline.engine.scoring import PooledStates, PromptReading, PromptScores
from paceline.engine.sequences import Sequence as Row
from paceline.engine.sequences import TextStream
from paceline.errors import EmptyPromptError, ParameterError, PromptTooLongError, RequestError

_LEAST_READ = 4  # tokens: a text that is only read waits for no token of its own, so it shares shorter prefixes


@dataclass
class Request:
    """A prompt to continue.

    make_stream: makes the text stream of one sample; None leaves the texts empty.
    make_constraint: makes the constraint of one sample. Needed if ``params`` have structured_outputs or other
        restrictions on tokens.
    arrival: seconds on the clock of time.monotonic, from which ``time_budget`` counts; None uses the time when it is
        added.
    references: token ids of texts that n-gram lookup may copy from, for this request only.
    reading: what is collected from the prompt's hidden states.
    only_read: whether it ends with its prompt; ``reading`` says how much of it is read.
    client: name of the sender; clients take turns when requests wait for a row.
    prefix_owner: only requests of the same owner share cached prefixes, and of them those with the same
        ``cache_salt``. It has no NUL.
    priority: requests with lower values go first, whatever their client.
    read_message: splits the text of a chat's answer; see ``CompletionOutput``.
    budget_from_row: whether ``time_budget`` counts from the moment when an answer gets a row instead of ``arrival``.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    request_id: str | None = None
    arrival: float | None = None
    make_stream: Callable[[SamplingParams], TextStream] | None = None
    make_constraint: Callable[[], Constraint] | None = None
    client: str = ""
    priority: int = 0
    references: Sequence[Sequence[int]] = ()
    reading: PromptReading | None = None
    only_read: bool = False
    read_message: Callable[[str], AssistantMessage] | None = None
    budget_from_row: bool = False
    prefix_owner: str = ""

    @property
    def text_to_read(self) -> list[int]:
        """The prompt without tokens that nothing follows."""
        only = self.reading if self.only_read else None
        return self.prompt_token_ids if only is None else self.prompt_token_ids[: only.prefill_stop]


@dataclass(frozen=True)
class _SharedFields:
    """The fields that all samples of a request share."""

    request: Request
    request_id: str
    seed: int
    arrival: float
    group: RequestGroup
    scope: Scope


@dataclass(frozen=True)
class Intake:
    """Turns requests into sequences.

    max_model_len: the engine's, in tokens. eos_token_ids: tokens that end a text. adapters: names of the target's.
    embeds_only: whether the target has no output head.
    """

    config: EngineConfig
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    adapters: tuple[str, ...] = ()
    embeds_only: bool = False
    _private: Iterator[int] = field(default_factory=count, init=False)  # scopes of requests that share no answers

    def begin(self, request: Request, request_id: str) -> tuple[RequestOutput, list[Row]]:
        """Return the result, which fills up, and its sequences, which may wait for rows."""
        params, arrival = request.params, time.monotonic() if request.arrival is None else request.arrival
        output = RequestOutput(request_id, request.prompt, request.prompt_token_ids, [], params.n, params.ranking)
        reading = request.reading
        if params.prompt_logprobs is not None:
            reading = PromptScores(request.prompt_token_ids, params.prompt_logprobs)
            output.prompt_logprobs = reading.logprobs
        seed = secrets.randbits(63) if params.seed is None else params.seed
        group, scope = self._request_group(request), self._scope_of(request)
        common = _SharedFields(request, request_id, seed, arrival, group, scope)
        rows = [self._sequence(common, index) for index in range(1 if request.only_read else params.answers)]
        rows[0].reading = reading
        output.outputs.extend(row.output for row in rows)
        for row in rows if params.answers > params.n else ():
            row.rivals = output.candidates
        return output, rows

    def _request_group(self, request: Request) -> RequestGroup:
        """Return the texts that drafts can be copied from beside a sample's own text."""
        shares = request.params.keep_prefix and self.config.shares_answers
        scope = _owner_parts(request) if shares else (f"{next(self._private)}",)
        return RequestGroup(request.references, scope, shares)

    def _scope_of(self, request: Request) -> Scope:
        """Return which cached prefixes a prompt may reuse, and which requests may reuse its own."""
        params = request.params
        # Neither an owner's name nor an adapter's has NUL: different parts, other names.
        name = "\0".join(_owner_parts(request)) if self.config.prefix_cache else None
        least = (_LEAST_READ, _LEAST_READ) if request.only_read else (LEAST, WORTH_WAITING)
        return Scope(name, name if params.keep_prefix else None, *least)

    def _sequence(self, common: _SharedFields, index: int) -> Row:
        request, params, arrival = common.request, common.request.params, common.arrival
        eos = () if params.ignore_eos else self.eos_token_ids
        rate, budget = self.config.synthetic_acceptance, math.inf if params.time_budget is None else params.time_budget
        metrics = Metrics(arrival, prompt_tokens=len(request.prompt_token_ids), synthetic_acceptance=rate)
        return Row(
            request_id=common.request_id,
            prompt=request.text_to_read,
            params=params,
            seed=sequence_seed(common.seed, index),
            stop_tokens=frozenset((*eos, *params.stop_token_ids)),
            output=CompletionOutput(
                index,
                logprobs=None if params.logprobs is None else [],
                cumulative_logprob=None if params.scored is None else 0.0,
                metrics=metrics,
                read_message=request.read_message,
            ),
            stream=request.make_stream(params) if request.make_stream is not None else None,
            deadline=math.inf if request.budget_from_row else arrival + budget,
            budget_from_row=request.budget_from_row,
            constraint=None if request.make_constraint is None else FaultIsolatedConstraint(request.make_constraint()),
            client=request.client,
            priority=request.priority,
            scope=common.scope,
            member=ParallelSample(common.group, max(0, len(request.prompt_token_ids) - CONTEXT)),
            only_read=request.only_read,
        )

    def _check_adapter(self, params: SamplingParams) -> None:
        if params.adapter is None:
            return
        if params.adapter not in self.adapters:
            allowed = f"one of {', '.join(self.adapters)}" if self.adapters else "None: no adapters were loaded"
            raise ParameterError("adapter", params.adapter, allowed)

    def check(self, request: Request) -> None:
        """Raise what ``Engine.add`` would raise. May be called from any thread."""
        size, vocab = len(request.prompt_token_ids), self.vocab_size
        if self.embeds_only and not (request.only_read and isinstance(request.reading, PooledStates)):
            raise RequestError(
                "the model has no output head (lm_head), so it can embed texts (LLM.embed, /v1/embeddings), "
                "and neither continue nor score them; for these use a checkpoint with a head"
            )
        needed = len(request.text_to_read) + (not request.only_read)
        if size == 0 or needed == 0:
            raise EmptyPromptError("the prompt has no tokens to read, to embed or to score; give at least one")
        if needed > self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {size} tokens, and needs {needed} of max_model_len={self.max_model_len}; "
                "shorten it or raise max_model_len"
            )
        self._check_adapter(request.params)
        if request.params.stop and request.make_stream is None:
            raise ParameterError("stop", request.params.stop, "stop strings need a tokenizer; use stop_token_ids")
        restriction = request.params.restriction
        if restriction and request.make_constraint is None:
            allowed = "given to LLM.generate or LLM.request, which make its constraint with the tokenizer"
            raise ParameterError(restriction, getattr(request.params, restriction), allowed)
        if not is_whole(request.priority):
            raise ParameterError("priority", request.priority, "a whole number; lower ones are served first")
        if request.arrival is not None and (not is_number(request.arrival) or math.isnan(request.arrival)):
            raise ParameterError("arrival", request.arrival, "seconds on the clock of time.monotonic, or None")
        self._check_references(request)
        ids: dict[str, Iterable[int]] = {
            "token_ids" if request.only_read else "prompt_token_ids": request.prompt_token_ids,
            "stop_token_ids": request.params.stop_token_ids,
            "logit_bias": request.params.logit_bias,
            "allowed_token_ids": request.params.allowed_token_ids or (),
        }
        for name, tokens in ids.items():
            check_tokens(name, tokens, vocab)

    def _check_references(self, request: Request) -> None:
        """Raise ParameterError for references that are too large, or that no drafter would read."""
        if not request.references:
            return
        value, size = f"{len(request.references)} texts", sum(map(len, request.references))
        if not self.config.looks_up:
            raise ParameterError("references", value, f"left out here; they need {LOOKS_UP}")
        if request.params.num_speculative_tokens == 0:
            raise ParameterError("references", value, "left out beside num_speculative_tokens=0, which drafts nothing")
        if size > MAX_REFERENCE_TOKENS or len(request.references) > MAX_REFERENCES:
            allowed = f"at most {MAX_REFERENCES} texts with {MAX_REFERENCE_TOKENS} tokens together"
            raise ParameterError("references", f"{value} with {size} tokens", allowed)
        for tokens in request.references:
            if not tokens:
                raise ParameterError(
                    "references", tokens, "lists of token ids that are not empty; leave empty ones out"
                )
            check_tokens("references", tokens, self.vocab_size)


def check_tokens(name: str, tokens: Iterable[int], vocab: int) -> None:
    """Raise ParameterError unless all tokens are ids of the target's vocabulary."""
    for token in tokens:
        if not (isinstance(token, int) and 0 <= token < vocab):
            raise ParameterError(name, token, f"token ids from 0 to {vocab - 1}, the target's vocabulary")


def _owner_parts(request: Request) -> tuple[str, ...]:
    """Whose prefixes and answers a request shares: keys, values and texts depend on the adapter."""
    return request.prefix_owner, request.params.adapter or "", request.params.cache_salt or ""
