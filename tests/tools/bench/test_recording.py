"""Recorded rounds."""

import pytest

from paceline.config import SamplingParams
from paceline.engine.engine import Request
from paceline.engine.rounds.round import Speculation
from paceline.tools.bench.recording import Recorder, kept_by_position
from toy import ToyModel, make_engine
from toy_llm import toy_llm


def test_tokens_beyond_the_ends_of_answers_are_not_counted() -> None:
    engine = toy_llm(drafter="model", num_speculative_tokens=4).engine
    recorder = engine.use_policy(Recorder(engine.parts.policy))
    sizes = [3, 5, 9]
    outputs = [
        engine.add(Request([1, 2, size], SamplingParams(temperature=0, max_tokens=size, ignore_eos=True)))
        for size in sizes
    ]
    while engine.busy:
        engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs] == sizes
    assert sum(record.surplus for record in recorder.rounds) > 0
    assert sum(record.tokens for record in recorder.rounds) == sum(sizes)


def test_recorded_rounds_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the host runs a round")

    monkeypatch.setattr(Speculation, "run", fail)
    engine = make_engine(ToyModel(), ToyModel(blur=0.3), drafter="model", num_speculative_tokens=3, rounds="device")
    recorder = engine.use_policy(Recorder(engine.parts.policy))
    engine.add(Request([1, 2, 3], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)))
    while engine.busy:
        engine.step()
    assert recorder.rounds
    assert {record.k for record in recorder.rounds} <= {0, 1, 2, 3}
    assert sum(record.tokens for record in recorder.rounds) == 12


def test_a_draft_token_is_tried_if_all_before_it_were_accepted() -> None:
    rows = [(0, 2), (1, 2), (2, 2), (1, 1), (0, 0)]  # accepted, drafted
    assert kept_by_position(rows, 3) == (3 / 4, 1 / 2, None)
