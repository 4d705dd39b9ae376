"""Flags of ``paceline serve``; the server itself is tested in tests/server."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from paceline.cli.options import EngineFlags
from paceline.cli.serve import named_models, with_json, with_keys
from paceline.config import ServerConfig
from paceline.errors import ParameterError


@pytest.mark.parametrize(
    ("text", "drafter", "draft_model", "k"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 3}', "ngram", None, 3),
        ('{"model": "small", "num_speculative_tokens": 5}', "model", "small", 5),
        ('{"method": "draft_model", "model": "small"}', "model", "small", "auto"),
        ('{"method": "eagle3", "model": "head", "num_speculative_tokens": 3}', "feature", "head", 3),
        ('{"method": "mtp"}', "mtp", None, "auto"),
    ],
)
def test_speculation_as_vllm_spells_it(text: str, drafter: str, draft_model: str | None, k: int | str) -> None:
    flags = with_json(EngineFlags(), text)
    assert (flags.drafter, flags.draft_model, flags.num_speculative_tokens) == (drafter, draft_model, k)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"method": "eagle"}', "method='eagle'.*'draft_model', 'ngram'"),
        ('{"method": "ngram", "prompt_lookup_max": 4}', "prompt_lookup_max"),
        ('{"model": 3}', "the draft model's name"),
        ('{"method": []}', "'draft_model', 'ngram'"),
        ("[]", "a JSON object"),
        ("{", "a JSON object"),
    ],
)
def test_speculation_that_is_not_ours_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(ParameterError, match=says):
        with_json(EngineFlags(), text)


@pytest.mark.parametrize("flags", [{"drafter": None}, {"draft_model": "a"}, {"num_speculative_tokens": 8}])
def test_speculation_is_spelled_once(flags: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="without --drafter, --draft-model and --num-speculative-tokens"):
        with_json(EngineFlags(**flags), '{"method": "ngram"}')


def test_keys_come_from_flags_the_environment_and_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PACELINE_API_KEYS", "two three")
    (tmp_path / "keys").write_text("\ufefffour\n", encoding="utf-8")  # as some editors do
    config = with_keys(ServerConfig(api_keys=["one"]), tmp_path / "keys")
    assert config.api_keys == ("one", "two", "three", "four")


@pytest.mark.parametrize("option", ["--tensor-parallel", "--tensor-parallel-size"])
def test_what_ranks_cannot_share_is_refused(paceline: Any, option: str) -> None:
    result = paceline("serve", option, "2", "--kv-cache-dtype", "int8")
    assert result.exit_code == 2
    assert "kv_cache_dtype='int8'" in result.output
    assert "tensor_parallel=2" in result.output


def test_without_the_packages_of_the_server_the_extra_is_named(paceline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "paceline.server.run":
            raise ModuleNotFoundError("no fastapi", name="fastapi")
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    result = paceline("serve", "no-such-model")
    assert result.exit_code == 2
    assert 'fastapi is not installed: pip install "paceline[serve]"' in result.output


def test_further_models_have_names_of_their_own() -> None:
    assert named_models(["a", "b=org/c", "d=x=y"], "first") == {"a": "a", "b": "org/c", "d": "x=y"}
    for text in ("first", "a", "=x", "b="):
        with pytest.raises(ParameterError, match="a name that no other model has"):
            named_models(["a", text], "first")
