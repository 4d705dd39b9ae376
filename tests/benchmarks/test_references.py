"""References and siblings: what the command line lets pass."""

from __future__ import annotations

import pytest
from benchmarks.references import arguments


def test_siblings_need_a_row_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["siblings", "model", "--rows", "7", "--n", "8"])
    assert "--rows 7" in capsys.readouterr().err
    assert arguments(["siblings", "model", "--rows", "8", "--n", "8"]).rows == 8
    assert arguments(["edits", "model"]).rows == 1
