"""All parameters, their defaults and their allowed ranges. This is the only home of defaults."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, TypeAlias, TypedDict, get_args

from paceline.errors import ParameterError
from paceline.ranges import (
    FileName,
    Number,
    Part,
    Text,
    Texts,
    TokenIds,
    TokenNumbers,
    Whole,
    check,
    check_fields,
    check_names,
    is_text,
    is_whole,
)
from paceline.registry import DRAFTERS, LENGTHS, DrafterKind, LengthKind

AcceptanceName = Literal["coupled", "rejection"]
AttentionName = Literal["auto", "native", "padded", "split", "ragged"]
QuantizationName = Literal["int8", "int4", "fp8"]
RoundsName = Literal["auto", "host", "device"]
DrafterName = Literal["auto", "model", "feature", "ngram", "hybrid"]  # ours; other packages may bring more
DtypeName = Literal["auto", "float32", "bfloat16"]
LogFormat = Literal["text", "json"]
RankName = Literal["mean_logprob", "logprob"]
Length: TypeAlias = int | str | LengthKind  # guesses a round: a number, or who chooses it

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_SPECULATION_LENGTH = 4
DEFAULT_ACCEPTANCE: AcceptanceName = "coupled"
SYNTHETIC = "synthetic:"  # before a rate: an acceptance rule for benchmarks
MAX_SPECULATION_LENGTH = 32
MAX_LOGPROBS = 20

# Whatever is counted or stored has an end, so that nothing overflows and no request alone can hold up the others.
MAX_COUNT = 2**31 - 1  # of tokens, and the largest token id: fits every kernel's whole numbers
MAX_ANSWERS = 2**16  # to one prompt: queued in about a second
MAX_STOP_STRINGS = 256  # looked for in every token's text: 25 microseconds a token
MAX_STOP_CHARACTERS = 2**13  # of all stop strings together: so much text may be held back
MAX_STOP_TOKEN_IDS = 2**12
MAX_LOGIT_BIAS = 2**16  # entries: set one by one when the row starts, 0.2 seconds
MAX_ROWS = 2**12
MAX_PREFILL_CHUNK = 2**20
MAX_THREADS = 2**10
MAX_BYTES = 2**63 - 1
MAX_SECONDS = 366 * 24 * 3600.0  # a year: who wants to wait for ever says None
MAX_API_KEYS, MAX_API_KEY_CHARACTERS = 2**20, 2**28
MAX_REFERENCES = 2**8  # texts that a request brings along to copy from
MAX_REFERENCE_CHARACTERS = 2**19  # of all of them: tokenized in some tenths of a second
MAX_REFERENCE_TOKENS = 2**17  # likewise: noted in 40 milliseconds, 8 MB while the request lives

# Below these float32 divides by nothing, or by so little that the result is infinite.
MIN_TEMPERATURE = 1e-30
MIN_TOP_P = 1e-30
MIN_SECONDS = 1e-3
MIN_TIME_BUDGET = 1e-9

MAX_CONNECTIONS = 2**20

Count = Annotated[int, Whole(1, MAX_COUNT)]
Share = Annotated[float, Number(0, 1)]
Penalty = Annotated[float, Number(-2, 2)]
Seconds = Annotated[float, Number(MIN_SECONDS, MAX_SECONDS)]
Guesses = Annotated[int, Whole(0, MAX_SPECULATION_LENGTH)]
Name = Annotated[str, Text(filled=True)]
COMPLETION_MAX_TOKENS = 16  # of /v1/completions, as OpenAI's; a chat's answer may fill what the prompt leaves


@dataclass(frozen=True)
class Schema:
    """A JSON schema, as an object or as its text; kept as text, so that nobody changes it under a running request."""

    allowed: str = "a JSON schema, which is an object"

    def take(self, name: str, value: Any) -> str:
        try:
            text = value if isinstance(value, str) else json.dumps(value)
            schema = json.loads(text)
            ok = isinstance(schema, dict) and is_text(json.dumps(schema, ensure_ascii=False))
        except (TypeError, ValueError, RecursionError):
            ok = False
        check(ok, name, value, self.allowed)
        return text


@dataclass(frozen=True)
class StructuredOutputs:
    """What an answer must look like: exactly one of these; needs the extra ``structured``.

    json: a JSON schema, as an object or as its text. json_object: any JSON object. regex: a regular expression that the
    whole answer matches.
    """

    json: Annotated[Mapping[str, Any] | str | None, Schema()] = None
    json_object: bool = False
    regex: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "structured_outputs.")
        given = [name for name in ("json", "json_object", "regex") if getattr(self, name) not in (None, False)]
        check(len(given) == 1, "structured_outputs", given, "exactly one of json, json_object, regex")


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    Order of work on the logits: bias, penalties, minimum length, temperature, min-p, top-k, top-p; then the draw.

    n: answers to the prompt; they share its prefill. best_of: so many are made, of which the best n are given back.
    rank_by: the order of the answers: "mean_logprob", the mean log-probability of an answer's tokens, as BASS ranks
        (2404.15778), or "logprob", their sum. Those that ended by themselves (finish_reason "stop") come before those
        that were cut. The log-probabilities are the model's own (temperature 1, before bias, penalties and cuts) of
        all tokens drawn: a stop token, and what a stop string cuts out of the text, count. None is the order of
        sampling; of best_of more than n answers the best are then those by "mean_logprob". An answer that cannot become
        one of the best n any more ends at once (finish_reason "outranked") and makes room.
    time_budget: seconds from the request's arrival, in which it also waits and its prompt is read. What is not finished
        by then ends as it is (finish_reason "deadline"); what a round brings later comes too late. None: no limit.
    max_tokens: most tokens of an answer. min_tokens: no end-of-text or stop token before so many.
    temperature: 0 is greedy, 100 the most. top_k: 0 keeps all. top_p, min_p: nucleus and relative cut.
    presence_penalty, frequency_penalty: subtracted for tokens of the answer so far, [-2, 2].
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and answer, [0.01, 100].
    seed: the same seed gives the same text, whatever else is in the batch; None draws one for the request.
    stop: strings that end the answer (not part of it unless include_stop_str_in_output).
    stop_token_ids: tokens that end it. ignore_eos: go on after the model's own end-of-text token.
    logit_bias: added to the logits of these token ids.
    logprobs: None for none; m for each token's own log-probability and the m most likely ones. They are the model's own
        (before bias, penalties and temperature).
    num_speculative_tokens: most guesses a round for this prompt, however many the engine plays; 0 is plain decoding.
        None leaves it to the engine.
    keep_prefix: whether later requests may copy what this one had read (``EngineConfig.prefix_cache``).
    cache_salt: only requests with the same one share what they read, so that nobody learns by the time that an answer
        takes whether another has sent the same words. None shares with all that have none.
    structured_outputs: what the answer must look like. Tokens that cannot lead there get no probability; the model's
        end-of-text token none before the answer is complete.
    """

    n: Annotated[int, Whole(1, MAX_ANSWERS)] = 1
    best_of: Annotated[int, Whole(1, MAX_ANSWERS)] | None = None
    rank_by: RankName | None = None
    time_budget: Annotated[float, Number(MIN_TIME_BUDGET, MAX_SECONDS)] | None = None
    max_tokens: Count = 128
    min_tokens: Annotated[int, Whole(0, MAX_COUNT)] = 0
    temperature: Annotated[float, Number(MIN_TEMPERATURE, 100, or_zero=True)] = 1.0
    top_p: Annotated[float, Number(MIN_TOP_P, 1)] = 1.0
    top_k: Annotated[int, Whole(0, MAX_COUNT)] = 0
    min_p: Share = 0.0
    seed: Annotated[int, Whole(0, 2**63 - 1)] | None = None
    stop: Annotated[str | Sequence[str], Texts(MAX_STOP_STRINGS, MAX_STOP_CHARACTERS, one=True)] = ()
    stop_token_ids: Annotated[Sequence[int], TokenIds(MAX_STOP_TOKEN_IDS, MAX_COUNT)] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Number(0.01, 100)] = 1.0
    logit_bias: Annotated[Mapping[int, float], TokenNumbers(TokenIds(MAX_LOGIT_BIAS, MAX_COUNT), Number(-100, 100))] = (
        field(default_factory=dict)
    )
    logprobs: Annotated[int, Whole(0, MAX_LOGPROBS)] | None = None
    num_speculative_tokens: Guesses | None = None
    keep_prefix: bool = True
    cache_salt: Name | None = None
    structured_outputs: Annotated[StructuredOutputs, Part(StructuredOutputs)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        fewer = f"a whole number from 0 to {self.max_tokens}, which is max_tokens"
        check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, fewer)
        enough = f"a whole number from {self.n}, which is n, to {MAX_ANSWERS}"
        check(self.best_of is None or self.best_of >= self.n, "best_of", self.best_of, enough)
        if self.structured_outputs is not None:
            free = "left alone with structured_outputs, which says itself when an answer ends"
            check(self.min_tokens == 0, "min_tokens", self.min_tokens, free)
            check(not self.ignore_eos, "ignore_eos", self.ignore_eos, free)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], base: SamplingParams | None = None) -> SamplingParams:
        """``base``, or the defaults, with what was given instead; for everything that comes as JSON.

        What clients send as JSON may be spelled in their way: logit_bias has its token ids as strings; -1 is 0 for
        top_k and None for seed; empty stop strings, which forms send where nothing was filled in, stop nothing.
        Raises ParameterError, also for what is no parameter.
        """
        check_names(cls, given)
        values: dict[str, Any] = {
            name: _SPELLED[name](value) if name in _SPELLED else value for name, value in given.items()
        }
        return replace(cls() if base is None else base, **values)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def answers(self) -> int:
        """How many are made."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranking(self) -> RankName | None:
        """What the answers are ranked by; None: they keep the order of sampling."""
        return "mean_logprob" if self.rank_by is None and self.answers > self.n else self.rank_by

    @property
    def scored(self) -> int | None:
        """How many of the most likely tokens of each place are told, besides the drawn one's own log-probability.

        None: nobody asks for any log-probability.
        """
        return 0 if self.logprobs is None and self.ranking is not None else self.logprobs


def _minus_one(meaning: int | None) -> Callable[[object], object]:
    return lambda value: meaning if is_whole(value) and value == -1 else value


def _filled(stop: object) -> object:
    if isinstance(stop, list):
        return [text for text in stop if text != ""]
    return () if stop == "" else stop


def _by_token(bias: object) -> object:
    return {_token_id(key): number for key, number in bias.items()} if isinstance(bias, Mapping) else bias


def _token_id(key: object) -> object:
    """A number spelled as JSON's keys are, one spelling each; what is none stays to be refused."""
    spelled = isinstance(key, str) and len(key) < 20 and key.isascii() and key.isdecimal() and str(int(key)) == key
    return int(key) if spelled else key  # type: ignore[call-overload]


_SPELLED: Mapping[str, Callable[[object], object]] = {
    "top_k": _minus_one(0),
    "seed": _minus_one(None),
    "stop": _filled,
    "logit_bias": _by_token,
}


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs.

    drafter: "model" (needs a draft model), "feature" (needs a trained head in its place), "ngram" (prompt lookup, no
        model), "hybrid" (prompt lookup where it will do, else the draft model or head), None (plain decoding). "auto"
        is hybrid with either of them, else n-gram; where the device plays rounds alone, which n-gram lookup would end,
        it is model or None, unless other options ask for guesses. An engine's own configuration never says "auto".
        Or another package's name, or an object: a ``paceline.drafters.Drafter``, as a class or as a pattern of which
        each engine plays a copy.
    num_speculative_tokens: guesses a round: a number, or who chooses it: "auto" (as many as pay at the measured cost
        and acceptance, 0 where none does), "bass" (BASS, Algorithm 1) or "profiled" (Synergy: by a profile's table).
        Or another package's name, or an object: a ``paceline.lengths.LengthPolicy``, likewise.
    profile: a file of ``paceline profile``: needed by "profiled"; "auto" then need not measure costs at the start.
    acceptance: "coupled" (same seed, same text, with or without speculation) or "rejection" (highest acceptance).
        "synthetic:0.8" keeps each guess with that probability, whatever it is: the speed is real, the text is not.
    benchmark: says that texts are not wanted; without it a synthetic acceptance is refused.
    attention: "native" (the C++ kernels for CPUs, ragged and batch-invariant), "ragged" (one Triton launch for all
        rows), "padded" (BASS-PAD) or "split" (BASS-SPLIT). "auto" is native where it can run the model, ragged on CUDA
        devices with Triton, else padded.
    deterministic: kernels whose tiles do not depend on the batch, so that a token's bits do not either: ragged
        attention and Triton's matrix products. The native kernels are so anyway.
    rounds: "device": a round is one program that the host never interrupts (on CUDA a graph), and the host is one round
        behind; requests with penalties, cuts or log-probabilities are still played by the host. "host": it reads every
        round. "auto" is device on CUDA, where models, drafter and attention allow it.
    dtype: "auto" is bfloat16 where the machine multiplies it natively, else float32.
    quantization: "int8" or "int4" weights, made at load, on the native kernels; on CUDA "int8" or "fp8", on Triton's.
        None leaves them in ``dtype``.
    draft_dtype, draft_quantization: the draft model's; "same" is the target's.
    max_batch_size: rows, that is sequences decoded at once.
    max_model_len: most tokens of a sequence, prompt and answer; None: the model's own limit, at most 4096.
    prefill_chunk: most prompt tokens fed in one step, all rows together.
    longest_pause: seconds between two tokens of a row while prompts are prefilled: chunks are as short as the speed
        measured so far wants it, the shortest prompts first. None: chunks are of ``prefill_chunk`` tokens.
    prefix_cache: whether a prompt copies the keys and values of the longest beginning that it shares with any text
        whose row has not been needed since. False reads every prompt whole, once for all of its answers.
    device: "cpu", "cuda", "cuda:1", ...; "auto" is the first CUDA device if there is one.
    threads: CPU threads of this engine; None: torch's own choice, and no more than a container's CPU quota can run.
    memory_limit: bytes the engine may take; None is what the machine has free.
    """

    drafter: Annotated[str | DrafterKind | None, DRAFTERS] = "auto"
    num_speculative_tokens: Guesses | Annotated[str | LengthKind, LENGTHS] = "auto"
    profile: Annotated[str, FileName()] | None = None
    acceptance: AcceptanceName | str = DEFAULT_ACCEPTANCE
    benchmark: bool = False
    attention: AttentionName = "auto"
    deterministic: bool = False
    rounds: RoundsName = "auto"
    dtype: DtypeName = "auto"
    quantization: QuantizationName | None = None
    draft_dtype: DtypeName | Literal["same"] = "same"
    draft_quantization: QuantizationName | Literal["same"] | None = "same"
    max_batch_size: Annotated[int, Whole(1, MAX_ROWS)] = 16
    max_model_len: Annotated[int, Whole(2, MAX_COUNT)] | None = None
    prefill_chunk: Annotated[int, Whole(1, MAX_PREFILL_CHUNK)] = 1024
    longest_pause: Seconds | None = 0.1
    prefix_cache: bool = True
    device: Name = "auto"
    threads: Annotated[int, Whole(1, MAX_THREADS)] | None = None
    memory_limit: Annotated[int, Whole(1, MAX_BYTES)] | None = None

    DEFAULT_MAX_MODEL_LEN = 4096

    def __post_init__(self) -> None:
        check_fields(self)
        if self.profile is None and self._length is not None and self._length.needs_profile:
            raise ParameterError("profile", None, "the file of a profile; make one with: paceline profile")
        self._check_acceptance()

    def _check_acceptance(self) -> None:
        given = self.acceptance
        if not given.startswith(SYNTHETIC):
            known = get_args(AcceptanceName)
            check(given in known, "acceptance", given, "one of " + ", ".join(map(repr, known)))
            return
        rate = self.synthetic_acceptance
        allowed = f"{SYNTHETIC}P, P a probability: for benchmarks alone"
        check(rate is not None and 0 <= rate <= 1, "acceptance", given, allowed)
        allowed = "'coupled' or 'rejection'; for benchmarks, whose texts nobody wants, with benchmark=True"
        check(self.benchmark, "acceptance", given, allowed)

    def resolved(self, *, draft_model: bool, lookup: bool = True) -> EngineConfig:
        """With the drafter that "auto" is. lookup: whether n-gram lookup may be had for nothing."""
        if self.drafter != "auto":
            return self
        lookup = lookup or self.num_speculative_tokens != EngineConfig.num_speculative_tokens
        names: tuple[DrafterName | None, ...] = ("ngram", "hybrid") if lookup else (None, "model")
        return replace(self, drafter=names[draft_model])

    @property
    def reads_profile(self) -> bool:
        """Whether its length policy makes use of one."""
        return self.drafter is not None and self._length is not None and self._length.reads_profile

    @property
    def asks_draft_model(self) -> bool:
        """Whether the drafter runs one."""
        return self.drafter_kind is not None and self.drafter_kind.needs_draft_model

    @property
    def guesses(self) -> bool:
        """Whether any round may have guesses; else it is plain decoding."""
        return self.drafter is not None and self.num_speculative_tokens != 0

    @property
    def looks_up(self) -> bool:
        """Whether its drafter copies from text."""
        return self.guesses and self.drafter_kind is not None and self.drafter_kind.copies

    @property
    def drafter_kind(self) -> DrafterKind | None:
        """What stands behind the drafter's name; None where nobody guesses, or it is not known yet who ("auto")."""
        return None if self.drafter is None or self.drafter == "auto" else DRAFTERS.get(self.drafter)

    @property
    def _length(self) -> LengthKind | None:
        """What stands behind the length policy's name; None for a number."""
        given = self.num_speculative_tokens
        return None if isinstance(given, int) else LENGTHS.get(given)

    @property
    def most_guesses(self) -> int:
        """Of a row in a round."""
        given = self.num_speculative_tokens
        return given if isinstance(given, int) else LENGTHS.get(given).most_guesses

    @property
    def length_name(self) -> str:
        """How many guesses a round, in a word: "k=4", "auto"."""
        given = self.num_speculative_tokens
        return f"k={given}" if isinstance(given, int) else given if isinstance(given, str) else given.name

    def as_json(self) -> dict[str, Any]:
        """Its fields; objects by their names."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value if value is None or isinstance(value, (str, int, float)) else value.name
            for name, value in given.items()
        }

    @property
    def synthetic_acceptance(self) -> float | None:
        """The chance with which every guess is kept; None where guesses are judged by the target."""
        if not self.acceptance.startswith(SYNTHETIC):
            return None
        try:
            return float(self.acceptance.removeprefix(SYNTHETIC))
        except ValueError:
            return math.nan


@dataclass(frozen=True)
class Hosts:
    """Names as a Host header has them, without the port; kept as a tuple."""

    allowed: str = 'names without a port, or "*"'

    def take(self, name: str, value: Any) -> tuple[str, ...]:
        ok = isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and all(map(_is_host, value))
        check(ok, name, value, self.allowed)
        return tuple(value)


def _is_host(name: object) -> bool:
    if not isinstance(name, str):
        return False
    return name == "*" or (bool(name) and name.isascii() and not set(name) & set(" /:,@*"))


@dataclass(frozen=True)
class ServerConfig:
    """How the server listens and whom it serves.

    host, port: where it listens. served_model_name: what requests call the model; None: its own name.
    api_keys: requests must carry one of them; none: everybody who reaches the server may use it. Limits may stand
        behind a key: "KEY max_requests=N max_tokens_per_minute=N" (at a time; of prompts and answers).
    max_waiting: answers that may wait for a row; requests beyond them are refused with 429.
    max_waiting_tokens: likewise tokens, of prompts to read and of answers to make at their longest; None: as many as
        max_waiting answers of the model's length have.
    allowed_hosts: names that requests may call this server by, besides loopback names, ``host`` and addresses in
        numbers; "*": any. None given: names are checked only if there are no keys.
    max_connections: open at a time; three quarters of them may hold a request.
    max_connections_per_client: those of one address.
    header_timeout: seconds in which a request's headers must have arrived.
    keep_alive_timeout: seconds that a connection stays open between requests.
    send_timeout: seconds after which a client that reads nothing is given up.
    max_body_bytes: of a request. body_timeout: seconds in which it must have arrived.
    max_bodies_bytes: of all requests that have not been answered; of one address half of it.
    request_timeout: seconds after which a request is given up, where it does not say so itself; None: never.
    shutdown_timeout: seconds that running requests may still take when the server is told to end.
    stall_timeout: seconds that the engine may take over one step, before ``/health`` calls it stalled. A step is meant
        to take a fraction of one; the default leaves room for a large model's longest on a slow machine.
    log_format: "text" for people, "json" for machines: one object a line.
    log_interval: seconds between two lines about throughput, while there is any.
    playground: whether there is a page at ``/`` to try the model on.
    batch_dir: where files and batches are kept; None: /v1/files and /v1/batches are refused.
    """

    host: Name = "127.0.0.1"
    port: Annotated[int, Whole(0, 65535)] = 8000
    served_model_name: Name | None = None
    api_keys: Annotated[Sequence[str], Texts(MAX_API_KEYS, MAX_API_KEY_CHARACTERS, secret=True)] = field(
        default=(), repr=False
    )
    allowed_hosts: Annotated[Sequence[str], Hosts()] = ()
    max_waiting: Annotated[int, Whole(0, MAX_COUNT)] = 64
    max_waiting_tokens: Annotated[int, Whole(0, MAX_BYTES)] | None = None
    max_connections: Annotated[int, Whole(16, MAX_CONNECTIONS)] = 512
    max_connections_per_client: Annotated[int, Whole(4, MAX_CONNECTIONS)] = 256
    header_timeout: Seconds = 10.0
    keep_alive_timeout: Seconds = 75.0
    send_timeout: Seconds = 30.0
    max_body_bytes: Annotated[int, Whole(1, MAX_BYTES)] = 4 * 2**20
    body_timeout: Seconds = 30.0
    max_bodies_bytes: Annotated[int, Whole(2, MAX_BYTES)] = 64 * 2**20
    request_timeout: Seconds | None = None
    shutdown_timeout: Annotated[float, Number(0, MAX_SECONDS)] = 30.0
    stall_timeout: Seconds = 10.0
    log_format: LogFormat = "text"
    log_interval: Seconds = 10.0
    playground: bool = True
    batch_dir: Annotated[str, FileName("the name of a directory")] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        least = 2 * self.max_body_bytes  # one address may have half of it
        allowed = f"at least {least}, twice max_body_bytes"
        check(self.max_bodies_bytes >= least, "max_bodies_bytes", self.max_bodies_bytes, allowed)


@dataclass(frozen=True)
class DraftData:
    """What a target's head learns from: texts that the target writes itself.

    tokens: at least so many, of prompts and answers. seed: of everything that is drawn.
    prompt_tokens, answer_tokens: most of each that are written. held_out: conversations that nothing is learnt from.
    shard: conversations of a file; what an interrupted run loses is one file at most.
    disk_budget: GiB that data and checkpoints may take.
    """

    tokens: Annotated[int, Whole(1, MAX_COUNT)] = 400_000
    seed: Annotated[int, Whole(0, 2**63 - 1)] = 0
    prompt_tokens: Count = 128
    answer_tokens: Count = 256
    held_out: Annotated[int, Whole(1, MAX_COUNT)] = 64
    shard: Annotated[int, Whole(1, MAX_ROWS)] = 128
    disk_budget: Annotated[float, Number(1e-6, 2**20)] = 20.0

    TEMPERATURES = (0.0, 0.7, 1.0)  # of the answers, in turn; held-out answers are greedy

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class DraftTraining:
    """How a head learns.

    epochs: how often it sees every text. minutes: train for so long instead, however often that is; the head then
        depends on the machine's speed, too.
    vocab: tokens that it can say, the most frequent ones. mlp_width: None is the target's.
    learning_rate: AdamW's highest, after a warm-up over the first ``warm_up`` of all work; then half a cosine down.
    batch_tokens: of a step. clip: the longest gradient.
    unroll: guesses that are learnt one after the other (test-time training), each weighing ``decay`` of the one before;
        one alone in the first ``alone`` of all work. total_variation: the last share of it, which learns acceptance
        itself instead of the target's law.
    evaluate_every: minutes between two looks at the held-out texts. checkpoint_every: likewise, between checkpoints.
    """

    epochs: Annotated[float, Number(1e-3, 1e6)] = 8.0
    minutes: Annotated[float, Number(1e-3, MAX_SECONDS / 60)] | None = None
    vocab: Annotated[int, Whole(2, MAX_COUNT)] = 8192
    mlp_width: Annotated[int, Whole(1, MAX_COUNT)] | None = None
    learning_rate: Annotated[float, Number(1e-7, 1)] = 2e-3
    warm_up: Share = 0.03
    batch_tokens: Annotated[int, Whole(8, MAX_PREFILL_CHUNK)] = 2048
    clip: Annotated[float, Number(1e-3, 1e3)] = 1.0
    unroll: Annotated[int, Whole(1, 8)] = 3
    decay: Share = 0.8
    alone: Share = 1 / 3
    total_variation: Share = 0.25
    evaluate_every: Annotated[float, Number(1e-4, MAX_SECONDS)] = 3.0
    checkpoint_every: Annotated[float, Number(1e-4, MAX_SECONDS)] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)


class EngineOptions(TypedDict, total=False):
    """EngineConfig's fields as keyword arguments; their meaning and defaults are EngineConfig's."""

    drafter: str | DrafterKind | None
    num_speculative_tokens: Length
    profile: str | None
    acceptance: AcceptanceName | str
    benchmark: bool
    attention: AttentionName
    deterministic: bool
    rounds: RoundsName
    dtype: DtypeName
    quantization: QuantizationName | None
    draft_dtype: DtypeName | Literal["same"]
    draft_quantization: QuantizationName | Literal["same"] | None
    max_batch_size: int
    max_model_len: int | None
    prefill_chunk: int
    longest_pause: float | None
    prefix_cache: bool
    device: str
    threads: int | None
    memory_limit: int | None


_GUESSES = "a drafter, who guesses; drafter=None is nobody"
_DRAFTS = "a draft model that drafts: drafter='model' or 'hybrid'"
LOOKS_UP = "n-gram lookup, which copies: drafter='ngram' or 'hybrid', and num_speculative_tokens other than 0"

_NEEDS: Mapping[str, tuple[Callable[[EngineConfig], bool], str]] = {
    "num_speculative_tokens": (lambda config: config.drafter is not None, _GUESSES),
    "acceptance": (lambda config: config.drafter is not None, _GUESSES),
    "profile": (lambda config: config.reads_profile, _GUESSES + "; and num_speculative_tokens='auto' or 'profiled'"),
    "draft_model": (lambda config: config.asks_draft_model, _DRAFTS),
    "draft_dtype": (lambda config: config.asks_draft_model, _DRAFTS),
    "draft_quantization": (lambda config: config.asks_draft_model, _DRAFTS),
    "reference_documents": (lambda config: config.looks_up, LOOKS_UP),
}
"""What an engine must do for an option to have any effect, and how to say so."""


def check_used(config: EngineConfig, given: Mapping[str, Any]) -> None:
    """Raise ParameterError for what was given, is not as it would be anyway, and changes nothing in this engine.

    given: options of ``EngineConfig``, draft_model, reference_documents.
    """
    usual = {each.name: each.default for each in fields(EngineConfig)} | {
        "draft_model": None,
        "reference_documents": (),
    }
    for name in given.keys() & _NEEDS.keys():
        used, needed = _NEEDS[name]
        idle = given[name] == usual[name] or (name == "num_speculative_tokens" and given[name] == 0)
        check(idle or used(config), name, given[name], f"left out here; it needs {needed}")


def engine_config(options: EngineOptions, draft_model: Any = None, documents: Sequence[Any] = ()) -> EngineConfig:
    """The configuration of an engine with these models and options.

    Raises ParameterError, also for what would have no effect.
    """
    config = EngineConfig(**options)
    if config.asks_draft_model and draft_model is None:
        raise ParameterError("drafter", config.drafter, "needs a draft_model; or choose 'ngram' or None")
    given = {**options, "draft_model": draft_model, "reference_documents": tuple(documents)}
    check_used(config.resolved(draft_model=draft_model is not None), given)
    return config
