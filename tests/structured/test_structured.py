"""Structured answers of an engine with a byte-level tokenizer, with and without speculation."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import jsonschema_rs
import pytest

from covering import in_pairs
from paceline.config import SamplingParams, StructuredOutputs
from paceline.errors import MissingPackageError, ParameterError, StructureError
from paceline.kernels import native
from paceline.llm import LLM
from paceline.structured.schemas import grammar_of
from server_support import load, save_model

pytestmark = pytest.mark.usefixtures("one_thread", "no_trials")
pytest.importorskip("llguidance", reason="structured outputs need the extra 'structured'")

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"é']}, "minItems": 1, "maxItems": 3},
        "boss": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "boss"],
    "additionalProperties": False,
}
FORMATS = {"schema": StructuredOutputs(json=PERSON), "regex": StructuredOutputs(regex="(yes|no)( or (yes|no)){2,9}")}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("structured") / "tiny")


@pytest.fixture(scope="module")
def plain(path: str) -> LLM:
    return load(path, drafter=None, num_speculative_tokens=0)


def answers(llm: LLM, params: SamplingParams, prompts: tuple[str, ...] = ("abc", "x", "hello")) -> list[list[str]]:
    return [[answer.text for answer in output.outputs] for output in llm.generate(prompts, params, use_tqdm=False)]


def finished(llm: LLM, wanted: StructuredOutputs) -> list[str]:
    """Answers that ended by themselves, which a logit bias makes likely."""
    tokenizer = llm.requests.tokenizer
    closing = dict.fromkeys(tokenizer.encode('"}],'), 6.0) | dict.fromkeys(tokenizer.eos_token_ids, 8.0)
    params = SamplingParams(
        n=12, seed=5, temperature=2.0, max_tokens=150, structured_outputs=wanted, logit_bias=closing
    )
    (output,) = llm.generate("abc", params, use_tqdm=False)
    texts = [answer.text for answer in output.outputs if answer.finish_reason == "stop"]
    assert len(texts) > 3
    return texts


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_follow_their_schema(plain: LLM, temperature: float) -> None:
    params = SamplingParams(n=4, seed=1, temperature=temperature, max_tokens=200, structured_outputs=FORMATS["schema"])
    for output in plain.generate(["abc", "x"], params, use_tqdm=False):
        for answer in output.outputs:
            assert answer.finish_reason == "stop"
            jsonschema_rs.validate(PERSON, json.loads(answer.text))


def test_json_object_gives_any_object(plain: LLM) -> None:
    texts = finished(plain, StructuredOutputs(json_object=True))
    assert all(isinstance(json.loads(text), dict) for text in texts)


@in_pairs(attention=["padded", "native"], drafter=["ngram", "model"], acceptance=["coupled", "rejection"])
def test_speculation_does_not_change_structured_answers(
    path: str, drafter: str, acceptance: str, attention: str
) -> None:
    if attention == "native" and native.select() is None:
        pytest.skip(native.why_none())
    model = {"attention": attention, "dtype": "bfloat16" if attention == "native" else "float32"}
    draft = path if drafter == "model" else None
    llm = load(path, draft_model=draft, drafter=drafter, acceptance=acceptance, **model)
    plain = llm.plain()
    exact = acceptance == "coupled" or drafter == "ngram"
    for wanted in FORMATS.values():
        for temperature in (0.0, 1.0) if exact else (0.0,):
            params = SamplingParams(
                n=2, seed=3, temperature=temperature, max_tokens=60, structured_outputs=wanted, repetition_penalty=1.1
            )
            assert answers(llm, params) == answers(plain, params)


def test_structures_apply_only_to_their_own_rows(plain: LLM) -> None:
    free = SamplingParams(seed=3, max_tokens=30)
    structured = SamplingParams(seed=3, max_tokens=60, structured_outputs=FORMATS["schema"])
    mixed = plain.generate(["abc", "x", "abc", "x"], [free, structured, structured, free], use_tqdm=False)
    alone = [
        plain.generate(p, s, use_tqdm=False)[0]
        for p, s in zip(("abc", "x", "abc", "x"), (free, structured, structured, free), strict=True)
    ]
    assert [o.outputs[0].text for o in mixed] == [o.outputs[0].text for o in alone]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one"),
        ({"json": {}, "regex": "a"}, "exactly one"),
        ({"json": "{"}, "a JSON schema"),
        ({"json": "[]"}, "a JSON schema"),
        ({"json": {"x": object()}}, "a JSON schema"),
    ],
)
def test_invalid_structured_outputs_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        StructuredOutputs(**given)


@pytest.mark.parametrize("given", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_parameters_that_conflict_with_a_structure_are_refused(given: Any) -> None:
    with pytest.raises(ParameterError, match="structured_outputs"):
        SamplingParams(structured_outputs=FORMATS["regex"], **given)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "null"}}, "not"),
        ({"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 3}}}, "multipleOf"),
        ({"$defs": {"a": {"anyOf": [{"if": {}, "else": {}}]}}}, "if"),
        ({"type": "string", "pattern": "a", "format": "date"}, "beside 'pattern'|beside 'format'"),
        ({"type": "string", "maxLength": 2**14 + 1}, "16385"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may allow the same value"),
        ({"oneOf": [{"const": "a"}, {"type": "string"}]}, "may allow the same value"),
        ({"type": "object", "uniqueItems": True, "multipleOf": 2}, "'multipleOf', 'uniqueItems'"),
        ({"enum": [1], "minimum": 2, "type": "integer"}, "beside 'enum'"),
        ({"minimum": 2}, "'type'"),
        ({"type": "string", "enum": ["a", 1]}, "1"),
        ({"type": "integer", "const": True}, "True"),
        ({"type": "object", "required": ["a"]}, "requires 'a'"),
        ({"type": "string", "pattern": "a(?=b)"}, "a lookaround"),
        ({"type": "array", "maxItems": 5000}, "5000"),
        ({"type": "string", "pattern": "a{3,900}"}, "900"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "allOf"),
    ],
)
def test_keywords_that_cannot_be_enforced_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(StructureError, match=message):
        grammar_of("schema", json.dumps(schema))


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": {"type": "nonsense"}},
        {"json": {"properties": 5, "type": "object"}},
        {"regex": "("},
        {"json": {"$ref": "#/a"}},
    ],
)
def test_a_broken_structure_is_refused_by_name(plain: LLM, wanted: Any) -> None:
    with pytest.raises(StructureError):
        plain.request("a", SamplingParams(structured_outputs=StructuredOutputs(**wanted)))


ENFORCED: dict[str, Any] = {
    "object": {
        "type": "object",
        "properties": {'a"\\é': {"type": "integer"}, "b": {"type": "string", "maxLength": 3}},
        "required": ["b"],
        "additionalProperties": {"type": "boolean"},
    },
    "sizes": {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
    "recursive": {
        "anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/x"}, "maxItems": 2}],
        "$defs": {"x": {"type": "object", "properties": {"y": {"$ref": "#/$defs/x"}}}},
    },
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False},
    "number": {"type": "number", "exclusiveMinimum": -3.5, "maximum": 12.25},
    "string": {"type": ["string", "integer"], "minLength": 2, "maxLength": 5, "minimum": 4},
    "long": {"type": "string", "minLength": 1, "maxLength": 128},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}-\\d+\\.(x|.)$"},
    "uuid": {"type": "string", "format": "uuid"},
    "all of one": {"allOf": [{"const": {"a": [1, 2.5, None, "x"]}}], "title": "t"},
}


@pytest.mark.parametrize("name", ENFORCED)
def test_answers_are_valid_for_their_schema(plain: LLM, name: str) -> None:
    schema = ENFORCED[name]
    for text in finished(plain, StructuredOutputs(json=schema)):
        jsonschema_rs.validate(schema, json.loads(text))


def test_without_llguidance_the_extra_is_named(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(plain.requests.__dict__, "_grammars", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"paceline\[structured\]"):
        plain.request("a", SamplingParams(structured_outputs=FORMATS["regex"]))


def test_a_tokenizer_that_cannot_spell_json_is_refused(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(plain.requests.__dict__, "_grammars", raising=False)
    monkeypatch.setattr(plain.requests.tokenizer, "token_bytes", lambda token: b"a")
    with pytest.raises(StructureError, match="no tokens for the bytes 20, 21"):
        plain.request("a", SamplingParams(structured_outputs=FORMATS["regex"]))
