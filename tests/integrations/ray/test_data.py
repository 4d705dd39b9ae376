"""``Answers``: columns in, columns out; an answer does not depend on other rows. Without Ray."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ParameterError
from paceline.integrations.ray.data import Columns, columns_of, own_name
from paceline.ray import Answers
from ray_support import ENGINE, PARAMS, as_columns
from server_support import save_model

ROWS = [{"custom_id": f"row {number}", "prompt": f"Say {number % 3} times: "} for number in range(7)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def answers(model: str) -> Answers:
    return Answers(model, seed=3, params=PARAMS, **ENGINE)


def rows_of(columns: Columns) -> dict[Any, Any]:
    names = columns["custom_id"] if "custom_id" in columns else columns["index"]
    return {name: (columns["answer"][place], columns["error"][place]) for place, name in enumerate(names)}


def test_order_neighbours_and_retries_change_no_answer(answers: Answers) -> None:
    whole = rows_of(answers(as_columns(ROWS)))
    alone = [rows_of(answers(as_columns([row]))) for row in reversed(ROWS)]
    assert {name: cell for each in alone for name, cell in each.items()} == whole
    assert len({text for text, _ in whole.values()}) == len(ROWS), "rows with the same prompt have seeds of their own"


def test_the_job_s_seed_is_part_of_every_row_s(model: str, answers: Answers) -> None:
    other = Answers(model, seed=4, params=PARAMS, **ENGINE)
    assert rows_of(other(as_columns(ROWS))) != rows_of(answers(as_columns(ROWS)))


def test_seeds_are_those_of_paceline_batch() -> None:
    assert (own_name("q-1"), own_name(np.int64(7))) == ("id q-1", "index 7")


def test_a_bad_row_has_an_error_and_the_others_their_answers(answers: Answers) -> None:
    good = rows_of(answers(as_columns(ROWS[:2])))
    bad = [{"custom_id": "long", "prompt": "x" * 600}, {"custom_id": "", "prompt": "y"}]
    spoilt = as_columns([ROWS[0], *bad, ROWS[1]])
    found = answers(spoilt)
    assert list(found["finish_reason"][1:3]) == ["error", "error"]
    assert "max_model_len" in found["error"][1]
    assert "custom_id" in found["error"][2]
    assert {name: cell for name, cell in rows_of(found).items() if name in good} == good


def test_conversations_as_arrow_has_them(answers: Answers) -> None:
    message = {"role": "user", "content": "Say"}
    columns = {"index": np.arange(2), "messages": np.empty(2, dtype=object)}
    columns["messages"][:] = [np.array([message], dtype=object), [message | {"content": None}]]
    found = answers(columns)
    assert found["answer"][0]
    assert list(found["error"]) == ["", found["error"][1]]
    assert "role and content" in found["error"][1]


def test_rows_without_parameters_are_sampled_as_the_model_recommends(model: str, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "advised")
    (tmp_path / "advised" / "generation_config.json").write_text('{"top_k": 1}')
    found = [Answers(str(tmp_path / "advised"), seed=seed, **ENGINE)(as_columns(ROWS[:1])) for seed in (3, 4)]
    assert rows_of(found[0]) == rows_of(found[1]), "the likeliest token, whatever the seed"


def test_several_answers_are_lists(model: str) -> None:
    found = Answers(model, seed=3, params={**PARAMS, "n": 2}, **ENGINE)(as_columns(ROWS[:2]))
    assert [len(cell) for cell in found["answer"]] == [2, 2]
    assert list(found["output_tokens"]) == [2 * PARAMS["max_tokens"]] * 2


def test_a_batch_without_rows(answers: Answers) -> None:
    found = answers({"index": np.arange(0), "prompt": np.array([], dtype=object)})
    assert [len(found[name]) for name in ("answer", "error")] == [0, 0]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["custom_id"], "either 'prompt' or 'messages'"),
        (["custom_id", "prompt", "messages"], "either 'prompt' or 'messages'"),
        (["prompt"], "'custom_id' or 'index'"),
        (["prompt", "index", "answer"], "other names"),
    ],
)
def test_invalid_columns_are_refused(columns: list[str], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        columns_of(dict.fromkeys(columns))


def test_a_seed_for_all_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"params\.seed"):
        Answers(str(tmp_path), seed=1, params={"seed": 2})
    with pytest.raises(ParameterError, match="seed"):
        Answers(str(tmp_path), seed=2**64)


def test_token_ids_may_be_arrays(answers: Answers) -> None:
    ids = [[72, 105, 32], [72, 105, 33, 32]]
    lists, arrays = (
        answers(as_columns([{"index": place, "prompt": kind(each)} for place, each in enumerate(ids)]))
        for kind in (list, np.array)
    )
    assert list(arrays["error"]) == ["", ""]
    assert list(arrays["answer"]) == list(lists["answer"])


@pytest.mark.parametrize("column", ["prompt", "messages"])
@pytest.mark.parametrize("cell", [None, float("nan"), 3, b"x", {"a": 1}, [True], [None], [], np.array([1.5])])
def test_an_invalid_prompt_fails_only_its_row(answers: Answers, column: str, cell: object) -> None:
    good = "Hi" if column == "prompt" else [{"role": "user", "content": "Hi"}]
    found = answers(as_columns([{"index": 0, column: cell}, {"index": 1, column: good}]))
    assert found["error"][0]
    assert list(found["finish_reason"]) == ["error", "length"]
