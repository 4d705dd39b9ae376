"""Requests in, results out: what is refused, where samples end, what is counted, what an interrupt leaves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from covering import in_pairs
from head_support import tiny_head
from paceline.config import EngineConfig, SamplingParams, StructuredOutputs
from paceline.core.outputs import Metrics
from paceline.core.sampling import sequence_seed
from paceline.engine import engine as engine_module
from paceline.engine import sequences as sequences_module
from paceline.engine.assembly import drafts_alone
from paceline.engine.engine import Engine, Models, Request
from paceline.engine.memory import plan_memory
from paceline.errors import CapacityError, EmptyPromptError, ParameterError, PromptTooLongError, RequestError
from paceline.models.decoding import cached_rows
from paceline.server.metrics import Meter
from toy import (
    POSITIONS,
    SHAPES,
    VOCAB,
    Scripted,
    ScriptedTrees,
    ToyConstraint,
    ToyModel,
    always,
    answers,
    logits_after,
    make_engine,
    make_request,
    run,
    slow_answer,
    sometimes,
)

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SAMPLED = SamplingParams(temperature=0.9, ignore_eos=True)
PROMPT = [1, 2, 3]
TRUTH = slow_answer(ToyModel(), PROMPT, SamplingParams(temperature=0, max_tokens=60))


class Letters:
    """A text stream: token t is the letter number t; looks for one stop string."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self.text, self.stopped, self.stop, self.held = "", None, stop, ""

    def push(self, token_id: int) -> str:
        assert self.stopped is None, "nothing may be pushed after the end"
        self.text += self.held
        self.held = chr(97 + token_id)
        for stop in self.stop:
            if stop in self.text + self.held:
                self.text, self.held = (self.text + self.held).split(stop)[0], ""
                self.stopped = stop  # type: ignore[assignment]
        return ""

    def finish(self) -> str:
        self.text, self.held = self.text + self.held, ""
        return ""


def letters(tokens: list[int]) -> str:
    return "".join(chr(97 + token) for token in tokens)


def oracle(truth: list[int] = TRUTH, script: Callable[..., int] = always, **options: Any) -> Engine:
    """An engine whose drafter knows the greedy continuation of PROMPT."""
    engine = make_engine(ToyModel(), drafter="ngram", **({"num_speculative_tokens": 6} | options))
    seeds = [sequence_seed(seed, 0) for seed in range(5)]
    engine.parts.drafter = Scripted({seed: [*PROMPT, *truth] for seed in seeds}, script)
    return engine


def seeded(params: SamplingParams, **changes: Any) -> SamplingParams:
    return dataclasses.replace(params, seed=0, **changes)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error", "says"),
    [
        (Request([], GREEDY), EmptyPromptError, "no tokens"),
        (Request([1] * POSITIONS, GREEDY), PromptTooLongError, f"{POSITIONS} tokens.*max_model_len={POSITIONS}"),
        (Request([1, VOCAB], GREEDY), ParameterError, f"prompt_token_ids={VOCAB}.*0 to {VOCAB - 1}"),
        (Request([-1], GREEDY), ParameterError, "prompt_token_ids=-1"),
        (Request([1.5], GREEDY), ParameterError, "prompt_token_ids=1.5"),  # type: ignore[list-item]
        (Request(["a"], GREEDY), ParameterError, "prompt_token_ids='a'"),  # type: ignore[list-item]
        (Request([1], SamplingParams(stop_token_ids=[VOCAB])), ParameterError, "stop_token_ids"),
        (Request([1], SamplingParams(logit_bias={VOCAB: 1.0})), ParameterError, "logit_bias"),
        (Request([1], SamplingParams(stop="x")), ParameterError, "stop=.*stop_token_ids"),
        (Request([1], GREEDY, request_id="twice"), ParameterError, "request_id='twice'"),
    ],
)
def test_bad_input_is_refused_by_name_and_affects_no_other_request(request_: Request, error: type, says: str) -> None:
    engine = make_engine(ToyModel())
    good = engine.add(Request(PROMPT, GREEDY, request_id="twice"))
    engine.step()
    with pytest.raises(error, match=says) as caught:
        engine.add(request_)
    assert isinstance(caught.value, (RequestError, ParameterError))
    while engine.busy:
        engine.step()
    assert good.outputs[0].token_ids == TRUTH[:12]


def test_the_longest_prompt_that_fits_gets_one_token() -> None:
    output = run(make_engine(ToyModel()), [[1] * (POSITIONS - 1)], [GREEDY])[0]
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_an_automatic_request_id_is_none_of_those_that_callers_chose() -> None:
    engine = make_engine(ToyModel())
    chosen = [engine.add(Request(PROMPT, GREEDY, request_id=f"request-{number}")) for number in range(2)]
    made = [engine.add(Request(PROMPT, GREEDY)) for _ in range(2)]
    assert len({output.request_id for output in (*chosen, *made)}) == 4


def test_a_budget_from_row_is_known_to_the_batch() -> None:
    engine = make_engine(ToyModel())
    engine.add(Request([1, 2, 3], SamplingParams(max_tokens=9, time_budget=30.0), budget_from_row=True))
    engine.step()
    assert engine.batch.deadlines[0] < math.inf


def test_a_request_id_may_come_again_once_its_request_has_ended() -> None:
    engine = make_engine(ToyModel())
    for _ in range(2):
        engine.add(Request(PROMPT, GREEDY, request_id="again"))
        while engine.busy:
            engine.step()


def test_rows_that_do_not_fit_into_memory_are_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def allocate(*args: object, **kwargs: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(cached_rows, "cache_of", allocate)
    with pytest.raises(
        CapacityError, match=r"max_batch_size=64 rows of max_model_len=96 .*: 20 rows of this length would fit"
    ):
        make_engine(ToyModel(), max_batch_size=64, memory_limit=bytes_for(20))
    with pytest.raises(CapacityError, match="not even one row"):
        make_engine(ToyModel(), max_batch_size=64, memory_limit=10)


def test_the_number_of_rows_that_a_capacity_error_names_does_fit() -> None:
    make_engine(ToyModel(), max_batch_size=20, memory_limit=bytes_for(20))
    with pytest.raises(CapacityError):
        make_engine(ToyModel(), max_batch_size=21, memory_limit=bytes_for(20))


def test_the_caches_of_a_draft_model_count_only_if_it_drafts() -> None:
    make_engine(
        ToyModel(), ToyModel(), drafter=None, max_batch_size=20, memory_limit=bytes_for(20) + ToyModel().weight_bytes()
    )
    with pytest.raises(CapacityError):
        make_engine(
            ToyModel(),
            ToyModel(),
            drafter="model",
            max_batch_size=20,
            memory_limit=bytes_for(20) + ToyModel().weight_bytes(),
        )


def bytes_for(rows: int) -> int:
    plan = plan_memory(ToyModel(), None, EngineConfig(num_speculative_tokens=4), rows, POSITIONS)
    return plan.weights + plan.to_allocate


def test_a_longer_sequence_than_the_models_own_limit_is_refused() -> None:
    with pytest.raises(ParameterError, match=f"max_model_len={POSITIONS + 1}.*at most {POSITIONS}"):
        make_engine(ToyModel(), max_model_len=POSITIONS + 1)


@pytest.mark.parametrize("drafter", ["model", "hybrid"])
def test_a_model_drafter_without_a_draft_model_is_refused(drafter: str) -> None:
    with pytest.raises(ParameterError, match=f"drafter='{drafter}'.*draft_model"):
        make_engine(ToyModel(), drafter=drafter)


def test_documents_with_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ParameterError, match=f"reference_documents={VOCAB}"):
        make_engine(ToyModel(), drafter="ngram", documents=[[1, 2], [3, VOCAB]])


# --- nothing that one request asks ends another -----------------------------------------------------------------------


class Faulty(ToyConstraint):
    """A constraint that allows every token and raises in one of its methods."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def mask(self, draft_tokens: Any, first: int, logits: Any) -> None:
        self._fail("mask")

    def advance(self, tokens: Any) -> None:
        self._fail("advance")

    def _fail(self, where: str) -> None:
        if where == self.at:
            raise RuntimeError(f"{where} failed")


class FaultyText(Letters):
    def __init__(self, at: str, after: int) -> None:
        super().__init__()
        self.at, self.after = at, after

    def push(self, token_id: int) -> str:
        self.after -= 1
        if self.at == "push" and self.after < 0:
            raise RuntimeError("push failed")
        return super().push(token_id)

    def finish(self) -> str:
        if self.at == "finish":
            raise RuntimeError("finish failed")
        return super().finish()


def faulty(where: str, n: int) -> Request:
    params = SamplingParams(max_tokens=9, seed=3, n=n, logprobs=1 if where == "logprobs" else None)
    if where in ("mask", "advance"):
        params = dataclasses.replace(params, structured_outputs=StructuredOutputs(json_object=True))
        return Request(PROMPT, params, make_constraint=lambda: Faulty(where))
    if where in ("push", "finish"):
        return Request(PROMPT, params, make_stream=lambda _: FaultyText(where, after=4))
    if where == "set up":
        object.__setattr__(params, "top_k", 2**70)  # no tensor can hold it
    return Request(PROMPT, params)


@in_pairs(where=["set up", "mask", "advance", "push", "finish", "logprobs"], n=[1, 3], rows=[2, 8])
def test_a_fault_of_one_request_ends_only_that_request(
    where: str, n: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("logprobs failed")

    monkeypatch.setattr(sequences_module, "_note_logprob", broken)
    engine = make_engine(ToyModel(), ToyModel(blur=0.3), drafter="model", max_batch_size=rows)
    good = [engine.add(Request(PROMPT, GREEDY)) for _ in range(2)]
    engine.step()
    bad = engine.add(faulty(where, n))
    good += [engine.add(Request(PROMPT, GREEDY)) for _ in range(2)]
    told = []
    while engine.busy:
        told += [output for output in engine.step() if output.finished]
        engine.scheduler.check_integrity()
    assert [output.outputs[0].token_ids for output in good] == [TRUTH[:12]] * 4
    assert [output.error for output in good] == [None] * 4
    assert [answer.finish_reason for answer in bad.outputs] == ["error"] * n
    assert bad.error is not None
    assert ("too big" if where == "set up" else f"{where} failed") in str(bad.error)
    assert all(answer.metrics.finished is not None for answer in bad.outputs)
    assert sorted(map(id, told)) == sorted(map(id, [*good, bad])), "every request's end is reported once"


def test_a_text_that_fails_when_its_request_is_aborted_ends_nothing_else() -> None:
    engine = make_engine(ToyModel())
    good = engine.add(Request(PROMPT, GREEDY))
    bad = engine.add(Request(PROMPT, GREEDY, request_id="bad", make_stream=lambda _: FaultyText("finish", after=4)))
    engine.step()
    engine.abort("bad")
    drain(engine)
    assert bad.outputs[0].finish_reason == "error"
    assert good.outputs[0].token_ids == TRUTH[:12]


def test_a_constraint_that_cannot_be_made_is_refused_and_nothing_is_queued() -> None:
    def broken() -> Any:
        raise RuntimeError("as planned")

    engine = make_engine(ToyModel())
    params = dataclasses.replace(GREEDY, structured_outputs=StructuredOutputs(json_object=True))
    with pytest.raises(RuntimeError, match="as planned"):
        engine.add(Request(PROMPT, params, make_constraint=broken))
    assert not engine.busy


def test_an_exception_in_a_round_ends_only_requests_with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(ToyModel(), max_batch_size=2)
    outputs = [engine.add(Request(PROMPT, GREEDY)) for _ in range(4)]
    engine.step()

    def broken(*_: Any) -> Any:
        raise RuntimeError("as planned")

    monkeypatch.setattr(engine.parts.target, "verify", broken)
    with pytest.raises(RuntimeError, match="as planned"):
        engine.step()
    monkeypatch.undo()
    assert {id(output) for output in engine.clear_begun()} == {id(output) for output in outputs[:2]}
    drain(engine)
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "abort", "length", "length"]
    assert answers(outputs[2:]) == [[TRUTH[:12]]] * 2


# --- where answers end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [0, 1, 2, 3, 5, 6, 7, 9])
def test_a_stop_token_inside_an_accepted_block_ends_the_answer_there(place: int) -> None:
    stop = TRUTH[place]
    place = TRUTH.index(stop)
    answer = run(oracle(), [PROMPT], [seeded(GREEDY, stop_token_ids=[stop])])[0].outputs[0]
    assert answer.token_ids == TRUTH[: place + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    check_counts(answer, k=6)


def test_the_end_of_text_token_ends_the_answer_unless_ignored() -> None:
    end = TRUTH[4]
    place = TRUTH.index(end)
    answer = run(oracle(eos=(end,)), [PROMPT], [seeded(GREEDY)])[0].outputs[0]
    assert answer.token_ids == TRUTH[: place + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    answer = run(oracle(eos=(end,)), [PROMPT], [seeded(GREEDY, ignore_eos=True)])[0].outputs[0]
    assert answer.token_ids == TRUTH[:12]
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("tokens", range(1, 16))
def test_max_tokens_inside_an_accepted_block_ends_the_answer_there(tokens: int) -> None:
    answer = run(oracle(), [PROMPT], [seeded(GREEDY, max_tokens=tokens)])[0].outputs[0]
    assert answer.token_ids == TRUTH[:tokens]
    assert answer.finish_reason == "length"
    check_counts(answer, k=6)


def test_rows_with_fewer_tokens_left_than_the_round_are_cut_and_counted_separately() -> None:
    params = [seeded(GREEDY, max_tokens=2), dataclasses.replace(GREEDY, seed=1, max_tokens=20)]
    short, long = (o.outputs[0] for o in run(oracle(), [PROMPT, PROMPT], params))
    assert short.token_ids == TRUTH[:2]
    assert (short.metrics.rounds, short.metrics.accepted, short.metrics.drafted) == (1, 2, 2)
    assert long.token_ids == TRUTH[:20]


def check_counts(answer: Any, k: int) -> None:
    """Check an oracle's counts: whole rounds of k + 1 tokens, then one that may be cut.

    Draft tokens beyond the sample's end do not count.
    """
    metrics, size = answer.metrics, len(answer.token_ids)
    assert metrics.rounds == -(-size // (k + 1))
    assert metrics.output_tokens == size == len(answer.token_kinds)
    assert metrics.accepted == answer.token_kinds.count("accepted")
    assert metrics.drafted == metrics.accepted, (
        "an oracle's draft tokens are all accepted, and none beyond the cut is counted"
    )
    assert "recovered" not in answer.token_kinds


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("place", [0, 2, 5, 6, 8])
def test_a_stop_string_inside_an_accepted_block_ends_the_answer_there(place: int, size: int) -> None:
    stop = letters(TRUTH[place : place + size])
    end = letters(TRUTH).index(stop) + size
    params = seeded(GREEDY, stop=stop)
    request = Request(PROMPT, params, make_stream=lambda p: Letters(p.stop))  # type: ignore[arg-type]
    engine = oracle()
    output = engine.add(request)
    while engine.busy:
        engine.step()
    answer = output.outputs[0]
    assert answer.token_ids == TRUTH[:end]
    assert answer.text == letters(TRUTH[: end - size])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    check_counts(answer, k=6)


@pytest.mark.parametrize("shape", ["two roots", "chain and siblings", "random"])
@pytest.mark.parametrize("place", [0, 1, 2, 5])
def test_a_stop_string_inside_an_accepted_path_of_a_tree_ends_the_answer_there(place: int, shape: str) -> None:
    stop = letters(TRUTH[place : place + 2])
    end = letters(TRUTH).index(stop) + 2
    engine = oracle()
    engine.parts.drafter = ScriptedTrees({sequence_seed(0, 0): [*PROMPT, *TRUTH]}, always, shape=SHAPES[shape])
    params = seeded(GREEDY, stop=stop, logprobs=0)
    output = engine.add(Request(PROMPT, params, make_stream=lambda p: Letters(p.stop)))  # type: ignore[arg-type]
    while engine.busy:
        engine.step()
    answer = output.outputs[0]
    assert (answer.token_ids, answer.text) == (TRUTH[:end], letters(TRUTH[: end - 2]))
    assert answer.logprobs is not None
    assert [entry.token_id for entry in answer.logprobs] == TRUTH[:end]
    assert answer.metrics.accepted == answer.token_kinds.count("accepted")
    assert answer.metrics.accepted <= answer.metrics.drafted


def test_logprobs_are_cut_with_the_tokens() -> None:
    answer = run(oracle(), [PROMPT], [seeded(GREEDY, max_tokens=9, logprobs=2)])[0].outputs[0]
    assert answer.logprobs is not None
    assert [entry.token_id for entry in answer.logprobs] == TRUTH[:9]
    distribution = torch.tensor([logits_after(ToyModel(), PROMPT + TRUTH[:i]) for i in range(9)]).log_softmax(-1)
    assert answer.cumulative_logprob == pytest.approx(
        sum(distribution[i, t].item() for i, t in enumerate(TRUTH[:9])), abs=1e-4
    )


def test_logprobs_only_where_they_were_asked_for_and_as_many_as_were() -> None:
    params = [dataclasses.replace(GREEDY, logprobs=m) for m in (None, 0, 4)]
    none, zero, four = (o.outputs[0] for o in run(make_engine(ToyModel()), [PROMPT] * 3, params))
    assert none.logprobs is None
    assert none.cumulative_logprob is None
    assert zero.logprobs is not None
    assert {len(entry.top) for entry in zero.logprobs} == {0}
    assert four.logprobs is not None
    assert {len(entry.top) for entry in four.logprobs} == {4}


# --- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 13, 30])
def test_every_token_is_accepted_recovered_or_bonus_and_every_round_is_counted(tokens: int) -> None:
    engine = oracle(script=sometimes)
    answer = run(engine, [PROMPT], [seeded(GREEDY, max_tokens=tokens)])[0].outputs[0]
    counts = {kind: answer.token_kinds.count(kind) for kind in ("accepted", "recovered", "bonus", "plain")}
    metrics = answer.metrics
    assert sum(counts.values()) == tokens == metrics.output_tokens
    assert metrics.accepted == counts["accepted"] <= metrics.drafted
    assert metrics.rounds - (answer.token_kinds[-1] == "accepted") == tokens - counts["accepted"]
    asked = engine.parts.drafter.asked  # type: ignore[attr-defined]
    assert len(asked) <= metrics.rounds
    assert metrics.drafted <= sum(asked)


@pytest.mark.parametrize("width", [1, 3])
def test_rounds_that_a_sibling_saved_are_counted_once_for_answers_and_for_the_server(width: int) -> None:
    """The server's counts of row rounds equal those of the samples, except for tokens beyond their ends."""
    options: dict[str, Any] = {"drafter": "model", "speculation_width": width}
    engine, meter = make_engine(ToyModel(), ToyModel(blur=0.3), **options), Meter(1e9)
    outputs = [engine.add(make_request(PROMPT, dataclasses.replace(SAMPLED, max_tokens=41, seed=n))) for n in range(3)]
    deepest, speeds = 0, []
    while engine.busy:
        engine.step()
        meter.record_round(engine)
        meter.update_gauges(engine)
        deepest = max(deepest, meter.stats().num_speculative_tokens)
        speeds.append(meter.stats().tokens_per_second)
    assert speeds[0] == 0 < max(speeds), "a speed takes two rounds"
    metrics = [output.outputs[0].metrics for output in outputs]

    def counted(name: str) -> float:
        return meter.registry.get_sample_value(f"paceline:{name}_total") or 0.0

    saved = sum(each.saved_by_sibling for each in metrics)
    assert (saved > 3) == (width > 1)
    assert saved <= counted("spec_decode_num_saved_by_sibling") <= saved + len(outputs)
    assert (counted("spec_decode_num_tree_drafts") > 0) == (width > 1)
    assert counted("spec_decode_num_tree_drafts") <= counted("spec_decode_num_drafts")
    assert sum(each.drafted for each in metrics) <= counted("spec_decode_num_draft_tokens")
    for each in metrics:
        assert sum(each.accepted_per_position) == each.accepted
        assert sum(each.drafted_per_position) == each.drafted or width > 1
        assert each.drafted_per_position[0] <= each.rounds
        pairs = [*zip(each.accepted_per_position, each.drafted_per_position, strict=False)]
        assert len(pairs) == len(each.accepted_per_position) <= 4
        assert all(accepted <= drafted for accepted, drafted in pairs)

    def at(name: str, position: int) -> float:
        labels = {"position": str(position)}
        return meter.registry.get_sample_value(f"paceline:spec_decode_num_{name}_tokens_per_pos_total", labels) or 0.0

    for position in range(4):
        drafted = sum(each.drafted_per_position[position] for each in metrics)
        assert drafted <= at("draft", position) <= drafted + len(outputs), "the last round may be cut off"
        assert at("accepted", position) <= at("draft", position)
    assert deepest == 4, "k is the depth of a tree, not its number of draft tokens"
    assert (meter.stats().saved_by_sibling or 0) > 0 or width == 1


def test_the_formulas_of_the_metrics() -> None:
    metrics = Metrics(10.0, 10.5, 11.0, 12.0, prompt_tokens=3, output_tokens=5, rounds=2, drafted=6, accepted=3)
    assert metrics.acceptance_rate == 0.5
    assert metrics.mean_acceptance_length == 2.5
    assert metrics.time_to_first_token == 1.0
    assert metrics.ms_per_token == 250.0
    nothing = Metrics()
    assert (nothing.acceptance_rate, nothing.mean_acceptance_length) == (None, None)
    assert (nothing.time_to_first_token, nothing.ms_per_token) == (None, None)


def test_the_times_of_a_request_are_in_order() -> None:
    metrics = run(make_engine(ToyModel()), [PROMPT], [GREEDY])[0].outputs[0].metrics
    times = (metrics.arrival_time, metrics.first_scheduled, metrics.first_token, metrics.finished)
    assert None not in times
    assert list(times) == sorted(times)  # type: ignore[type-var]


def test_speculation_takes_fewer_rounds_than_tokens_and_plain_decoding_as_many() -> None:
    fast = run(oracle(), [PROMPT], [seeded(GREEDY, max_tokens=28)])[0].outputs[0].metrics
    slow = run(make_engine(ToyModel()), [PROMPT], [seeded(GREEDY, max_tokens=28)])[0].outputs[0].metrics
    assert (fast.rounds, fast.drafted, fast.accepted) == (4, 24, 24)
    assert (slow.rounds, slow.drafted, slow.accepted) == (28, 0, 0)
    assert fast.mean_acceptance_length == 7


# --- steps, seeds, interrupts -----------------------------------------------------------------------------------------


def test_a_step_returns_the_requests_that_gained_tokens_or_ended() -> None:
    engine = make_engine(ToyModel(), max_batch_size=2)
    first = engine.add(Request(PROMPT, dataclasses.replace(GREEDY, max_tokens=2)))
    second = engine.add(Request(PROMPT, dataclasses.replace(GREEDY, max_tokens=1)))
    third = engine.add(Request(PROMPT, GREEDY))
    assert engine.step() == [first, second]
    assert engine.step() == [first, third]
    assert first.finished


def test_without_a_seed_every_request_draws_its_own() -> None:
    params = SamplingParams(max_tokens=20, temperature=3.0)
    found = answers(run(make_engine(ToyModel()), [PROMPT] * 4, [params] * 4))
    assert len({tuple(answer[0]) for answer in found}) == 4


def test_the_answers_of_one_request_differ_and_come_again_with_the_seed() -> None:
    params = SamplingParams(max_tokens=20, temperature=2.0, n=3, seed=5)
    first, second = (answers(run(make_engine(ToyModel()), [PROMPT], [params])) for _ in range(2))
    assert first == second
    assert len({tuple(answer) for answer in first[0]}) == 3


@pytest.mark.parametrize(
    "where", ["propose", "verify", "accept", "commit", "observe", "prefill", "process_outputs", "_release_finished"]
)
def test_an_interrupt_anywhere_in_a_round_leaves_the_engine_usable(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(ToyModel(), ToyModel(blur=0.3), drafter="model", max_batch_size=3, prefill_chunk=3)
    parts, scheduler = engine.parts, engine.scheduler
    owner: Any = {
        "propose": parts.drafter,
        "verify": parts.target,
        "accept": parts,
        "commit": engine.batch,
        "observe": parts.drafter,
        "prefill": parts.target,
        "process_outputs": scheduler,
        "_release_finished": scheduler,
    }[where]
    original, calls = getattr(owner, where), []

    def interrupted(*args: Any) -> Any:
        calls.append(where)
        if len(calls) == 3:
            if where not in ("verify", "accept"):
                original(*args)
            raise KeyboardInterrupt
        return original(*args)

    prompts, params = (
        [[1], [2] * 9, [3, 4], [5] * 5],
        [dataclasses.replace(GREEDY, max_tokens=n) for n in (40, 3, 5, 12)],
    )

    def stream(p: SamplingParams) -> Letters:
        return Letters()

    outputs = [engine.add(Request(p, s, make_stream=stream)) for p, s in zip(prompts, params, strict=True)]
    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    monkeypatch.undo()
    engine.clear()
    assert not engine.busy
    expected = answers(run(make_engine(ToyModel()), prompts, params))
    for output, (whole,) in zip(outputs, expected, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason in ("abort", "length")
        assert answer.text == letters(answer.token_ids), "the text is the text of the tokens, also after an interrupt"
        assert answer.token_ids == whole[: len(answer.token_ids)]
        assert (answer.finish_reason == "length") == (answer.token_ids == whole)
    assert answers(run(engine, prompts, params)) == expected


def drain(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def test_clearing_ends_everything() -> None:
    engine = make_engine(ToyModel(), max_batch_size=1)
    outputs = [engine.add(Request(PROMPT, GREEDY)) for _ in range(3)]
    engine.step()
    engine.clear()
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 3
    assert outputs[0].outputs[0].token_ids == TRUTH[:1]
    assert not engine.busy


def test_the_logits_after_a_text_are_the_targets_own() -> None:
    engine = make_engine(ToyModel(), max_batch_size=1)
    assert engine.next_logits([4, 5, 6]).tolist() == logits_after(ToyModel(), [4, 5, 6])


@pytest.mark.parametrize("drafter", [None, "ngram", "model", "hybrid"])
def test_the_engine_says_what_it_runs(drafter: str | None) -> None:
    line = make_engine(ToyModel(), ToyModel(blur=0.5), drafter=drafter, attention="split").describe()
    assert "toy(blur=0.0)" in line
    assert "split" in line
    assert "float32" in line
    who = {"ngram": "drafter ngram", "model": "drafter toy(blur=0.5)", "hybrid": "drafter ngram or toy(blur=0.5)"}
    assert (who[drafter] if drafter else "no speculation") in line
    assert engine_module.__doc__


@pytest.mark.parametrize(
    ("options", "drafter"),
    [
        ({}, "model"),
        ({"rounds": "host"}, "hybrid"),
        ({"num_speculative_tokens": 3}, "model"),
        ({"drafter": None}, None),
        ({"tensor_parallel": 2}, "hybrid"),
    ],
)
def test_on_a_cuda_device_only_a_draft_model_drafts_without_lookup(
    options: dict[str, Any], drafter: str | None
) -> None:
    config, cuda = EngineConfig(**options), ToyModel()
    cuda.device = torch.device("cuda")
    head = tiny_head(ToyModel(), 16)
    both = None if drafter is None else "hybrid"
    cases = ((None, (), both and "ngram"), (ToyModel(), (), drafter), (ToyModel(), [[1]], both), (head, (), both))
    for draft, documents, expected in cases:
        alone = drafts_alone(Models(cuda, draft, documents=documents), config)
        assert config.resolved(draft_model=draft is not None, alone=alone).drafter == expected


def test_rounds_with_unchanged_rows_read_no_sampling_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the features that rows use takes as long as a small model's draw."""
    engine = make_engine(ToyModel(), max_batch_size=3)
    for prompt in ([1, 2], [3, 4], [5, 6]):
        engine.add(Request(prompt, SamplingParams(temperature=0, max_tokens=8)))
    engine.step()
    monkeypatch.setattr(engine.batch.sampling, "refresh", lambda _: pytest.fail("nothing has changed"))
    for _ in range(5):
        engine.step()
