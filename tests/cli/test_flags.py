"""Options made of configuration fields: every field is one or has a reason, and its value arrives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.main import get_command

from paceline.cli.flags import NOT_FLAGS, PANELS, flags_of, from_flags, from_text
from paceline.cli.main import app
from paceline.cli.options import EngineFlags
from paceline.config import EngineConfig, SamplingParams, ServerConfig, StructuredOutputs
from paceline.config.ranges import names_of
from paceline.errors import ParameterError

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", PANELS)
def test_every_field_is_an_option_or_has_a_reason_not_to_be(kind: type) -> None:
    flags = [flag.name for flag in flags_of(kind)]
    assert sorted([*flags, *NOT_FLAGS[kind]]) == sorted(names_of(kind))
    assert all(NOT_FLAGS[kind].values())


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        ("generate", [EngineFlags, SamplingParams]),
        ("batch", [EngineFlags, SamplingParams]),
        ("serve", [EngineFlags, ServerConfig]),
    ],
)
def test_the_large_commands_have_every_option_with_its_names_default_and_panel(command: str, kinds: list[type]) -> None:
    options = {option.name: option for option in COMMANDS[command].params}
    for flag in [flag for kind in kinds for flag in flags_of(kind)]:
        option = options[flag.name]
        spelled = [name for spelling in flag.spellings for name in spelling.split("/")]
        assert sorted([*option.opts, *option.secondary_opts]) == sorted(spelled)
        assert option.default == flag.default
        assert (option.help, option.rich_help_panel) == (flag.text, flag.panel)


@pytest.mark.parametrize("kind", [*PANELS, EngineFlags])
def test_nothing_given_is_the_default_and_so_is_the_default_given(kind: Any) -> None:
    assert from_flags(kind, {}) == kind()
    assert from_flags(kind, {flag.name: flag.default for flag in flags_of(kind)}) == kind()


GIVEN: list[tuple[type, str, Any, Any]] = [
    (EngineConfig, "drafter", "none", None),
    (EngineConfig, "num_speculative_tokens", "3", 3),
    (EngineConfig, "num_speculative_tokens", "bass", "bass"),
    (EngineConfig, "speculation_width", "2", 2),
    (EngineConfig, "longest_pause", "none", None),
    (EngineConfig, "longest_pause", "0.25", 0.25),
    (EngineConfig, "draft_quantization", "none", None),
    (EngineConfig, "profile", "7", "7"),
    (EngineConfig, "memory_limit", 2**40, 2**40),
    (SamplingParams, "stop", ["1", "none"], ("1", "none")),
    (SamplingParams, "stop_token_ids", [1, 2], (1, 2)),
    (SamplingParams, "allowed_token_ids", [1, 2], (1, 2)),
    (SamplingParams, "bad_words", ["a"], ("a",)),
    (SamplingParams, "logit_bias", '{"7": -1.5}', {7: -1.5}),
    (SamplingParams, "structured_outputs", '{"regex": "a+"}', StructuredOutputs(regex="a+")),
    (SamplingParams, "rank_by", "logprob", "logprob"),
    (ServerConfig, "allowed_hosts", ["a,b", "c"], ("a", "b", "c")),
    (ServerConfig, "allowed_origins", ["*", "http://[::1]:3000"], ("*", "http://[::1]:3000")),
    (ServerConfig, "api_keys", ["1"], ("1",)),
]


@pytest.mark.parametrize(("kind", "name", "given", "kept"), GIVEN)
def test_an_option_spells_the_value_of_its_field(kind: type, name: str, given: Any, kept: Any) -> None:
    assert getattr(from_flags(kind, {name: given}), name) == kept


@pytest.mark.parametrize("text", ["[" * 10**5, "9" * 5000, "{", "\ud800", ""])
def test_a_text_that_spells_nothing_else_is_itself(text: str) -> None:
    assert from_text(text) == text


def test_values_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ParameterError, match=r"^n=0 "):
        from_flags(SamplingParams, {"n": 0})
    with pytest.raises(ParameterError, match=r"^stop="):
        from_flags(SamplingParams, {"stop": [""]})
    with pytest.raises(ParameterError, match=r"^longest_pause='soon' "):
        from_flags(EngineConfig, {"longest_pause": "soon"})


def test_options_that_only_python_had_before_are_honoured(paceline: Any, tiny: str) -> None:
    run = ("generate", tiny, "-p", "hello", "--max-tokens", "4", "--ignore-eos", "--json", "--seed", "1")

    def tokens(*options: str) -> list[int]:
        result = paceline(*run, *options)
        assert result.exit_code == 0, result.stderr
        return list(json.loads(result.stdout)["outputs"][0]["token_ids"])

    plain = tokens()
    assert set(tokens("--allowed-token-ids", "70", "--allowed-token-ids", "71")) <= {70, 71}
    assert tokens("--logit-bias", '{"70": 100}') == [70] * 4
    assert plain[0] not in tokens("--logit-bias", json.dumps(dict.fromkeys(map(str, plain), -100)))
    assert tokens("--stop-token-ids", str(plain[1])) == plain[: plain.index(plain[1]) + 1]
    assert tokens("--prefill-chunk", "1", "--longest-pause", "none", "--no-keep-prefix") == plain


def test_the_memory_limit_reaches_the_engine(paceline: Any, tiny: str) -> None:
    result = paceline("generate", tiny, "-p", "hello", "--memory-limit", "1")
    assert result.exit_code == 2
    assert "memory_limit" in result.stderr


def test_an_option_that_is_refused_is_named_as_it_is_spelled(paceline: Any) -> None:
    result = paceline("generate", "--prompts-file", "absent", "--chat")
    assert result.stderr.startswith("error: --chat=")
