"""Ranks as processes: answers equal one process's, and all of them end, whichever ends first."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import distributed as dist

from models.parallel import ranks
from models.parallel.ranks import POSITIONS, WIDER, NoProcesses, params, prompts, toy, write
from paceline import LLM
from paceline.core.cpus import Node
from paceline.core.outputs import RequestOutput
from paceline.errors import RankError
from paceline.models.description.shards import ModelShard
from paceline.models.load.prepare import ModelOptions
from paceline.models.parallel import group, launch, native
from polling import wait_until
from served import Served

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": POSITIONS, "max_batch_size": 4}
OPTIONS |= {"drafter": "ngram", "num_speculative_tokens": 3, "threads": 1}
SECONDS = 20  # limit for ranks to end; it takes tenths of a second


@contextmanager
def shared(path: Path, **options: Any) -> Iterator[LLM]:
    llm = LLM(path, tensor_parallel=2, **OPTIONS | options)
    try:
        yield llm
    finally:
        llm.close()


def ranks_of(pid: int | None = None) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [child for child in children if "paceline.models.parallel.rank" in child.cmdline()]


def texts(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


IN_TORCH: dict[str, Any] = {}
ON_KERNELS = {"dtype": "auto", "quantization": "int8"}
PARTS = [
    pytest.param(IN_TORCH, "cut into 2 ranks (gloo)", id="torch"),
    pytest.param(ON_KERNELS, "1 threads a rank (0.00 GiB of weights and 1 key heads on rank 0", id="int8"),
]


@pytest.mark.parametrize(("options", "described"), PARTS)
def test_two_processes_answer_like_one_and_a_killed_one_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], described: str
) -> None:
    monkeypatch.setattr(ranks, "SHAPE", ranks.SHAPE | WIDER)
    path = write(toy("qwen2"), tmp_path)
    expected = LLM(path, **OPTIONS | options).generate(prompts(4), params(24), use_tqdm=False)
    with shared(path, **options) as llm:
        assert described in llm.engine.describe()
        assert texts(llm.generate(prompts(4), params(24), use_tqdm=False)) == texts(expected)
        (rank,) = ranks_of()
        listening = [each for each in rank.net_connections() if each.status == psutil.CONN_LISTEN]
        assert {each.laddr.ip for each in listening} == {"127.0.0.1"}
        stream = llm.stream(prompts(4), params(200))
        next(stream)
        rank.kill()
        killed = time.monotonic()
        with pytest.raises(RankError, match=r"rank 1 of 2 has ended \(killed by signal 9\).*make a new LLM"):
            list(stream)
        assert time.monotonic() - killed < SECONDS
        with pytest.raises(RankError, match="rank 1 of 2 has ended"):
            llm.generate([1, 2], use_tqdm=False)


@pytest.mark.parametrize(("dtype", "count"), [(torch.bfloat16, 2), (torch.float32, 0)])
def test_only_ranks_on_the_kernels_are_placed_on_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, count: int
) -> None:
    """Ranks in torch may be on another machine, which does not have these CPUs."""
    monkeypatch.setattr(ranks, "SHAPE", ranks.SHAPE | WIDER)
    monkeypatch.setattr(launch, "Spawned", lambda _ranks: NoProcesses())
    monkeypatch.setattr(launch, "_lead", lambda _processes, _share, settings, _launched: settings)
    options = ModelOptions(dtype, torch.device("cpu"))
    nodes = [(Node(0, (rank,)),) for rank in range(2)]
    settings: Any = launch.lead(write(toy("llama"), tmp_path), ModelShard(0, 2), options, 1, nodes)
    assert len(settings.nodes) == count
    assert (settings.exchange is None) == (count == 0)


def test_a_ranks_start_up_error_is_reported() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("failed/2", "ModelFormatError: no weights")
    with pytest.raises(RankError, match="rank 2 could not start: ModelFormatError: no weights"):
        launch._wait_for(store, NoProcesses(), ModelShard(0, 3))


@pytest.mark.slow
def test_ranks_end_with_their_last_user(tmp_path: Path) -> None:
    with shared(write(toy("llama"), tmp_path)) as llm:
        other = llm.with_options(max_batch_size=2)
        (rank,) = ranks_of()
        expected = texts(llm.generate(prompts(4), params(20), use_tqdm=False))
        llm.close()
        assert texts(other.generate(prompts(4), params(20), use_tqdm=False)) == expected
        directory = Path(rank.cmdline()[-1].split('"')[3]).parent
        assert directory.stat().st_mode & 0o777 == 0o700, "other users must not take part"
        other.close()
        assert not rank.is_running()
        assert not directory.exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [IN_TORCH, ON_KERNELS], ids=["torch", "int8"])
def test_a_rank_that_does_not_answer_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(ranks, "SHAPE", ranks.SHAPE | WIDER)
    monkeypatch.setattr(group, "PATIENCE", timedelta(seconds=3))
    monkeypatch.setattr(native, "PATIENCE", timedelta(seconds=3))
    with shared(write(toy("llama"), tmp_path), **options) as llm:
        (rank,) = ranks_of()
        rank.suspend()
        with pytest.raises(RankError, match=r"a forward pass failed.*make a new LLM"):
            llm.generate([1, 2], use_tqdm=False)
        wait_until(lambda: not rank.is_running(), "the rank is still there", SECONDS)


@contextmanager
def begun(
    script: str, path: Path, *command: str, folder: Path | None = None, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """A separate program with LLM, PATH, OPTIONS, prompts, params and texts defined. It ends with the block.

    folder: its working directory. environment: in addition to this process's.
    """
    head = f"""
        import signal
        import sys
        from pathlib import Path
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a shell starts in the background
        from paceline import LLM, SamplingParams
        from models.parallel.ranks import params, prompts
        from models.parallel.test_launch import texts
        PATH, OPTIONS = Path({str(path)!r}), {OPTIONS!r}
    """
    file = path / "program.py"
    file.write_text(textwrap.dedent(head) + textwrap.dedent(script))
    command = command or (sys.executable,)
    environment = _environment() | environment
    with subprocess.Popen(
        [*command, str(file)], stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
    ) as program:
        try:
            yield program
        finally:
            program.kill()


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": ":".join(place for place in sys.path if place)}


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.slow
@pytest.mark.parametrize("options", [IN_TORCH, ON_KERNELS], ids=["torch", "int8"])
def test_all_ranks_end_when_rank_0_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(ranks, "SHAPE", ranks.SHAPE | WIDER)
    script = f"""
        llm = LLM(PATH, tensor_parallel=2, **OPTIONS | {options})
        print("ready", flush=True)
        while True:
            llm.generate(prompts(4), params(200), use_tqdm=False)
    """
    with begun(script, write(toy("llama"), tmp_path)) as program:
        assert line_of(program) == "ready"
        (rank,) = ranks_of(program.pid)
        directory = Path(rank.cmdline()[-1].split('"')[3]).parent
    wait_until(lambda: not rank.is_running(), "the rank is still there", SECONDS)
    wait_until(lambda: not directory.exists(), "its directory is still there", SECONDS)


@pytest.mark.slow
def test_after_an_interrupt_the_model_goes_on(tmp_path: Path) -> None:
    script = """
        llm = LLM(PATH, tensor_parallel=2, **OPTIONS)
        expected = texts(llm.generate(prompts(4), params(20), use_tqdm=False))
        print("ready", flush=True)
        try:
            while True:
                llm.generate(prompts(4), params(200), use_tqdm=False)
        except KeyboardInterrupt:
            print(texts(llm.generate(prompts(4), params(20), use_tqdm=False)) == expected, flush=True)
    """
    with begun(script, write(toy("llama"), tmp_path)) as program:
        assert line_of(program) == "ready"
        (rank,) = ranks_of(program.pid)
        time.sleep(0.3)  # anywhere in a round
        program.send_signal(signal.SIGINT)
        assert line_of(program) == "True"
        assert program.wait(SECONDS) == 0
        assert not rank.is_running()


@pytest.mark.slow
def test_under_torchrun_its_ranks_are_used(tmp_path: Path) -> None:
    script = """
        llm = LLM(PATH, tensor_parallel=2, **OPTIONS)
        print(texts(llm.generate(prompts(4), params(20), use_tqdm=False)), flush=True)
        try:
            LLM(PATH, tensor_parallel=2, **OPTIONS)
        except ValueError as error:
            print(error, flush=True)
    """
    path = write(toy("llama"), tmp_path)
    expected = texts(LLM(path, **OPTIONS).generate(prompts(4), params(20), use_tqdm=False))
    torchrun = sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"
    with begun(script, path, *torchrun) as program:
        said, _ = program.communicate(timeout=120)
    first, second = said.splitlines()
    assert first == str(expected), "and once: what stands behind LLM runs on rank 0 alone"
    assert "used by only one LLM" in second
    assert program.returncode == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "machines"), [pytest.param(ON_KERNELS, 1, id="int8"), pytest.param(IN_TORCH, 2, id="two machines")]
)
def test_ranks_of_any_launcher_find_each_other_from_different_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], machines: int
) -> None:
    """Ranks on two machines speak through a named interface. The path is relative to rank 0's directory."""
    monkeypatch.setattr(ranks, "SHAPE", ranks.SHAPE | WIDER)
    path = write(toy("llama"), tmp_path / "model")
    script = f"""
        llm = LLM(PATH.name, tensor_parallel=2, **OPTIONS | {options})
        print(texts(llm.generate(prompts(4), params(20), use_tqdm=False)), flush=True)
    """
    launcher = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": str(2 // machines), "MASTER_ADDR": "127.0.0.1"}
    launcher |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    with (
        begun(script, path, folder=tmp_path, RANK="0", **launcher) as leader,
        begun(script, path, folder=path, RANK="1", **launcher) as other,
    ):
        said, _ = leader.communicate(timeout=120)
        assert (other.wait(SECONDS), leader.returncode) == (0, 0)
    expected = LLM(path, **OPTIONS | options).generate(prompts(4), params(20), use_tqdm=False)
    assert said.strip() == str(texts(expected))


@pytest.mark.slow
def test_a_server_ends_when_a_rank_does(tmp_path: Path) -> None:
    with Served(str(write(toy("llama"), tmp_path)), tmp_path / "log", "--tensor-parallel", "2").ready() as served:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 5}
        assert served.post(body).status_code == 200
        (rank,) = ranks_of(served.process.pid)
        rank.kill()
        wait_until(lambda: served.process.poll() is not None, "the server goes on without its rank", SECONDS)
        assert served.process.returncode != 0
        assert "rank 1 of 2 has ended (killed by signal 9)" in (tmp_path / "log").read_text()
