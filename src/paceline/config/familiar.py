"""Options as other engines name them, translated to this package's."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from paceline.config.limits import DrafterName, Length
from paceline.config.names import SAME
from paceline.errors import ParameterError


class SpeculativeConfig(NamedTuple):
    """Speculation as vLLM's ``speculative_config`` names it."""

    drafter: DrafterName
    draft_model: str | None
    num_speculative_tokens: Length


_METHODS: Mapping[str, DrafterName] = {"draft_model": "model", "ngram": "ngram", "eagle3": "feature", "mtp": "mtp"}


def speculation_of(config: object, default_length: Length) -> SpeculativeConfig:
    """The options that ``speculative_config`` spells, an object or its JSON. Raises ParameterError."""
    given = _object(config)
    model = given.pop("model", None)
    method = given.pop("method", "ngram" if model is None else "draft_model")
    if not isinstance(method, str) or method not in _METHODS:
        raise ParameterError("speculative_config.method", method, "one of " + ", ".join(map(repr, _METHODS)))
    if model is not None and not isinstance(model, str):
        raise ParameterError("speculative_config.model", model, "the draft model's name")
    length = given.pop("num_speculative_tokens", default_length)
    for name, value in given.items():
        allowed = "left out; known are method, model and num_speculative_tokens"
        raise ParameterError(f"speculative_config.{name}", value, allowed)
    return SpeculativeConfig(_METHODS[method], model, length)


def _object(config: object) -> dict[str, Any]:
    given = config
    if isinstance(config, str):
        try:
            given = json.loads(config)
        except ValueError as error:
            raise ParameterError("speculative_config", config, f"a JSON object: {error}") from error
    if not isinstance(given, Mapping):
        raise ParameterError("speculative_config", config, "a JSON object")
    return dict(given)


def translated(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The options with those of ``SAME`` under their names here, if these are known.

    Raises ParameterError for an option that is given under two names.
    """
    options: dict[str, Any] = {}
    for name, value in given.items():
        own = SAME.get(name, name)
        own = own if own in known else name
        if own in options or (own != name and own in given):
            raise ParameterError(name, value, f"left out beside {own}, which is another name of it")
        options[own] = value
    return options
