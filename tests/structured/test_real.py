"""The default model, which has no tokens for some bytes, follows ordinary schemas."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from paceline.config import DEFAULT_MODEL, SamplingParams, StructuredOutputs
from paceline.errors import StructureError
from paceline.llm import LLM

pytestmark = pytest.mark.slow
pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 30},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2000},
        "fields": {"type": "array", "items": {"enum": ["physics", "chemistry", "math"]}, "minItems": 1, "maxItems": 3},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "born", "fields", "code", "alive"],
}


def test_the_default_model_follows_ordinary_schemas_with_and_without_speculation() -> None:
    llm = LLM(DEFAULT_MODEL, drafter="ngram", max_model_len=512)
    params = SamplingParams(n=4, seed=1, max_tokens=200, structured_outputs=StructuredOutputs(json=SCHEMA))
    (found,) = llm.generate("Marie Curie as JSON: ", params, use_tqdm=False)
    (plain,) = llm.plain().generate("Marie Curie as JSON: ", params, use_tqdm=False)
    assert [each.token_ids for each in found.outputs] == [each.token_ids for each in plain.outputs]
    for answer in found.outputs:
        assert answer.finish_reason == "stop"
        jsonschema_rs.validate(SCHEMA, json.loads(answer.text))
    with pytest.raises(StructureError, match=r"U\+50000"):
        llm.requests.structure(StructuredOutputs(json={"const": "\U00050000"}))
