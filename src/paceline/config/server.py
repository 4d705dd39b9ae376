"""``ServerConfig``: how the server listens and which requests it takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from paceline.config.help import Help, described
from paceline.config.limits import (
    MAX_API_KEY_CHARACTERS,
    MAX_API_KEYS,
    MAX_BYTES,
    MAX_CONNECTIONS,
    MAX_COUNT,
    MAX_SECONDS,
    GenerationDefaults,
    LogFormat,
    LogLevel,
    MetricsNames,
    Name,
    Seconds,
    ToolParserName,
)
from paceline.config.ranges import FileName, Number, Texts, Whole, check, check_fields
from paceline.errors import ParameterError


@dataclass(frozen=True)
class Words:
    """Rule: words, one or several (a,b) in each string, or "*" for all; kept as a tuple."""

    allowed: str
    is_word: Callable[[str], bool]

    def take(self, name: str, value: Any) -> tuple[str, ...]:
        texts = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
        check(texts and all(isinstance(text, str) for text in value), name, value, self.allowed)
        words = tuple(word for text in value for word in text.split(","))
        check(all(word == "*" or self.is_word(word) for word in words), name, value, self.allowed)
        return words


FIXED_VARIABLES = ("messages", "tools", "add_generation_prompt")


@dataclass(frozen=True)
class Variables:
    """Rule: variables of a chat template, as an object; kept as a copy."""

    allowed: str = "a JSON object from names to values, without messages, tools and add_generation_prompt"

    def take(self, name: str, value: Any) -> Mapping[str, Any]:
        try:
            variables: object = json.loads(json.dumps(value))
        except (TypeError, ValueError, RecursionError):
            variables = None
        if not isinstance(variables, dict) or variables != value or not variables.keys().isdisjoint(FIXED_VARIABLES):
            raise ParameterError(name, value, self.allowed)
        return variables


def _is_host(name: str) -> bool:
    return bool(name) and name.isascii() and not set(name) & set(" /:,@*")


def _is_origin(text: str) -> bool:
    return text == "null" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+", text) is not None


@described
@dataclass(frozen=True)
class ServerConfig:
    """Options of the server. Raises ParameterError for a value outside of its range."""

    host: Annotated[Name, Help("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Whole(0, 65535), Help("Port to listen on; 0: a free one.")] = 8000
    served_model_name: Annotated[Name | None, Help("Model name in requests. Default: the model's own name.")] = None
    api_keys: Annotated[
        Sequence[str],
        Texts(MAX_API_KEYS, MAX_API_KEY_CHARACTERS, secret=True),
        Help(
            "Keys, one of which requests must carry. Better: a file, or $PACELINE_API_KEYS.",
            "--api-key",
            more="Without keys every client that reaches the server may use it. Limits may follow a key: "
            '"KEY max_requests=N max_tokens_per_minute=N" (requests at a time; tokens of prompts and answers).',
        ),
    ] = field(default=(), repr=False)
    share_prefixes: Annotated[
        bool,
        Help(
            "Let requests with different keys copy each other's cached prefixes and draft from each other's answers.",
            more="Then cached_tokens and times tell a key's holder how far a prompt begins like one of another key, "
            "and whether an answer was given before. Else each key has its own. Without keys all clients share.",
        ),
    ] = False
    allowed_hosts: Annotated[
        Sequence[str],
        Words('names without a port, or "*"', _is_host),
        Help(
            "Names by which requests may call this server, besides loopback names and --host; '*': any.",
            more="Addresses in numbers are always allowed. Without this option names are checked only if there are no "
            "keys.",
        ),
    ] = ()
    allowed_origins: Annotated[
        Sequence[str],
        Words('origins such as "https://app.example" or "http://localhost:3000", or "*"', _is_origin),
        Help(
            "Origins of web pages on other sites that may use this server (CORS); '*': any.",
            more="Without keys, such pages may use the server in the name of everyone who can reach it.",
        ),
    ] = ()
    max_waiting: Annotated[
        int, Whole(0, MAX_COUNT), Help("Answers that may wait for a row; further requests are refused with 429.")
    ] = 64
    max_waiting_tokens: Annotated[
        int | None,
        Whole(0, MAX_BYTES),
        Help(
            "Tokens that may wait, of prompts and of answers at their longest. Default: max_waiting answers of the "
            "model's length."
        ),
    ] = None
    max_connections: Annotated[
        int, Whole(16, MAX_CONNECTIONS), Help("Connections open at a time; three quarters of them may hold a request.")
    ] = 512
    max_connections_per_client: Annotated[
        int, Whole(4, MAX_CONNECTIONS), Help("Connections open at a time from one address.")
    ] = 256
    header_timeout: Annotated[Seconds, Help("Seconds in which a request's headers must have arrived.")] = 10.0
    keep_alive_timeout: Annotated[Seconds, Help("Seconds that a connection stays open between requests.")] = 75.0
    send_timeout: Annotated[Seconds, Help("Seconds after which a client that reads nothing is disconnected.")] = 30.0
    max_body_bytes: Annotated[int, Whole(1, MAX_BYTES), Help("Maximum bytes of a request's body.")] = 4 * 2**20
    body_timeout: Annotated[Seconds, Help("Seconds in which a request's body must have arrived.")] = 30.0
    max_bodies_bytes: Annotated[
        int,
        Whole(2, MAX_BYTES),
        Help("Maximum bytes of the bodies of all unanswered requests; one address may have half of it."),
    ] = 64 * 2**20
    max_upload_bytes: Annotated[
        int,
        Whole(1, MAX_BYTES),
        Help(
            "Maximum bytes of a form with a file for a batch.",
            more="It is written to disk as it arrives and counts in no other limit. It has ``body_timeout`` once more "
            "for every ``max_body_bytes`` that have arrived.",
        ),
    ] = 200 * 2**20
    request_timeout: Annotated[
        Seconds | None, Help("Seconds after which a request is cancelled if it has no timeout itself. Default: never.")
    ] = None
    shutdown_timeout: Annotated[
        float, Number(0, MAX_SECONDS), Help("Seconds that running requests may take when the server ends.")
    ] = 30.0
    stall_timeout: Annotated[
        Seconds,
        Help(
            "Seconds of one step after which /health reports the engine as stalled.",
            more="A step takes a fraction of a second; the default leaves room for a large model on a slow machine.",
        ),
    ] = 10.0
    capture_seconds: Annotated[
        float,
        Number(0, MAX_SECONDS),
        Help(
            "Seconds that the start may take to capture a GPU's rounds as CUDA graphs; 0: none is captured.",
            more="The likeliest rounds come first; the others are captured when they are first needed, while requests "
            "wait. Where rounds are not captured, other values than 0 and the default are refused.",
        ),
    ] = 30.0
    generation_config: Annotated[
        GenerationDefaults,
        Help(
            "Sampling of requests that do not say: as the model's files recommend (auto), or temperature 1 and nothing "
            "cut off (off).",
            more="Where the files recommend nothing, auto samples chats that name none of these fields as llama.cpp "
            "does: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05. /v1/models has the values.",
        ),
    ] = "auto"
    log_format: Annotated[LogFormat, Help("text for people; json for machines, one object a line.")] = "text"
    log_level: Annotated[
        LogLevel, Help("debug: also log where the prompts of one client first differ; such lines quote prompts.")
    ] = "info"
    log_interval: Annotated[Seconds, Help("Seconds between log lines about throughput, while there is any.")] = 10.0
    metrics_names: Annotated[
        MetricsNames, Help("vllm: /metrics also has vLLM's names, for dashboards made for it.")
    ] = "paceline"
    tool_parser: Annotated[
        ToolParserName | None, Help("Syntax of the model's tool calls. Default: chosen by its chat template.")
    ] = None
    chat_template_kwargs: Annotated[
        Mapping[str, Any],
        Variables(),
        Help(
            'Variables of the chat template for all chats, as JSON: {"enable_thinking": false}.',
            more="A request's reasoning_effort and chat_template_kwargs override them.",
        ),
    ] = field(default_factory=dict)
    unload_after: Annotated[
        Seconds | None,
        Help(
            "Seconds without a request after which a model of --also is unloaded; none: never.",
            more="The first model stays loaded. Ollama's keep_alive in a request replaces it for that model.",
        ),
    ] = 300.0
    playground: Annotated[bool, Help("Serve pages to try the model: a chat at /chat, an inspector at /.")] = True
    batch_dir: Annotated[
        str | None,
        FileName("the name of a directory"),
        Help("Directory for /v1/files and /v1/batches. Default: both are refused."),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        least = 2 * self.max_body_bytes  # one address may have half of it
        allowed = f"at least {least}, twice max_body_bytes"
        check(self.max_bodies_bytes >= least, "max_bodies_bytes", self.max_bodies_bytes, allowed)
