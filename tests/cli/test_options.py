"""Every option is honoured or refused: what a command has no use for, it does not have, or it says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ABSENT = [
    ("chat", "--n"),
    ("chat", "--best-of"),
    ("chat", "--rank"),
    ("chat", "--logprobs"),
    ("verify", "--num-speculative-tokens"),
    ("verify", "--acceptance"),
    ("profile", "--num-speculative-tokens"),
    ("profile", "--max-batch-size"),
    ("profile", "--profile"),
    ("bench offline", "--max-batch-size"),
    ("eval humaneval", "--max-batch-size"),
    ("train-draft", "--draft-vocab-size"),
]


@pytest.mark.parametrize(("command", "option"), ABSENT)
def test_commands_lack_what_they_have_no_use_for(paceline: Any, command: str, option: str) -> None:
    result = paceline(*command.split(), "no-model", option, "1")
    assert result.exit_code == 2
    assert f"No such option: {option}" in result.stderr
    assert f"{option} " not in paceline(*command.split(), "--help", "all").stdout


REFUSED = [
    ("generate -p x --logprobs 3", "--logprobs"),
    ("generate --prompts-file absent --chat", "--chat"),
    ("generate -p x --drafter none -k 4", "num_speculative_tokens"),
    ("generate -p x --drafter none --speculation-width 2", "speculation_width"),
    ("generate -p x --speculation-width wide", "speculation_width"),
    ("serve --acceptance rejection --speculation-width 2", "speculation_width"),
    ("generate -p x --drafter none --acceptance rejection", "acceptance"),
    ("generate -p x --drafter none --profile p.json", "profile"),
    ("generate -p x --draft-quantization int8", "draft_quantization"),
    ("generate -p x --draft-dtype float32 --drafter ngram", "draft_dtype"),
    ("generate -p x --draft-model other --drafter ngram", "draft_model"),
    ("generate -p x --draft-model other --drafter model --reference-document a", "reference_documents"),
    ("serve --draft-model other --drafter model --reference-document a", "reference_documents"),
    ("generate -p x -k 0 --reference-document a", "reference_documents"),
    ("bench offline --prompts chat --references", "--references"),
    ("bench offline --no-references", "--references"),
    ("bench offline --drafter ngram -k 3 --lengths 1,2", "--num-speculative-tokens"),
    ("bench offline --drafter none --lengths 1,2", "--lengths"),
    ("bench offline --drafter none --wrong-drafts", "--wrong-drafts"),
    ("profile --drafter none", "--drafter"),
    ("profile --drafter ngram --quick --max-k 3", "--max-k"),
]


@pytest.mark.parametrize(("line", "named"), REFUSED)
def test_what_would_do_nothing_is_refused_before_anything_is_loaded(paceline: Any, line: str, named: str) -> None:
    result = paceline(*line.split(), "no-model")
    assert result.exit_code == 2
    (error,) = result.stderr.splitlines()
    assert error.startswith(f"error: {named}=")


NOTHING_DRAFTED = [
    ("bench offline -k 0 --wrong-drafts", "--wrong-drafts"),
    ("bench offline --lengths 0 --wrong-drafts", "--wrong-drafts"),
    ("bench offline --prompts edits -k 0 --references", "--references"),
    ("bench offline --prompts edits --drafter none --no-references", "--references"),
]


@pytest.mark.parametrize(("line", "named"), NOTHING_DRAFTED)
def test_what_only_a_loaded_engine_cannot_use_is_refused_too(paceline: Any, tiny: str, line: str, named: str) -> None:
    result = paceline(*line.split(), tiny, "--batch-sizes", "1", "-q")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: {named}=")


def test_verify_takes_no_parameters_from_lines(paceline: Any, tiny: str, tmp_path: Path) -> None:
    others = ('"temperature": 0.3', '"references": ["y"]', '"n": 2')
    for line in (*(f'{{"prompt": "x", {other}}}' for other in others), '{"messages": [], "temperature": 0.3}'):
        (tmp_path / "lines").write_text(line)
        result = paceline("verify", tiny, "--prompts-file", str(tmp_path / "lines"))
        assert result.exit_code == 2
        assert "lines with a prompt, messages or turns and nothing else" in result.stderr
