"""``paceline serve``: the OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import DEFAULT_MODEL, AdaptedEngineFlags, EngineFlags, Model
from paceline.config import EngineConfig, ServerConfig
from paceline.config.limits import DrafterName
from paceline.errors import MissingPackageError, ParameterError

if TYPE_CHECKING:
    from paceline.llm import LLM

KEYS_VARIABLE = "PACELINE_API_KEYS"
_METHODS: dict[str, DrafterName] = {  # vLLM's names
    "draft_model": "model",
    "ngram": "ngram",
    "eagle3": "feature",
    "mtp": "mtp",
}


def serve(
    engine: AdaptedEngineFlags,
    server: ServerConfig,
    model: Model = DEFAULT_MODEL,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file", help="A file with one key a line, each perhaps with limits.", rich_help_panel="Server"
        ),
    ] = None,
    speculative_config: Annotated[
        str | None,
        typer.Option(
            "--speculative-config",
            help="JSON in place of --drafter, --draft-model, -k, as vLLM spells it: "
            '{"method": "ngram", "num_speculative_tokens": 4}. Methods: ngram, draft_model, eagle3, mtp.',
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            help="Number of engines on Ray, each with its own copy of the model. Default: one, without Ray.",
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", help="Address of Ray: HOST:PORT, or auto. Default: Ray is started here."),
    ] = None,
) -> None:
    """Serve a model over HTTP: OpenAI's API, its Responses API, and Anthropic's Messages API."""
    try:
        from paceline.server.run import serve as run
    except ModuleNotFoundError as error:
        raise MissingPackageError(error.name, "serve") from error
    from paceline.models.files import hub

    flags = engine if speculative_config is None else with_json(engine, speculative_config)
    config = with_keys(server, api_key_file)
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


def with_keys(config: ServerConfig, path: Path | None) -> ServerConfig:
    """The configuration with the keys of the environment and of a file, too. Raises ParameterError."""
    from paceline.server.security import read_keys

    keys = [*config.api_keys, *os.environ.get(KEYS_VARIABLE, "").split(), *(() if path is None else read_keys(path))]
    return dataclasses.replace(config, api_keys=keys)


def on_ray(flags: EngineFlags, config: ServerConfig, model: str, replicas: int | None, address: str | None) -> None:
    """Several replicas behind one address. Raises ParameterError, MissingPackageError."""
    if replicas is None:
        raise ParameterError("ray_address", address, "left out without --replicas")
    from paceline.integrations.ray.cluster import LOCAL
    from paceline.integrations.ray.serving import serve as run

    run(config, flags.recipe(model), replicas, LOCAL if address is None else address)


def with_json(flags: EngineFlags, text: str) -> EngineFlags:
    """The options with speculation as vLLM spells it in JSON. Raises ParameterError."""
    alone = EngineConfig.drafter, None, EngineConfig.num_speculative_tokens
    if (flags.drafter, flags.draft_model, flags.num_speculative_tokens) != alone:
        names = "--drafter, --draft-model and --num-speculative-tokens"
        raise ParameterError("speculative_config", text, f"given alone, without {names}")
    given = _parse(text)
    model = given.pop("model", None)
    method = given.pop("method", "ngram" if model is None else "draft_model")
    if not isinstance(method, str) or method not in _METHODS:
        raise ParameterError("speculative_config.method", method, "one of " + ", ".join(map(repr, _METHODS)))
    if model is not None and not isinstance(model, str):
        raise ParameterError("speculative_config.model", model, "the draft model's name")
    k = given.pop("num_speculative_tokens", EngineConfig.num_speculative_tokens)
    for name, value in given.items():
        allowed = "left out; known are method, model and num_speculative_tokens"
        raise ParameterError(f"speculative_config.{name}", value, allowed)
    return dataclasses.replace(flags, drafter=_METHODS[method], draft_model=model, num_speculative_tokens=k)


def _parse(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ParameterError("speculative_config", text, f"a JSON object: {error}") from error
    if not isinstance(given, dict):
        raise ParameterError("speculative_config", text, "a JSON object")
    return given
