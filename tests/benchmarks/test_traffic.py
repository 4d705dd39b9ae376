"""The serving experiment: deterministic traces, and every policy on the same one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from benchmarks.traffic import POLICIES, PROMPTS, TRACES, Load, app, arrivals, draw, measure, summary
from typer.testing import CliRunner

from byte_model import byte_tokenizer, save_llama
from paceline.errors import ParameterError
from paceline.tools.bench import profile
from toy_llm import toy_llm

pytestmark = pytest.mark.usefixtures("one_thread")
LOAD = Load(requests=4000, interval=2.0, cv=0.5, tokens=8, max_batch_size=4)


def test_intervals_have_the_mean_and_the_variation_asked_for() -> None:
    gaps = np.diff(arrivals("steady", LOAD))
    assert gaps.mean() == pytest.approx(2.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(0.5, rel=0.05)


def test_busy_traffic_is_denser_and_varying_traffic_is_both() -> None:
    assert arrivals("busy", LOAD)[-1] == pytest.approx(arrivals("steady", LOAD)[-1] / 4)
    gaps = np.diff(arrivals("varying", LOAD))
    assert gaps[:600].mean() > 6 * gaps[700:1300].mean()


@pytest.mark.parametrize("trace", TRACES)
def test_a_trace_is_the_same_each_time(trace: str) -> None:
    assert arrivals(trace, LOAD) == arrivals(trace, LOAD)


def test_prompts_are_not_those_of_the_profile() -> None:
    assert not set(PROMPTS) & set(profile.PROMPTS)


def test_every_policy_serves_every_request(tmp_path: Path) -> None:
    load = Load(requests=5, interval=0.002, cv=1.0, tokens=6, max_batch_size=3)
    llm = toy_llm(drafter="ngram", prefix_cache=False)
    results = list(measure(llm, [[1, 2, 1], [3, 4]], ["steady", "varying"], load, 1, lambda steps: steps))
    assert {r.policy for r in results} == set(POLICIES) - {"profiled"}  # there is no profile
    assert all(0 < r.p50 <= r.p99 and 1 <= r.mean_rows <= 3 for r in results)
    plain = next(r for r in results if r.policy == "plain")
    assert plain.mean_k == 0
    latencies = [r.latency for r in results if r.latency is not None]
    assert len(latencies) == len(results)
    assert all(0 < each.first <= each.all <= each.last for each in latencies)
    judged = summary(results)
    assert set(judged) == {"steady", "varying"}
    assert judged["steady"]["auto_over"]["auto"] == 1
    draw(results, tmp_path / "traffic.png", "a toy")
    assert (tmp_path / "traffic.png").stat().st_size > 1000
    json.dumps([asdict(result) for result in results])


def test_with_a_profile_its_policy_takes_part_and_plain_decoding_still_does(tmp_path: Path) -> None:
    llm = toy_llm(drafter="ngram", prefix_cache=False)
    path = tmp_path / "profile.json"
    measured, _ = profile.run_profile(llm, [[1, 2, 1, 2], [4, 5]], profile.Sweep.quick(), lambda steps, what: steps)
    measured.save(path)
    guided = llm.with_options(profile=str(path))
    load = Load(requests=2, interval=0.002, cv=1.0, tokens=3, max_batch_size=2)
    results = list(measure(guided, [[1, 2, 1]], ["steady"], load, 1, lambda steps: steps))
    assert {r.policy for r in results} == set(POLICIES)


def test_the_command_ends_with_one_json_document(tmp_path: Path) -> None:
    model, file = save_llama(tmp_path / "tiny", byte_tokenizer(), seed=1), tmp_path / "traffic.json"
    load = ["--traces", "busy", "--requests", "2", "--interval", "0.01", "--max-tokens", "3"]
    options = ["--drafter", "ngram", "--dtype", "float32", "--max-batch-size", "2", "--output", str(file)]
    result = CliRunner().invoke(app, [model, *load, *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document == json.loads(file.read_text())
    assert {result["policy"] for result in document["results"]} == set(POLICIES) - {"profiled"}
    assert "tokens/s" in result.stderr
    assert file.with_suffix(".png").is_file()


@pytest.mark.parametrize(
    "wrong", [("--interval", "nan"), ("--interval", "inf"), ("--cv", "0"), ("--traces", "calm"), ("--output", "/no/a")]
)
def test_wrong_options_are_refused_by_name(wrong: tuple[str, str]) -> None:
    with pytest.raises(ParameterError, match=wrong[0]):
        CliRunner().invoke(app, ["no-model", *wrong], catch_exceptions=False)
