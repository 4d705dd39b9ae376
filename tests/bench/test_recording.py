"""Rounds as they were played."""

from paceline.bench.recording import Recorder
from paceline.engine import Request
from paceline.params import SamplingParams
from toy_llm import toy_llm


def test_tokens_beyond_the_ends_of_answers_are_not_counted() -> None:
    engine = toy_llm(drafter="model", num_speculative_tokens=4).engine
    recorder = engine.parts.policy = Recorder(engine.parts.policy)
    sizes = [3, 5, 9]
    outputs = [
        engine.add(Request([1, 2, size], SamplingParams(temperature=0, max_tokens=size, ignore_eos=True)))
        for size in sizes
    ]
    while engine.busy:
        engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs] == sizes
    assert sum(played.surplus for played in recorder.rounds) > 0
    assert sum(played.tokens for played in recorder.rounds) == sum(sizes)
