"""Offline Python API: ``LLM`` decodes batches of prompts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Self, TypeAlias, TypeVar, Unpack, get_args

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from paceline.chat.options import ChatFields, ChatOptions
from paceline.config import (
    CHAT_SAMPLING,
    DEFAULT_MODEL,
    OWN_HEAD,
    RECOMMENDED_FIELDS,
    EngineConfig,
    FamiliarOptions,
    PoolingName,
    SamplingParams,
    check_used,
    engine_config,
    uses_own_head,
)
from paceline.config.inputs import (
    GivenPrompt,
    Message,
    Prompt,
    as_adapters,
    as_conversations,
    as_gaps,
    as_pairs,
    as_prompt,
    as_prompts,
    as_sources,
)
from paceline.config.ranges import OneOf, check
from paceline.core.hardware import default_threads, ignore_torch_context, torch_threads
from paceline.core.outputs import RequestOutput, Score
from paceline.drafters.heads.loading import find_head, has_own_head, load_own_head
from paceline.engine.calls import CallArguments, OnError, Prepared, check_params
from paceline.engine.chat import ChatPrompt
from paceline.engine.engine import Engine, Models, Request
from paceline.engine.loading import (
    TokenizerSource,
    check_model_source,
    load_draft,
    load_dtype,
    load_head,
    load_target,
    load_tokenizer,
    loading_stages,
    serve_other_rank,
)
from paceline.engine.options import familiar_options
from paceline.engine.requests import RequestMaker, encoded, needed
from paceline.engine.scoring import EMBEDDED, SCORED, PooledStates, PromptReading, PromptScores
from paceline.engine.sharing import SharedCall, SharedEngine
from paceline.engine.threads import nodes_of_rank
from paceline.errors import ModelFormatError, PacelineError, ParameterError
from paceline.kernels.native import kernel_threads
from paceline.models.files.boundary import Source
from paceline.models.files.gguf import parse_once
from paceline.models.files.recommended import recommended_pooling, recommended_sampling
from paceline.models.load.loading import check_source, eos_token_ids, lacks_head
from paceline.models.text.infill import InfillMarkers
from paceline.models.text.tokenizer import check_same_vocabulary

_WEIGHT_OPTIONS = (
    "dtype",
    "quantization",
    "draft_dtype",
    "draft_quantization",
    "device",
    "deterministic",
    "tensor_parallel",
    "numa",
)

_as_prompt = partial(as_prompt, "prompts")

ModelSource: TypeAlias = Source
R = TypeVar("R", bound=PromptReading)


class LLM:
    """A target model, optionally with a drafter, that decodes batches. Threads that call it share its rounds.

    ``with LLM(...) as llm:`` closes it at the end.

    model: a hub name, a directory, a .gguf file, an embedded name ("smollm2-135m") or a loaded PreTrainedModel.
    draft_model: a draft model, named in the same ways, with the target's vocabulary. It makes drafter="hybrid" the
        default, on CUDA "model" (see EngineConfig). Or a trained head (EAGLE-3) of this target, as a directory or a hub
        name, for which "hybrid" is the default. "smollm2-135m-head" comes with the package.
    tokenizer: a loaded tokenizer, or the directory, file or name of one, which replaces the model's own. A loaded
        PreTrainedModel has no tokenizer: without one, prompts and answers are token ids.
    reference_documents: texts or token ids that the n-gram drafter may copy from, beside each row's own tokens.
    adapters: directories of LoRA adapters (peft's files) by the names under which ``SamplingParams.adapter`` finds
        them. Drafters draft for the model itself, which changes the speed only.
    use_tqdm: whether a terminal shows the stages of start-up (reading, packing, measuring). Where none does, the logger
        "paceline.loading" gets a line for each.
    given: options, see EngineConfig. Names that vLLM and llama.cpp have for them are taken, too: max_num_seqs,
        tensor_parallel_size, ctx_size, speculative_config, gpu_memory_utilization and others.

    Raises ModelError (model not found, corrupt files, different vocabularies), ParameterError, CapacityError.
    """

    @parse_once()
    @ignore_torch_context
    @torch.inference_mode(False)  # tensors made in a caller's inference mode could only be written in that mode
    def __init__(
        self,
        model: ModelSource = DEFAULT_MODEL,
        draft_model: ModelSource | None = None,
        *,
        tokenizer: TokenizerSource | None = None,
        reference_documents: Sequence[Prompt] = (),
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        use_tqdm: bool = True,
        **given: Unpack[FamiliarOptions],
    ) -> None:
        options, draft_model = familiar_options(given, draft_model)
        check_model_source("model", model)
        if draft_model is not None:
            check_model_source("draft_model", draft_model)
        documents = as_sources("reference_documents", reference_documents)
        asks_own_head = draft_model is None and uses_own_head(options)  # the options are checked before any file
        own_head = asks_own_head and find_head(model) is None and has_own_head(model)
        adapter_paths = as_adapters(adapters or {})
        config = engine_config(options, OWN_HEAD if own_head else draft_model, documents)
        serve_other_rank(config.tensor_parallel)  # before any file is looked for: a relative path is rank 0's
        if find_head(model) is not None:
            raise ParameterError(
                "model", model, "a model; this is a trained head, which is passed as draft_model of its target"
            )
        check_source(model, config.max_model_len)
        for of_draft in (False, True):
            load_dtype(config, of_draft=of_draft)  # raises before anything is loaded if the device lacks the dtype
        self.tokenizer = load_tokenizer(model, tokenizer)
        head = None if draft_model is None else find_head(draft_model)
        if draft_model is not None and head is None:
            draft_tokenizer = load_tokenizer(draft_model, None)
            if self.tokenizer is not None and draft_tokenizer is not None:
                check_same_vocabulary(self.tokenizer, draft_tokenizer)
        references = [encoded(self.tokenizer, document) for document in documents]
        with loading_stages(use_tqdm) as stages:
            threads, nodes = config.threads or default_threads(), nodes_of_rank(config)
            with torch_threads(threads), kernel_threads(threads, nodes):  # other engines have their own number
                draft = None if draft_model is None or head is not None else load_draft(draft_model, config, stages)
                target = load_target(model, config, stages, adapter_paths)
                draft = draft if head is None else load_head(head, model, target, config)
                if own_head:
                    draft = load_own_head(target, model, quantization=config.draft_quantization)
            of_tokenizer = () if self.tokenizer is None else self.tokenizer.eos_token_ids
            eos = tuple(dict.fromkeys((*eos_token_ids(model), *of_tokenizer)))
            self.requests = RequestMaker(self.tokenizer, target.vocab_size, eos)
            self._recommended, self._pooling = recommended_sampling(model), recommended_pooling(model)
            self._models = Models(
                target, draft, eos, references, embeds_only=lacks_head(model), tokenizer=self.tokenizer
            )
            self._models.users.add(self)
            stages.begin("measuring what rounds cost")
            self._shared: SharedEngine | None = SharedEngine(Engine(self._models, config))

    @classmethod
    def _sharing(cls, other: LLM, config: EngineConfig) -> LLM:
        llm = cls.__new__(cls)
        llm.tokenizer, llm.requests = other.tokenizer, other.requests
        llm._recommended, llm._pooling = other._recommended, other._pooling
        llm._models = other._models
        llm._models.users.add(llm)
        llm._shared = SharedEngine(Engine(other._models, config))
        return llm

    def with_options(self, **given: Unpack[FamiliarOptions]) -> LLM:
        """Return an LLM on the same weights with other options.

        Options that determine how weights are loaded cannot change. A drafter for an LLM that drafts nothing brings
        "auto" lengths back. Raises ParameterError, CapacityError.
        """
        options, draft_model = familiar_options(given)
        if draft_model is not None:
            raise ParameterError("draft_model", draft_model, "what the LLM was made with; make a new LLM")
        for name, value in options.items():
            if name in _WEIGHT_OPTIONS:
                raise ParameterError(name, value, "what the weights were loaded with; make a new LLM")
        if options.get("drafter") is not None and self.config.num_speculative_tokens == 0:
            options.setdefault("num_speculative_tokens", EngineConfig.num_speculative_tokens)
        config = replace(self.engine.config, **options)
        check_used(config, options)
        return self._sharing(self, config)

    def plain(self) -> LLM:
        """Return an LLM on the same weights that decodes without speculation, for comparison."""
        return self.with_options(drafter=None, num_speculative_tokens=0, profile=None, lookup_dir=None)

    @property
    def config(self) -> EngineConfig:
        """Options of the engine. Raises PacelineError after ``close``."""
        return self.engine.config

    def generate(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        references: Sequence[Sequence[Prompt]] | None = None,
        use_tqdm: bool = True,
        on_finished: Callable[[RequestOutput], None] | None = None,
        on_error: OnError = "raise",
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: object = None,
    ) -> list[RequestOutput]:
        """Continue all prompts (strings or token ids) in one batch. Results are in the order of the prompts.

        prompts: also {"prompt": text} and {"prompt_token_ids": ids}, as in vLLM.
        params: one for all prompts, or one per prompt; by default ``get_default_sampling_params()``. A ``time_budget``
            starts with this call. sampling_params: vLLM's name of it. lora_request: refused with what there is instead.
        references: for each prompt a list of texts or token ids that its answers are likely to repeat in part. N-gram
            lookup copies from them; they change the speed only.
        use_tqdm: whether to show a progress bar.
        on_finished: called with each request when it ends, in the order of ending.
        on_error: "raise" raises for a prompt that cannot be served (too long, empty, no text, a blank reference),
            before anything is decoded; the message names it: "prompts[3]: ...". "skip" serves the other prompts; the
            result of such a prompt has one answer without tokens, finish_reason "error" and the ``error``.

        An error while a request is decoded ends only this request, with finish_reason "error" and its ``error``; for
        logits that are NaN it is NotFiniteError. If the call is interrupted, unfinished requests get finish_reason
        "abort" and the interrupt propagates.
        Raises ParameterError, RequestError, MissingPackageError.
        """
        call = CallArguments(self._params(params, sampling_params, lora_request), references, on_error)
        return self._run(self._make_requests(as_prompts("prompts", prompts), call), use_tqdm, on_finished)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        references: Sequence[Sequence[Prompt]] | None = None,
        use_tqdm: bool = True,
        on_finished: Callable[[RequestOutput], None] | None = None,
        on_error: OnError = "raise",
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: object = None,
        **options: Unpack[ChatFields],
    ) -> list[RequestOutput]:
        """Answer one conversation, or several in one batch, with the model's chat template. See ``generate``.

        The content of a message is a text, or a list of text parts: {"type": "text", "text": ...}.
        params: by default ``get_default_sampling_params(chat=True)``.
        options: tools, thoughts and variables of the chat template; see ``ChatFields``. The ``message`` of each answer
        has its thoughts, its text and its tool calls; its ``text`` is what the model wrote.
        """
        params = self._params(params, sampling_params, lora_request, chat=True)
        call, wanted = CallArguments(params, references, on_error), ChatOptions.of(options)

        def read(conversation: Sequence[Message]) -> ChatPrompt:
            return self.requests.chat_prompt(conversation, wanted)

        return self._run(self._make_requests(as_conversations(messages), call, read), use_tqdm, on_finished)

    def infill(
        self, gaps: Sequence[tuple[str, str]], params: SamplingParams | None = None, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Fill each gap, given as the texts (before, after), with the model's own fill-in-the-middle tokens.

        An answer ends at the tokens by which such models end a gap, too. Raises what ``generate`` raises, and
        RequestError if the model has no such tokens.
        """
        tokenizer = needed(self.tokenizer, "infill")
        markers = InfillMarkers.of(tokenizer)
        prompts = [markers.prompt(tokenizer, before, after) for before, after in as_gaps(gaps)]
        params = self.get_default_sampling_params() if params is None else params
        check_params(params)
        return self.generate(prompts, markers.ended(params), use_tqdm=use_tqdm)

    def tokens_of_chat(self, messages: Sequence[Message], **options: Unpack[ChatFields]) -> list[int]:
        """Token ids of a conversation in the format of the model's chat template. options: see ``ChatFields``.

        Raises ParameterError, RequestError.
        """
        return self.requests.chat_prompt(messages, ChatOptions.of(options)).token_ids

    def stream(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        references: Sequence[Sequence[Prompt]] | None = None,
        on_error: OnError = "raise",
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: object = None,
    ) -> Iterator[RequestOutput]:
        """Yield the growing result of a request whenever it has gained tokens or ended. Arguments as in ``generate``.

        Until a request ends, its result has all samples in the order of sampling. When it is yielded for the last time
        it is finished, and ranked answers are in the order of their rank. Closing the iterator aborts unfinished
        requests.
        """
        call = CallArguments(self._params(params, sampling_params, lora_request), references, on_error)
        made = self._make_requests(as_prompts("prompts", prompts), call)
        yield from (refused for refused in made if isinstance(refused, RequestOutput))
        with self._submit(made, final=False) as submitted:
            yield from submitted

    @property
    def recommends_sampling(self) -> bool:
        """Whether the model's files recommend how to sample."""
        return bool(self._recommended)

    def get_default_sampling_params(self, *, chat: bool = False) -> SamplingParams:
        """Return the sampling parameters that the model's files recommend, and the usual ones for the rest.

        They stand in ``generation_config.json`` or in a GGUF file's ``general.sampling.*``. Where the files recommend
        nothing, a prompt is sampled at temperature 1 without a cut, and a ``chat`` by ``CHAT_SAMPLING``.
        Raises ModelFormatError for a recommended value that ``SamplingParams`` refuses.
        """
        return self.follow_recommendation(SamplingParams(), given=(), chat=chat)

    def follow_recommendation(
        self, params: SamplingParams, given: Collection[str], *, chat: bool = False
    ) -> SamplingParams:
        """Return ``params`` with the values that the model's files recommend for fields other than those ``given``.

        chat: for a conversation. Where the files recommend nothing and none of ``RECOMMENDED_FIELDS`` is given, it has
            the values of ``CHAT_SAMPLING``.
        Raises ModelFormatError for a recommended value that ``SamplingParams`` refuses.
        """
        recommended = self._recommended
        if chat and not recommended and not set(given) & set(RECOMMENDED_FIELDS):
            recommended = dict(CHAT_SAMPLING)
        values = {name: value for name, value in recommended.items() if name not in given}
        try:
            return SamplingParams.from_mapping(values, params)
        except ParameterError as error:
            raise ModelFormatError(f"the model's files recommend sampling that is impossible: {error}") from error

    def _params(
        self,
        params: SamplingParams | Sequence[SamplingParams] | None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: object,
        *,
        chat: bool = False,
    ) -> SamplingParams | Sequence[SamplingParams]:
        """The sampling parameters of a call, by either name. Raises ParameterError."""
        if lora_request is not None:
            allowed = "left out; instead: SamplingParams(adapter=NAME), with LLM(adapters={NAME: DIRECTORY})"
            raise ParameterError("lora_request", lora_request, allowed)
        if sampling_params is not None:
            check(params is None, "sampling_params", sampling_params, "left out beside params, its other name")
            params = sampling_params
        return self.get_default_sampling_params(chat=chat) if params is None else params

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the Hugging Face tokenizer. Raises ParameterError if there is none."""
        return needed(self.tokenizer, "get_tokenizer").huggingface

    def score(
        self,
        prompts: GivenPrompt | Sequence[GivenPrompt],
        continuations: GivenPrompt | Sequence[GivenPrompt],
        *,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
    ) -> list[Score]:
        """Log-probability of each continuation after its prompt (strings or token ids), in the order given.

        There is one prompt per continuation, or a single prompt, not in a list, for all continuations.
        If both are strings, their text is encoded as a whole, and scored from the first token that differs from the
        prompt's own tokens. Where a token spans the end of the prompt, the score includes all of it. A prefix that
        several texts share is computed once. At most as many texts as the engine has rows are processed at once.

        on_error: "raise" raises for a pair that cannot be scored (empty, too long, joined within the prompt's first
            token) before anything is computed; the message names it: "continuations[3]: ...". "skip" scores the other
            pairs; the score of such a pair has no tokens, logprob -inf and the ``error``.
        Raises ParameterError, EmptyPromptError, PromptTooLongError, RequestError.
        """

        def make(pair: tuple[object, object], *_: object) -> Request:
            return self._checked(self.requests.score_request(*pair))

        call = CallArguments(SCORED, None, on_error)
        made = call.prepare_all(as_pairs(prompts, continuations), make, "continuations")
        outputs = self._read(made, "continuations", use_tqdm)
        return [_score(*entry, on_error) for entry in zip(made, outputs, strict=True)]

    def embed(
        self, prompts: GivenPrompt | Sequence[GivenPrompt], *, pooling: PoolingName | None = None, use_tqdm: bool = True
    ) -> Tensor:
        """Embeddings [N, width] of one or N texts (strings or token ids), each of length 1, float32.

        An embedding is the "mean" of the hidden states of all tokens, or the state of the "last" one, after the model's
        final norm.
        pooling: None is the one that the model's files name (``1_Pooling/config.json``, or ``pooling_type`` in GGUF),
            or "mean" if they name none.
        Raises ParameterError, EmptyPromptError, PromptTooLongError before anything is computed.
        """
        how = self.pooling_or_default(pooling)

        def make(text: object, *_: object) -> Request:
            return self._checked(self.requests.embedding_request(text, how))

        made = CallArguments(EMBEDDED, None).prepare_all(as_prompts("prompts", prompts), make)
        outputs = self._read(made, "embeddings", use_tqdm)
        vectors = [_read_of(*entry, PooledStates).vector for entry in zip(made, outputs, strict=True)]
        return torch.stack(vectors) if vectors else torch.empty(0, 0)

    def pooling_or_default(self, pooling: PoolingName | None) -> PoolingName:
        """Return a pooling, for None the model's own. Raises ParameterError for one that there is not."""
        known, own = get_args(PoolingName), self._pooling or "mean"
        if pooling is None and own not in known:
            allowed = f"{' or '.join(map(repr, known))} here: the model's own, {own!r}, is not supported"
            raise ParameterError("pooling", pooling, allowed)
        found: PoolingName = OneOf(known).take("pooling", own if pooling is None else pooling)
        return found

    def _checked(self, request: Request) -> Request:
        self.engine.check(request)
        return request

    def _read(self, made: Sequence[Prepared], what: str, use_tqdm: bool) -> list[RequestOutput]:
        """Read texts in sorted order, so that texts with a common prefix are neighbours; return results in theirs.

        what: label of the bar.
        """
        order = sorted(range(len(made)), key=lambda index: made[index].prompt_token_ids)
        outputs = self._run([made[index] for index in order], use_tqdm, None, what)
        return [output for _, output in sorted(zip(order, outputs, strict=True), key=lambda pair: pair[0])]

    def clear_answers(self) -> None:
        """Forget all answers that n-gram lookup copies from, also the file of them in ``lookup_dir``.

        Those of requests that run are forgotten when they end.
        """
        self._open_engine().clear_answers()

    def close(self) -> None:
        """Free the caches. The object cannot be used afterwards; closing it again does nothing.

        The other processes of a tensor-parallel target end once no LLM uses it.
        """
        if self._shared is not None:
            self._shared.close()
        self._shared = None
        self._models.give_back(self)

    @property
    def engine(self) -> Engine:
        """The engine. Raises PacelineError after ``close``."""
        return self._open_engine().engine

    def _open_engine(self) -> SharedEngine:
        if self._shared is None:
            raise PacelineError("this LLM was closed; make a new one")
        return self._shared

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise PacelineError(
            "an LLM cannot be copied or pickled: it holds weights, caches and threads of this process. Create one in "
            "every process that uses it; llm.with_options(...) makes another engine on the same weights"
        )

    def _run(
        self,
        made: list[Prepared],
        use_tqdm: bool,
        on_finished: Callable[[RequestOutput], None] | None,
        what: str = "answers",
    ) -> list[RequestOutput]:
        """Run all requests; return their results and those of refused prompts, in the order of ``made``.

        what: label of the progress bar.
        """
        refused = [entry for entry in made if isinstance(entry, RequestOutput)]
        with self._submit(made, final=True) as call, tqdm(total=len(made), desc=what, disable=not use_tqdm) as bar:
            for output in itertools.chain(refused, call):
                if output.finished:
                    bar.update()
                    if on_finished is not None:
                        on_finished(output)
        served = iter(call.outputs)
        return [entry if isinstance(entry, RequestOutput) else next(served) for entry in made]

    def _submit(self, made: Sequence[Prepared], *, final: bool) -> SharedCall:
        """Return a context that adds the requests to the engine for its duration."""
        return self._open_engine().call([entry for entry in made if isinstance(entry, Request)], final=final)

    def _make_requests(
        self, entries: Sequence[Any], call: CallArguments, read: Callable[[Any], Prompt | ChatPrompt] = _as_prompt
    ) -> list[Prepared]:
        """Make a request of each entry, or its result if it is refused. read: converts an entry to a prompt."""

        def make(entry: Any, params: SamplingParams, references: Sequence[Prompt]) -> Request:
            prompt = read(entry)
            if isinstance(prompt, ChatPrompt):
                request = self.requests.chat_request(prompt, params, call.arrival, references)
            else:
                request = self.requests.request(prompt, params, arrival=call.arrival, references=references)
            return self._checked(request)

        return call.prepare_all(entries, make)

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
        """Make the request that ``engine.add`` takes: token ids, detokenizer and constraint.

        arrival: time of arrival in seconds of time.monotonic; None uses the time at which the request is added.
        Raises ParameterError, StructureError, MissingPackageError.
        """
        return self.requests.request(
            prompt,
            params,
            arrival=arrival,
            references=references,
            request_id=request_id,
            client=client,
            priority=priority,
        )


def _score(entry: Prepared, output: RequestOutput, on_error: OnError) -> Score:
    if output.error is not None and on_error == "skip":
        return Score([], [], False, output.error)
    tokens = [token for token in _read_of(entry, output, PromptScores).logprobs if token is not None]
    greedy = all(token.logprob >= token.top[0][1] for token in tokens)
    return Score([token.token_id for token in tokens], [token.logprob for token in tokens], greedy)


def _read_of(entry: Prepared, output: RequestOutput, kind: type[R]) -> R:
    """Return what was collected from a text. Raises its error, or PacelineError if the LLM was closed."""
    if output.outputs[0].finish_reason != "length":
        raise output.error or PacelineError("the LLM was closed while it read texts")
    assert isinstance(entry, Request)
    assert isinstance(entry.reading, kind)
    return entry.reading
