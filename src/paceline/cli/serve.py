"""``paceline serve``: the OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import DEFAULT_MODEL, AdaptedEngineFlags, EngineFlags, Model
from paceline.config import EngineConfig, EngineOptions, ServerConfig
from paceline.config.aliases import full_name
from paceline.config.familiar import speculation_of
from paceline.errors import MissingPackageError, ParameterError

if TYPE_CHECKING:
    from paceline.llm import LLM

KEYS_VARIABLE = "PACELINE_API_KEYS"


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
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            help="Another model that requests may name; it is loaded when one does. NAME or NAME=MODEL. Repeatable.",
            rich_help_panel="Server",
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
    """Serve models over HTTP: OpenAI's API and its Responses API, Anthropic's Messages API, Ollama's API."""
    try:
        from paceline.server.models import ModelSource
        from paceline.server.run import serve as run
    except ModuleNotFoundError as error:
        raise MissingPackageError(error.name, "serve") from error
    from paceline.models.files import hub

    flags = engine if speculative_config is None else with_json(engine, speculative_config)
    config = with_keys(server, api_key_file)
    flags.check()
    if config.served_model_name is None:
        config = dataclasses.replace(config, served_model_name=model)

    names = named_models(also or (), config.served_model_name or model)
    if replicas is not None or ray_address is not None:
        if names:
            raise ParameterError("--also", min(names), "left out with --replicas, which all serve one model")
        on_ray(flags, config, model, replicas, ray_address)
        return

    def load(flags: EngineFlags, model: str, memory_limit: int | None) -> LLM:
        if full_name(model) in hub.EMBEDDED:
            hub.pull(model)
        return dataclasses.replace(flags, memory_limit=memory_limit).load(model, quiet=True)

    alone = EngineFlags(**flags.options() if flags.draft_model is None else without_draft(flags.options()))
    others = {name: ModelSource(other, partial(load, alone, other)) for name, other in names.items()}
    run(config, lambda: load(flags, model, flags.memory_limit), others, flags.memory_limit)


def named_models(texts: Sequence[str], first: str) -> dict[str, str]:
    """The models of ``--also`` by the names of requests. first: the first model's. Raises ParameterError."""
    names: dict[str, str] = {}
    for text in texts:
        name, equals, model = text.partition("=")
        if not name or (equals and not model) or name in (first, *names):
            raise ParameterError("--also", text, "NAME or NAME=MODEL, with a name that no other model has")
        names[name] = model or name
    return names


def without_draft(options: EngineOptions) -> EngineOptions:
    """The options of models beside one with a draft model: how that one drafts says nothing of theirs."""
    return {**options, "drafter": EngineConfig.drafter, "num_speculative_tokens": EngineConfig.num_speculative_tokens}


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
    wanted = speculation_of(text, EngineConfig.num_speculative_tokens)
    return dataclasses.replace(flags, **wanted._asdict())
