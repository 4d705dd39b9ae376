"""``Answers`` in workers of Ray Data, one of which is killed while it works."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import real_models
from paceline.ray import Answers
from ray_support import ENGINE, PARAMS, as_columns, local_ray
from server_support import save_model

pytestmark = pytest.mark.slow
ROWS = [{"index": place, "prompt": f"Say {place % 5} times: "} for place in range(64)]


class Mortal(Answers):
    """Its first worker to get the row kills itself with SIGKILL."""

    def __init__(self, mark: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._mark = Path(mark)

    def __call__(self, batch: Any) -> Any:
        answered = super().__call__(batch)
        if 20 in batch["index"] and not self._mark.exists():
            self._mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)  # with its answers
        return answered


def test_a_killed_worker_loses_nothing_and_answers_are_those_of_one_process(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="needs the extra [ray]")
    model, mark = save_model(tmp_path / "model"), tmp_path / "killed"
    given = {"model": model, "seed": 3, "params": PARAMS, **ENGINE}
    expected = dict(zip(range(64), Answers(**given)(as_columns(ROWS))["answer"], strict=True))
    with local_ray():
        data = ray.data.from_items(ROWS, override_num_blocks=8).map_batches(
            Mortal,
            fn_constructor_args=(str(mark),),
            fn_constructor_kwargs=given,
            batch_size=8,
            concurrency=2,
            num_cpus=1,
        )
        found = data.take_all()
    assert mark.exists(), "no worker was killed"
    assert sorted(row["index"] for row in found) == list(range(64))
    assert {row["index"]: row["answer"] for row in found} == expected


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="needs the extra [ray]")
    real_models.find("smollm2-135m")
    page = (Path(__file__).parents[3] / "docs" / "ray.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    with local_ray():
        exec(compile(code, "ray.md", "exec"), {})
    assert sorted(line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("q-")) == [
        f"q-{n}" for n in range(8)
    ]
