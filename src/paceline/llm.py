"""The offline Python API: a batch of prompts in, their answers out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn, Self, TypeAlias, Unpack

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from paceline.config import (
    DEFAULT_MODEL,
    EngineConfig,
    EngineOptions,
    QuantizationName,
    SamplingParams,
    StructuredOutputs,
    check_used,
    engine_config,
)
from paceline.config.inputs import (
    Message,
    Prompt,
    as_conversations,
    as_documents,
    as_prompt,
    as_prompts,
    as_references,
    as_sources,
)
from paceline.config.ranges import FileName
from paceline.core.hardware import (
    default_threads,
    ignore_torch_context,
    resolve_device,
    resolve_dtype,
    threads_per_rank,
    torch_threads,
)
from paceline.core.outputs import RequestOutput, Score, TokenLogprob
from paceline.core.processors import processed_row
from paceline.core.rows import Constraint
from paceline.drafters.heads.decoder import HeadModel
from paceline.drafters.heads.loading import find_head, load_head_for
from paceline.engine.calls import Call, Made, OnError, check_params, fields_of
from paceline.engine.engine import Engine, Models, Request
from paceline.engine.scoring import Text
from paceline.engine.sharing import Call as EngineCall
from paceline.engine.sharing import SharedEngine
from paceline.errors import EmptyPromptError, PacelineError, ParameterError
from paceline.models.base import AnyModel
from paceline.models.boundary import Source, is_loaded, name_of
from paceline.models.hub import resolve_tokenizer
from paceline.models.loading import check_source, eos_token_ids, load_model
from paceline.models.native import NativeModel
from paceline.models.packed_file import find_packed
from paceline.models.prepare import prepare
from paceline.models.shares import Share
from paceline.models.tokenizer import Detokenizer, Tokenizer, check_same_vocabulary
from paceline.structured import Grammars

_OF_WEIGHTS = "dtype", "quantization", "draft_dtype", "draft_quantization", "device", "deterministic", "tensor_parallel"

_as_prompt = partial(as_prompt, "prompts")

ModelSource: TypeAlias = Source
TokenizerSource: TypeAlias = str | os.PathLike[str] | PreTrainedTokenizerBase


class LLM:
    """A target model, perhaps with a drafter, ready to decode batches. Calls from several threads share its rounds.

    ``with LLM(...) as llm:`` closes it at the end.

    model: a hub name, a directory, a .gguf file, an embedded name ("smollm2-135m") or a loaded PreTrainedModel.
    draft_model: likewise; it must share the target's vocabulary. Giving one makes drafter="hybrid" the default, on CUDA
        "model" (see EngineConfig). Or a trained head (EAGLE-3) of this target, a directory or a hub name: "hybrid".
        "smollm2-135m-head" comes with the package.
    tokenizer: a loaded one, or the directory, file or name of one, in place of the model's own. A loaded
        PreTrainedModel has none: without one, prompts and answers are token ids.
    reference_documents: texts (or token ids) that the n-gram drafter may copy from, besides each row's own tokens.
    use_tqdm: whether a terminal shows what is being done: loading, packing, measuring costs.
    options: see EngineConfig.

    Raises ModelError (not found, broken, vocabularies differ), ParameterError, CapacityError.
    """

    @ignore_torch_context
    @torch.inference_mode(False)  # what is made in a caller's inference mode could be written in that mode alone
    def __init__(
        self,
        model: ModelSource = DEFAULT_MODEL,
        draft_model: ModelSource | None = None,
        *,
        tokenizer: TokenizerSource | None = None,
        reference_documents: Sequence[Prompt] = (),
        use_tqdm: bool = True,
        **options: Unpack[EngineOptions],
    ) -> None:
        _check_source("model", model)
        if draft_model is not None:
            _check_source("draft_model", draft_model)
        documents = as_sources("reference_documents", reference_documents)
        config = engine_config(options, draft_model, documents)
        if find_head(model) is not None:
            raise ParameterError("model", model, "a model; this is a trained head: its target's draft_model")
        check_source(model, config.max_model_len)
        for draft_too in (False, True):
            _dtype(config, of_draft=draft_too)  # what this device cannot do is refused before anything is loaded
        _serve_if_launched(config.tensor_parallel)
        self.tokenizer = _load_tokenizer(model, tokenizer)
        head = None if draft_model is None else find_head(draft_model)
        if draft_model is not None and head is None:
            self._check_vocabulary(draft_model)
        references = [self._encode(document) for document in documents]
        with _stages(use_tqdm) as begin:
            with torch_threads(config.threads or default_threads()):  # for a while: other engines have their own
                draft = None if draft_model is None or head is not None else _load_draft(draft_model, config, begin)
                target = _load_target(model, config, begin)
                draft = draft if head is None else _load_head(head, model, target, config)
            self._models = Models(target, draft, self._eos(model), references)
            self._models.users.add(self)
            begin("measuring what rounds cost")
            self._shared: SharedEngine | None = SharedEngine(Engine(self._models, config))

    @classmethod
    def _sharing(cls, other: LLM, config: EngineConfig) -> LLM:
        llm = cls.__new__(cls)
        llm.tokenizer = other.tokenizer
        llm._models = other._models
        llm._models.users.add(llm)
        llm._shared = SharedEngine(Engine(other._models, config))
        return llm

    def with_options(self, **options: Unpack[EngineOptions]) -> LLM:
        """Another engine on the same weights, with some options changed (but not how the weights were loaded)."""
        for fixed, given in options.items():
            if fixed in _OF_WEIGHTS:
                raise ParameterError(fixed, given, "what the weights were loaded with; make a new LLM")
        config = replace(self.engine.config, **options)
        check_used(config, options)
        return self._sharing(self, config)

    def plain(self) -> LLM:
        """The same weights decoding without speculation, for comparison."""
        return self.with_options(drafter=None, num_speculative_tokens=0, profile=None)

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    def _check_vocabulary(self, draft_model: ModelSource) -> None:
        draft = _load_tokenizer(draft_model, None)
        if self.tokenizer is not None and draft is not None:
            check_same_vocabulary(self.tokenizer, draft)

    def _eos(self, model: ModelSource) -> tuple[int, ...]:
        of_model = eos_token_ids(model)
        of_tokenizer = self.tokenizer.eos_token_ids if self.tokenizer is not None else ()
        return tuple(dict.fromkeys((*of_model, *of_tokenizer)))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        references: Sequence[Sequence[Prompt]] | None = None,
        use_tqdm: bool = True,
        on_finished: Callable[[RequestOutput], None] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Continue all prompts (strings or token ids) in one batch; results in the order of the prompts.

        params: one for all, or one a prompt; a ``time_budget`` counts from this call on. references: for each prompt a
        list of texts (or token ids) that its answers will repeat in parts: n-gram lookup copies from them; they change
        the speed and nothing else. on_finished is called with each request as it ends, in the order of ending.
        If interrupted, what has not ended has finish_reason "abort" and the interrupt goes on to the caller.
        What goes wrong with one request ends it with finish_reason "error" and its ``error``; the others go on.
        on_error: a prompt that cannot be served (too long, empty, no text, a blank reference) raises before anything is
        decoded, and the error names it: "prompts[3]: ...". With "skip" the others are served: the result in its place
        has one answer without tokens, finish_reason "error" and the ``error``.
        """
        call = Call(params, references, on_error)
        return self._run(self._made(as_prompts("prompts", prompts), call), use_tqdm, on_finished)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        references: Sequence[Sequence[Prompt]] | None = None,
        use_tqdm: bool = True,
        on_finished: Callable[[RequestOutput], None] | None = None,
        on_error: OnError = "raise",
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several in one batch, through the model's chat template. See ``generate``.

        A message's content is a text, or a list of text parts: {"type": "text", "text": ...}.
        add_generation_prompt, chat_template_kwargs: as ``tokens_of_chat`` has them.
        """
        call, fields = Call(params, references, on_error), fields_of(chat_template_kwargs, add_generation_prompt)

        def read(conversation: Sequence[Message]) -> list[int]:
            return self._need_tokenizer("chat").chat(conversation, fields)

        return self._run(self._made(as_conversations(messages), call, read), use_tqdm, on_finished)

    def tokens_of_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """A conversation as the prompt the model was trained on.

        add_generation_prompt: whether the assistant's turn is begun at its end. chat_template_kwargs: what else the
        model's chat template knows by name, as ``enable_thinking`` of some. Raises ParameterError, RequestError.
        """
        return self._need_tokenizer("chat").chat(messages, fields_of(chat_template_kwargs, add_generation_prompt))

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        references: Sequence[Sequence[Prompt]] | None = None,
        on_error: OnError = "raise",
    ) -> Iterator[RequestOutput]:
        """Like ``generate``, but yields a request's (growing) result whenever it gained tokens or ended.

        The last time that a request is yielded it is finished, and its answers are in the order of their rank, if they
        are ranked: until then they are all there, in the order of sampling. Leaving the iterator ends what is not.
        """
        made = self._made(as_prompts("prompts", prompts), Call(params, references, on_error))
        yield from (each for each in made if isinstance(each, RequestOutput))
        with self._begun(made, use_tqdm=False, final=False) as call:
            yield from call

    def beam_search(self, *_: object, **__: object) -> NoReturn:
        """There is none: raises PacelineError, which says what to do."""
        raise PacelineError(
            "there is no beam search here: SamplingParams(n=..., best_of=..., rank_by='logprob') gives the most likely "
            "of many samples; transformers has beams"
        )

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The Hugging Face tokenizer. Raises ParameterError where there is none."""
        return self._need_tokenizer("get_tokenizer").huggingface

    def score(
        self, prompts: Sequence[Prompt], continuations: Sequence[Prompt], *, use_tqdm: bool = True
    ) -> list[Score]:
        """The log-probability of each continuation behind its prompt (strings or token ids), in the order given.

        A text's continuation begins with the first token behind those of its prompt alone. Continuations of one prompt,
        and prompts that begin alike, cost what is different in them; as many are read at a time as the engine has rows.
        Raises ParameterError, EmptyPromptError, PromptTooLongError before anything is read.
        """
        before, behind = as_documents("prompts", prompts), as_documents("continuations", continuations)
        if len(before) != len(behind):
            raise ParameterError("continuations", f"{len(behind)} entries", f"one a prompt ({len(before)})")
        return self._scores([self._pair(*pair) for pair in zip(before, behind, strict=True)], use_tqdm)

    def _scores(self, texts: Sequence[tuple[list[int], int]], use_tqdm: bool) -> list[Score]:
        """texts: tokens, and which is the first that is scored."""
        scope = self.engine.scope_of(SamplingParams())
        scored = [Text(tokens, scope=scope, first=first) for tokens, first in texts]
        self._read(scored, "continuations", use_tqdm)
        return [_score(text.logprobs) for text in scored]

    def _read(self, scored: Sequence[Text], what: str, use_tqdm: bool) -> None:
        """Score texts, those that begin alike one after the other."""
        neighbours = sorted(scored, key=lambda text: list(text.token_ids))
        try:
            with self._share().turn() as engine:
                engine.scorer.add(neighbours)
            with tqdm(total=len(scored), desc=what, disable=not use_tqdm) as bar:
                for text in neighbours:
                    while not text.finished:
                        with self._share().turn() as engine:
                            engine.score_some(awaited=engine.busy)
                    bar.update()
        finally:
            with self._share().turn() as engine:
                engine.scorer.drop(scored)

    def _read_prompts(self, requests: Sequence[Request], use_tqdm: bool) -> None:
        """The log-probabilities of those prompts that ask for them."""
        texts: list[tuple[Request, Text]] = []
        for request in requests:
            if (top := request.params.prompt_logprobs) is not None:
                text = Text(request.prompt_token_ids, top=top, scope=self.engine.scope_of(request.params))
                texts.append((request, text))
        self._read([text for _, text in texts if not text.finished], "prompts", use_tqdm and bool(texts))
        for request, text in texts:
            request.prompt_logprobs = [None, *text.logprobs]

    def _pair(self, prompt: Prompt, continuation: Prompt) -> tuple[list[int], int]:
        """Both as one text, and the number of tokens before the continuation."""
        before = self._encode(prompt)
        if isinstance(prompt, str) and isinstance(continuation, str):
            tokens = self._encode(prompt + continuation)
        else:
            tokens = before + self._encode(continuation, plain=True)
        if not before:
            raise EmptyPromptError("a prompt has no tokens, so nothing says what its continuation follows")
        if len(before) >= len(tokens):
            raise ParameterError("continuations", continuation, "texts of at least one token behind the prompt's")
        self.engine.check_scored(tokens)
        return tokens, len(before)

    def close(self) -> None:
        """Give the caches back. The object cannot be used afterwards; closing it again does nothing.

        Other processes that share the target end when nobody uses it any more.
        """
        if self._shared is not None:
            self._shared.close()
        self._shared = None
        self._models.give_back(self)

    @property
    def engine(self) -> Engine:
        """Raises PacelineError after ``close``."""
        return self._share().engine

    def _share(self) -> SharedEngine:
        if self._shared is None:
            raise PacelineError("this LLM was closed; make a new one")
        return self._shared

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise PacelineError(
            "an LLM cannot be copied or pickled: it holds weights, caches and threads of this process. Make it where "
            "it is used, in every process its own; llm.with_options(...) is another engine on the same weights"
        )

    def _run(
        self, made: list[Made], use_tqdm: bool, on_finished: Callable[[RequestOutput], None] | None
    ) -> list[RequestOutput]:
        refused = [each for each in made if isinstance(each, RequestOutput)]
        with (
            self._begun(made, use_tqdm=use_tqdm, final=True) as call,
            tqdm(total=len(made), desc="answers", disable=not use_tqdm) as bar,
        ):
            for output in itertools.chain(refused, call):
                if output.finished:
                    bar.update()
                    if on_finished is not None:
                        on_finished(output)
        served = iter(call.outputs)
        return [each if isinstance(each, RequestOutput) else next(served) for each in made]

    @contextmanager
    def _begun(self, made: Sequence[Made], *, use_tqdm: bool, final: bool) -> Iterator[EngineCall]:
        """The requests in the engine, behind the log-probabilities of their prompts."""
        requests = [each for each in made if isinstance(each, Request)]
        self._read_prompts(requests, use_tqdm)
        with self._share().begin(requests, final=final) as call:
            yield call

    def _made(self, entries: Sequence[Any], call: Call, read: Callable[[Any], Prompt] = _as_prompt) -> list[Made]:
        """read: makes a prompt of an entry."""

        def make(entry: Any, params: SamplingParams, references: Sequence[Prompt]) -> Request:
            request = self.request(read(entry), params, arrival=call.arrival, references=references)
            request.prompt_logprobs = None if params.prompt_logprobs is None else []
            self.engine.check(request)
            return request

        return call.made(entries, make)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        arrival: float | None = None,
        references: Sequence[Prompt] = (),
        request_id: str | None = None,
        client: str = "",
        priority: int = 0,
    ) -> Request:
        """A prompt as ``engine.add`` takes it: tokens, how they become text again, and what the answers must look like.

        arrival: when it came, on the clock of time.monotonic; None: when it is added.
        Raises ParameterError, StructureError, MissingPackageError.
        """
        check_params(params)
        text = prompt if isinstance(prompt, str) else None
        make_stream = self._stream if self.tokenizer is not None else None
        tokens = self._encode(prompt)
        copied = [self._encode(each, plain=True) for each in as_references("references", references)]
        make_constraint = self._constraint(params)
        return Request(
            tokens, params, text, request_id, arrival, make_stream, make_constraint, client, priority, copied
        )

    def _constraint(self, params: SamplingParams) -> Callable[[], Constraint] | None:
        """What makes the constraint of one answer; None where any token may come.

        Raises ParameterError, StructureError, MissingPackageError.
        """
        if params.structured_outputs is not None:
            return self.structure(params.structured_outputs)
        if not params.restriction:
            return None

        def encode(word: str) -> list[int]:
            return self._need_tokenizer("bad_words").encode(word, add_special_tokens=False)

        eos = () if params.ignore_eos else self._models.eos_token_ids
        return processed_row(params, encode, (*eos, *params.stop_token_ids), self._models.target.vocab_size)

    def structure(
        self, wanted: StructuredOutputs, stopped: Callable[[], bool] = lambda: False
    ) -> Callable[[], Constraint]:
        """What makes a constraint for one answer; any thread may ask. ``stopped``: whether nobody waits any more.

        Raises StructureError, MissingPackageError.
        """
        return self._grammars.compile(wanted, stopped)

    @cached_property
    def _grammars(self) -> Grammars:
        tokenizer, models = self._need_tokenizer("structured_outputs"), self._models
        return Grammars(tokenizer, models.target.vocab_size, models.eos_token_ids)

    def _stream(self, params: SamplingParams) -> Detokenizer:
        assert self.tokenizer is not None
        return Detokenizer(
            self.tokenizer,
            tuple(params.stop),
            params.include_stop_str_in_output,
            params.min_tokens,
            params.skip_special_tokens,
        )

    def _encode(self, prompt: Prompt, plain: bool = False) -> list[int]:
        """plain: without the special tokens that begin a text; references stand in the middle of one."""
        if not isinstance(prompt, str):
            return list(prompt)
        return self._need_tokenizer("a text prompt").encode(prompt, add_special_tokens=not plain)

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ParameterError("tokenizer", None, f"{what} needs one: pass tokenizer=..., or give token ids")
        return self.tokenizer


def _score(told: Sequence[TokenLogprob]) -> Score:
    greedy = all(token.logprob >= token.top[0][1] for token in told)
    return Score([token.token_id for token in told], [token.logprob for token in told], greedy)


def _dtype(config: EngineConfig, *, of_draft: bool = False) -> torch.dtype:
    """In which the target, or the draft model or head, is loaded. Raises ParameterError."""
    device = resolve_device(config.device)
    if of_draft and config.draft_dtype != "same":
        return resolve_dtype(config.draft_dtype, device, "draft_dtype")
    return resolve_dtype(config.dtype, device)


Begin: TypeAlias = Callable[[str], None]  # called with what is done from now on


@contextmanager
def _stages(shown: bool) -> Iterator[Begin]:
    """A line on a terminal, which says what is done, and for how long when the next stage begins."""
    with tqdm(bar_format="{desc} ({elapsed})", leave=False, disable=None if shown else True) as bar:
        yield lambda stage: bar.set_description_str(stage, refresh=True)


def _load(
    source: ModelSource, config: EngineConfig, dtype: torch.dtype, quantization: QuantizationName | None, begin: Begin
) -> AnyModel:
    device = resolve_device(config.device)
    name = name_of(source) if is_loaded(source) else os.fspath(source)
    begin(f"loading {name}")
    kept = find_packed(source, dtype, device, config.attention, quantization)
    if kept is not None and (packed := kept.load()) is not None:
        return packed
    loaded = load_model(source, dtype=dtype, device=device)
    begin(f"packing {name}")
    model = prepare(loaded, config.attention, quantization, config.deterministic)
    del loaded  # its memory is not needed to keep the packed weights
    if kept is not None and isinstance(model, NativeModel):
        kept.save(model)
    return model


def _load_target(source: ModelSource, config: EngineConfig, begin: Begin) -> AnyModel:
    """All of it, or rank 0's part."""
    if config.tensor_parallel == 1:
        return _load(source, config, _dtype(config), config.quantization, begin)
    from paceline.models.parallel.launch import lead

    device, share = resolve_device(config.device), Share(0, config.tensor_parallel)
    threads = config.threads or threads_per_rank(share.ranks)
    return lead(source, share, _dtype(config), device, threads)


def _serve_if_launched(ranks: int) -> None:
    """A rank other than 0 that torchrun has started comes back from here no more."""
    if ranks > 1:
        from paceline.models.parallel.launch import serve_if_launched

        serve_if_launched(ranks)


def _load_draft(source: ModelSource, config: EngineConfig, begin: Begin) -> AnyModel:
    quantization = config.quantization if config.draft_quantization == "same" else config.draft_quantization
    return _load(source, config, _dtype(config, of_draft=True), quantization, begin)


def _load_head(path: Path, source: ModelSource, target: AnyModel, config: EngineConfig) -> HeadModel:
    dtype = _dtype(config, of_draft=True)
    return load_head_for(target, source, path, dtype=dtype, quantization=config.draft_quantization)


def _load_tokenizer(source: ModelSource, given: TokenizerSource | None) -> Tokenizer | None:
    if given is not None:
        if not isinstance(given, PreTrainedTokenizerBase):
            FileName("a loaded PreTrainedTokenizerBase, or a directory, a file or a name").take("tokenizer", given)
            return Tokenizer.load(resolve_tokenizer(given))
        return Tokenizer.load(given)
    return Tokenizer.load(source) if isinstance(source, (str, os.PathLike)) else None


def _check_source(name: str, source: object) -> None:
    if not is_loaded(source):
        FileName("a model's name, directory or file, or a loaded PreTrainedModel").take(name, source)
