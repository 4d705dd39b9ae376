"""Routing of requests, resources of replicas, and refused options. Without Ray."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from paceline.config import ServerConfig
from paceline.errors import ParameterError
from paceline.integrations.ray.cluster import Recipe, device_of, threads_of
from paceline.integrations.ray.routing import BLOCK, Affinity, blocks_of
from paceline.integrations.ray.serving import check

REPLICAS = ["a", "b", "c"]
RECIPE = Recipe("model", None, [], {})


def conversation(turns: int, name: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{name} {turn}"} for turn in range(turns)]}


def test_a_conversation_goes_to_the_replica_with_its_prefix() -> None:
    affinity = Affinity()
    first = {name: affinity.choose(name, blocks_of(conversation(1, name)), REPLICAS) for name in "xyz"}
    assert sorted(first.values()) == REPLICAS, "those that share nothing are spread"
    for name in "zxy":
        affinity.end(name)
        assert affinity.choose(name, blocks_of(conversation(3, name)), REPLICAS) == first[name]


@pytest.mark.parametrize("field", ["messages", "input"])
def test_a_turn_of_any_route_begins_like_the_turn_before(field: str) -> None:
    turns = [conversation(turn, "x")["messages"] for turn in (1, 3)]
    before, after = (blocks_of({field: turn, "system": f"changes {len(turn)}"}) for turn in turns)
    assert len(after) == 3
    assert after[:1] == before
    assert blocks_of({"input": "y" * 2 * BLOCK}) == blocks_of({"prompt": "y" * 2 * BLOCK})


def test_a_busy_replica_is_avoided() -> None:
    affinity = Affinity(slack=2)
    chosen = [affinity.choose(str(flight), blocks_of(conversation(1, "x")), REPLICAS) for flight in range(9)]
    assert chosen[:3] == ["a"] * 3
    assert len(set(chosen)) == 3
    counts = [chosen[: end + 1] for end in range(9)]
    assert all(max(map(some.count, REPLICAS)) - min(map(some.count, REPLICAS)) <= 3 for some in counts)


def test_finished_requests_do_not_count_and_lost_replicas_are_not_chosen() -> None:
    affinity = Affinity(slack=0)
    for flight in range(100):
        affinity.choose(str(flight), [], REPLICAS)
        affinity.end(str(flight))
    assert set(affinity._loads(REPLICAS).values()) == {0}
    blocks = blocks_of(conversation(1, "x"))
    reader = affinity.choose("1", blocks, REPLICAS)
    assert affinity.choose("1", blocks, [each for each in REPLICAS if each != reader]) != reader
    assert sum(affinity._loads(REPLICAS).values()) == 1, "asked again it counts once"


def test_the_number_of_remembered_prefixes_is_limited() -> None:
    affinity = Affinity(remembered=10)
    for number in range(100):
        affinity.choose(str(number), blocks_of(conversation(2, str(number))), REPLICAS)
    assert len(affinity._readers) == 10


def test_blocks_of_a_prompt_are_digests_of_its_prefixes() -> None:
    long, longer = "x" * BLOCK * 2, "x" * BLOCK * 2 + "y" * BLOCK
    assert blocks_of({"prompt": longer})[:2] == blocks_of({"prompt": long})
    assert len(blocks_of({"prompt": longer})) == 3
    assert blocks_of({"prompt": "y" * BLOCK}) != blocks_of({"prompt": longer})[2:], "where it stands matters"


@pytest.mark.parametrize("body", [None, 3, [], {"prompt": 3}, {"messages": 3}, {"prompt": "short"}, {"messages": []}])
def test_short_and_invalid_bodies_have_no_blocks(body: Any) -> None:
    assert blocks_of(body) == []


@pytest.mark.parametrize(
    "body", [{"messages": [3, None, {}]}, {"prompt": ["\ud800" * 200]}, {"prompt": "\ud800" * 200}]
)
def test_invalid_bodies_are_left_to_the_replica(body: Any) -> None:
    assert blocks_of(body)


@pytest.mark.parametrize(
    ("given", "replicas", "cores", "threads"),
    [(None, 2, [2], 1), (None, 2, [8, 4], 4), (None, 3, [8, 4], 4), (None, 1, [8, 4], 8), (3, 3, [8, 4], 3)],
)
def test_cores_are_divided(given: int | None, replicas: int, cores: list[int], threads: int) -> None:
    assert threads_of(given, replicas, cores) == threads


@pytest.mark.parametrize(("given", "replicas", "name"), [(None, 3, "replicas"), (2, 2, "threads")])
def test_more_threads_than_cores_are_refused(given: int | None, replicas: int, name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        threads_of(given, replicas, [2])


def test_each_replica_has_its_own_device() -> None:
    assert device_of("auto", 0, 2) == device_of("auto", 1, 2) == device_of("cpu", 4, 2) == ("cpu", 0)
    assert device_of("auto", 2, 2) == device_of("cuda", 2, 2) == ("cuda", 1)
    for given, gpus in itertools.product(["cuda:1"], [0, 8]):
        with pytest.raises(ParameterError, match="device"):
            device_of(given, gpus, 2)
    with pytest.raises(ParameterError, match="replicas"):
        device_of("cuda", 1, 2)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"log_format": "json"}, "log_format"),
        ({"batch_dir": "some"}, "batch_dir"),
        ({"api_keys": ["secret max_requests=2"]}, "api_keys"),
    ],
)
def test_options_that_would_mean_something_else_are_refused(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    check(ServerConfig(), RECIPE, 2)
    with pytest.raises(ParameterError, match=name) as refused:
        check(ServerConfig(**config), RECIPE, 2)
    assert "secret" not in str(refused.value)


def test_invalid_replica_settings_are_refused() -> None:
    with pytest.raises(ParameterError, match="replicas"):
        check(ServerConfig(), RECIPE, 0)
    with pytest.raises(ParameterError, match="tensor_parallel"):
        check(ServerConfig(), Recipe("model", None, [], {"tensor_parallel": 2}), 2)
