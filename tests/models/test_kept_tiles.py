"""Tiles of 8-bit matrix products: timed on the first load, cached on disk, and read by the next load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from paceline.errors import ParameterError
from paceline.kernels.gpu import linear
from paceline.kernels.gpu.linear import CANDIDATES, ROW_TILES, Linears, SmallRowLinear
from paceline.kernels.spec import LinearWeights
from paceline.models.load.kept_tiles import VARIABLE, CachedTiles, tune

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, "on")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return tmp_path / "tiles"


class Timer:
    """A timer for which the second candidate is the fastest."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: object) -> float:
        self.calls += 1
        return abs(self.calls % len(CANDIDATES) - 2)


def load(timer: Timer, seconds: float = 60.0, sizes: Sequence[int] = (48,)) -> Linears:
    """Tune a model whose matrices have so many outputs."""
    linears = Linears("int8")
    layers = [linears(LinearWeights(torch.ones(outputs, 32))) for outputs in sizes]
    assert all(isinstance(layer, SmallRowLinear) for layer in layers)
    tune(layers, linears, torch.float32, timer=timer, seconds=seconds)
    return linears


def test_tiles_are_timed_once_per_shape_and_cached_for_the_next_load(kept: Path) -> None:
    timer, sizes = Timer(), (48, 48, 80)
    first = load(timer, sizes=sizes)
    assert {(n, m) for _, n, _, m in first.tiles} == {(n, m) for n in (48, 80) for m in ROW_TILES}
    assert first.tiles["int8", 48, 32, 16] == CANDIDATES[1]
    calls = timer.calls
    assert load(timer, sizes=sizes).tiles == first.tiles
    assert timer.calls == calls > 0
    assert len(list(kept.iterdir())) == 1


def test_a_kept_tile_whose_product_is_wrong_here_is_not_used(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may have changed since it was timed, and the compiler's mistake may be the machine's."""
    first = load(Timer()).tiles
    monkeypatch.setattr(linear, "_TOLERANCE", -1.0)  # any product is wrong
    assert set(load(Timer()).tiles.values()) == {None}
    assert None not in {tile for (*_, rows), tile in first.items() if rows <= 64}


def test_shapes_that_one_load_has_no_time_for_are_timed_by_the_next(kept: Path) -> None:
    timer = Timer()
    assert load(timer, seconds=0.0).tiles == {}
    assert not kept.exists()
    assert len(load(timer).tiles) == len(ROW_TILES)


def test_an_unreadable_file_is_replaced_by_new_timings(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = load(Timer()).tiles
    (path,) = kept.iterdir()
    whole = path.read_text()
    for text in ("", "[1]", '[["int8", 48, 32, 16, {"size": 1}]]', "{}" * 3, '"tiles"'):
        path.write_text(text)
        caplog.clear()
        timer = Timer()
        assert load(timer).tiles == expected
        assert timer.calls > 0
        assert "cannot be used" in caplog.text
        assert path.read_text() == whole
    assert load(Timer()).tiles == expected


def test_unknown_tiles_are_never_run_and_tiles_of_other_models_stay(kept: Path) -> None:
    """The kernels count tiles of at least 32 outputs: smaller tiles would write beyond the end of the counters."""
    expected = load(Timer()).tiles
    (path,) = kept.iterdir()
    lines = json.loads(path.read_text())
    lines[0][4]["outputs"], lines[1][4]["parts"] = 1, 2**20
    path.write_text(json.dumps([*lines, ["int8", 7, 7, 16, None]]))
    assert load(Timer()).tiles == expected
    assert ["int8", 7, 7, 16, None] in json.loads(path.read_text())


def test_other_gpus_and_formats_have_files_of_their_own() -> None:
    names = {
        CachedTiles(*key).document.path.name for key in (("a", "int8", "x"), ("b", "int8", "x"), ("a", "fp8", "x"))
    }  # type: ignore[arg-type]
    assert len(names) == 3


def test_off_disables_the_cache(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    load(Timer())
    assert not kept.exists()
    monkeypatch.setenv(VARIABLE, "of")
    with pytest.raises(ParameterError, match=f"{VARIABLE}='of' is not allowed: 'on' or 'off'"):
        load(Timer())
