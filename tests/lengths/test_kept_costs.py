"""Cost tables kept on disk."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core import hardware
from paceline.engine.engine import Engine
from paceline.errors import ParameterError
from paceline.lengths import kept_costs
from paceline.lengths.calibration import Calibration
from paceline.lengths.kept_costs import KeptCosts
from paceline.lengths.profile import Identity
from simulation import linear_costs
from toy import ToyModel, make_engine

pytestmark = pytest.mark.usefixtures("one_thread")
HERE = KeptCosts(Identity("a CPU", "cpu", 2, "1234", "ngram", "float32", "padded", "coupled"), 4, 96)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(kept_costs.VARIABLE, "on")
    return tmp_path / "cache"


def from_a_file(path: Path, content: bytes = b"weights") -> ToyModel:
    path.write_bytes(content)
    model = ToyModel()
    model.name = str(path)
    return model


def engine_on(model: ToyModel, **options: int) -> Engine:
    return make_engine(model, drafter="ngram", num_speculative_tokens="auto", **options)  # type: ignore[arg-type]


def test_the_second_process_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = engine_on(from_a_file(tmp_path / "model.gguf")).models.costs
    monkeypatch.setattr(Calibration, "plain_ms", lambda _: 1000)
    monkeypatch.setattr(Calibration, "run", lambda *_: pytest.fail("measured again"))
    assert engine_on(from_a_file(tmp_path / "model.gguf")).models.costs == measured


def test_a_table_of_a_busy_machine_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (slow,) = engine_on(from_a_file(tmp_path / "model.gguf")).models.costs.values()
    for plain_ms, again in ((slow.verify_ms(1, 0) / 2, True), (slow.verify_ms(1, 0) * 2, False)):
        measured: list[float] = []
        monkeypatch.setattr(Calibration, "plain_ms", lambda _, ms=plain_ms: ms)
        monkeypatch.setattr(Calibration, "run", lambda *_, told=measured: told.append(1) or slow)
        engine_on(from_a_file(tmp_path / "model.gguf"))
        assert bool(measured) == again


def test_other_weights_or_sizes_are_measured(tmp_path: Path, cache: Path) -> None:
    engine_on(from_a_file(tmp_path / "model.gguf"))
    engine_on(from_a_file(tmp_path / "model.gguf", b"others"))
    engine_on(from_a_file(tmp_path / "model.gguf"), max_batch_size=2)
    assert len(list((cache / "costs").iterdir())) == 3


def test_nothing_is_kept_for_weights_without_files(cache: Path) -> None:
    """Otherwise two models of the same shape would share a table."""
    engine_on(ToyModel())
    assert not cache.exists()


def test_another_machine_or_version_has_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {HERE.table.path, replace(HERE, max_batch_size=8).table.path}
    monkeypatch.setattr(kept_costs, "__version__", "another")
    paths.add(HERE.table.path)
    monkeypatch.setattr(kept_costs, "cpu_signature", lambda: "cpu family : 26")
    paths.add(HERE.table.path)
    assert len(paths) == 4


def test_processors_of_one_name_have_their_own_signatures() -> None:
    signature = hardware.cpu_signature()
    assert signature == hardware.cpu_signature()
    assert "MHz" not in signature  # changes from moment to moment
    assert "processor" not in signature  # the core's number


def damaged(**changes: object) -> str:
    return json.dumps(linear_costs().as_json() | changes)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '"table"',
        "\udcff",
        damaged(draft_once=[]),
        damaged(verify=[]),
        damaged(context=-1),
        damaged(context=10**400),
        damaged(context="many"),
        damaged(context_token=math.nan),
        damaged(feed=[math.inf]),
        damaged(verify=[[0.0] * len(linear_costs().lengths)] * len(linear_costs().batch_sizes)),
        damaged(colour="red"),
        damaged(verify=linear_costs().as_json()["verify"][:-1]),
        damaged(batch_sizes=[1, 1, 1, 1, 1]),
        damaged(batch_sizes=[0, 1, 2, 4, 8]),
        damaged(feed_tokens=[], feed=[]),
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_measured_anew_with_a_warning(content: str, caplog: pytest.LogCaptureFixture) -> None:
    HERE.table.save(linear_costs().as_json())
    assert HERE.table.load() == linear_costs()
    HERE.table.path.write_bytes(content.encode(errors="surrogateescape"))
    assert HERE.table.load() is None
    assert "measuring again" in caplog.text


def test_where_nothing_can_be_written_the_engine_says_so_and_runs(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file where the folder should be")
    engine_on(from_a_file(tmp_path / "model.gguf"))
    assert "the costs could not be cached" in caplog.text


def test_it_can_be_turned_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kept_costs.VARIABLE, "off")
    HERE.table.save(linear_costs().as_json())
    assert not cache.exists()
    monkeypatch.setenv(kept_costs.VARIABLE, "of")
    with pytest.raises(ParameterError, match="PACELINE_COST_CACHE='of' is not allowed: 'on' or 'off'"):
        HERE.table.load()
