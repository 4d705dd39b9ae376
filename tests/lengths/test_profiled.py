"""The policy ``profiled``, and the profile that its table comes from."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import ParameterError, ProfileError
from paceline.lengths.base import ProfiledLength
from paceline.lengths.profile import Identity, Profile
from paceline.models.files.fingerprint import model_hash
from paceline.tools.bench.profile import MeasuredProfile, SweepPoint
from simulation import linear_costs
from toy import ToyModel, answers, make_engine, run

pytestmark = pytest.mark.usefixtures("one_thread")
PAPER = {1: 7, 2: 6, 4: 4, 8: 4, 16: 3, 32: 1}
HERE = Identity("a CPU", "cpu", 2, "1234", "ngram", "float32", "padded", "coupled")
POINT = SweepPoint(1, 2, 10.0, 20.0, 100.0, 2.0, 9.0, 11.0)


@pytest.mark.parametrize(("rows", "k"), [(1, 7), (2, 6), (3, 4), (5, 4), (9, 3), (16, 3), (17, 1), (32, 1), (50, 1)])
def test_batch_sizes_round_up_to_the_next_entry(rows: int, k: int) -> None:
    assert ProfiledLength(PAPER).length_for(rows) == k


def written(path: Path, **changes: Any) -> Path:
    measured = {"acceptance": (0.8, 0.7), "sweep": (POINT,), "versions": {"paceline": "1"}, "fit": {"beta": 1.0}}
    profile = MeasuredProfile(HERE, linear_costs(), PAPER, **measured)  # type: ignore[arg-type]
    path.write_text(json.dumps(profile.as_json() | changes))
    return path


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = written(tmp_path / "p.json")
    loaded = Profile.load(path)
    assert loaded.best == PAPER
    assert loaded.costs == linear_costs()
    assert json.loads(path.read_text())["sweep"] == [vars(POINT)]
    loaded.check(HERE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"machine": "another CPU"}, "machine is 'another CPU', not 'a CPU'"),
        ({"threads": 1}, "threads is 1, not 2"),
        ({"target": "5678"}, "target is '5678', not '1234'"),
        (
            {"drafter": "5678", "precision": "int8"},
            "drafter is '5678', not 'ngram'; precision is 'int8', not 'float32'",
        ),
    ],
    ids=["machine", "threads", "model", "two reasons"],
)
def test_a_profile_of_something_else_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ProfileError, match=words):
        Profile.load(written(tmp_path / "p.json")).check(replace(HERE, **change))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "paceline-profile-0"}', '{"format": "paceline-profile-1"}']
)
def test_a_file_that_is_not_a_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ProfileError, match=r"p\.json"):
        Profile.load(tmp_path / "p.json")


def test_a_missing_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot read"):
        Profile.load(tmp_path / "none.json")
    with pytest.raises(ProfileError, match="damaged"):
        Profile.load(written(tmp_path / "p.json", costs={"batch_sizes": [1]}))


@pytest.mark.parametrize(
    "changes",
    [
        {"best": {}},
        {"best": []},
        {"best": {"0": 1}},
        {"best": {"1": -1}},
        {"best": {"1": 10**9}},
        {"costs": linear_costs().as_json() | {"batch_sizes": [1, 1, 1, 1, 1]}},
        {"costs": linear_costs().as_json() | {"draft_step": [0.0]}},
        {"costs": linear_costs().as_json() | {"context_once": math.nan}},
    ],
)
def test_a_profile_with_impossible_numbers_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Otherwise a round would fail on them, and with it all requests of the batch."""
    with pytest.raises(ProfileError, match="damaged"):
        Profile.load(written(tmp_path / "p.json", **changes))


def test_an_engine_checks_its_profile(tmp_path: Path) -> None:
    path = str(written(tmp_path / "p.json"))
    with pytest.raises(ProfileError, match="target is"):
        make_engine(ToyModel(), drafter="ngram", num_speculative_tokens="profiled", profile=path)
    with pytest.raises(ParameterError, match="profile"):
        make_engine(ToyModel(), drafter="ngram", num_speculative_tokens="profiled")


def test_a_profile_of_a_draft_model_alone_is_refused_with_ngram_drafts_beside_it(tmp_path: Path) -> None:
    def engine(drafter: str, k: int | str, profile: str | None = None) -> Engine:
        return make_engine(ToyModel(), ToyModel(blur=0.3), drafter=drafter, num_speculative_tokens=k, profile=profile)

    paths = {}
    for drafter in ("model", "hybrid"):
        identity = vars(engine(drafter, 1).identity())
        paths[drafter] = str(written(tmp_path / drafter, identity=identity))
        engine(drafter, "profiled", paths[drafter])
    for drafter, other in (("model", "hybrid"), ("hybrid", "model")):
        with pytest.raises(ProfileError, match="drafter is"):
            engine(drafter, "profiled", paths[other])


def test_an_engine_follows_its_profile(tmp_path: Path) -> None:
    identity = make_engine(ToyModel(), drafter="ngram", num_speculative_tokens=1).identity()
    path = written(tmp_path / "p.json", identity=vars(identity), best={"1": 3, "4": 0})
    profiled = make_engine(ToyModel(), drafter="ngram", num_speculative_tokens="profiled", profile=str(path))
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 3
    prompts = [[1, 2, 1, 2], [3, 4], [5]]
    plain = answers(run(make_engine(ToyModel()), prompts, params))
    assert answers(run(profiled, prompts, params)) == plain
    auto = make_engine(ToyModel(), drafter="ngram", num_speculative_tokens="auto", profile=str(path))
    assert answers(run(auto, prompts, params)) == plain
    assert auto.models.costs == {}  # nothing was measured: the profile says it


def test_models_of_other_weights_or_shapes_have_other_hashes(tmp_path: Path) -> None:
    one, two = ToyModel(), ToyModel(vocab_size=30)
    assert model_hash(one) == model_hash(ToyModel())
    assert model_hash(one) != model_hash(two)
    file = tmp_path / "model.gguf"
    hashes = set()
    for content in (b"a" * 100, b"b" * 100):
        file.write_bytes(content)
        one.name = str(file)
        hashes.add(model_hash(one))
    assert len(hashes) == 2
