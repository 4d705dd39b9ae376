"""The number of threads, measured where it matters, and the NUMA nodes of an engine."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from paceline.config import EngineConfig, SamplingParams
from paceline.core import cpus
from paceline.engine import threads
from paceline.engine.threads import chosen_nodes, engine_threads, fewest_threads, nodes_of_rank, pass_seconds
from paceline.errors import ParameterError
from paceline.kernels import native
from toy import ToyModel, answers, make_engine, run, tiny_native

needs_kernels = pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}")

NODES = (cpus.Node(0, (0, 1)), cpus.Node(1, (2, 3)))


def test_more_threads_must_be_worth_it() -> None:
    assert fewest_threads({64: 1.0, 32: 1.1, 16: 1.5}) == 64
    assert fewest_threads({64: 1.0, 32: 1.02, 16: 1.5}) == 32
    assert fewest_threads({64: 2.0, 32: 1.1, 16: 1.09, 8: 1.8}) == 16, "a small model: the others only wait"


@needs_kernels
@pytest.mark.parametrize(("most", "measured"), [(8, []), (16, [16, 8]), (48, [48, 24, 12]), (64, [64, 32, 16, 8])])
def test_the_default_is_measured_above_eight_threads(
    most: int, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def seconds(_model: object, count: int, _nodes: object) -> float:
        asked.append(count)
        return 1 / count

    monkeypatch.setattr(threads, "pass_seconds", seconds)
    monkeypatch.setattr(threads, "threads_per_rank", lambda _ranks: most)
    assert engine_threads(EngineConfig(), tiny_native(0), ()) == most
    assert asked == measured
    assert engine_threads(EngineConfig(), ToyModel(), ()) == most
    assert engine_threads(EngineConfig(threads=3), tiny_native(0), ()) == 3
    assert asked == measured, "a model in torch, and a number that was asked for, are not measured"


@needs_kernels
def test_a_pass_is_measured_on_threads_that_end() -> None:
    before = dict(native._pools)
    assert pass_seconds(tiny_native(0), 3) > 0
    assert native._pools == before


def test_more_threads_than_cpus_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpus, "usable_cpus", lambda: (0, 3))
    with caplog.at_level(logging.WARNING):
        engine_threads(EngineConfig(threads=2), ToyModel(), ())
        assert caplog.text == ""
        engine_threads(EngineConfig(threads=64), ToyModel(), ())
        engine_threads(EngineConfig(threads=2, tensor_parallel=2), ToyModel(), ())
        assert "threads=64, but this process may use 2 CPUs" in caplog.text
        assert "threads=2 in each of 2 ranks, but this process may use 2 CPUs" in caplog.text
        caplog.clear()
        launcher = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
        for name, value in launcher.items():
            monkeypatch.setenv(name, value)
        engine_threads(EngineConfig(threads=2, tensor_parallel=2), ToyModel(), ())
        assert caplog.text == "", "the other rank is on another machine"


def test_auto_is_all_nodes_if_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "nodes", lambda: NODES)
    assert chosen_nodes("auto") == NODES
    assert chosen_nodes("off") == ()
    assert chosen_nodes("1") == NODES[1:]
    assert chosen_nodes("1,0,1") == NODES[::-1]
    with pytest.raises(ParameterError, match=r"numa='0,7' is not allowed: nodes with CPUs .*: 0-1"):
        chosen_nodes("0,7")
    dealt = [nodes_of_rank(EngineConfig(tensor_parallel=ranks), rank) for ranks in (1, 2, 4) for rank in range(ranks)]
    halves = [(cpus.Node(node.number, (cpu,)),) for node in NODES for cpu in node.cpus]
    assert dealt == [NODES, *((node,) for node in NODES), *halves]
    monkeypatch.setattr(cpus, "nodes", lambda: NODES[:1])
    assert chosen_nodes("auto") == ()
    assert nodes_of_rank(EngineConfig(tensor_parallel=2), 1) == (cpus.Node(0, (1,)),)
    assert nodes_of_rank(EngineConfig(tensor_parallel=2, numa="off"), 1) == ()


@needs_kernels
def test_an_engine_on_nodes_gives_the_same_text_and_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    one: tuple[Any, Any] = [[1, 5, 9, 3]], [SamplingParams(temperature=0, max_tokens=9, seed=1)]
    plain = run(make_engine(tiny_native(1), threads=3, numa="off"), *one)
    here = cpus.usable_cpus()
    monkeypatch.setattr(cpus, "nodes", lambda: (cpus.Node(0, here[:1]), cpus.Node(1, here[-1:])))
    engine = make_engine(tiny_native(1), threads=3)
    assert answers(run(engine, *one)) == answers(plain)
    where = f"3 threads on NUMA nodes 0 (CPUs {here[0]}) and 1 (CPUs {here[-1]})"
    assert f"{where}, weights where they were loaded;" in engine.describe()
    with native.kernel_threads(3, engine.nodes):
        target = tiny_native.__wrapped__(1)
    target.packed_decoder.nodes = engine.nodes  # as where the system has both nodes
    assert f"{where}, weights divided between them;" in make_engine(target, threads=3).describe()


def test_named_nodes_are_for_the_cpu_kernels() -> None:
    with pytest.raises(ParameterError, match=r"numa='0' .*does not run on the CPU kernels"):
        make_engine(ToyModel(), numa="0")
