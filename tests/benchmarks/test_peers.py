"""The orchestrator of `make bench-peers`, with fake workers."""

import json
from pathlib import Path

import pytest
from benchmarks.peers import config, contenders, run, schedule

WORKER = Path(__file__).parent / "fake_worker.py"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Peers are fake, models are empty files; returns the workers' logged calls."""
    monkeypatch.setenv("PACELINE_TEST_MODELS", str(tmp_path))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "calls"))
    for name in ("qwen-coder-1.5b", "qwen-coder-0.5b", "smollm2-135m"):
        (tmp_path / f"{name}.gguf").touch()
    monkeypatch.setattr(run, "prompt_ids", lambda pair, chosen, count: [[10 + row, 2, 3] for row in range(count)])
    return lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls, capsys):
    def benchmark(*behaviours: str, arguments: str = "", split: bool = False) -> dict:
        peers = {how: config.Peer(how, None, str(WORKER), "gguf", how, split=split) for how in behaviours}
        monkeypatch.setattr(config, "PEERS", peers)
        files = ["--output", str(tmp_path / "out.json"), "--plot", str(tmp_path / "img" / "peers.png")]
        shape = ["--batches", "1,2", "--max-tokens", "8", "--peers", ",".join(behaviours)]
        assert run.main([*shape, *files, *arguments.split()]) == 0
        printed = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert printed == json.loads((tmp_path / "out.json").read_text())
        assert (tmp_path / "img" / "peers.png").stat().st_size > 1000
        return printed

    return benchmark


def cells(document: dict) -> dict:
    return {(row["peer"], row["mode"], row["batch"]): row for row in document["results"]}


def test_every_configuration_has_a_median_of_all_repeats(bench) -> None:
    document = bench("one", "two", arguments="--repeats 3")
    found = cells(document)
    assert set(found) == {(p, m, b) for p in ("one", "two") for m in ("plain", "draft", "ngram") for b in (1, 2)}
    row = found["two", "draft", 2]
    assert (row["status"], len(row["samples"])) == ("ok", 3)
    assert row["tokens_per_s"] == pytest.approx(16 / 1.5, abs=1e-3)
    assert row["decode_tokens_per_s"] == pytest.approx(14 / 1.0)
    assert (row["acceptance"], row["rows_equal_plain"], row["k"]) == (0.7, 1.0, 5)
    assert found["two", "plain", 2]["k"] is None
    assert document["workers"]["one"]["versions"] == {"fake": "1"}
    assert document["settings"]["prompt_tokens"] == [3, 3]


def test_peers_alternate_back_and_forth_and_are_started_once(bench, calls) -> None:
    bench("one", "two", arguments="--repeats 2 --modes plain")
    order = [call["peer"] for call in calls() if call.get("tokens") == 8]
    assert order == ["one", "one", "two", "two", "two", "two", "one", "one"]
    assert [call["started"] for call in calls() if "started" in call] == ["one", "two"]


@pytest.mark.parametrize(
    ("how", "batch", "line"),
    [
        ("broken", 1, "RuntimeError: cannot load"),
        ("refuses", 2, "ValueError: batch > 1 is not supported"),
        ("dies", 2, "the process ended with status -9"),
        ("short", 1, "answered [7] tokens per row instead of 8"),
    ],
)
def test_a_peer_that_fails_is_in_the_results_with_its_error(bench, how: str, batch: int, line: str) -> None:
    document = bench(how, "sound", arguments="--repeats 2 --modes plain")
    found = cells(document)
    assert found[how, "plain", batch]["status"] == "failed"
    assert line in found[how, "plain", batch]["error"]
    assert [found["sound", "plain", b]["status"] for b in (1, 2)] == ["ok", "ok"]


def test_a_call_that_times_out_ends_its_worker(bench) -> None:
    found = cells(bench("hangs", arguments="--repeats 1 --modes plain --call-seconds 0.5 --batches 1,2,4"))
    errors = [found["hangs", "plain", batch]["error"] for batch in (1, 2, 4)]
    assert errors == ["no answer within 0.5 s"] * 2 + ["its worker was lost 2 times before"]


def test_without_time_repeats_are_dropped_before_configurations(bench, monkeypatch) -> None:
    monkeypatch.setattr(run.Measurement, "_has_time_for", lambda self, outcomes: False)  # type: ignore[attr-defined]
    document = bench("one", arguments="--repeats 3 --modes plain")
    assert document["notes"] == ["dropped repeats 2 to 3: no time left in the budget"]
    assert [len(row["samples"]) for row in document["results"]] == [1, 1]


@pytest.mark.parametrize("peer", config.PEERS.values(), ids=lambda peer: peer.name)
def test_every_peer_has_its_worker_and_pinned_requirements(peer: config.Peer) -> None:
    assert (config.HERE / "workers" / peer.worker).is_file()
    lines = [line for line in peer.requirements.read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    assert all("==" in line for line in lines)


def test_points_far_behind_in_an_earlier_run_are_skipped_with_a_reason(bench, calls, tmp_path: Path) -> None:
    speeds = {("one", "plain"): 100, ("one", "draft"): 80, ("one", "ngram"): 90, ("paceline-int8", "draft"): 1}
    speeds |= {("paceline-int8", "plain"): 9}
    results = [{"peer": p, "mode": m, "batch": 2, "tokens_per_s": speed} for (p, m), speed in speeds.items()]
    earlier_run = tmp_path / "first.json"
    earlier_run.write_text(json.dumps({"results": [*results, {"peer": "one", "mode": "draft", "batch": 1}]}))
    assert contenders.left_out(earlier_run).keys() == {("one", "draft", 2)}
    document = bench("one", arguments=f"--repeats 1 --contenders {earlier_run}")
    row = cells(document).pop(("one", "draft", 2))
    assert (row["status"], row["left_out"]) == ("left out", "80.0 tokens/s, 80% of this peer's best in first.json")
    assert {row["status"] for row in document["results"]} == {"ok", "left out"}
    assert document["settings"]["contenders"] == "first.json"
    measured = [(call["mode"], call["batch"]) for call in calls() if call.get("tokens") == 8]
    assert ("draft", 1) in measured
    assert ("draft", 2) not in measured


def test_points_far_behind_in_the_first_repeat_have_one_sample(bench, monkeypatch) -> None:
    words = {("one", "draft", 2): "slow"}
    monkeypatch.setattr(schedule, "far_behind", lambda speeds: words if ("one", "draft", 2) in speeds else {})
    found = cells(bench("one", arguments="--repeats 3"))
    assert found["one", "draft", 2]["left_out"] == "not repeated: slow"
    assert {at: len(row["samples"]) for at, row in found.items() if len(row["samples"]) != 3} == {
        ("one", "draft", 2): 1
    }


def test_far_behind_is_relative_to_the_peers_best_at_each_batch_size() -> None:
    speeds = {("a", "plain", 1): 100.0, ("a", "draft", 1): 84.0, ("a", "ngram", 1): 86.0, ("a", "draft", 2): 50.0}
    speeds |= {("b", "plain", 1): 10.0, ("paceline-int8", "plain", 1): 1.0, ("paceline-int8", "draft", 1): 9.0}
    assert contenders.far_behind(speeds) == {("a", "draft", 1): "84.0 tokens/s, 84% of this peer's best"}
    assert contenders.hopeless(speeds) == {("b", "plain", 1): "10.0 tokens/s, 10% of the fastest"}
