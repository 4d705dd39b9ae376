"""Python's share of a round: the time outside of the library; on a tiny model it is most of the time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.python_share import share_of, timed_library

from benchmarks.test_rounds import PARAMS, needs_kernels, tiny_llm
from paceline.kernels import native

pytestmark = pytest.mark.usefixtures("one_thread")


@needs_kernels
def test_time_outside_of_the_library_is_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.python_share.WARM_UP_ROUNDS", 0)  # ``auto`` could finish the rows in eight
    kernels = native.select()
    assert kernels is not None
    untimed = kernels.library.pl_round
    with timed_library() as clock:
        share = share_of(tiny_llm(), 2, replace(PARAMS, max_tokens=48), clock)
    assert kernels.library.pl_round is untimed
    assert share.native_ms["pl_round"] > 0
    assert share.rounds > 0
    assert share.round_ms == pytest.approx(share.python_ms + sum(share.native_ms.values()), abs=1e-3)
    assert 0 < share.python < 1
    assert "2 rows: Python's share" in str(share)
