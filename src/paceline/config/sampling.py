"""``SamplingParams``: how to continue a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar, TypeAlias

from paceline.config import names
from paceline.config.help import Help, described
from paceline.config.limits import (
    LEAST_SEED,
    MAX_ANSWERS,
    MAX_BAD_WORDS,
    MAX_CHOICE_CHARACTERS,
    MAX_CHOICES,
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
    MIN_TYPICAL_P,
    MOST_SEED,
    Count,
    DraftTokenCount,
    Name,
    Penalty,
    RankName,
    Share,
)
from paceline.config.ranges import (
    Functions,
    InstanceOf,
    Number,
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
from paceline.errors import ParameterError

LogitsProcessor: TypeAlias = Callable[[list[int], Any], Any]
"""(token ids of the answer so far, logits of the next token [V] float32) -> logits to draw from [V]."""

RECOMMENDED_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
)  # fmt: skip
"""Fields of ``SamplingParams`` for which a model's files may recommend values."""

CHAT_SAMPLING: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Sampling of a chat for which neither the caller nor the model's files name any: the defaults of llama.cpp.

Ollama's differ in top_p (0.9), min_p (0) and a repetition penalty of the last 64 tokens.
"""


@dataclass(frozen=True)
class Schema:
    """Rule: a JSON schema, as an object or as its text; kept as text, which cannot change under a running request."""

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


@names_checked
@described
@dataclass(frozen=True)
class StructuredOutputs:
    """Form of an answer: exactly one of these fields. Needs the extra ``structured``."""

    json: Annotated[Mapping[str, Any] | str | None, Schema(), Help("A JSON schema, as an object or as its text.")] = (
        None
    )
    json_object: Annotated[bool, Help("Any JSON object.")] = False
    regex: Annotated[str | None, Help("A regular expression that the whole answer matches.")] = None
    choice: Annotated[
        Sequence[str] | None, Texts(MAX_CHOICES, MAX_CHOICE_CHARACTERS), Help("Texts of which the answer is one.")
    ] = None
    grammar: Annotated[str | None, Help("A grammar in llguidance's Lark syntax; its first rule is ``start``.")] = None

    def __post_init__(self) -> None:
        check_fields(self, "structured_outputs.")
        names = tuple(each.name for each in fields(self))
        given = [name for name in names if getattr(self, name) not in (None, False)]
        check(len(given) == 1, "structured_outputs", given, f"exactly one of {', '.join(names)}")
        check(self.choice != (), "structured_outputs.choice", (), "at least one text")


@described
@names_checked
@dataclass(frozen=True)
class SamplingParams:
    """Parameters for continuing one prompt. Raises ParameterError for a value outside of its range.

    Logits are changed in this order: structured outputs or logits processors, bias, penalties, minimum length,
    temperature, typical-p and the cuts of its kind, min-p, top-k, top-p. Then the token is drawn.
    """

    n: Annotated[int, Whole(1, MAX_ANSWERS), Help("Answers to each prompt; they share its prefill.", "--n", "-n")] = 1
    best_of: Annotated[
        int | None,
        Whole(1, MAX_ANSWERS),
        Help("Answers sampled for each prompt, of which the best n are returned. Default: n."),
    ] = None
    rank_by: Annotated[
        RankName | None,
        Help(
            "Order of the answers, best first: mean_logprob or logprob; answers that were cut come last. Default: as "
            "sampled.",
            "--rank",
            "--rank-by",
            more='"mean_logprob" is the mean log-probability of an answer\'s tokens, as BASS ranks (2404.15778), '
            '"logprob" their sum. Both are the model\'s own (temperature 1, before bias, penalties and cuts) and '
            "include stop tokens and text that a stop string removed. ``best_of`` above ``n`` ranks by "
            '"mean_logprob" unless this says otherwise. An answer that can no longer be among the best n ends with '
            'finish_reason "outranked".',
        ),
    ] = None
    time_budget: Annotated[
        float | None,
        Number(MIN_TIME_BUDGET, MAX_SECONDS),
        Help(
            "Seconds after a request's arrival at which its answers end as they are. Default: no limit.",
            more='Waiting and prefill count. Such an answer has finish_reason "deadline".',
        ),
    ] = None
    max_tokens: Annotated[Count, Help("Maximum tokens of an answer.")] = 128
    min_tokens: Annotated[
        int,
        Whole(0, MAX_COUNT),
        Help("Tokens before which no end-of-text or stop token may come, nor a stop string end."),
    ] = 0
    temperature: Annotated[
        float,
        Number(MIN_TEMPERATURE, 100, or_zero=True),
        Help("Divisor of the logits; 0 is greedy.", "--temperature", "-t"),
    ] = 1.0
    top_p: Annotated[
        Share, Help("Probability mass of the nucleus, in [0, 1]; the likeliest token stays even at 0.")
    ] = 1.0
    top_k: Annotated[int, Whole(0, MAX_COUNT), Help("Number of most likely tokens kept; 0 or -1 keeps all.")] = 0
    min_p: Annotated[Share, Help("Minimum probability relative to the most likely token's, in [0, 1].")] = 0.0
    typical_p: Annotated[
        float,
        Number(MIN_TYPICAL_P, 1),
        Help(
            "Probability mass of the tokens that typical sampling keeps, in (0, 1].",
            more="They are those whose surprise is nearest to the entropy. This cut, epsilon_cutoff, eta_cutoff and "
            "top_n_sigma come before min_p, top_k and top_p; each looks at the whole distribution.",
        ),
    ] = 1.0
    epsilon_cutoff: Annotated[Share, Help("Minimum probability of a token, in [0, 1].")] = 0.0
    eta_cutoff: Annotated[
        Share, Help("Minimum probability of a token, lower where the entropy is high (eta sampling), in [0, 1].")
    ] = 0.0
    top_n_sigma: Annotated[
        float,
        Number(0, 100),
        Help("Standard deviations of the logits that a token may lie below the likeliest one; 0 keeps all."),
    ] = 0.0
    seed: Annotated[
        int | None,
        Whole(LEAST_SEED, MOST_SEED),
        Help(
            "Seed of the draws, which do not depend on what else is in the batch. Default and -1: random.",
            more="On the CPU kernels, and with ``deterministic`` on CUDA, the text does not either. Elsewhere rounding "
            "in bfloat16 and float16 does, and may decide between tokens that are nearly equally likely.",
        ),
    ] = None
    stop: Annotated[
        str | Sequence[str],
        Texts(MAX_STOP_STRINGS, MAX_STOP_CHARACTERS, one=True),
        Help(
            "Strings that end the answer and are not part of it; they may spell special tokens. In chats they do not "
            "count in thoughts."
        ),
    ] = ()
    stop_token_ids: Annotated[
        Sequence[int], TokenIds(MAX_STOP_TOKEN_IDS, MAX_COUNT), Help("Token ids that end the answer.")
    ] = ()
    ignore_eos: Annotated[bool, Help("Continue after the model's end-of-text token.")] = False
    include_stop_str_in_output: Annotated[bool, Help("Keep the stop string in the answer's text.")] = False
    presence_penalty: Annotated[
        Penalty, Help("Subtracted from the logit of each token that the answer has, in [-2, 2].")
    ] = 0.0
    frequency_penalty: Annotated[
        Penalty, Help("Subtracted once for each time that the answer has the token, in [-2, 2].")
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Number(0.01, 100),
        Help("Divisor of positive, factor of negative logits of tokens in prompt and answer, in [0.01, 100]."),
    ] = 1.0
    logit_bias: Annotated[
        Mapping[int, float],
        TokenNumbers(TokenIds(MAX_LOGIT_BIAS, MAX_COUNT), Number(-100, 100)),
        Help('Numbers in [-100, 100] added to the logits of token ids: {"50256": -100}.'),
    ] = field(default_factory=dict)
    bad_words: Annotated[
        str | Sequence[str],
        Texts(MAX_BAD_WORDS, MAX_STOP_CHARACTERS, one=True),
        Help(
            "Texts that the answer must not contain.",
            more="They are matched as token sequences, with and without a space before: the token that would complete "
            "one gets no probability. The same letters spelled by other tokens may come.",
        ),
    ] = ()
    allowed_token_ids: Annotated[
        Sequence[int] | None,
        TokenIds(MAX_VOCABULARY, MAX_COUNT),
        Help(
            "Token ids that the answer may contain. Default: all.",
            more="An end-of-text token may come only if it is one of them.",
        ),
    ] = None
    logits_processors: Annotated[
        Sequence[LogitsProcessor],
        Functions(),
        Help(
            "Functions ``(token ids of the answer, logits [V] float32) -> logits [V]``, called in order at each "
            "position.",
            more="They run after allowed_token_ids and bad_words, must depend on these arguments alone, and are called "
            "for draft tokens too, also for those that are rejected. Requests with processors run on the host's "
            "rounds. A processor that raises or leaves no token ends its own request with finish_reason "
            '"error". A processor cannot use the LLM that runs it.',
        ),
    ] = ()
    skip_special_tokens: Annotated[
        bool, Help("Leave special tokens out of the answer's text. A stop token is never part of it.")
    ] = True
    prompt_logprobs: Annotated[
        int | None,
        Whole(0, MAX_LOGPROBS),
        Help(
            "Log-probabilities of the prompt's tokens, with this many most likely alternatives.",
            more="They are in ``RequestOutput.prompt_logprobs``. The engine reuses a cached prefix "
            "only as far as it still has the log-probabilities of its tokens.",
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        Whole(0, MAX_LOGPROBS),
        Help(
            "Log-probabilities of the answer's tokens, with this many most likely alternatives.",
            more="They are the model's own: before bias, penalties and temperature.",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        DraftTokenCount | None,
        Help("Maximum draft tokens a round for this prompt; 0 is plain decoding. Default: the engine's."),
    ] = None
    keep_prefix: Annotated[
        bool, Help("Let later requests copy this one's keys and values (see prefix_cache), and draft from its answers.")
    ] = True
    cache_salt: Annotated[
        Name | None,
        Help(
            "Only requests with the same salt share cached prefixes, and draft from each other's answers. "
            "Default: shared with all that have none.",
            more="So the time of an answer does not reveal whether another client has sent the same words. A server "
            "with API keys separates the keys by itself.",
        ),
    ] = None
    adapter: Annotated[
        Name | None,
        Help(
            "Name of the LoRA adapter that answers. Default: the model itself.",
            "--use-adapter",
            more="It must be one of those that the engine was loaded with.",
        ),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        InstanceOf(StructuredOutputs),
        Help(
            'Form of the answer: {"json": SCHEMA}, {"json_object": true}, {"regex": "..."}, {"choice": ["...", "..."]} '
            'or {"grammar": "..."}.',
            more="Tokens that cannot lead to a valid answer get no probability; the end-of-text token gets none before "
            "the answer is complete.",
        ),
    ] = None

    OTHER_NAMES: ClassVar[Mapping[str, str]] = names.SAMPLING

    def __post_init__(self) -> None:
        self._take_spellings()
        check_fields(self)
        fewer = f"a whole number from 0 to {self.max_tokens}, which is max_tokens"
        check(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, fewer)
        enough = f"a whole number from {self.n}, which is n, to {MAX_ANSWERS}"
        check(self.best_of is None or self.best_of >= self.n, "best_of", self.best_of, enough)
        if self.structured_outputs is not None:
            free = "left out with structured_outputs, which decides when an answer ends"
            check(self.min_tokens == 0, "min_tokens", self.min_tokens, free)
            check(not self.ignore_eos, "ignore_eos", self.ignore_eos, free)
        self._check_restrictions()

    def _take_spellings(self) -> None:
        """Accept vLLM's spellings of the defaults: top_k=-1, seed=-1, stop=None."""
        if is_whole(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if is_whole(self.seed) and self.seed == -1:
            object.__setattr__(self, "seed", None)
        stop: object = self.stop
        if stop is None:
            object.__setattr__(self, "stop", ())

    def _check_restrictions(self) -> None:
        """Allow only one kind of restriction with structured outputs, so that some token remains."""
        check(self.allowed_token_ids != (), "allowed_token_ids", (), "None for all tokens, or at least one of them")
        if self.structured_outputs is not None and self.restriction != "structured_outputs":
            allowed = "left out with structured_outputs, which decides which tokens may come"
            raise ParameterError(self.restriction, getattr(self, self.restriction), allowed)

    @property
    def restriction(self) -> str:
        """The first field that restricts which tokens may come; "" if none does."""
        fields = "bad_words", "allowed_token_ids", "logits_processors", "structured_outputs"
        return next((name for name in fields if getattr(self, name) not in (None, ())), "")

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], base: SamplingParams | None = None) -> SamplingParams:
        """``base``, or the defaults, with the given fields replaced; for parameters that come as JSON.

        Clients' spellings are accepted: token ids of logit_bias as strings, and empty stop strings, which forms send
        for fields that are not filled in.
        Raises ParameterError, also for unknown names.
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
    def truncates(self) -> bool:
        """Whether tokens are cut by the shape of the distribution: typical sampling, epsilon, eta or top-n-sigma."""
        return self.typical_p < 1 or max(self.epsilon_cutoff, self.eta_cutoff, self.top_n_sigma) > 0

    @property
    def answers(self) -> int:
        """Number of answers sampled for the prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranking(self) -> RankName | None:
        """The order of the answers; None is the order of sampling."""
        return "mean_logprob" if self.rank_by is None and self.answers > self.n else self.rank_by

    @property
    def scored(self) -> int | None:
        """Number of most likely tokens whose log-probabilities are reported beside the drawn token's own.

        None: no log-probability is needed.
        """
        return 0 if self.logprobs is None and self.ranking is not None else self.logprobs


def sampling_values(params: SamplingParams) -> dict[str, float]:
    """The temperature, and those of the other ``RECOMMENDED_FIELDS`` that differ from their defaults."""
    return {
        name: getattr(params, name)
        for name in RECOMMENDED_FIELDS
        if name == "temperature" or getattr(params, name) != getattr(SamplingParams, name)
    }


def sampling_words(params: SamplingParams) -> str:
    """``sampling_values`` as a text: "temperature 0.2, top_p 0.9"."""
    return ", ".join(f"{name} {value}" for name, value in sampling_values(params).items())


def _filled(stop: object) -> object:
    if isinstance(stop, list):
        return [text for text in stop if text != ""]
    return () if stop == "" else stop


def _by_token(bias: object) -> object:
    return {_token_id(key): number for key, number in bias.items()} if isinstance(bias, Mapping) else bias


def _token_id(key: object) -> object:
    """The token id that a JSON key spells in its only spelling; other keys stay as they are and are refused later."""
    spelled = isinstance(key, str) and len(key) < 20 and key.isascii() and key.isdecimal() and str(int(key)) == key
    return int(key) if spelled else key  # type: ignore[call-overload]


_SPELLED: Mapping[str, Callable[[object], object]] = {
    "stop": _filled,
    "logit_bias": _by_token,
}
