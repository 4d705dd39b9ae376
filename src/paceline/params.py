"""All parameters, their defaults and their allowed ranges. This is the only home of defaults."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args

from paceline.errors import ParameterError

AcceptanceName = Literal["coupled", "rejection"]
AttentionName = Literal["auto", "native", "padded", "split", "ragged"]
QuantizationName = Literal["int8", "int4", "fp8"]
RoundsName = Literal["auto", "host", "device"]
DrafterName = Literal["model", "ngram", "hybrid"]
DtypeName = Literal["auto", "float32", "bfloat16"]
LengthName = Literal["auto", "bass", "profiled"]
LogFormat = Literal["text", "json"]

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_SPECULATION_LENGTH = 4
DEFAULT_ACCEPTANCE: AcceptanceName = "coupled"
SYNTHETIC = "synthetic:"  # before a rate: an acceptance rule for benchmarks
MAX_SPECULATION_LENGTH = 32
MAX_LOGPROBS = 20
COMPLETION_MAX_TOKENS = 16  # of /v1/completions, as OpenAI's; a chat's answer may fill what the prompt leaves


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ParameterError(name, value, allowed)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token(value: object) -> bool:
    return _is_int(value) and value >= 0  # type: ignore[operator]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    _check(value in choices, name, value, "one of " + ", ".join(repr(choice) for choice in choices))


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    allowed = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    _check(ok, name, value, allowed)


def _check_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    bracket = "(" if open_low else "["
    allowed = f"a number in {bracket}{low:g}, {high:g}]" if math.isfinite(high) else f"a number of at least {low:g}"
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    ok = ok and (value > low if open_low else value >= low) and value <= high  # type: ignore[operator]
    _check(ok, name, value, allowed)


@dataclass(frozen=True)
class StructuredOutputs:
    """What an answer must look like: exactly one of these; needs the extra ``structured``.

    json: a JSON schema, as an object or as its text. json_object: any JSON object. regex: a regular expression that the
    whole answer matches.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "json_object", "regex") if getattr(self, name) not in (None, False)]
        _check(len(given) == 1, "structured_outputs", given, "exactly one of json, json_object, regex")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))


def _schema_text(schema: object) -> str:
    """Also a copy, so that nobody changes it under a running request."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        ok = isinstance(json.loads(text), dict)
    except (TypeError, ValueError, RecursionError):
        ok = False
    _check(ok, "structured_outputs.json", schema, "a JSON schema, which is an object")
    return text


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    Order of work on the logits: bias, penalties, minimum length, temperature, min-p, top-k, top-p; then the draw.

    n: answers to the prompt; they share its prefill.
    max_tokens: most tokens of an answer. min_tokens: no end-of-text or stop token before so many.
    temperature: 0 is greedy, 100 the most. top_k: 0 keeps all. top_p, min_p: nucleus and relative cut.
    presence_penalty, frequency_penalty: subtracted for tokens of the answer so far, [-2, 2].
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and answer, > 0.
    seed: the same seed gives the same text, whatever else is in the batch; None draws one for the request.
    stop: strings that end the answer (not part of it unless include_stop_str_in_output).
    stop_token_ids: tokens that end it. ignore_eos: go on after the model's own end-of-text token.
    logit_bias: added to the logits of these token ids.
    logprobs: None for none; m for each token's own log-probability and the m most likely ones. They are the model's own
        (before bias, penalties and temperature).
    num_speculative_tokens: most guesses a round for this prompt, however many the engine plays; 0 is plain decoding.
        None leaves it to the engine.
    structured_outputs: what the answer must look like. Tokens that cannot lead there get no probability; the model's
        end-of-text token none before the answer is complete.
    """

    n: int = 1
    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    num_speculative_tokens: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1)
        _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_number("temperature", self.temperature, 0, 100)
        _check_number("top_p", self.top_p, 0, 1, open_low=True)
        _check_int("top_k", self.top_k, 0)
        _check_number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.num_speculative_tokens is not None:
            _check_int("num_speculative_tokens", self.num_speculative_tokens, 0, MAX_SPECULATION_LENGTH)
        if self.structured_outputs is not None:
            free = "left alone with structured_outputs, which says itself when an answer ends"
            _check(self.min_tokens == 0, "min_tokens", self.min_tokens, free)
            _check(not self.ignore_eos, "ignore_eos", self.ignore_eos, free)
        self._check_collections()

    def _check_collections(self) -> None:
        """Also takes copies, so that nobody changes them under a running request."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        ok = isinstance(stop, Sequence) and all(isinstance(s, str) and s for s in stop)
        _check(ok, "stop", self.stop, "strings that are not empty")
        ok = isinstance(self.stop_token_ids, Sequence) and all(_is_token(t) for t in self.stop_token_ids)
        _check(ok, "stop_token_ids", self.stop_token_ids, "token ids (whole numbers of at least 0)")
        bias, allowed = self.logit_bias, "token ids (whole numbers of at least 0) to numbers in [-100, 100]"
        _check(isinstance(bias, Mapping) and all(_is_token(t) for t in bias), "logit_bias", bias, allowed)
        _check(all(_is_number(b) and -100 <= b <= 100 for b in bias.values()), "logit_bias", bias, allowed)
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(bias))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs.

    drafter: "model" (needs a draft model), "ngram" (prompt lookup, no model), "hybrid" (prompt lookup where it will do,
        else the draft model), None (plain decoding).
    num_speculative_tokens: guesses a round: a number, or who chooses it: "auto" (as many as pay at the measured cost
        and acceptance, 0 where none does), "bass" (BASS, Algorithm 1) or "profiled" (Synergy: by a profile's table).
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
    prefill_chunk: most prompt tokens fed in one step, all rows together, so that a long prompt does not stall the rest.
    device: "cpu", "cuda", "cuda:1", ...; "auto" is the first CUDA device if there is one.
    threads: CPU threads; None leaves torch's own choice.
    memory_limit: bytes the engine may take; None is what the machine has free.
    """

    drafter: DrafterName | None = None
    num_speculative_tokens: int | LengthName = "auto"
    profile: str | None = None
    acceptance: AcceptanceName | str = DEFAULT_ACCEPTANCE
    benchmark: bool = False
    attention: AttentionName = "auto"
    deterministic: bool = False
    rounds: RoundsName = "auto"
    dtype: DtypeName = "auto"
    quantization: QuantizationName | None = None
    draft_dtype: DtypeName | Literal["same"] = "same"
    draft_quantization: QuantizationName | Literal["same"] | None = "same"
    max_batch_size: int = 16
    max_model_len: int | None = None
    prefill_chunk: int = 1024
    device: str = "auto"
    threads: int | None = None
    memory_limit: int | None = None

    DEFAULT_MAX_MODEL_LEN = 4096

    def __post_init__(self) -> None:
        _check_choice("drafter", self.drafter, (None, *get_args(DrafterName)))
        if self.num_speculative_tokens not in get_args(LengthName):
            _check(
                _is_int(self.num_speculative_tokens) and 0 <= self.num_speculative_tokens <= MAX_SPECULATION_LENGTH,  # type: ignore[operator]
                "num_speculative_tokens",
                self.num_speculative_tokens,
                f"a whole number from 0 to {MAX_SPECULATION_LENGTH}, or one of 'auto', 'bass', 'profiled'",
            )
        if self.num_speculative_tokens == "profiled":
            _check(self.profile is not None, "profile", None, "the file of a profile; make one with: paceline profile")
        self._check_acceptance()
        _check_choice("attention", self.attention, get_args(AttentionName))
        _check_choice("rounds", self.rounds, get_args(RoundsName))
        _check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _check_choice("quantization", self.quantization, (None, *get_args(QuantizationName)))
        _check_choice("draft_dtype", self.draft_dtype, ("same", "auto", "float32", "bfloat16"))
        _check_choice("draft_quantization", self.draft_quantization, ("same", None, *get_args(QuantizationName)))
        for name in ("benchmark", "deterministic"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        self._check_numbers()

    def _check_acceptance(self) -> None:
        given = self.acceptance
        if not (isinstance(given, str) and given.startswith(SYNTHETIC)):
            _check_choice("acceptance", given, get_args(AcceptanceName))
            return
        rate = self.synthetic_acceptance
        allowed = f"{SYNTHETIC}P, P a probability: for benchmarks alone"
        _check(rate is not None and 0 <= rate <= 1, "acceptance", given, allowed)
        allowed = "'coupled' or 'rejection'; for benchmarks, whose texts nobody wants, with benchmark=True"
        _check(self.benchmark, "acceptance", given, allowed)

    @property
    def asks_draft_model(self) -> bool:
        """Whether the drafter runs one."""
        return self.drafter in ("model", "hybrid")

    @property
    def synthetic_acceptance(self) -> float | None:
        """The chance with which every guess is kept; None where guesses are judged by the target."""
        if not self.acceptance.startswith(SYNTHETIC):
            return None
        try:
            return float(self.acceptance.removeprefix(SYNTHETIC))
        except ValueError:
            return math.nan

    def _check_numbers(self) -> None:
        _check_int("max_batch_size", self.max_batch_size, 1, 4096)
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 2)
        _check_int("prefill_chunk", self.prefill_chunk, 1)
        if self.threads is not None:
            _check_int("threads", self.threads, 1)
        if self.memory_limit is not None:
            _check_int("memory_limit", self.memory_limit, 1)


@dataclass(frozen=True)
class ServerConfig:
    """How the server listens and whom it serves.

    host, port: where it listens. served_model_name: what requests call the model; None: its own name.
    api_keys: requests must carry one of them; none: everybody who reaches the server may use it.
    max_waiting: answers that may wait for a row; requests beyond them are refused with 429.
    max_body_bytes: of a request. body_timeout: seconds in which it must have arrived.
    request_timeout: seconds after which a request is given up, where it does not say so itself; None: never.
    shutdown_timeout: seconds that running requests may still take when the server is told to end.
    log_format: "text" for people, "json" for machines: one object a line.
    log_interval: seconds between two lines about throughput, while there is any.
    playground: whether there is a page at ``/`` to try the model on.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: Sequence[str] = field(default=(), repr=False)
    max_waiting: int = 64
    max_body_bytes: int = 4 * 2**20
    body_timeout: float = 30.0
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    log_format: LogFormat = "text"
    log_interval: float = 10.0
    playground: bool = True

    def __post_init__(self) -> None:
        _check_int("port", self.port, 0, 65535)
        _check(self.served_model_name != "", "served_model_name", "", "a name")
        _check(all(self.api_keys), "api_keys", "...", "keys that are not empty")
        _check_int("max_waiting", self.max_waiting, 0)
        _check_int("max_body_bytes", self.max_body_bytes, 1)
        _check_number("body_timeout", self.body_timeout, 0, math.inf, open_low=True)
        if self.request_timeout is not None:
            _check_number("request_timeout", self.request_timeout, 0, math.inf, open_low=True)
        _check_number("shutdown_timeout", self.shutdown_timeout, 0, math.inf)
        _check_choice("log_format", self.log_format, get_args(LogFormat))
        _check_number("log_interval", self.log_interval, 0, math.inf, open_low=True)
        object.__setattr__(self, "api_keys", tuple(self.api_keys))


class EngineOptions(TypedDict, total=False):
    """EngineConfig's fields as keyword arguments; their meaning and defaults are EngineConfig's."""

    drafter: DrafterName | None
    num_speculative_tokens: int | LengthName
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
    device: str
    threads: int | None
    memory_limit: int | None
