"""``paceline batch --replicas``: a file answered by workers of Ray, one of which is killed."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.cli.workers import SentLine, WorkerPool
from paceline.errors import PacelineError
from paceline.server.batch.lines import InputLine
from paceline.server.batch.window import LineResult
from polling import wait_until
from server_support import save_model

LINES = 300
FLAGS = ("--dtype", "bfloat16", "--attention", "native", "--device", "cpu", "--max-batch-size", "4", "--threads", "1")


class Actor:
    """An actor that answers a line when the test releases it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, asyncio.Future[LineResult]]] = []
        self.run = SimpleNamespace(remote=self._play)

    def _play(self, line: InputLine, seed: int, settings: dict[str, Any]) -> asyncio.Future[LineResult]:
        assert (seed, settings) == (7, {"model": "m"})
        future = asyncio.get_running_loop().create_future()
        self.asked.append((line.name, future))
        return future


def line(index: int) -> InputLine:
    return InputLine(index, index + 1, b"{}", f"{index:016x}", 100)


def test_lines_go_to_the_least_busy_worker_and_a_lost_line_ends_the_job() -> None:
    asyncio.run(_three_lines_and_a_loss())


async def _three_lines_and_a_loss() -> None:
    one, other = Actor(), Actor()
    team = WorkerPool([one, other], 7, {"model": "m"}, KeyError)
    tasks = [asyncio.create_task(SentLine(team, line(index)).run()) for index in range(3)]
    await asyncio.sleep(0)
    assert [len(actor.asked) for actor in (one, other)] == [2, 1]
    for _, future in one.asked:
        future.set_result(LineResult(b"{}", failed=False))
    await asyncio.wait(tasks[::2])
    tasks.append(asyncio.create_task(SentLine(team, line(3)).run()))
    await asyncio.sleep(0)
    assert [len(actor.asked) for actor in (one, other)] == [3, 1]
    other.asked[0][1].set_exception(KeyError("gone"))
    with pytest.raises(PacelineError, match="line 2 cannot be answered"):
        await tasks[1]
    tasks[3].cancel()


def test_an_address_without_replicas_is_refused(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--ray-address", "auto"])
    assert ended.exit_code == 2
    assert "--ray-address" in ended.stderr


@pytest.mark.slow
def test_a_killed_worker_loses_no_line_and_answers_are_those_of_one_engine(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra [ray]")
    model, source = str(save_model(tmp_path / "model")), tmp_path / "in"
    asked = [
        {"custom_id": f"line-{n}", "prompt": f"Say {n}: ", "max_tokens": 24, "temperature": 0.8 * (n % 2)}
        for n in range(LINES)
    ]
    source.write_text("".join(json.dumps(each) + "\n" for each in asked))
    alone, together = tmp_path / "alone", tmp_path / "together"
    _batch(source, alone, model).communicate()
    process = _batch(source, together, model, "--replicas", "2")
    wait_until(lambda: _done(together) > 20 or process.poll() is not None, "nothing was answered", 120)
    (first, *_) = _workers(process)
    first.send_signal(signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors.decode()[-3000:]
    assert _done(together) == LINES
    assert set(Counter(_answers(together)).values()) == {1}
    assert dict(_answers(together)) == dict(_answers(alone))


def _batch(source: Path, output: Path, model: str, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "paceline.cli.main", "batch", str(source), str(output), model]
    return subprocess.Popen([*command, "--seed", "5", *FLAGS, *more], stderr=subprocess.PIPE)


def _workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    found = [each for each in children if "ray::Worker" in " ".join((each.name(), *each.cmdline()))]
    assert len(found) == 2
    return found


def _done(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _answers(path: Path) -> list[tuple[str, str]]:
    entries = [json.loads(text) for text in path.read_text().splitlines()]
    return [(entry["custom_id"], json.dumps(entry["outputs"][0]["token_ids"])) for entry in entries]
