"""The engine: requests in, tokens out, one round at a time."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.acceptance import RULES
from paceline.attention import BACKENDS
from paceline.batch import Batch
from paceline.decoder import Decoder
from paceline.drafters import Drafter, ModelDrafter, NgramDrafter, NoDrafter
from paceline.errors import EmptyPromptError, ParameterError, PromptTooLongError
from paceline.lengths import make_policy
from paceline.memory import check_memory
from paceline.models.base import Model
from paceline.outputs import CompletionOutput, Metrics, RequestOutput
from paceline.params import EngineConfig, SamplingParams
from paceline.round import Speculation, speculative_round
from paceline.sampling import sequence_seed
from paceline.scheduler import Scheduler, TextStream
from paceline.scheduler import Sequence as Row


@dataclass
class Request:
    """A prompt to continue. ``make_stream`` makes one text stream an answer; None leaves the texts empty.

    max_time: seconds from now; what is not finished by then ends with finish_reason "deadline".
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    request_id: str | None = None
    max_time: float | None = None
    make_stream: Callable[[SamplingParams], TextStream] | None = None


@dataclass
class Models:
    """What the engine runs: a target, perhaps a draft model, and the tokens that end a text."""

    target: Model
    draft: Model | None = None
    eos_token_ids: tuple[int, ...] = ()
    documents: Sequence[Sequence[int]] = field(default_factory=tuple)  # for the n-gram drafter


class Engine:
    """Decodes all requests in one ragged batch. Not thread-safe: one thread calls ``add`` and ``step``.

    Raises CapacityError if the rows asked for do not fit into memory, ParameterError for a configuration that makes no
    sense with these models.
    """

    def __init__(self, models: Models, config: EngineConfig) -> None:
        self.models = models
        self.config = config
        self.max_model_len = _max_model_len(models.target, config)
        check_memory(models.target, models.draft, config, self.max_model_len)
        self._ids = itertools.count()
        self._requests: dict[str, RequestOutput] = {}
        target = self._decoder(models.target)
        drafter = self._drafter()
        self.parts = Speculation(target, drafter, make_policy(config.num_speculative_tokens), RULES[config.acceptance])
        self.batch = Batch(config.max_batch_size, self.max_model_len, models.target.vocab_size, models.target.device)
        self.scheduler = Scheduler(self.batch, [target, *drafter.decoders], config.max_batch_size, config.prefill_chunk)

    def _decoder(self, model: Model) -> Decoder:
        backend = BACKENDS[self.config.attention]()
        return Decoder(model, backend, self.config.max_batch_size, self.max_model_len, self.models.target.vocab_size)

    def _drafter(self) -> Drafter:
        if self.config.drafter is None or self.config.num_speculative_tokens == 0:
            return NoDrafter()
        if self.config.drafter == "ngram":
            return NgramDrafter(self.models.documents, self.models.target.device)
        if self.models.draft is None:
            raise ParameterError("drafter", "model", "needs a draft_model; or choose 'ngram' or None")
        return ModelDrafter(self._decoder(self.models.draft), self.config.acceptance)

    def describe(self) -> str:
        """What runs, in one line."""
        target, config, drafter = self.models.target, self.config, self.parts.drafter
        guesses = "no speculation"
        if not isinstance(drafter, NoDrafter):
            who = self.models.draft.name if drafter.decoders and self.models.draft is not None else drafter.name
            guesses = f"drafter {who}, length {self.parts.policy.name}, acceptance {config.acceptance}"
        return (
            f"target {target.name} ({str(target.dtype).removeprefix('torch.')} on {target.device}, "
            f"{torch.get_num_threads()} threads); {guesses}; attention {config.attention}; "
            f"{config.max_batch_size} rows of {self.max_model_len} tokens"
        )

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def add(self, request: Request) -> RequestOutput:
        """Queue a request; the result it returns fills up as ``step`` is called.

        Raises EmptyPromptError, PromptTooLongError or ParameterError; other requests are not affected.
        """
        self._check(request)
        request_id = request.request_id or f"request-{next(self._ids)}"
        if request_id in self._requests:
            raise ParameterError("request_id", request_id, "not the id of a request that still runs")
        now = time.monotonic()
        output = RequestOutput(request_id, request.prompt, request.prompt_token_ids, [])
        seed = secrets.randbits(63) if request.params.seed is None else request.params.seed
        for index in range(request.params.n):
            row = self._sequence(request, request_id, index, seed, now)
            output.outputs.append(row.output)
            self.scheduler.waiting.append(row)
        self._requests[request_id] = output
        return output

    def _sequence(self, request: Request, request_id: str, index: int, seed: int, now: float) -> Row:
        params = request.params
        eos = () if params.ignore_eos else self.models.eos_token_ids
        metrics = Metrics(arrival_time=now, prompt_tokens=len(request.prompt_token_ids))
        return Row(
            request_id=request_id,
            prompt=request.prompt_token_ids,
            params=params,
            seed=sequence_seed(seed, index),
            stop_tokens=frozenset((*eos, *params.stop_token_ids)),
            output=CompletionOutput(index, logprobs=None if params.logprobs is None else [], metrics=metrics),
            stream=request.make_stream(params) if request.make_stream is not None else None,
            deadline=None if request.max_time is None else now + request.max_time,
        )

    def _check(self, request: Request) -> None:
        size, vocab = len(request.prompt_token_ids), self.models.target.vocab_size
        if size == 0:
            raise EmptyPromptError("the prompt has no tokens; give at least one")
        if size >= self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {size} tokens, and max_model_len={self.max_model_len} leaves no room for an answer; "
                "shorten the prompt or raise max_model_len"
            )
        if request.params.stop and request.make_stream is None:
            raise ParameterError("stop", request.params.stop, "stop strings need a tokenizer; use stop_token_ids")
        if request.max_time is not None and not request.max_time > 0:
            raise ParameterError("max_time", request.max_time, "a number of seconds above 0")
        ids: dict[str, Iterable[int]] = {
            "prompt_token_ids": request.prompt_token_ids,
            "stop_token_ids": request.params.stop_token_ids,
            "logit_bias": request.params.logit_bias,
        }
        for name, tokens in ids.items():
            for token in tokens:
                if not 0 <= token < vocab:
                    raise ParameterError(name, token, f"token ids from 0 to {vocab - 1}, the target's vocabulary")

    @torch.inference_mode()
    def step(self) -> list[RequestOutput]:
        """Admit, prefill a chunk, play one round. Returns the requests that gained tokens or ended."""
        changed = self.scheduler.overdue(time.monotonic())
        self.scheduler.admit()
        if self.scheduler.running:
            verdict = speculative_round(self.parts, self.batch)
            changed += self.scheduler.settle(verdict)
        return self._collect(changed)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its rows are free at once. None if there is no such request."""
        output = self._requests.get(request_id)
        self._collect(self.scheduler.drop(request_id, "abort"))
        return output

    def clear(self) -> None:
        """End all requests; also after an exception or Ctrl-C in the middle of a round."""
        for output in self._requests.values():
            for answer in output.outputs:
                answer.finish_reason = answer.finish_reason or "abort"
        self.scheduler.clear()
        self._requests.clear()

    def _collect(self, changed: list[Row]) -> list[RequestOutput]:
        for row in changed:
            if row.stream is not None:
                row.output.text = row.stream.text
        ids = dict.fromkeys(row.request_id for row in changed)
        outputs = [self._requests[request_id] for request_id in ids]
        for output in outputs:
            if output.finished:
                del self._requests[output.request_id]
        return outputs

    @torch.inference_mode()
    def next_logits(self, token_ids: Sequence[int]) -> Tensor:
        """The target's logits [V] after these tokens, from one plain forward pass with a cache of its own."""
        model = self.models.target
        decoder = Decoder(model, BACKENDS[self.config.attention](), 1, len(token_ids), model.vocab_size)
        tokens = torch.tensor([list(token_ids)], device=model.device)
        hidden = decoder.forward(tokens, tokens.new_zeros(1), len(token_ids))
        return decoder.logits(hidden[:, -1])[0]


def _max_model_len(target: Model, config: EngineConfig) -> int:
    if config.max_model_len is None:
        return min(target.max_positions, config.DEFAULT_MAX_MODEL_LEN)
    if config.max_model_len > target.max_positions:
        raise ParameterError(
            "max_model_len", config.max_model_len, f"at most {target.max_positions}, the model's own limit"
        )
    return config.max_model_len
