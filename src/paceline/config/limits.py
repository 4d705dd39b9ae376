"""Names, limits and types that the parameters share."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from paceline.config.ranges import Number, Text, Whole
from paceline.config.registry import LengthKind

AcceptanceName = Literal["coupled", "rejection"]
AttentionName = Literal["auto", "native", "padded", "split", "ragged"]
QuantizationName = Literal["int8", "int4", "fp8"]
RoundsName = Literal["auto", "host", "device"]
DrafterName = Literal["auto", "model", "feature", "mtp", "ngram", "hybrid"]  # ours; other packages may bring more
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtypeName = Literal["auto", "bf16", "int8", "fp8"]
GenerationDefaults = Literal["auto", "off"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["info", "debug"]
MetricsNames = Literal["paceline", "vllm"]
RankName = Literal["mean_logprob", "logprob"]
PoolingName = Literal["mean", "last"]  # how the hidden states of a text become its embedding
Length: TypeAlias = int | str | LengthKind  # draft tokens a round: a number or a length policy

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_SPECULATION_LENGTH = 4
DEFAULT_ACCEPTANCE: AcceptanceName = "coupled"
SYNTHETIC = "synthetic:"  # prefix of a rate: an acceptance rule for benchmarks
MAX_SPECULATION_LENGTH = 32
MAX_SPECULATION_WIDTH = 8
MAX_LOGPROBS = 20

# Everything that is counted or stored is bounded: nothing overflows, and no single request blocks the others.
MAX_COUNT = 2**31 - 1  # of tokens, and the largest token id: fits every kernel's whole numbers
MAX_ANSWERS = 2**16  # to one prompt: queued in about a second
MAX_STOP_STRINGS = 256  # looked for in every token's text: 25 microseconds a token
MAX_STOP_CHARACTERS = 2**13  # of all stop strings together: text that may be held back
MAX_STOP_TOKEN_IDS = 2**12
MAX_BAD_WORDS = 2**8  # compared with the end of the text at every position
MAX_CHOICES, MAX_CHOICE_CHARACTERS = 2**10, 2**16  # compiled in a tenth of a second
MAX_SCHEMA_CHARACTERS = 2**18  # of a schema or grammar: translated in a tenth of a second
MAX_VOCABULARY = 2**20  # token ids that are listed: more than any model has
MAX_LOGIT_BIAS = 2**16  # entries: set one by one when the row starts, 0.2 seconds
MAX_ROWS = 2**12
MAX_PREFILL_CHUNK = 2**20
MAX_THREADS = 2**10
MAX_RANKS = 2**6
MAX_BYTES = 2**63 - 1
LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1  # whole numbers of 64 bits, with or without a sign
MAX_SECONDS = 366 * 24 * 3600.0  # a year; None means no limit
MAX_API_KEYS, MAX_API_KEY_CHARACTERS = 2**20, 2**28
MAX_REFERENCES = 2**8  # texts that a request may be copied from
MAX_REFERENCE_CHARACTERS = 2**19  # in total: tokenized in a few tenths of a second
MAX_REFERENCE_TOKENS = 2**17  # in total: indexed in 40 ms, 8 MB while the request lives

# Below these, float32 divides by zero or overflows.
MIN_TEMPERATURE = 1e-30
MIN_TYPICAL_P = 1e-30
MIN_SECONDS = 1e-3
MIN_TIME_BUDGET = 1e-9

MAX_CONNECTIONS = 2**20

Count = Annotated[int, Whole(1, MAX_COUNT)]
Share = Annotated[float, Number(0, 1)]
Penalty = Annotated[float, Number(-2, 2)]
Seconds = Annotated[float, Number(MIN_SECONDS, MAX_SECONDS)]
DraftTokenCount = Annotated[int, Whole(0, MAX_SPECULATION_LENGTH)]
DraftVocabulary = Annotated[int, Whole(0, MAX_VOCABULARY)]
Width = Annotated[int, Whole(1, MAX_SPECULATION_WIDTH)]
ToolParserName = Literal[
    "harmony",
    "qwen_xml",
    "glm",
    "minimax",
    "kimi",
    "deepseek_v3",
    "deepseek_v31",
    "cohere",
    "hermes",
    "mistral",
    "mistral_json",
    "gemma",
    "function_gemma",
    "llama3",
    "json",
]
Name = Annotated[str, Text(filled=True)]
COMPLETION_MAX_TOKENS = 16  # of /v1/completions, as OpenAI's; a chat's answer may fill what the prompt leaves
