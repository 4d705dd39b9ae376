"""transformers' ``generate`` run by paceline: the same call and shapes, for batches and with an assistant."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from paceline.config import DtypeName, EngineOptions
from paceline.core.hardware import ignore_torch_context
from paceline.core.outputs import CompletionOutput, RequestOutput
from paceline.engine.engine import Engine, Request
from paceline.errors import ModelError, PacelineError, ParameterError
from paceline.integrations.transformers.assistant import check_assistant
from paceline.integrations.transformers.call_config import CallConfig, by_their_names, merged
from paceline.integrations.transformers.hooks import Criteria, Criterion, Processed, Processor, Record
from paceline.llm import LLM
from paceline.models.load.loading import max_positions

_DTYPES: dict[torch.dtype, DtypeName] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_DTYPES_ON_CUDA: dict[torch.dtype, DtypeName] = {**_DTYPES, torch.float16: "float16"}
_NOT_HERE = ("synced_gpus", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate")
_CHECKED_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.1, torch.float16: 0.05}  # of log-probabilities, relative
_SWITCHES = "_disable_adapters", "_active_adapter", "scaling"  # of peft's layers
_SAMPLES = 4  # numbers of each weight that tell whether it has changed
Allowed = Callable[[int, Tensor], list[int]]


@ignore_torch_context
def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: Sequence[Processor] | None = None,
    stopping_criteria: Sequence[Criterion] | None = None,
    prefix_allowed_tokens_fn: Allowed | None = None,
    synced_gpus: bool | None = None,
    assistant_model: PreTrainedModel | None = None,
    streamer: BaseStreamer | None = None,
    **kwargs: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """``model.generate`` of transformers, decoded by paceline: prompts of any lengths, speculation in all rows.

    inputs (or input_ids) [B, L] int64, padded on the left; attention_mask [B, L]. The other arguments are those of
    transformers, and every field of a ``GenerationConfig`` is honoured or refused by name. Draft tokens come from the
    assistant, else from the text so far; they do not change the answers. Sampling draws its seed from torch's
    generator, so that ``torch.manual_seed`` fixes it; the samples differ from transformers'. Processors and criteria
    are called for one row at a time, [1, L].

    Returns sequences [B * num_return_sequences, L + N] on the inputs' device, filled with the padding token; with
    ``return_dict_in_generate`` a GenerateDecoderOnlyOutput.

    The engine is kept as long as the model lives, and rebuilt when weights or assistant have changed.

    Raises ParameterError for options that cannot be honoured, ModelError for a model that cannot be run, CapacityError,
    and any exception of a processor or criterion.
    """
    _check_alone(model)
    refused = dict(kwargs, synced_gpus=synced_gpus)
    for name in _NOT_HERE:
        if refused.get(name):
            raise ParameterError(name, refused[name], "omitted: only model.generate of transformers supports it")
        kwargs.pop(name, None)
    with by_their_names():
        config, rest = merged(model, generation_config, kwargs)
        prompts = _prompts(inputs, rest, config)
        call_config = CallConfig(config, prompts.ids.shape[1])
        tokenizers = rest.pop("tokenizer", None), rest.pop("assistant_tokenizer", None)
        criteria = [*(stopping_criteria or ()), *_stop_strings(config, tokenizers[0])]
        if rest:
            allowed = "omitted: paceline does not know this argument; model.generate of transformers may support it"
            raise ParameterError(next(iter(rest)), next(iter(rest.values())), allowed)
        check_assistant(model, assistant_model, *tokenizers)
        if assistant_model is not None and config.prompt_lookup_num_tokens is not None:
            looked_up = config.prompt_lookup_num_tokens
            raise ParameterError("prompt_lookup_num_tokens", looked_up, "omitted with an assistant")
        if streamer is not None and len(prompts.ids) * call_config.answers > 1:
            raise ParameterError("streamer", streamer, "for one prompt with one answer")
        call = _Call(prompts, call_config, list(logits_processor or ()), criteria, prefix_allowed_tokens_fn, streamer)
        kept = _kept(model)
        with kept.alone():
            return call.run(kept.engine(model, assistant_model, call))


# Inputs


@dataclass(frozen=True)
class _Prompts:
    """ids [B, L] as given, on the CPU; paddings: number of padding tokens at the beginning of each row."""

    ids: Tensor
    paddings: list[int]
    device: torch.device

    def tokens(self, row: int) -> list[int]:
        tokens: list[int] = self.ids[row, self.paddings[row] :].tolist()
        return tokens


def _prompts(inputs: Tensor | None, rest: dict[str, Any], config: GenerationConfig) -> _Prompts:
    named = rest.pop("input_ids", None)
    if inputs is not None and named is not None:
        raise ParameterError("input_ids", named, "omitted when inputs are given")
    ids = named if inputs is None else inputs
    if ids is None and config.bos_token_id is not None:
        ids = torch.tensor([[config.bos_token_id]])
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.numel() == 0:
        raise ParameterError("input_ids", ids, "token ids as a tensor [B, L]")
    mask = _mask(ids, rest.pop("attention_mask", None), config)
    kinds = rest.pop("token_type_ids", None)
    if kinds is not None and bool(torch.as_tensor(kinds).any()):
        raise ParameterError("token_type_ids", kinds, "omitted, or all 0")
    return _Prompts(ids.cpu(), (mask == 0).sum(1).tolist(), ids.device)


def _mask(ids: Tensor, given: Tensor | None, config: GenerationConfig) -> Tensor:
    """[B, L]: 0 where a row is padded, which may only be at its beginning, and not all of it.

    Without a mask padding tokens count as padding, unless they also end answers: then none does, as in transformers.
    """
    pads = CallConfig(config, 0)
    if given is None:
        padded = config.pad_token_id is not None and pads.pad not in pads.ends
        given = (ids != pads.pad).long() if padded else torch.ones_like(ids)
    fits = isinstance(given, Tensor) and given.shape == ids.shape
    allowed = f"[B, L] = {tuple(ids.shape)} like the prompts, 0 only at the beginning of a row (padding_side='left')"
    if not fits or bool((given[:, 1:].bool() < given[:, :-1].bool()).any()) or not bool(given[:, -1].all()):
        raise ParameterError("attention_mask", given, allowed)
    return given.cpu()


def _stop_strings(config: GenerationConfig, tokenizer: Any) -> list[Criterion]:
    if config.stop_strings is None:
        return []
    if tokenizer is None:
        raise ParameterError("stop_strings", config.stop_strings, "given together with tokenizer=")
    return [StopStringCriteria(tokenizer, config.stop_strings)]


# One call


@dataclass
class _Call:
    prompts: _Prompts
    call_config: CallConfig
    own: list[Processor]
    criteria: list[Criterion]
    allowed: Allowed | None
    streamer: BaseStreamer | None
    records: list[Record] = field(default_factory=list)  # one per answer, in order

    @property
    def rows(self) -> int:
        return len(self.prompts.ids) * self.call_config.answers

    @property
    def length(self) -> int:
        """Largest number of tokens of a row."""
        return self.prompts.ids.shape[1] + self.call_config.max_tokens

    def run(self, engine: Engine) -> GenerateDecoderOnlyOutput | Tensor:
        try:
            rows = len(self.prompts.ids)
            seeds = torch.randint(2**62, (rows,)).tolist() if self.call_config.sampled else [None] * rows
            requests = [self._request(row, seed) for row, seed in enumerate(seeds)]  # all before the first is added
            outputs = [engine.add(request) for request in requests]
            self._decode(engine, outputs)
        except BaseException:
            engine.clear()
            raise
        answers = [answer for output in outputs for answer in output.outputs]
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return self._result([answer.token_ids for answer in answers])

    def _request(self, row: int, seed: int | None) -> Request:
        processed = self.call_config.processed(self.own, self.allowed)
        return Request(
            self.prompts.tokens(row),
            self.call_config.params(seed, processed),
            make_stream=(lambda _: Criteria(self.prompts.ids[row : row + 1], self.criteria)) if self.criteria else None,
            make_constraint=(lambda: self._processed(row)) if processed else None,
        )

    def _processed(self, row: int) -> Processed:
        record = Record() if self.call_config.records else None
        if record is not None:
            self.records.append(record)
        processors = self.call_config.processors(row, self.prompts.paddings[row], self.own, self.allowed)
        ends, most = self.call_config.ends, self.call_config.max_tokens
        return Processed(self.prompts.ids[row : row + 1], processors, ends, most, record)

    def _decode(self, engine: Engine, outputs: Sequence[RequestOutput]) -> None:
        if self.streamer is not None:
            self.streamer.put(self.prompts.ids)
        shown = 0
        while engine.busy:
            engine.step()
            if self.streamer is not None:
                shown = self._stream(outputs[0].outputs[0], shown)
        if self.streamer is not None:
            self.streamer.end()

    def _stream(self, answer: CompletionOutput, shown: int) -> int:
        assert self.streamer is not None
        for token in answer.token_ids[shown:]:
            self.streamer.put(torch.tensor([token]))
        return len(answer.token_ids)

    def _result(self, answers: list[list[int]]) -> GenerateDecoderOnlyOutput | Tensor:
        longest = max(map(len, answers))
        filled = torch.tensor([answer + [self.call_config.pad] * (longest - len(answer)) for answer in answers])
        prompts = self.prompts.ids.repeat_interleave(self.call_config.answers, 0)
        sequences = torch.cat([prompts, filled.to(prompts.dtype).view(len(answers), longest)], 1)
        sequences = sequences.to(self.prompts.device)
        config = self.call_config.config
        if not config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self._recorded("scores", longest) if config.output_scores else None,
            logits=self._recorded("raw", longest) if config.output_logits else None,
        )

    def _recorded(self, kind: str, longest: int) -> tuple[Tensor, ...]:
        """Per token of the longest answer [B * n, V]; an answer that has ended repeats its last token's.

        Those of an answer without tokens are 0.
        """
        each: list[list[Tensor]] = [getattr(record, kind) for record in self.records]
        nothing = [torch.zeros_like(tables[0]) for tables in each if tables][:1]
        each = [tables or nothing for tables in each]
        steps = [torch.stack([tables[min(place, len(tables) - 1)] for tables in each]) for place in range(longest)]
        return tuple(step.to(self.prompts.device) for step in steps)


# Cached engines


class _Kept:
    """A model's engine, with or without an assistant, for the weights they had when it was built."""

    def __init__(self) -> None:
        self._lock, self._thread = threading.Lock(), 0
        self._llm: LLM | None = None
        self._weights: object = None
        self._options: object = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other thread runs the model. Raises PacelineError inside of a call by the same thread."""
        if self._thread == threading.get_ident():
            raise PacelineError("a processor, criterion or streamer called generate on the model that runs it")
        with self._lock:
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = 0

    def engine(self, model: PreTrainedModel, assistant: PreTrainedModel | None, call: _Call) -> Engine:
        weights = _stamp(model), None if assistant is None else _stamp(assistant)
        if self._llm is None or weights != self._weights:
            self._llm, self._weights = _load(model, assistant, call), weights
            self._options = _options(self._llm, model, assistant, call)
        wanted = _options(self._llm, model, assistant, call)
        if wanted != self._options:
            self._llm, self._options = self._llm.with_options(**wanted), wanted
        return self._llm.engine


_KEPT: WeakKeyDictionary[PreTrainedModel, _Kept] = WeakKeyDictionary()
_KEPT_LOCK = threading.Lock()


def _kept(model: PreTrainedModel) -> _Kept:
    if not isinstance(model, PreTrainedModel):
        raise ParameterError("model", model, "a loaded transformers model")
    with _KEPT_LOCK:
        return _KEPT.setdefault(model, _Kept())


def _check_alone(model: PreTrainedModel) -> None:
    """Raise ParameterError for a model with an encoder, before its other arguments are examined."""
    if isinstance(model, PreTrainedModel) and model.config.is_encoder_decoder:
        raise ParameterError(
            "model", type(model).__name__, "a decoder-only model; model.generate of transformers runs others"
        )


def _load(model: PreTrainedModel, assistant: PreTrainedModel | None, call: _Call) -> LLM:
    known = _DTYPES_ON_CUDA if model.device.type == "cuda" else _DTYPES
    if model.dtype not in known:
        allowed = " or ".join(map(str, known))
        raise ParameterError("model", model.dtype, f"in {allowed} on this device: model.to(torch.bfloat16)")
    options = _sized(model, assistant, call)
    options |= EngineOptions(device=str(model.device), dtype=known[model.dtype])
    if assistant is not None:
        options["draft_dtype"] = known.get(assistant.dtype, "same")
    llm = LLM(model, assistant, use_tqdm=False, **options)
    _check_logits(llm, model)
    return llm


def _check_logits(llm: LLM, model: PreTrainedModel) -> None:
    """Raise ModelError for a model that computes something else than its weights and its configuration say.

    Hooks and replaced modules change what it computes.
    """
    if model.training:  # dropout would change its logits, and is not applied here
        return
    count = max(2, min(_CHECKED_TOKENS, llm.engine.max_model_len - 1))
    # Not the first or last ids: after control tokens alone SmolLM2's log-probabilities in bfloat16 are off by 23 %.
    tokens = torch.arange(1, count + 1) * model.config.get_text_config().vocab_size // (count + 2)
    (score,) = llm.score([tokens[:1].tolist()], [tokens[1:].tolist()], use_tqdm=False)
    with torch.no_grad():
        logits = model(input_ids=tokens[None].to(model.device), use_cache=False).logits[0, :-1].float().cpu()
    expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    both = torch.stack([torch.tensor(score.logprobs), expected]).nan_to_num(neginf=0.0)
    error = ((both[0] - both[1]).abs().max() / both[1].abs().max().clamp(min=1)).item()
    if not error <= _TOLERANCE[model.dtype]:
        raise ModelError(
            f"{type(model).__name__} does not compute what its weights and configuration say: log-probabilities differ "
            f"by {100 * error:.2g} %. Hooks, replaced modules and own forward methods are run by model.generate only"
        )


def _options(llm: LLM, model: PreTrainedModel, assistant: PreTrainedModel | None, call: _Call) -> EngineOptions:
    """Options of the next engine, large enough for this call and for earlier ones."""
    options, engine = _sized(model, assistant, call), llm.engine
    options["max_batch_size"] = max(call.rows, engine.config.rows)
    options["max_model_len"] = max(_positions(model, assistant, call), engine.max_model_len)
    return options


def _sized(model: PreTrainedModel, assistant: PreTrainedModel | None, call: _Call) -> EngineOptions:
    drafter, length = call.call_config.drafting
    return EngineOptions(
        drafter=drafter,
        num_speculative_tokens="auto" if length is None else length,
        max_batch_size=call.rows,
        max_model_len=_positions(model, assistant, call),
    )


def _positions(model: PreTrainedModel, assistant: PreTrainedModel | None, call: _Call) -> int:
    """Positions of a row: the next power of two, so that calls of other lengths fit, too.

    Raises ParameterError for a call that needs more positions than the model or its assistant has.
    """
    limits = {"model": max_positions(model)}
    if assistant is not None:
        limits["assistant_model"] = max_positions(assistant)
    who = min(limits, key=lambda name: limits[name])
    most, wanted = limits[who], call.length - min(call.prompts.paddings)
    if wanted > most:
        prompt = wanted - call.call_config.max_tokens
        if prompt >= most:
            raise ParameterError("input_ids", f"{prompt} tokens", f"fewer than {most}: {who} has {most} positions")
        allowed = f"at most {most - prompt} after a prompt of {prompt} tokens: {who} has {most} positions"
        raise ParameterError("max_new_tokens", call.call_config.max_tokens, allowed)
    return min(most, 1 << (call.length - 1).bit_length())


def _stamp(model: PreTrainedModel) -> tuple[object, ...]:
    """A value that changes when the model does: its configuration, hooks and active adapters, and of each tensor the
    address, the version counter and a few of its numbers.

    Changes through ``weight.data`` are not counted in the version, and are seen only if they change those numbers.
    """
    weights = list(model.state_dict(keep_vars=True).values())
    if any(not isinstance(weight, Tensor) or weight.is_meta for weight in weights):
        raise ParameterError("model", type(model).__name__, "with all of its weights in memory, as torch's own tensors")
    samples = [weight.detach().reshape(-1)[:: max(1, weight.numel() // _SAMPLES)] for weight in weights]
    versions = ((weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights)
    code = [
        (
            *module._forward_hooks,
            "before",
            *module._forward_pre_hooks,
            id(vars(module).get("forward")),
            *(repr(vars(module).get(name)) for name in _SWITCHES),
        )
        for module in model.modules()
    ]
    numbers = torch.cat([sample.to("cpu", torch.float32) for sample in samples]).nan_to_num().tolist()
    return model.training, model.config.to_dict(), code, *versions, *numbers
