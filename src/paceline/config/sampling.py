"""How to continue a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeAlias

from paceline.config import names
from paceline.config.limits import (
    MAX_ANSWERS,
    MAX_BAD_WORDS,
    MAX_COUNT,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SECONDS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_VOCABULARY,
    MIN_TEMPERATURE,
    MIN_TIME_BUDGET,
    MIN_TOP_P,
    Count,
    Guesses,
    Name,
    Penalty,
    RankName,
    Share,
)
from paceline.config.ranges import (
    Functions,
    Number,
    Part,
    Texts,
    TokenIds,
    TokenNumbers,
    Whole,
    check,
    check_fields,
    check_names,
    is_text,
    is_whole,
    names_checked,
)

LogitsProcessor: TypeAlias = Callable[[list[int], Any], Any]
"""The tokens of an answer so far, and the logits of the next one, [V] float32 -> the logits that it is drawn from."""


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


@names_checked
@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt.

    Order of work on the logits: structured outputs or logits processors, bias, penalties, minimum length, temperature,
    min-p, top-k, top-p; then the draw.

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
    temperature: 0 is greedy, 100 the most. top_k: 0 or -1 keeps all. top_p, min_p: nucleus and relative cut.
    presence_penalty, frequency_penalty: subtracted for tokens of the answer so far, [-2, 2].
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and answer, [0.01, 100].
    seed: the same seed gives the same text, whatever else is in the batch; None draws one for the request.
    stop: strings that end the answer (not part of it unless include_stop_str_in_output). None is the same as none.
    stop_token_ids: tokens that end it. ignore_eos: go on after the model's own end-of-text token.
    logit_bias: added to the logits of these token ids.
    bad_words: texts that the answer must not have, as token sequences: with and without a space before each. Where the
        answer's last tokens begin one, the token that would complete it gets no probability. The same letters spelled
        by other tokens may come.
    allowed_token_ids: the only tokens that may come; an end-of-text token may if it is one of them. None: all may.
    logits_processors: functions ``(answer's token ids, logits [V] float32) -> logits [V]``, called in their order at
        every place, after allowed_token_ids and bad_words. They have to be functions of these two alone: they are asked
        about draft tokens, too, of which some are rejected. Such requests run on the host's rounds. One that raises,
        or that leaves no token at all, ends its own request with finish_reason "error".
    skip_special_tokens: whether special tokens are left out of the answer's text. A stop token is never part of it.
    prompt_logprobs: as logprobs, of the prompt's own tokens, in ``RequestOutput.prompt_logprobs``; the prompt is read
        once more for them. Offline alone.
    logprobs: None for none; m for each token's own log-probability and the m most likely ones. They are the model's own
        (before bias, penalties and temperature).
    num_speculative_tokens: most draft tokens a round for this prompt, however many the engine plays; 0 is plain
    decoding.
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
    bad_words: Annotated[str | Sequence[str], Texts(MAX_BAD_WORDS, MAX_STOP_CHARACTERS, one=True)] = ()
    allowed_token_ids: Annotated[Sequence[int], TokenIds(MAX_VOCABULARY, MAX_COUNT)] | None = None
    logits_processors: Annotated[Sequence[LogitsProcessor], Functions()] = ()
    skip_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Whole(0, MAX_LOGPROBS)] | None = None
    logprobs: Annotated[int, Whole(0, MAX_LOGPROBS)] | None = None
    num_speculative_tokens: Guesses | None = None
    keep_prefix: bool = True
    cache_salt: Name | None = None
    structured_outputs: Annotated[StructuredOutputs, Part(StructuredOutputs)] | None = None

    OTHER_NAMES: ClassVar[Mapping[str, str]] = names.SAMPLING

    def __post_init__(self) -> None:
        self._take_spellings()
        check_fields(self)
        fewer = f"a whole number from 0 to {self.max_tokens}, which is max_tokens"
        check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, fewer)
        enough = f"a whole number from {self.n}, which is n, to {MAX_ANSWERS}"
        check(self.best_of is None or self.best_of >= self.n, "best_of", self.best_of, enough)
        if self.structured_outputs is not None:
            free = "left alone with structured_outputs, which says itself when an answer ends"
            check(self.min_tokens == 0, "min_tokens", self.min_tokens, free)
            check(not self.ignore_eos, "ignore_eos", self.ignore_eos, free)
        self._check_restrictions()

    def _take_spellings(self) -> None:
        """What vLLM's users write for nothing: top_k=-1, stop=None."""
        if is_whole(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        stop: object = self.stop
        if stop is None:
            object.__setattr__(self, "stop", ())

    def _check_restrictions(self) -> None:
        """Only one thing may say which tokens can come, so that some always can."""
        check(self.allowed_token_ids != (), "allowed_token_ids", (), "None for all tokens, or at least one of them")
        if self.structured_outputs is not None and self.restriction != "structured_outputs":
            given = getattr(self, self.restriction)
            check(False, self.restriction, given, "left out with structured_outputs, which says itself what may come")

    @property
    def restriction(self) -> str:
        """The first field that says which tokens may come; "" where none does."""
        fields = "bad_words", "allowed_token_ids", "logits_processors", "structured_outputs"
        return next((name for name in fields if getattr(self, name) not in (None, ())), "")

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], base: SamplingParams | None = None) -> SamplingParams:
        """``base``, or the defaults, with what was given instead; for everything that comes as JSON.

        What clients send as JSON may be spelled in their way: logit_bias has its token ids as strings; -1 is None for
        seed; empty stop strings, which forms send where nothing was filled in, stop nothing.
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
    "seed": lambda seed: None if is_whole(seed) and seed == -1 else seed,
    "stop": _filled,
    "logit_bias": _by_token,
}
