"""The engine: requests in, tokens out, one round at a time."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from paceline.acceptance import make_rule
from paceline.attention import AttentionBackend, make_backend
from paceline.batch import Batch, Family, Member
from paceline.chunks import Chunks
from paceline.decoder import Decoder
from paceline.device_round import DeviceRound, Rule
from paceline.draft import Verdict
from paceline.drafters import Drafter, Equipment, NoDrafter, make_drafter
from paceline.drafters.lookup import LONGEST_SUFFIX as CONTEXT
from paceline.errors import EmptyPromptError, ParameterError, PromptTooLongError
from paceline.guard import Guarded
from paceline.hardware import default_threads, torch_threads
from paceline.heads.decoder import HeadDecoder, HeadModel
from paceline.kernels.native import kernel_threads
from paceline.lengths import FixedLength, LengthPolicy, Means, make_policy
from paceline.lengths.calibration import Calibration, Grid, Progress
from paceline.lengths.cost import CostTable
from paceline.lengths.kept_costs import KeptCosts, kept_or_measured
from paceline.lengths.profile import Identity, Profile, is_from_files, machine_name, model_hash
from paceline.memory import check_memory
from paceline.models.base import AnyModel, FlatModel
from paceline.models.prepare import why_not_native
from paceline.native_round import NativeRound, plays_rounds
from paceline.outputs import CompletionOutput, Metrics, RequestOutput
from paceline.params import LOOKS_UP, MAX_REFERENCE_TOKENS, MAX_REFERENCES, EngineConfig, SamplingParams
from paceline.pipeline import Pipeline, why_not_device
from paceline.prefixes import Scope
from paceline.round import Speculation, speculative_round
from paceline.rows import Constraint
from paceline.sampling import sequence_seed
from paceline.scheduler import Scheduler, TextStream
from paceline.scheduler import Sequence as Row
from paceline.scoring import PromptScorer, ScoringRow


@dataclass
class Request:
    """A prompt to continue. ``make_stream`` makes one text stream an answer; None leaves the texts empty.

    make_constraint: makes one constraint an answer, where ``params`` have structured_outputs, or where tokens are held
        to something else.

    arrival: when it came, on the clock of time.monotonic: its ``time_budget`` is counted from there; None: when it is
        added.

    references: token ids of texts that n-gram lookup may copy from, for this request alone.

    client: who asks; clients take turns where requests wait for a row. priority: lower values do not wait for higher
        ones, whoever asks.
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


@dataclass(frozen=True)
class _Begins:
    """What all answers of a request begin with."""

    request: Request
    request_id: str
    seed: int
    arrival: float
    family: Family | None
    scope: Scope


@dataclass
class Models:
    """What the engine runs: a target, perhaps a draft model, and the tokens that end a text."""

    target: AnyModel
    draft: AnyModel | None = None
    eos_token_ids: tuple[int, ...] = ()
    documents: Sequence[Sequence[int]] = field(default_factory=tuple)  # for the n-gram drafter
    costs: dict[tuple[object, ...], CostTable] = field(default_factory=dict)  # measured by engines on these models


class Engine:
    """Decodes all requests in one ragged batch. Not thread-safe: one thread calls ``add`` and ``step``.

    Raises CapacityError if the rows asked for do not fit into memory, ParameterError for a configuration that makes no
    sense with these models.
    """

    def __init__(self, models: Models, config: EngineConfig) -> None:
        self.models = models
        self.config = config = config.resolved(
            draft_model=models.draft is not None, lookup=_lookup_is_free(models, config)
        )
        self.max_model_len = _max_model_len(models, config)
        _check_attention(models, config)
        check_memory(models.target, models.draft, config, self.max_model_len)
        self._on_kernels = isinstance(models.target, FlatModel)  # asked once: the answer takes 20 microseconds
        self.threads = config.threads or default_threads()
        self._ids = itertools.count()
        self._requests: dict[str, RequestOutput] = {}
        self.closed = False  # whether no request will come before those that are here have ended
        self.last_verdict: Verdict | None = None  # of the last step; None: it played no round
        target = self._decoder(models.target)
        drafter = self._drafter(target)
        if drafter.reader is not None:
            target.show(drafter.reader)
        self.parts = Speculation(target, drafter, FixedLength(0), make_rule(config.acceptance))
        self.batch = Batch(config.max_batch_size, self.max_model_len, models.target.vocab_size, models.target.device)
        self._player = self._make_player()
        self._profile = self._load_profile()
        self.parts.policy = self._policy()
        self.parts.native = NativeRound.of(target, self.batch, self.parts.accept, self.threads)
        self.chunks = Chunks(config.prefill_chunk, config.longest_pause)
        self.scheduler = Scheduler(self.batch, self.parts, config.max_batch_size, self.chunks)
        self._pipeline = self._make_pipeline()

    def _backend(self) -> AttentionBackend:
        """What models that do not run their own attention use."""
        config, target = self.config, self.models.target
        deterministic = config.deterministic and not isinstance(target, FlatModel)  # a FlatModel is so by itself
        return make_backend(config.attention, target.device, deterministic=deterministic)

    def _make_pipeline(self) -> Pipeline | None:
        """None where the host plays all rounds."""
        player = self._player
        return Pipeline(player, self.parts, self.scheduler) if player is not None and self._device_plays() else None

    def _make_player(self) -> DeviceRound | None:
        """Of rounds that the device plays alone; None where the host plays them."""
        config, parts = self.config, self.parts
        if not self._device_plays():
            return None
        draft = parts.drafter.decoders[0] if parts.drafter.decoders else None
        rule = Rule(independent=config.acceptance == "rejection", synthetic=config.synthetic_acceptance)
        return DeviceRound(parts.target, draft, self.batch, rule)

    def _device_plays(self) -> bool:
        """As far as is known: the length policy comes last. Raises ParameterError where it was asked for and cannot."""
        rounds, obstacle = self.config.rounds, why_not_device(self.parts)
        if rounds == "device" and obstacle is not None:
            raise ParameterError("rounds", "device", f"not possible here: {obstacle}; 'host' is")
        wanted = rounds == "device" or (rounds == "auto" and self.models.target.device.type == "cuda")
        return wanted and obstacle is None

    def _decoder(self, model: AnyModel) -> Decoder:
        backend = self._backend()
        sizes = backend, self.config.max_batch_size, self.max_model_len, self.models.target.vocab_size
        return HeadDecoder(model, *sizes) if isinstance(model, HeadModel) else Decoder(model, *sizes)

    def _drafter(self, target: Decoder) -> Drafter:
        config, models, kind = self.config, self.models, self.config.drafter_kind
        if kind is None or not config.guesses:
            return NoDrafter()
        if kind.needs_draft_model and models.draft is None:
            raise ParameterError("drafter", config.drafter, "needs a draft_model; or choose 'ngram' or None")
        for document in models.documents if config.looks_up else ():
            _check_tokens("reference_documents", document, models.target.vocab_size)
        equipment = Equipment(target, config.acceptance, models.draft, models.documents, self._decoder)
        return make_drafter(kind, equipment)

    def _policy(self) -> LengthPolicy:
        """No drafter is the length 0."""
        config, drafter = self.config, self.parts.drafter
        overlaps = self._player is not None
        means = Means(self._costs, self._need_profile, drafter.decoders, self._on_kernels, drafter.copies, overlaps)
        return make_policy(config.num_speculative_tokens if config.guesses else 0, means)

    def _load_profile(self) -> Profile | None:
        if self.config.profile is None:
            return None
        profile = Profile.load(Path(self.config.profile))
        profile.check(self.identity())
        return profile

    def _need_profile(self) -> Profile:
        if self._profile is None:
            raise ParameterError("profile", None, "the file of a profile; make one with: paceline profile")
        return self._profile

    def measure_costs(self, grid: Grid, progress: Progress = iter) -> CostTable:
        """What rounds cost with these models; only while the engine is idle."""
        self.scheduler.forget()
        with self._own_threads():
            return self._calibration(grid).run(progress)

    def _calibration(self, grid: Grid) -> Calibration:
        parts = self.parts
        natively = partial(NativeRound.of, parts.target, rule=parts.accept, threads=self.threads)
        return Calibration(parts.target, parts.drafter, parts.accept, grid, self._player, natively)

    def _costs(self) -> CostTable:
        """From the profile, from an engine before this one on the same models, from disk, or measured now."""
        if self._profile is not None:
            return self._profile.costs
        config, known = self.config, self.models.costs
        sizes = config.max_batch_size, self.max_model_len, self.threads
        key = (config.drafter, config.attention, config.acceptance, self._player is None, *sizes)
        if key not in known:
            with self._own_threads():
                known[key] = kept_or_measured(self._calibration(Grid.coarse(config.max_batch_size)), self._keep())
        return known[key]

    def _keep(self) -> KeptCosts | None:
        """Where costs are kept from one process to the next; None unless files say which weights these are."""
        draft = self.models.draft if self.config.asks_draft_model else None
        if not all(is_from_files(model) for model in (self.models.target, draft) if model is not None):
            return None
        return KeptCosts(self.identity(), self.config.max_batch_size, self.max_model_len)

    def identity(self) -> Identity:
        """What a profile of this engine is measured for."""
        target, draft = self.models.target, self.models.draft if self.config.asks_draft_model else None
        return Identity(
            machine=machine_name(target.device),
            device=target.device.type,
            threads=self.threads,
            target=model_hash(target),
            drafter=_drafter_identity(self.config, draft),
            precision=_precision(target) if draft is None else f"{_precision(target)}, draft {_precision(draft)}",
            attention=self._played_with(target),
            acceptance=self.config.acceptance,
        )

    def _played_with(self, target: AnyModel) -> str:
        """Attention, and who plays rounds: both decide what a round takes."""
        attention = "native" if isinstance(target, FlatModel) else self._backend().name
        return attention if self._player is None else f"{attention}, rounds by the device"

    def describe(self) -> str:
        """What runs and why, in one line."""
        config, drafter = self.config, self.parts.drafter
        guesses = "no speculation"
        draft = self.models.draft if drafter.decoders else None
        if who := drafter.describe(None if draft is None else _describe_model(draft)):
            guesses = f"drafter {who}, length {self.parts.policy.name}, acceptance {config.acceptance}"
            if config.synthetic_acceptance is not None:
                guesses += " (a benchmark: guesses are kept by chance, the text means nothing)"
        return (
            f"target {_describe_model(self.models.target)}, {self.threads} threads; {guesses}; "
            f"attention {self._describe_attention()}; {self._describe_rounds()}"
            f"{config.max_batch_size} rows of {self.max_model_len} tokens"
            f"{', prompts read anew (prefix_cache=False)' if not config.prefix_cache else ', prefixes reused'}"
        )

    def _describe_attention(self) -> str:
        if isinstance(self.models.target, FlatModel):
            return "native (ragged, batch-invariant)"
        why = why_not_native(self.models.target, self.config.attention)
        kind = " (deterministic)" if self.config.deterministic else ""
        return self.parts.target.backend.name + kind + (f" (not native: {why})" if why else "")

    def _describe_rounds(self) -> str:
        """Nothing to say where a CPU's host plays them. Those that need the host (``suits``) it plays everywhere."""
        why = why_not_device(self.parts)
        if self._pipeline is not None and why is None:
            how = "CUDA graphs" if self._pipeline.player.graphs.captures else "uncaptured"
            return f"rounds by the device ({how}, {self._pipeline.player.ops.name} kernels); "
        if self.parts.native is not None:
            return "rounds by the kernels; "
        if self.models.target.device.type != "cuda":
            shown = self.parts.target.reader is not None and plays_rounds(self.models.target)
            return "rounds by the host (the drafter reads the target's streams); " if shown else ""
        why = why or "rounds='host'"
        return f"rounds by the host ({why}); "

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def add(self, request: Request) -> RequestOutput:
        """Queue a request; the result it returns fills up as ``step`` is called.

        Raises EmptyPromptError, PromptTooLongError or ParameterError; other requests are not affected.
        """
        self.check(request)
        request_id = request.request_id or f"request-{next(self._ids)}"
        if request_id in self._requests:
            raise ParameterError("request_id", request_id, "not the id of a request that still runs")
        params, arrival = request.params, time.monotonic() if request.arrival is None else request.arrival
        output = RequestOutput(request_id, request.prompt, request.prompt_token_ids, [], params.n, params.ranking)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        begins = _Begins(request, request_id, seed, arrival, self._family(request), self.scope_of(params))
        rows = [self._sequence(begins, index) for index in range(params.answers)]
        output.outputs.extend(row.output for row in rows)
        for row in rows if params.answers > params.n else ():
            row.rivals = output.candidates
        self._requests[request_id] = output
        self.scheduler.waiting.extend(rows)
        return output

    def _family(self, request: Request) -> Family | None:
        """For n-gram lookup; None where an answer's own text is all that it can be guessed from."""
        answers = request.params.answers
        alone = answers == 1 and not request.references
        return None if alone or not self.config.looks_up else Family(request.references, answers)

    def scope_of(self, params: SamplingParams) -> Scope:
        """Whose texts its prompt may be copied from, and who may copy it."""
        name = (params.cache_salt or "") if self.config.prefix_cache else None
        return Scope(copies=name, kept=name if params.keep_prefix else None)

    def _sequence(self, begins: _Begins, index: int) -> Row:
        request, params, arrival, family = begins.request, begins.request.params, begins.arrival, begins.family
        eos = () if params.ignore_eos else self.models.eos_token_ids
        rate = self.config.synthetic_acceptance
        metrics = Metrics(arrival, prompt_tokens=len(request.prompt_token_ids), synthetic_acceptance=rate)
        return Row(
            request_id=begins.request_id,
            prompt=request.prompt_token_ids,
            params=params,
            seed=sequence_seed(begins.seed, index),
            stop_tokens=frozenset((*eos, *params.stop_token_ids)),
            output=CompletionOutput(
                index,
                logprobs=None if params.logprobs is None else [],
                cumulative_logprob=None if params.scored is None else 0.0,
                metrics=metrics,
            ),
            stream=request.make_stream(params) if request.make_stream is not None else None,
            deadline=None if params.time_budget is None else arrival + params.time_budget,
            constraint=None if request.make_constraint is None else Guarded(request.make_constraint()),
            client=request.client,
            priority=request.priority,
            scope=begins.scope,
            member=None if family is None else Member(family, index, max(0, len(request.prompt_token_ids) - CONTEXT)),
        )

    def check(self, request: Request) -> None:
        """Raise what ``add`` would; any thread may ask."""
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
        if request.params.structured_outputs is not None and request.make_constraint is None:
            allowed = "given to LLM.generate or LLM.request, which make its constraint with the tokenizer"
            raise ParameterError("structured_outputs", request.params.structured_outputs, allowed)
        if not isinstance(request.priority, int):
            raise ParameterError("priority", request.priority, "a whole number; lower ones are served first")
        self._check_references(request)
        ids: dict[str, Iterable[int]] = {
            "prompt_token_ids": request.prompt_token_ids,
            "stop_token_ids": request.params.stop_token_ids,
            "logit_bias": request.params.logit_bias,
        }
        for name, tokens in ids.items():
            _check_tokens(name, tokens, vocab)

    def _check_references(self, request: Request) -> None:
        """Those that nobody would look at are refused, too."""
        if not request.references:
            return
        given, size = f"{len(request.references)} texts", sum(map(len, request.references))
        if not self.config.looks_up:
            raise ParameterError("references", given, f"left out here; they need {LOOKS_UP}")
        if request.params.num_speculative_tokens == 0:
            raise ParameterError("references", given, "left out beside num_speculative_tokens=0, which guesses nothing")
        if size > MAX_REFERENCE_TOKENS or len(request.references) > MAX_REFERENCES:
            allowed = f"at most {MAX_REFERENCES} texts with {MAX_REFERENCE_TOKENS} tokens together"
            raise ParameterError("references", f"{given} with {size} tokens", allowed)
        for tokens in request.references:
            _check_tokens("references", tokens, self.models.target.vocab_size)

    def step(self) -> list[RequestOutput]:
        """Admit, prefill a chunk, play one round. Returns the requests that gained tokens or ended."""
        if self._goes_without_torch():
            return self._step()
        with torch.inference_mode(), self._own_threads():
            return self._step()

    def _goes_without_torch(self) -> bool:
        """Whether the kernels play the next round and nothing else is to do: then torch's modes, 80 us, are not set."""
        scheduler, parts = self.scheduler, self.parts
        comes = scheduler.prefilling or (scheduler.waiting and len(scheduler.running) < scheduler.capacity)
        lean = not comes and parts.native is not None and not parts.native.needs_host(parts.accept)
        return lean and not parts.drafter.uses_torch

    @contextmanager
    def _own_threads(self) -> Iterator[None]:
        """Beside the CPU kernels' own threads torch gets one: its others would spin on cores that they need next."""
        with torch_threads(1 if self._on_kernels else self.threads), kernel_threads(self.threads):
            yield

    def _step(self) -> list[RequestOutput]:
        self.last_verdict = None
        changed = self.scheduler.overdue(time.monotonic())
        changed += self.scheduler.admit()
        if self.scheduler.running:
            self.batch.draining = self.closed and not self.scheduler.waiting and not self.scheduler.prefilling
            started = time.perf_counter()
            changed += self._play()
            self.chunks.round_seconds = time.perf_counter() - started
        if not self.busy:
            if self._pipeline is not None:
                self._pipeline.forget()
            self.scheduler.check_integrity()
        return self._collect(changed)

    def _play(self) -> list[Row]:
        """One round: by the device alone where it can. Returns the sequences that gained tokens."""
        pipeline = self._pipeline
        if pipeline is not None:
            suits, pipeline.last_verdict = pipeline.suits(), None
            gained = pipeline.step() if suits else pipeline.drain()
            self.last_verdict = pipeline.last_verdict
            return gained if suits or not self.scheduler.running else gained + self._play_on_host()
        return self._play_on_host()

    def _play_on_host(self) -> list[Row]:
        self.last_verdict = speculative_round(self.parts, self.batch)
        return self.scheduler.settle(self.last_verdict)

    @torch.inference_mode()
    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its rows are free at once. None if there is no such request."""
        output = self._requests.get(request_id)
        self._collect(self.scheduler.drop(request_id, "abort"))
        return output

    def clear(self) -> None:
        """End all requests; also after an exception or Ctrl-C in the middle of a round."""
        self.scheduler.clear()
        if self._pipeline is not None:
            self._pipeline.forget()
        for output in self._requests.values():  # an interrupt may have caught a sequence between two queues
            for answer in output.candidates:
                answer.finish_reason = answer.finish_reason or "abort"
            output.close()
        self._requests.clear()

    def clear_begun(self) -> list[RequestOutput]:
        """After an exception in a round: end the requests it may have touched; those that only wait go on."""
        waiting = Counter(row.request_id for row in self.scheduler.waiting)
        begun = {name for name, output in self._requests.items() if waiting[name] < len(output.candidates)}
        ended = [self._requests[name] for name in begun]
        untouched = {name: output for name, output in self._requests.items() if name not in begun}
        queue = [row for row in self.scheduler.waiting if row.request_id in untouched]
        self.scheduler.waiting.keep(row for row in self.scheduler.waiting if row.request_id in begun)
        self._requests = {output.request_id: output for output in ended}
        self.clear()
        self.scheduler.waiting.extend(queue)
        self._requests.update(untouched)
        return ended

    def _collect(self, changed: list[Row]) -> list[RequestOutput]:
        ids = dict.fromkeys(row.request_id for row in changed)
        outputs = [self._requests[request_id] for request_id in ids]
        for output in outputs:
            if output.finished:
                output.close()
                del self._requests[output.request_id]
        return outputs

    def scorer(self, token_ids: Sequence[int], top: int, scope: Scope, first: int = 1) -> PromptScorer:
        """For ``score_some``: a text, how many of the most likely tokens to tell, and the first token that is scored.

        All texts are read into one row, beside those that decode: what the one before began with is not read again, if
        ``scope`` (``scope_of``) allows it.
        """
        return PromptScorer(self._scoring_row, token_ids, top, scope, first)

    def check_scored(self, token_ids: Sequence[int]) -> None:
        """Raise PromptTooLongError or ParameterError if a text cannot be scored."""
        if len(token_ids) > self.max_model_len + 1:  # nothing follows the last one: it is not read
            raise PromptTooLongError(
                f"the text has {len(token_ids)} tokens, max_model_len is {self.max_model_len}; shorten it or raise that"
            )
        _check_tokens("token_ids", token_ids, self.models.target.vocab_size)

    @cached_property
    def _scoring_row(self) -> ScoringRow:
        model = self.models.target
        return ScoringRow(Decoder(model, self._backend(), 1, self.max_model_len, model.vocab_size))

    @torch.inference_mode()
    def score_some(self, scorer: PromptScorer) -> None:
        """Score a chunk; rounds may be played between two chunks."""
        with self._own_threads():
            scorer.step()

    @torch.inference_mode()
    def next_logits(self, token_ids: Sequence[int]) -> Tensor:
        """The target's logits [V] after these tokens, from one plain forward pass with a cache of its own."""
        model = self.models.target
        decoder = Decoder(model, self._backend(), 1, len(token_ids), model.vocab_size)
        tokens = torch.tensor([list(token_ids)], device=model.device)
        with self._own_threads():
            hidden = decoder.forward(tokens, tokens.new_zeros(1), len(token_ids))
            return decoder.logits(hidden[:, -1])[0]


def _lookup_is_free(models: Models, config: EngineConfig) -> bool:
    """Whether n-gram lookup takes no round off the device, or somebody asked for it."""
    on_host = models.target.device.type != "cuda" or config.rounds == "host" or isinstance(models.draft, HeadModel)
    return on_host or bool(models.documents)


def _check_tokens(name: str, tokens: Iterable[int], vocab: int) -> None:
    for token in tokens:
        if not (isinstance(token, int) and 0 <= token < vocab):
            raise ParameterError(name, token, f"token ids from 0 to {vocab - 1}, the target's vocabulary")


def _max_model_len(models: Models, config: EngineConfig) -> int:
    running = [models.target]
    if models.draft is not None and config.asks_draft_model:
        running.append(models.draft)
    shortest = min(running, key=lambda model: model.max_positions)
    if config.max_model_len is None:
        return min(shortest.max_positions, config.DEFAULT_MAX_MODEL_LEN)
    if config.max_model_len > shortest.max_positions:
        allowed = f"at most {shortest.max_positions}, the limit of {shortest.name}"
        raise ParameterError("max_model_len", config.max_model_len, allowed)
    return config.max_model_len


def _drafter_identity(config: EngineConfig, draft: AnyModel | None) -> str:
    name = "None" if config.drafter_kind is None else config.drafter_kind.name
    return name if draft is None else f"{name} {model_hash(draft)}"


def _describe_model(model: AnyModel) -> str:
    where = "" if isinstance(model, FlatModel) else f" on {model.device}"
    return f"{model.name} ({_precision(model)}{where})"


def _precision(model: AnyModel) -> str:
    precision = str(model.dtype).removeprefix("torch.")
    if isinstance(model, FlatModel):
        return f"{model.quantization or precision} on the CPU kernels {model.kernels}"
    return str(getattr(model, "precision", precision))


def _check_attention(models: Models, config: EngineConfig) -> None:
    """The weights were packed, or not, when they were loaded: refuse what can no longer be chosen."""
    packed = isinstance(models.target, FlatModel)
    if config.attention in ("padded", "split", "ragged") and packed:
        raise ParameterError(
            "attention", config.attention, "'native' or 'auto' with weights loaded for the CPU kernels"
        )
    if config.attention == "native" and not packed:
        raise ParameterError("attention", "native", "weights loaded with attention='native' or 'auto'")
