"""The model of many cores: shared panels, a slow core, barriers; and that its measurements run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.cores import EPYC, EVERY, finish, finish_equal_shares, predict
from benchmarks.kernels import Shape

from benchmarks import cores
from paceline.kernels import native

NAMES = "llama-8b", "smollm2-135m"


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
def test_equal_threads_end_together(threads: int) -> None:
    for items in (1, 2, 18, 48, 257, 4748):
        assert finish(items, [1.0] * threads) == finish_equal_shares(items, [1.0] * threads) == -(-items // threads)


@pytest.mark.parametrize("items", [18, 48, 560])
def test_a_slow_core_holds_up_the_others_by_little(items: int) -> None:
    speeds = [1.0, 1.0, 1.0, 0.5]
    assert finish(items, speeds) <= 1.06 * items / sum(speeds) + 3  # equal shares take 1.75 times as long
    assert finish_equal_shares(items, speeds) == 2 * -(-items // 4)


def test_two_levels_of_a_barrier_pay_beyond_one_group() -> None:
    flat, tree = ([EPYC.barrier(threads, group) for threads in (2, 8, 64)] for group in (64, 8))
    assert tree[:2] == pytest.approx(flat[:2], rel=0.4)
    assert tree[2] < flat[2] / 4


def test_predictions_are_limited_by_what_a_machine_has() -> None:
    large, small = ([predict(name, EVERY[name], 1, threads, EPYC) for threads in (1, 8, 64)] for name in NAMES)
    assert [each.work_of for each in large] == ["memory", "memory", "memory of the socket"]
    assert large[0].ms > 7 * large[1].ms > 7 * large[2].ms
    assert small[2].described().startswith("memory of the socket 4"), "and barriers take about as long"
    assert small[2].barriers_ms > 0.3 * small[2].ms
    assert "| llama-8b | 8 | 2.0 | " in cores.table(EPYC, ["llama-8b"], [8])


@pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}")
def test_the_measurements_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = Shape(64, 2, 2, 1, 32, 64, 96)
    monkeypatch.setattr(cores, "EVERY", EVERY | {"smollm2-135m": tiny})
    monkeypatch.setattr(cores, "_bytes_a_second", lambda _kernels, threads: 1e10 * threads)
    monkeypatch.setattr(cores, "kernel_rate", lambda *_: 1e11)
    few = ["--shapes", "smollm2-135m", "--rows", "2", "--threads", "3", "--seconds", "0"]
    cores.main(["measure", *few, "--json", str(tmp_path / "cores.json")])
    results = json.loads((tmp_path / "cores.json").read_text())["results"]
    assert [result["threads"] for result in results] == [1, 2, 3]
    assert all(result["measured_ms"] > 0 for result in results)
    cores.main(["hog", *few])
    assert "ms in equal shares" in capsys.readouterr().out
