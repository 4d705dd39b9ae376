"""``paceline serve``: the OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from paceline.cli.options import DEFAULT_MODEL, EngineFlags, Model
from paceline.config import EngineConfig, LogFormat, MetricsNames, ServerConfig
from paceline.errors import MissingPackageError, ParameterError

if TYPE_CHECKING:
    from paceline.llm import LLM

SERVER = "Server"
KEYS_VARIABLE = "PACELINE_API_KEYS"
_METHODS: dict[str, Literal["model", "ngram"]] = {"draft_model": "model", "ngram": "ngram"}


def _option(*names: str, text: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=SERVER)


@dataclass(frozen=True)
class ServerFlags:
    """How the server listens: ``ServerConfig`` as options."""

    host: Annotated[str, _option("--host", text="Address to listen on.")] = ServerConfig.host
    port: Annotated[int, _option("--port", text="Port to listen on.")] = ServerConfig.port
    api_key: Annotated[
        list[str] | None,
        _option("--api-key", text=f"A key that requests must carry; repeatable. Better: a file, or ${KEYS_VARIABLE}."),
    ] = None
    api_key_file: Annotated[
        Path | None, _option("--api-key-file", text="A file with one key a line, each perhaps with limits.")
    ] = None
    served_model_name: Annotated[
        str | None, _option("--served-model-name", text="What requests call the model. Default: its own name.")
    ] = ServerConfig.served_model_name
    max_waiting: Annotated[
        int, _option("--max-waiting", text="Answers that may wait for a row; more are refused with 429.")
    ] = ServerConfig.max_waiting
    max_waiting_tokens: Annotated[
        int | None,
        _option(
            "--max-waiting-tokens",
            text="Likewise tokens, of prompts and of answers at their longest. Default: those of as many long answers.",
        ),
    ] = ServerConfig.max_waiting_tokens
    allowed_hosts: Annotated[
        list[str] | None,
        _option(
            "--allowed-hosts",
            text="A name that requests may call this server by, besides localhost and --host; repeatable; '*': any.",
        ),
    ] = None
    max_connections: Annotated[int, _option("--max-connections", text="Connections open at a time.")] = (
        ServerConfig.max_connections
    )
    max_connections_per_client: Annotated[
        int, _option("--max-connections-per-client", text="Connections open at a time from one address.")
    ] = ServerConfig.max_connections_per_client
    header_timeout: Annotated[
        float, _option("--header-timeout", text="Seconds in which a request's headers must have arrived.")
    ] = ServerConfig.header_timeout
    keep_alive_timeout: Annotated[
        float, _option("--keep-alive-timeout", text="Seconds that a connection stays open between requests.")
    ] = ServerConfig.keep_alive_timeout
    send_timeout: Annotated[
        float, _option("--send-timeout", text="Seconds after which a client that reads nothing is given up.")
    ] = ServerConfig.send_timeout
    max_body_bytes: Annotated[int, _option("--max-body-bytes", text="Longest body of a request.")] = (
        ServerConfig.max_body_bytes
    )
    body_timeout: Annotated[
        float, _option("--body-timeout", text="Seconds in which a request's body must have arrived.")
    ] = ServerConfig.body_timeout
    max_bodies_bytes: Annotated[
        int, _option("--max-bodies-bytes", text="Bodies of all requests that have not been answered, together.")
    ] = ServerConfig.max_bodies_bytes
    max_upload_bytes: Annotated[
        int, _option("--max-upload-bytes", text="Longest file for a batch, with the form around it; goes to the disk.")
    ] = ServerConfig.max_upload_bytes
    request_timeout: Annotated[
        float | None, _option("--request-timeout", text="Seconds after which a request is given up. Default: never.")
    ] = ServerConfig.request_timeout
    shutdown_timeout: Annotated[
        float, _option("--shutdown-timeout", text="Seconds that running requests may take when the server ends.")
    ] = ServerConfig.shutdown_timeout
    stall_timeout: Annotated[
        float, _option("--stall-timeout", text="Seconds of one step after which /health calls the engine stalled.")
    ] = ServerConfig.stall_timeout
    capture_seconds: Annotated[
        float,
        _option("--capture-seconds", text="Seconds that the start may take to capture a GPU's rounds as CUDA graphs."),
    ] = ServerConfig.capture_seconds
    log_format: Annotated[LogFormat, _option("--log-format", text="text for people, json for machines.")] = (
        ServerConfig.log_format
    )
    log_interval: Annotated[float, _option("--log-interval", text="Seconds between lines about throughput.")] = (
        ServerConfig.log_interval
    )
    metrics_names: Annotated[
        MetricsNames,
        _option("--metrics-names", text="vllm: /metrics has vLLM's names, too, for its dashboards."),
    ] = ServerConfig.metrics_names
    playground: Annotated[bool, _option("--playground/--no-playground", text="A page at / to try the model on.")] = (
        ServerConfig.playground
    )
    batch_dir: Annotated[
        str | None, _option("--batch-dir", text="Where /v1/files and /v1/batches keep everything. Default: no batches.")
    ] = ServerConfig.batch_dir

    def config(self) -> ServerConfig:
        """With the keys of all three sources. Raises ParameterError."""
        from paceline.server.security import read_keys

        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        keys = [*(given.pop("api_key") or ()), *os.environ.get(KEYS_VARIABLE, "").split()]
        given["allowed_hosts"] = [name for each in given["allowed_hosts"] or () for name in each.split(",")]
        if (path := given.pop("api_key_file")) is not None:
            keys += read_keys(path)
        return ServerConfig(**given, api_keys=keys)


def serve(
    engine: EngineFlags,
    server: ServerFlags,
    model: Model = DEFAULT_MODEL,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            "--speculative-config",
            help='JSON in place of --drafter, --draft-model, -k: {"method": "ngram", "num_speculative_tokens": 4}.',
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas", help="So many engines on Ray, each with the model of its own. Default: one, without."
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", help="Where Ray runs: HOST:PORT, or auto. Default: it is started here."),
    ] = None,
) -> None:
    """Serve a model over HTTP as OpenAI does. Without a draft model, n-gram lookup draft tokens."""
    try:
        from paceline.server.run import serve as run
    except ModuleNotFoundError as error:
        raise MissingPackageError(error.name, "serve") from error
    from paceline.models import hub

    flags = engine if speculative_config is None else with_json(engine, speculative_config)
    config = server.config()
    flags.check()
    if config.served_model_name is None:
        config = dataclasses.replace(config, served_model_name=model)

    if replicas is not None or ray_address is not None:
        on_ray(flags, config, model, replicas, ray_address)
        return

    def load() -> LLM:
        if model in hub.EMBEDDED:
            hub.pull(model)
        return flags.load(model, quiet=True)

    run(config, load)


def on_ray(flags: EngineFlags, config: ServerConfig, model: str, replicas: int | None, address: str | None) -> None:
    """Several replicas behind one address. Raises ParameterError, MissingPackageError."""
    if replicas is None:
        raise ParameterError("ray_address", address, "left out without --replicas")
    from paceline.integrations.ray.cluster import LOCAL
    from paceline.integrations.ray.serving import serve as run

    run(config, flags.recipe(model), replicas, LOCAL if address is None else address)


def with_json(flags: EngineFlags, text: str) -> EngineFlags:
    """The flags that vLLM's spelling of speculation means. Raises ParameterError."""
    if flags.drafter != EngineConfig.drafter or flags.draft_model is not None:
        raise ParameterError("speculative_config", text, "given alone, without --drafter and --draft-model")
    given = _parse(text)
    model = given.pop("model", None)
    method = given.pop("method", "ngram" if model is None else "draft_model")
    if method not in _METHODS:
        raise ParameterError("speculative_config.method", method, "one of " + ", ".join(map(repr, _METHODS)))
    if model is not None and not isinstance(model, str):
        raise ParameterError("speculative_config.model", model, "the draft model's name")
    k = given.pop("num_speculative_tokens", EngineConfig.num_speculative_tokens)
    for name, value in given.items():
        allowed = "left out; known are method, model and num_speculative_tokens"
        raise ParameterError(f"speculative_config.{name}", value, allowed)
    return dataclasses.replace(flags, drafter=_METHODS[method], draft_model=model, num_speculative_tokens=str(k))


def _parse(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ParameterError("speculative_config", text, f"a JSON object: {error}") from error
    if not isinstance(given, dict):
        raise ParameterError("speculative_config", text, "a JSON object")
    return given
