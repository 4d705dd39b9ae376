"""What --help shows: the common options, a group, or all."""

from __future__ import annotations

import re
from typing import Any

import pytest


def options(text: str) -> set[str]:
    """The options that a help lists at the beginnings of its lines."""
    return set(re.findall(r"^\W*(--[a-z][\w-]*)", text, re.MULTILINE))


@pytest.mark.parametrize("command", ["generate", "batch", "chat", "serve", "train-draft"])
def test_help_is_short_and_names_the_groups_that_have_the_rest(paceline: Any, command: str) -> None:
    short, whole = (paceline(command, "--help", *words).stdout for words in ([], ["all"]))
    assert 8 <= len(options(short)) <= 18
    assert len(options(whole)) > 2 * len(options(short))
    assert options(short) < options(whole)
    hidden = int(re.findall(r"(\d+) more options: --help ", short)[0])
    assert hidden == len(options(whole) - options(short))
    groups = re.findall(r"--help (\w+)", short.partition("more options")[2])
    assert groups[-1] == "all"
    shown = [options(paceline(command, "--help", group).stdout) for group in groups[:-1]]
    assert set.union(*shown) == options(whole)
    assert "more options" not in whole


def test_help_of_a_group_has_its_options_and_the_command_s_own(paceline: Any) -> None:
    text = paceline("generate", "-h", "sampling").stdout
    assert {"--typical-p", "--logit-bias", "--prompts-file"} <= options(text)
    assert not {"--attention", "--memory-limit"} & options(text)
    assert paceline("generate", "smollm2-135m", "--help").stdout == paceline("generate", "--help", "nothing").stdout


def test_a_command_without_groups_shows_all(paceline: Any) -> None:
    assert "more options" not in paceline("demo", "--help").stdout


def test_shells_complete_commands(paceline: Any) -> None:
    assert "--install-completion" in paceline("--help").stdout
