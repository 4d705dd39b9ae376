"""``paceline profile`` on a toy model: all parts are present; the numbers are meaningless."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ParameterError
from paceline.lengths.profile import Profile
from paceline.tools.bench.fit import fit_paper
from paceline.tools.bench.offline import sides_for
from paceline.tools.bench.profile import MeasuredProfile, Sweep, acceptance_by_position, draw, run_profile
from paceline.tools.bench.recording import Round, latency_of, longest_stretch
from toy import make_engine
from toy_llm import toy_llm

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[1, 2, 3, 1, 2, 3], [4, 5]]


def no_bar(steps: Iterable[Any], what: str) -> Iterable[Any]:
    return steps


def kept_of(profile: MeasuredProfile) -> list[float]:
    """Mean number of accepted tokens out of 1, 2, ..., over the batch sizes."""
    lengths = sorted({p.k for p in profile.sweep} - {0})
    return [statistics.fmean(p.mean_acceptance_length - 1 for p in profile.sweep if p.k == k) for k in lengths]


def test_a_profile_is_measured_written_read_and_drawn(tmp_path: Path) -> None:
    llm = toy_llm(drafter="model")
    profile, fit = run_profile(llm, PROMPTS, Sweep.quick(), no_bar)
    assert set(profile.best) == {1, 2}
    assert [(p.batch_size, p.k) for p in profile.sweep] == [(b, k) for b in (1, 2) for k in range(3)]
    assert all(p.ms_per_token > 0 and p.mean_acceptance_length >= 1 for p in profile.sweep)
    for point in profile.sweep:
        assert point.first_ms_per_token is not None
        assert point.last_ms_per_token is not None
        assert 0 < point.first_ms_per_token <= point.ms_per_token * 1.001
        assert point.ms_per_token <= point.last_ms_per_token * 1.001
    assert len(profile.acceptance) == 2
    assert fit.error >= 0
    rounds = [p.ms_per_round for p in profile.sweep if p.batch_size == 1]
    assert fit == fit_paper(
        profile.costs, [rounds, [p.ms_per_round for p in profile.sweep if p.batch_size == 2]], kept_of(profile)
    ), "what the sweep measured, and no other rounds"
    profile.save(tmp_path / "profile.json")
    draw(profile, fit, tmp_path / "profile.png", "a toy")
    assert (tmp_path / "profile.png").stat().st_size > 1000
    assert Profile.load(tmp_path / "profile.json").best == profile.best
    written = json.loads((tmp_path / "profile.json").read_text())
    assert written["sweep"] == [vars(point) for point in profile.sweep]
    assert written["acceptance"] == list(profile.acceptance)
    assert {"versions", "fit", "costs", "identity"} <= written.keys()


def test_its_profile_serves_an_engine_on_the_same_models(tmp_path: Path) -> None:
    llm = toy_llm(drafter="ngram")
    profile, _ = run_profile(llm, PROMPTS, Sweep.quick(), no_bar)
    profile.save(tmp_path / "profile.json")
    guided = llm.with_options(num_speculative_tokens="profiled", profile=str(tmp_path / "profile.json"))
    assert guided.engine.parts.policy.name == "profiled"
    assert guided.plain().config.drafter is None  # the baseline needs no profile
    assert [side.name for side in sides_for(guided, 1)] == ["plain", "speculation"]


def test_without_a_drafter_there_is_nothing_to_profile() -> None:
    with pytest.raises(ParameterError, match="nothing to profile"):
        run_profile(toy_llm(drafter=None), PROMPTS, Sweep.quick(), no_bar)


def round_with(k: int, *accepted: int) -> Round:
    return Round(0.0, 1.0, k, accepted, (k,) * len(accepted))


def test_acceptance_by_position_is_conditional_on_earlier_positions() -> None:
    rounds = [round_with(2, 0, 1), round_with(2, 2, 2), round_with(1, 1, 1)]
    assert acceptance_by_position(rounds, 2) == (3 / 4, 2 / 3)


def test_rows_with_more_accepted_tokens_take_less_time_per_token() -> None:
    rounds = [Round(0, 1, 2, (2, 0), (2, 2)), Round(1, 2, 2, (2, 1), (2, 2))]
    found = latency_of(rounds, seconds=3.0)  # 6 and 3 tokens
    assert (found.first, found.last, found.all) == pytest.approx((500.0, 1000.0, 750.0))


def test_the_longest_stretch_of_a_batch_size() -> None:
    rounds = [round_with(1, 0), round_with(1, 0, 0), round_with(1, 0), round_with(2, 0), round_with(1, 0, 0)]
    assert [r.k for r in longest_stretch(rounds, 1)] == [1, 2]
    assert longest_stretch(rounds, 3) == []


def test_a_recorder_behaves_like_its_inner_policy(tmp_path: Path) -> None:
    from paceline.config import SamplingParams
    from paceline.engine.engine import Request
    from paceline.tools.bench.recording import Recorder

    engine = make_engine(toy_llm().engine.models.target, drafter="ngram", num_speculative_tokens=2)
    recorder = Recorder(engine.parts.policy)
    engine.use_policy(recorder)
    output = engine.add(Request([1, 2, 1, 2], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)))
    while engine.busy:
        engine.step()
    assert sum(r.tokens for r in recorder.rounds) >= len(output.outputs[0].token_ids)
