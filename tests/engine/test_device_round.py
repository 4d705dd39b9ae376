"""Rounds on the device equal rounds on the host, and never read anything back to the host.

Everything here runs uncaptured on the CPU; tests/kernels/gpu runs the same programs as CUDA graphs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from batches import new_batch
from block_support import tiny_block
from covering import in_pairs
from model_support import NATIVE, tiny
from paceline.config import SamplingParams
from paceline.core.batch import Batch, ParallelSample, RequestGroup, RowStart, SpeculationPlan
from paceline.core.draft import Verdict
from paceline.core.draft_tensors import DraftTensors
from paceline.core.ops import RoundOps
from paceline.core.outputs import CompletionOutput
from paceline.core.processors import ProcessedRow
from paceline.core.rows import NOTHING, StepFeatures
from paceline.core.sampling import sequence_seed
from paceline.core.slots import Slots
from paceline.core.values import DeviceAcceptance
from paceline.drafters.heads.block_decoder import TorchBlock, TorchBlockDecoder
from paceline.drafters.lookup import LONGEST_SUFFIX, WHOLE, CopySources, HostLookup, SearchedRows
from paceline.engine.engine import Engine, Request
from paceline.engine.rounds.device_drafters import DeviceDrafter, RoundRows, device_drafter, ngram_draft
from paceline.engine.rounds.device_round import DeviceRound
from paceline.engine.rounds.program import MaskedProgram, RoundProgram
from paceline.engine.rounds.references import References
from paceline.errors import ParameterError, RequestError
from paceline.kernels.attention.reference import ReferenceAttention
from paceline.kernels.gpu.graphs import Graphs, NoOtherRanks, Ring, Ticket, Upload, recorded
from paceline.kernels.gpu.lookup import copied, copied_from, suffix_of
from paceline.kernels.gpu.ops import DeviceOps, ReferenceOps, TritonOps
from paceline.kernels.gpu.state import read_record, read_trees
from paceline.kernels.gpu.steps import TorchSteps, TritonSteps
from paceline.lengths.auto import AutoLength
from paceline.lengths.by_position import DEPTHS
from paceline.lengths.calibration import Grid
from paceline.lengths.cost import CostModel
from paceline.models.base import AnyModel, Model
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.draft_decoder import DraftDecoder
from paceline.models.load.loading import load_model
from recurrent_support import in_torch, tiny_falcon_h1, tiny_granite_hybrid, tiny_lfm2, tiny_qwen3_5
from simulation import linear_costs
from toy import (
    POSITIONS,
    VOCAB,
    FlatToy,
    RandomCaps,
    RandomLength,
    RandomSelection,
    Scripted,
    ToyConstraint,
    ToyModel,
    answers,
    make_engine,
    run,
    tiny_llama,
)

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = (0, 22)
NEEDS_HOST: dict[str, Any] = {"stop_token_ids": tuple(range(2, 14)), "min_tokens": 4}
_rng = random.Random(6)
PROMPTS = [[_rng.randrange(1, VOCAB) for _ in range(size)] for size in (1, 9, 2, 17, 5, 1, 30, 4, 3, 11)]
TEMPERATURES = (0, 1.0, 0.7, 1.3, 0, 2.0, 1.0, 0.5, 0, 1.0)
PARAMS = [
    SamplingParams(temperature=t, max_tokens=16 - i, seed=i, n=1 + (i == 1), stop_token_ids=(5,) if i == 3 else ())
    for i, t in enumerate(TEMPERATURES)
]
MODELS: dict[str, tuple[Callable[[], Model], Callable[[], AnyModel]]] = {
    "toy": (ToyModel, lambda: ToyModel(blur=0.3)),
    "llama": (tiny_llama, lambda: tiny_llama(1)),
    "dspark": (tiny_llama, lambda: tiny_block(tiny_llama(), 32, "dspark")),
    "dflash2": (tiny_llama, lambda: tiny_block(tiny_llama(), 32, "dflash2")),
}
BLOCK = {"model": "dspark", "drafter": "feature"}


def engine_on(rounds: str, model: str = "toy", **options: Any) -> Engine:
    target, draft = MODELS[model]
    options = {"drafter": "model", "num_speculative_tokens": 4, "attention": "padded"} | options
    return make_engine(target(), draft(), eos=EOS, rounds=rounds, **options)


class NoHostReads(TorchDispatchMode):
    """Fails if a device tensor is read by the host or copied between devices; ``allowed`` lifts it."""

    FORBIDDEN = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_unique2", "masked_select")
    METHODS = ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__")

    def __init__(self) -> None:
        super().__init__()
        self.allowed = False
        self._patches = [mock.patch.object(Tensor, name, self._watched(getattr(Tensor, name))) for name in self.METHODS]

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any) -> Any:
            assert self.allowed, f"the host reads a tensor: {method}"
            return method(tensor, *args)

        return call

    def __enter__(self) -> NoHostReads:
        for patch in self._patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self._patches:
            patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        moved = name == "_to_copy" and (kwargs or {}).get("device") is not None
        masked = name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        assert self.allowed or not (name in self.FORBIDDEN or moved or masked), f"the host reads the device: {func}"
        return func(*args, **(kwargs or {}))


# --- the same answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "k"), [*(("toy", k) for k in (0, 1, 4, 7, "bass")), ("llama", 4)])
def test_device_rounds_equal_host_rounds(model: str, k: int | str) -> None:
    found, expected = [
        answers(run(engine_on(rounds, model, num_speculative_tokens=k), PROMPTS, PARAMS))
        for rounds in ("device", "host")
    ]
    assert found == expected


@pytest.mark.parametrize(("model", "k"), [("toy", 1), ("toy", "bass"), ("llama", 4)])
def test_under_the_rejection_rule_greedy_rows_are_the_same(model: str, k: int | str) -> None:
    """Rows at a temperature keep their distribution (test_lossless.py), but their last rounds may differ in length."""
    options = {"num_speculative_tokens": k, "acceptance": "rejection"}
    found, expected = [answers(run(engine_on(r, model, **options), PROMPTS, PARAMS)) for r in ("device", "host")]
    for one, other, params in zip(found, expected, PARAMS, strict=True):
        assert one == other or params.temperature > 0


@pytest.mark.parametrize("policy", [RandomLength, RandomCaps])
def test_changing_lengths_and_waiting_rows_change_no_output(policy: Callable[[], Any]) -> None:
    engine = engine_on("device", max_batch_size=3, prefill_chunk=4)
    engine.use_policy(policy())
    plain = make_engine(ToyModel(), eos=EOS)
    assert answers(run(engine, PROMPTS, PARAMS)) == answers(run(plain, PROMPTS, PARAMS))


@pytest.mark.parametrize("options", [{"drafter": None}, {"drafter": "ngram"}, {"speculation_width": 2}], ids=str)
def test_idle_slots_may_be_longer_than_all_rows_that_run(options: dict[str, Any]) -> None:
    """Padded rounds read as many positions as the rows that run have; a free slot keeps the prompt it had."""

    def outputs(rounds: str) -> list[Any]:
        size = {"max_positions": 1024}
        settings = {"drafter": "model", "num_speculative_tokens": 4, "max_model_len": 1024, "max_batch_size": 4}
        target, draft = ToyModel(**size), ToyModel(blur=0.3, **size)
        engine = make_engine(target, draft, rounds=rounds, attention="padded", **(settings | options))
        first = run(engine, [[i * 7 % 22 + 1 for i in range(700)]], [SamplingParams(temperature=0, max_tokens=5)])
        prompts = [[i, 2, 3, 1, 2, 3, 1] for i in (1, 2, 3)]
        return answers(first + run(engine, prompts, 3 * [SamplingParams(temperature=0, max_tokens=40)]))

    assert outputs("device") == outputs("host")


def test_auto_observes_device_rounds_one_round_late() -> None:
    """Rows wait, join and end while rounds are in flight. Costs are those of device rounds, so none has to be timed."""
    engine = engine_on("device", num_speculative_tokens="auto", max_batch_size=3)
    policy, waiting, late, judged = engine.parts.policy, [], [], []
    assert isinstance(policy, AutoLength)
    assert not policy.costs.table.draft_step[0]
    policy.costs = CostModel(linear_costs(token=0.3))
    choose, observe, learn = policy.choose, policy.observe, policy.model_drafts.learn

    def choosing(batch: Batch) -> SpeculationPlan:
        plan = choose(batch)
        waiting.append(plan.note)
        return plan

    def observing(batch: Batch, verdict: Verdict) -> None:
        assert verdict.timing is None
        late.append(len(waiting) - waiting.index(verdict.note))
        del waiting[: waiting.index(verdict.note) + 1]
        observe(batch, verdict)

    policy.choose, policy.observe = choosing, observing  # type: ignore[method-assign]
    policy.model_drafts.learn = lambda lines, slots: (judged.extend(lines), learn(lines, slots))[1]  # type: ignore[method-assign]
    plain = make_engine(ToyModel(), eos=EOS)
    outputs = run(engine, PROMPTS, PARAMS)
    assert answers(outputs) == answers(run(plain, PROMPTS, PARAMS))
    assert late.count(2) > len(late) / 2
    assert engine.scheduler.in_flight == 0
    kept = sum(answer.metrics.accepted for output in outputs for answer in output.outputs)
    assert sum(right for line in judged for _, right in line) >= kept > 20  # what was cut is right, too
    assert policy.model_drafts.acceptance == pytest.approx(
        sum(r for x in judged for _, r in x) / sum(map(len, judged)), abs=0.2
    )


@pytest.mark.parametrize("when", ["its rows have left", "everything was cleared"])
def test_a_round_whose_rows_have_all_ended_is_not_observed(when: str) -> None:
    engine = engine_on("device", num_speculative_tokens="auto")
    policy = engine.parts.policy
    chosen: list[object] = []
    observed: list[object] = []
    choose, observe = policy.choose, policy.observe
    policy.choose = lambda batch: (plan := choose(batch), chosen.append(plan.note))[0]  # type: ignore[func-returns-value, method-assign]
    policy.observe = lambda batch, verdict: (observed.append(verdict.note), observe(batch, verdict))[1]  # type: ignore[func-returns-value, method-assign]
    request = Request([1, 2, 3], SamplingParams(max_tokens=30, temperature=0), request_id="x")
    engine.add(request)
    engine.step()
    if when == "everything was cleared":
        engine.clear()
    else:
        engine.abort("x")
    engine.add(replace(request, request_id="y"))
    while engine.busy:
        engine.step()
    assert observed
    assert not set(map(id, observed)) & set(map(id, chosen[:1])), "the first round"
    assert all(any(note is known for known in chosen) for note in observed)


@pytest.fixture
def four_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the lengths of an engine's start, of which other tests leave out half."""
    grid = Grid((1, 2), (0, 1, 3, 7), seconds=0.0, repeats=2, max_tokens=8)
    monkeypatch.setattr(Grid, "coarse", lambda *_, **__: grid)


@pytest.mark.usefixtures("four_lengths")
def test_auto_measures_device_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, cut = list[tuple[int, int]](), set[tuple[int, int]]()
    run_round = DeviceRound.run

    def watched(device: DeviceRound, rows: int, k: int, longest: int, features: StepFeatures, *more: Any) -> Ticket:
        rounds.append((rows, k))
        cut.update([(rows, k)] if features.cuts else [])
        return run_round(device, rows, k, longest, features, *more)

    monkeypatch.setattr(DeviceRound, "run", watched)
    engine = engine_on("device", num_speculative_tokens="auto", max_batch_size=2)
    assert {(rows, k) for rows in (1, 2) for k in (0, 1, 3, 7)} <= set(rounds)
    costs = cast(AutoLength, engine.parts.policy).costs.table
    assert cut == {(rows, k) for rows in (1, 2) for k in (0, 7 if rows == 1 else 3)}
    assert len(costs.cut_once) == len(costs.cut_step) == 2
    assert engine.batch.rows == 0
    assert engine.identity().attention != engine_on("host").identity().attention
    found = answers(run(engine, PROMPTS, PARAMS))
    assert found == answers(run(make_engine(ToyModel(), eos=EOS), PROMPTS, PARAMS))


@pytest.mark.parametrize("needs_host", [False, True])
@pytest.mark.parametrize("reads_prompts", [True, False])
def test_the_draft_cache_catches_up_after_many_plain_rounds(reads_prompts: bool, needs_host: bool) -> None:
    """With the target as its own drafter, one stale key anywhere would cost acceptance.

    The draft cache misses prompts that it did not read. While a row needs the host, all rows run there.
    """
    engine = make_engine(ToyModel(), ToyModel(), drafter="model", rounds="device", attention="padded")
    rng = random.Random(0)
    engine.use_policy(RandomLength())
    engine.parts.policy.choose = lambda batch: SpeculationPlan(rng.choice([0] * 12 + [3]))  # type: ignore[method-assign]
    engine.parts.policy.expects_to_draft = lambda _: reads_prompts  # type: ignore[method-assign]
    params = [SamplingParams(seed=i, max_tokens=60, **(NEEDS_HOST if needs_host and i == 4 else {})) for i in range(9)]
    outputs = run(engine, [[1 + i % 5] * (1 + 3 * (i % 4)) for i in range(9)], params)
    drafted = sum(output.outputs[0].metrics.drafted for output in outputs)
    assert drafted == sum(output.outputs[0].metrics.accepted for output in outputs) > 0


SPECIAL = [
    SamplingParams(max_tokens=20, seed=50, top_k=5, temperature=0.9),
    SamplingParams(max_tokens=20, seed=51, presence_penalty=1.0, frequency_penalty=0.3),
    SamplingParams(max_tokens=20, seed=52, logprobs=2),
    SamplingParams(max_tokens=20, seed=53, min_tokens=9, top_p=0.7),
    SamplingParams(max_tokens=20, seed=54, min_p=0.1, repetition_penalty=1.4, logprobs=6),
    SamplingParams(max_tokens=20, seed=55, temperature=0, frequency_penalty=1.5),
    SamplingParams(max_tokens=20, seed=56, typical_p=0.7, top_p=0.9),
    SamplingParams(max_tokens=20, seed=57, top_n_sigma=1.5, eta_cutoff=0.05, logprobs=1),
]


@pytest.mark.parametrize(("acceptance", "k"), [("coupled", 0), ("coupled", 4), ("rejection", 1)])
def test_the_device_runs_cuts_penalties_and_logprobs(k: int, acceptance: str) -> None:
    """Under the rejection rule only greedy rows are compared: their last rounds may differ in length."""
    prompts, params = [*PROMPTS[:4], *PROMPTS[: len(SPECIAL)], *PROMPTS[4:6]], [*PARAMS[:4], *SPECIAL, *PARAMS[4:6]]
    outputs = []
    for rounds in ("device", "host"):
        engine = engine_on(rounds, num_speculative_tokens=k, acceptance=acceptance, max_batch_size=4)
        outputs.append(run(engine, prompts, params))
        assert (engine.rounds.counts["host"] > 0) == (rounds == "host")
    for found, expected, each in zip(*outputs, params, strict=True):
        if acceptance == "coupled" or each.temperature == 0:
            for one, other in zip(found.outputs, expected.outputs, strict=True):
                assert one.token_ids == other.token_ids
                assert _logprobs(one) == _logprobs(other)


def _logprobs(answer: CompletionOutput) -> list[tuple[float, list[tuple[int, float]]]] | None:
    if answer.logprobs is None:
        return None
    close = [(t.logprob, list(t.top)) for t in answer.logprobs]
    return [(pytest.approx(own, abs=1e-5), [(i, pytest.approx(v, abs=1e-5)) for i, v in top]) for own, top in close]


def test_requests_that_need_the_host_run_there_and_others_continue_on_the_device() -> None:
    special = [
        SamplingParams(max_tokens=6, seed=50, top_k=5, logit_bias=dict.fromkeys(range(VOCAB), 2.0) | {3: 5.0}),
        SamplingParams(max_tokens=6, seed=51, logprobs=2, **NEEDS_HOST),
    ]
    prompts, params = [*PROMPTS, *PROMPTS[:2], *PROMPTS], [*PARAMS, *special, *PARAMS]
    found, expected = [answers(run(engine_on(rounds), prompts, params)) for rounds in ("device", "host")]
    assert found == expected


def test_a_change_to_the_host_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_on("device")
    run(engine, PROMPTS, PARAMS)
    assert not caplog.records
    assert "by the host" not in engine.describe()
    for _ in range(2):
        run(engine, PROMPTS[:2], [SamplingParams(max_tokens=6, **NEEDS_HOST), SamplingParams(max_tokens=6)])
    (record,) = caplog.records
    assert "run on the host" in record.getMessage()
    assert "min_tokens with many stop tokens" in record.getMessage()
    assert ", by the host for min_tokens with many stop tokens; " in engine.describe()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter, where no token is left
@pytest.mark.parametrize(
    ("options", "own", "ops", "count"),
    [
        ({"num_speculative_tokens": 4}, {}, ReferenceOps, 10),
        ({"num_speculative_tokens": 0}, {"top_p": 0.8, "logprobs": 2}, ReferenceOps, 10),
        ({"drafter": "ngram"}, {"n": 1, "logit_bias": {3: 4.0, 7: -100.0}}, ReferenceOps, 10),
        ({"num_speculative_tokens": "auto", "max_batch_size": 3}, {"top_k": 3}, ReferenceOps, 10),
        ({"drafter": "hybrid", "num_speculative_tokens": 6}, {"logprobs": 2}, ReferenceOps, 10),
        ({"num_speculative_tokens": 2}, {"n": 1}, TritonOps, 3),
    ],
    ids=str,
)
def test_rows_with_a_grammar_run_in_rounds_of_the_device(
    options: dict[str, Any], own: dict[str, Any], ops: type[DeviceOps], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among others that have none, join and leave; some of them are left without any token."""
    monkeypatch.setattr("paceline.engine.rounds.program.ops_for", lambda _device: ops())
    params = [replace(each, **(own if i % 2 else {})) for i, each in enumerate(PARAMS[:count])]
    found = []
    for rounds in ("device", "host"):
        engine = engine_on(rounds, **options)
        outputs = [engine.add(request) for request in with_grammars(PROMPTS, params)]
        while engine.busy:
            engine.step()
        assert engine.rounds.counts[rounds] == sum(engine.rounds.counts.values())
        found.append([(each, answers([each]), type(each.error)) for each in outputs])
    for (one, *device), (other, *host) in zip(*found, strict=True):
        assert device == host
        assert list(map(_logprobs, one.outputs)) == list(map(_logprobs, other.outputs))
    assert {error for _, _, error in found[0]} == {type(None), RequestError}


class Dead(ToyConstraint):
    """Leaves no token after five."""

    def forbids(self, answer: Sequence[int], token: int) -> bool:
        return len(answer) == 5 or super().forbids(answer, token)


def with_grammars(prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[Request]:
    for place, (prompt, each) in enumerate(zip(prompts, params, strict=False)):
        make: list[Callable[[], Any] | None] = [ToyConstraint, None, Dead, None]
        yield Request(prompt, each, make_constraint=make[place % 4])


@pytest.mark.parametrize(
    ("options", "make", "why"),
    [
        ({}, lambda: ProcessedRow([lambda _, logits: logits], (), 9), "a logits processor"),
        ({"acceptance": "rejection"}, ToyConstraint, "a grammar under the rejection rule"),
        ({"speculation_width": 2}, ToyConstraint, "trees under a grammar"),
    ],
)
def test_some_constraints_need_the_host(options: dict[str, Any], make: Callable[[], Any], why: str) -> None:
    engine = engine_on("device", **options)
    engine.add(Request([1, 2], SamplingParams(max_tokens=4), make_constraint=make))
    while engine.busy:
        engine.step()
    assert list(engine.rounds.choice.reasons) == [why]


def test_arrivals_and_aborts_during_a_round_in_flight_affect_no_other_request() -> None:
    rng = random.Random(3)
    engine = engine_on("device", max_batch_size=3, prefill_chunk=4)
    outputs, waiting = {}, list(range(len(PROMPTS)))
    dropped: set[int] = set()
    while waiting or engine.busy:
        if waiting and rng.random() < 0.4:
            index = waiting.pop(rng.randrange(len(waiting)))
            outputs[index] = engine.add(Request(PROMPTS[index], PARAMS[index], request_id=str(index)))
        if rng.random() < 0.05 and outputs:
            dropped.add(index := rng.choice(list(outputs)))
            engine.abort(str(index))
        engine.step()
        engine.scheduler.check_integrity()
    plain = answers(run(make_engine(ToyModel(), eos=EOS), PROMPTS, PARAMS))
    assert len(dropped) > 0
    for index, output in outputs.items():
        for answer, full in zip(output.outputs, plain[index], strict=True):
            assert answer.token_ids == full[: len(answer.token_ids)]
            assert answer.token_ids == full or index in dropped


@pytest.mark.parametrize("options", [{}, BLOCK], ids=str)
def test_rows_join_and_leave_without_a_wait_for_the_device(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No count of a draft cache's missing tokens is read, and no copy to the device blocks."""
    blocking: list[object] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ == "copy_" and not (len(args) > 2 and args[2]):
                blocking.append((kwargs or {}).get("non_blocking", False) or args[1].shape)
            return func(*args, **(kwargs or {}))

    def under(name: str) -> None:
        change = getattr(Batch, name)

        def watched(*given: Any) -> None:
            with Copies():
                change(*given)

        monkeypatch.setattr(Batch, name, watched)

    engine = engine_on("device", max_batch_size=3, prefill_chunk=7, **options)
    for name in ("set_row", "set_live", "free_slot"):
        under(name)
    monkeypatch.setattr(DraftDecoder, "missing_tokens", lambda *_: pytest.fail("the host reads the device"))
    plain = make_engine(engine.models.target, eos=EOS)
    assert answers(run(engine, PROMPTS, PARAMS)) == answers(run(plain, PROMPTS, PARAMS))
    assert [each for each in blocking if each is not True] == []


def test_prompts_in_scattered_slots_are_one_pass_of_ragged_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, passes in (("ragged", 1), ("padded", 3)):
        decoder = Decoder(ToyModel(), ReferenceAttention(), 8, POSITIONS, VOCAB)
        expected = Decoder(ToyModel(), ReferenceAttention(), 8, POSITIONS, VOCAB)
        monkeypatch.setattr(decoder.passes._backend, "name", name)  # type: ignore[attr-defined]
        batch, slots, sizes = new_batch(8, POSITIONS, VOCAB), (1, 2, 5, 7), (9, 17, 5, 30)
        for slot, prompt in zip(slots, (PROMPTS[1], PROMPTS[3], PROMPTS[4], PROMPTS[6]), strict=True):
            batch.set_row(slot, RowStart(prompt, SamplingParams(), 0))
            expected.prefill(batch, [slot], [0], [len(prompt)])
        forward, counted = decoder.passes.forward, []
        monkeypatch.setattr(
            decoder.passes, "forward", lambda *a, f=forward, c=counted, **k: (c.append(a), f(*a, **k))[1]
        )
        decoder.prefill(batch, slots, [0] * 4, sizes)
        assert len(counted) == passes
        for slot, size in zip(slots, sizes, strict=True):
            for held, wanted in zip(decoder.cache.tables, expected.cache.tables, strict=True):
                assert torch.equal(held[:, slot, :, :size], wanted[:, slot, :, :size])


def test_the_host_is_one_round_behind() -> None:
    engine = engine_on("device")
    output = engine.add(Request([1, 2, 3], SamplingParams(max_tokens=30, temperature=0)))
    engine.step()
    assert output.outputs[0].token_ids == []
    assert engine.scheduler.in_flight == 5
    engine.step()
    assert output.outputs[0].token_ids != []


def test_an_engine_works_after_it_was_cleared_in_flight() -> None:
    engine = engine_on("device")
    engine.add(Request([1, 2, 3], SamplingParams(max_tokens=30)))
    engine.step()
    engine.step()
    engine.clear()
    plain = make_engine(ToyModel(), eos=EOS)
    assert answers(run(engine, PROMPTS, PARAMS)) == answers(run(plain, PROMPTS, PARAMS))


@pytest.mark.parametrize(
    ("k", "options"),
    [(0, {}), (1, {}), (4, {}), (1, BLOCK), (5, BLOCK), (5, BLOCK | {"drafter": "hybrid"})],
    ids=str,
)
def test_a_round_is_one_launch(k: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Except the first round with new rows: the draft model may miss tokens of their prompts."""
    launched: list[object] = []
    run_graph = Graphs.run
    monkeypatch.setattr(Graphs, "run", lambda *given: (launched.append(given[1]), run_graph(*given))[1])
    engine = engine_on("device", num_speculative_tokens=k, **options)
    for prompt in PROMPTS[:4]:
        engine.add(Request(prompt, SamplingParams(max_tokens=60, seed=1)))
    engine.step()
    launched.clear()
    for _ in range(6):
        engine.step()
    assert len(launched) == 6
    assert len(set(launched)) == 1


class Replayed:
    """Replaces a CUDA graph."""

    def replay(self) -> None:
        pass


def test_the_least_recently_used_graphs_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.kernels.gpu.graphs.MOST_GRAPHS", 3)
    numbers, forgotten, other_ranks = count(), list[object](), NoOtherRanks()
    monkeypatch.setattr(other_ranks, "forget", forgotten.append)
    monkeypatch.setattr("paceline.kernels.gpu.graphs.wait_for", forgotten.append)
    graphs = Graphs(torch.device("cpu"), other_ranks=other_ranks)
    graphs.captures = True
    monkeypatch.setattr(graphs, "_capture", lambda program: (Replayed(), program(), next(numbers)))
    for key in "abcab":
        graphs.run(key, lambda: torch.zeros(1))
    graphs.run("d", lambda: torch.ones(1))
    assert graphs.keys == ["a", "b", "d"]
    assert forgotten == [torch.device("cpu"), 2], "it may still run"
    assert graphs.run("d", lambda: torch.zeros(1)).item() == 1, "as it was captured"
    assert [*graphs.keys, next(numbers)] == ["a", "b", "d", 4]


def test_captures_do_not_mind_what_other_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's default ends a capture at any thread's allocation, such as the watchdog's of NCCL."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "graph", lambda _graph, **options: given.update(options))
    recorded(cast(Any, None), "pool")
    assert given == {"pool": "pool", "capture_error_mode": "thread_local"}


class Rerun:
    """Replaces a CUDA graph by running the program again."""

    def __init__(self, program: Callable[[], Tensor], result: Tensor) -> None:
        self.program, self.result = program, result

    def replay(self) -> None:
        self.result.copy_(self.program())


def test_auto_is_told_which_rounds_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on("device", num_speculative_tokens="auto")
    device = engine._device_round
    assert device is not None

    def capture(program: Callable[[], Tensor]) -> tuple[Rerun, Tensor, int]:
        with device._all_rows_idle():
            result = program().clone()
        return Rerun(program, result), result, 0

    assert device.is_captured(1), "nothing is captured on a CPU"
    monkeypatch.setattr(device.graphs, "captures", True)
    monkeypatch.setattr(device.graphs, "_capture", capture)
    for prompt in PROMPTS[:3]:
        engine.add(Request(prompt, SamplingParams(max_tokens=60, seed=1, ignore_eos=True)))
    while engine.batch.rows < 3:
        engine.step()
    for _ in range(8):
        engine.step()
        assert device.is_captured(engine.rounds._launched[-1].plan.k)
    assert not all(map(device.is_captured, DEPTHS))
    engine.add(Request(PROMPTS[3], SamplingParams(max_tokens=60, seed=1, top_p=0.9, ignore_eos=True)))
    while engine.batch.rows < 4:
        engine.step()
    engine.step()
    last = engine.rounds._launched[-1].plan.k
    assert device.is_captured(last), "with the new row's cuts"
    monkeypatch.setattr(type(engine.batch.sampling), "step_features", StepFeatures(adjusts=True))
    assert not device.is_captured(last), "with penalties"


# --- trees ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "width"), [("toy", 2), ("toy", 3), ("llama", 2)])
def test_a_tree_is_the_chain_and_the_next_best_candidates_beside_it(model: str, width: int) -> None:
    """After every round, whatever was accepted: the draft model's cache must equal the text."""
    engine = engine_on("device", model, speculation_width=width)
    assert engine._device_round is not None
    drafter, compared, draft = engine._device_round.drafter, Counter[str](), MODELS[model][1]()
    draft_trees = drafter.draft

    def check(rows: RoundRows, k: int, span: int) -> DraftTensors:
        found, state, before = draft_trees(rows, k, span), rows.state, rows.before
        for row, draft_tokens in enumerate(found.counts[: engine.batch.rows].tolist()):
            if state.values.temperature[row] > 0:
                continue
            text = state.text[state.slots.index[row], : int(before[row])].tolist()
            for depth in range(draft_tokens // width):
                logits = logits_of(draft, text)
                beside = found.tokens[row, depth * width : (depth + 1) * width].tolist()
                assert beside == logits.topk(width).indices.tolist()
                text.append(beside[0])
                compared["places"] += 1
        return found

    drafter.draft = check  # type: ignore[method-assign]
    params = [replace(each, temperature=0) if place % 2 else each for place, each in enumerate(PARAMS)]
    prompts, params = PROMPTS[:7], params[:7]
    outputs = run(engine, prompts, params)
    plain = run(engine_on("host", model, drafter=None, num_speculative_tokens=0), prompts, params)
    assert answers(outputs) == answers(plain)
    assert compared["places"] > 50
    assert sum(each.metrics.saved_by_sibling for output in outputs for each in output.outputs) > 0


def logits_of(model: Model, text: list[int]) -> Tensor:
    """Return logits [V] after a text, from one plain pass."""
    decoder = Decoder(model, ReferenceAttention(), 1, len(text), VOCAB)
    hidden = decoder.forward(torch.tensor([text]), torch.zeros(1, dtype=torch.int64), len(text))
    return decoder.logits(hidden[0, -1])


# --- no reads ---------------------------------------------------------------------------------------------------------


WITH_STATES = (lambda: in_torch(tiny_qwen3_5()), lambda: tiny_llama(1))
WITH_EXPERTS = (lambda: in_torch(tiny(*NATIVE["qwen3_moe"])), lambda: tiny_llama(1))


def runner(
    ops: RoundOps,
    rule: DeviceAcceptance,
    model: str = "llama",
    rows: int = 3,
    width: int = 1,
    attention: str = "padded",
) -> DeviceRound:
    """Return a device round with prefilled rows of different lengths."""
    target, draft = (make() for make in (MODELS | {"hybrid": WITH_STATES, "experts": WITH_EXPERTS})[model])
    batch = new_batch(rows, POSITIONS, VOCAB)
    from paceline.kernels.attention import make_backend

    sizes = make_backend(attention, torch.device("cpu")), rows, POSITIONS, VOCAB
    decoders = (
        Decoder(target, *sizes),
        (TorchBlockDecoder if isinstance(draft, TorchBlock) else DraftDecoder)(draft, *sizes),
    )
    if isinstance(decoders[1], TorchBlockDecoder):
        decoders[0].attach_reader(decoders[1].fused_states)
    for row in range(rows):
        params = SamplingParams(temperature=row / 2, max_tokens=40)
        batch.set_row(row, RowStart(PROMPTS[3 - row], params, sequence_seed(1, row), stop_tokens=(22,)))
    batch.set_live(range(rows))
    for decoder in decoders:
        decoder.prefill(batch, range(rows), [0] * rows, [length - 1 for length in batch.lengths[:rows]])
    drafter = device_drafter(*decoders, batch, width=width)
    return DeviceRound(RoundProgram(decoders[0], drafter, batch, rule, ops))


RULES = {
    "coupled": DeviceAcceptance(),
    "rejection": DeviceAcceptance(independent=True),
    "synthetic": DeviceAcceptance(synthetic=0.7),
}


@in_pairs(rule=RULES, k=[0, 3], model=["llama", "hybrid", "dspark", "dflash2"])
def test_a_round_reads_nothing_from_the_device(rule: str, k: int, model: str) -> None:
    rounds = runner(ReferenceOps(), RULES[rule], model)
    with torch.inference_mode(), NoHostReads():
        rounds.program.run(3, k, 64)
        rounds.program.run(3, k, 64, StepFeatures(adjusts=True, cuts=True, logprobs=5))
        rounds.named_catch_up(3, 4, 64)[1]()
        masked = MaskedProgram(rounds.program)
        masked.draft(3, k, 64, StepFeatures(biases=True))
        masked.verify(3, k, 64)
        if not RULES[rule].independent:
            masked.accept_and_commit(3, k, StepFeatures(biases=True, masks=True))


@pytest.mark.parametrize("model", ["llama", "hybrid", "dspark"])
def test_a_round_of_trees_reads_nothing_from_the_device(model: str) -> None:
    rounds = runner(ReferenceOps(), RULES["coupled"], model, width=2)
    with torch.inference_mode(), NoHostReads():
        rounds.program.run(3, 3, 64)
        rounds.program.run(3, 3, 64, StepFeatures(cuts=True))


@pytest.mark.parametrize(
    ("alone", "rule", "model"),
    [
        (True, "coupled", "llama"),
        *((False, rule, model) for rule in ("coupled", "rejection") for model in ("llama", "dflash2")),
    ],
)
def test_a_round_of_ngram_drafts_reads_nothing_from_the_device(alone: bool, rule: str, model: str) -> None:
    """One is longer than a block drafter's."""
    program = runner(ReferenceOps(), RULES[rule], model).program
    draft = None if alone else program.drafter.decoder
    program.drafter = device_drafter(program.target, draft, program.batch, copies=True)
    with torch.inference_mode(), NoHostReads():
        program.run(3, 3, 64)
        program.run(3, 6, 64, StepFeatures(adjusts=True, cuts=True, logprobs=5), references=True)


def test_a_round_in_parts_is_the_whole_round() -> None:
    """N-gram drafts replace the model's where the match is long enough, and the parts pass on which."""
    programs, least = [runner(ReferenceOps(), RULES["synthetic"]).program for _ in range(2)], [1, 99, 2]
    for program in programs:
        program.drafter = device_drafter(program.target, program.drafter.decoder, program.batch, copies=True)
        program.set_limits([3] * 3, least)
    (whole, parted), replaced = programs, 0
    masked = MaskedProgram(parted)
    with torch.inference_mode():
        for _ in range(8):
            found = ngram_draft(whole.rows(3, NOTHING), 3, 64)[1].tolist()
            record = whole.run(3, 3, 64)
            masked.draft(3, 3, 64, NOTHING)
            masked.verify(3, 3, 64)
            assert torch.equal(masked.accept_and_commit(3, 3, NOTHING), record)
            enough = [size if size >= needed else 0 for size, needed in zip(found, least, strict=True)]
            assert record[:, -1].tolist() == enough
            replaced += sum(map(bool, enough))
            assert torch.equal(*(program.drafter.decoder.num_computed_tokens for program in programs))  # type: ignore[union-attr]
    assert replaced > 3


@pytest.mark.parametrize(("vocabulary", "k"), [(2, 7), (4, 1), (50, 7)])
def test_the_devices_ngram_drafts_equal_the_hosts(vocabulary: int, k: int) -> None:
    """Rows of many lengths, 1 included, with stale tokens behind their ends."""
    texts = torch.randint(vocabulary, (24, 90), generator=torch.Generator().manual_seed(k))
    length = 3 * torch.arange(24) + 1
    rows = Slots.listed(range(24), texts.device)
    draft_tokens, matched = copied(texts, rows, length, k, LONGEST_SUFFIX)
    by_kernel = copied(texts, rows, length, k, LONGEST_SUFFIX, TritonOps().last_match)
    assert torch.equal(by_kernel[1], matched)
    assert torch.equal(by_kernel[0][matched > 0], draft_tokens[matched > 0])
    found = HostLookup(()).find(SearchedRows(texts, length, range(24)), k)
    assert matched.tolist() == found.matched
    for row, (size, expected) in enumerate(zip(found.matched, found.draft_tokens, strict=True)):
        assert not size or draft_tokens[row].tolist() == expected
    assert any(found.matched)


def test_the_devices_drafts_from_references_equal_the_hosts() -> None:
    """Texts of all lengths one after the other in a line: no match spans two, and a continuation ends with its text."""
    generator, k = torch.Generator().manual_seed(3), 4
    texts = torch.randint(3, (40, 30), generator=generator)
    length, batch = torch.arange(40) % 30 + 1, new_batch(40, 200, VOCAB)
    lookup, sources = HostLookup(()), []
    for row in range(40):
        parts = torch.randint(3, (row % 4 + 1, 1 + row // 2), generator=generator).tolist()
        sources.append(CopySources(lookup.texts(parts)))
        sample = ParallelSample(RequestGroup(parts), 0)
        batch.set_row(row, RowStart([1], SamplingParams(), row, sample=sample))
    batch.set_live(range(40))
    references = References(batch)
    assert references.follow(batch)
    rows = Slots.listed(range(40), texts.device)
    suffix = suffix_of(texts, rows, length, LONGEST_SUFFIX)
    found, count, matched = copied_from(references.table, rows, references.size, suffix, k)
    own = copied(texts, rows, length, k, LONGEST_SUFFIX)[1]
    by_kernel = copied_from(references.table, rows, references.size, suffix, k, TritonOps().last_match)
    for one, other in zip(by_kernel, (found, count, matched), strict=True):
        assert torch.equal(one[matched > 0], other[matched > 0])
    expected = lookup.find(SearchedRows(texts, length, range(40), sources), k)
    longer = [row for row in range(40) if matched[row] > own[row]]
    assert len(longer) > 5
    assert torch.maximum(matched, own).tolist() == expected.matched
    for row in longer:
        tokens = found[row, : count[row]].tolist()
        if expected.shares[row] == WHOLE:  # the host takes what most matches go on with
            assert tokens[0] == expected.draft_tokens[row][0]


def test_a_draft_models_cache_follows_rows_with_ngram_drafts() -> None:
    """After every round the cache holds what a pass over the row's text gives, however many tokens it lacks."""
    engine = make_engine(ToyModel(), ToyModel(blur=0.3), drafter="hybrid", rounds="device", attention="padded")
    policy, seen, batch = engine.use_policy(RandomLength(longest=12)), Counter[tuple[bool, bool]](), engine.batch
    fresh = Decoder(ToyModel(blur=0.3), ReferenceAttention(), batch.capacity, batch.positions, VOCAB)
    (decoder,) = engine.parts.decoders[1:]

    def observe(_batch: Batch, verdict: Verdict) -> None:
        rows = zip(verdict.accepted, verdict.drafted, verdict.matched or [], strict=False)
        seen.update((matched > 0, accepted > 0) for accepted, _, matched in rows)

    policy.observe = observe  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=50)
    alone = run(make_engine(ToyModel()), PROMPTS[:6], [params] * 6)
    for prompt, output in zip(PROMPTS, alone, strict=False):  # every 13th token of a reference is wrong
        text = [(token + (i % 13 == 12)) % VOCAB for i, token in enumerate(output.outputs[0].token_ids)]
        engine.add(Request(prompt, params, references=[text]))
    while engine.busy:
        engine.step()
        for slot in batch.slots:
            computed = int(decoder.num_computed_tokens[slot])
            assert computed < int(batch.length[slot])
            fresh.prefill(batch, [slot], [0], [computed])
            for held, expected in zip(decoder.cache.tables, fresh.cache.tables, strict=True):
                assert torch.equal(held[:, slot, :, :computed], expected[:, slot, :, :computed])
    assert engine.rounds.counts["host"] == 0
    assert min(seen[True, False], seen[True, True], seen[False, True]) > 3


@pytest.mark.parametrize("drafter", ["ngram", "hybrid"])
def test_requests_with_references_and_samples_stay_on_the_device(drafter: str) -> None:
    """A reference that is the answer is copied; the rows beside it have none, and slots are used again."""
    plain = answers(run(make_engine(ToyModel(), eos=EOS), PROMPTS, PARAMS))
    engine = engine_on("device", drafter=drafter, max_batch_size=4)
    saved = {}
    for given in (False, True):
        outputs = []
        for row, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            texts = [[3, 4, 5], [*prompt, *plain[row][0]]] if given and row % 2 == 0 else []
            outputs.append(engine.add(Request(prompt, params, references=texts)))
        while engine.busy:
            engine.step()
        assert answers(outputs) == plain
        saved[given] = sum(outputs[row].outputs[0].metrics.rounds for row in range(0, 10, 2))
    assert saved[True] < 0.7 * saved[False]
    assert engine.rounds.counts["host"] == 0
    assert "by the host" not in engine.describe()


@pytest.mark.parametrize("read", [lambda t: t.tolist(), lambda t: t[t > 0], lambda t: bool(t.any()), torch.nonzero])
def test_the_check_for_host_reads_can_fail(read: Callable[[Tensor], object]) -> None:
    with pytest.raises(AssertionError), NoHostReads():
        read(torch.arange(3))


@pytest.mark.parametrize(("k", "options"), [(4, {}), ("auto", {}), (4, BLOCK)], ids=str)
def test_the_loop_reads_only_one_record_per_round(
    monkeypatch: pytest.MonkeyPatch, k: int | str, options: dict[str, Any]
) -> None:
    engine = engine_on("device", num_speculative_tokens=k, **options)
    for prompt in PROMPTS[:4]:
        engine.add(Request(prompt, SamplingParams(max_tokens=60, seed=1)))
    engine.step()
    watchdog, read, reads = NoHostReads(), Ticket.read, []

    def counted(ticket: Ticket) -> list[list[int]]:
        watchdog.allowed = True
        reads.append(read(ticket))
        watchdog.allowed = False
        return reads[-1]

    monkeypatch.setattr(Ticket, "read", counted)
    with watchdog:
        for _ in range(5):
            assert engine.step()
    assert len(reads) == 5


@pytest.mark.parametrize("theirs", [tiny_qwen3_5, tiny_lfm2, tiny_granite_hybrid, tiny_falcon_h1])
def test_states_without_kernels_stay_on_the_host_and_the_start_line_says_so(
    theirs: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = in_torch(theirs())
    engine = make_engine(target, rounds="host")
    monkeypatch.setattr(target, "device", torch.device("cuda"))
    monkeypatch.setattr(target, "steps", TritonSteps())
    assert "rounds by the host (rounds='host'); " in engine.describe()
    monkeypatch.setattr(target, "steps", TorchSteps())
    assert "rounds by the host (recurrent layers run token by token); " in engine.describe()


def test_rounds_of_experts_stay_on_the_host_without_kernels_and_the_start_line_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = load_model(tiny(*NATIVE["qwen3_moe"]), dtype=torch.float32)
    engine = make_engine(target, rounds="host", max_model_len=64)
    monkeypatch.setattr(target, "device", torch.device("cuda"))
    assert "rounds by the host (the experts that a router chose are read on the host); " in engine.describe()
    monkeypatch.setattr(target, "steps", TritonSteps())
    assert "rounds by the host (rounds='host'); " in engine.describe()


def test_a_round_of_experts_in_the_kernels_is_torchs_and_reads_nothing_from_the_device() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from paceline.kernels.gpu.experts import GroupedProducts
    from paceline.kernels.gpu.linear import LinearTile

    runners = [runner(ReferenceOps(), DeviceAcceptance(), "experts", rows=2) for _ in range(2)]
    runners[1].program.target.model.steps = TritonSteps()  # type: ignore[attr-defined]
    with torch.inference_mode(), mock.patch.object(GroupedProducts, "_tile", return_value=LinearTile(32, 64)):
        expected = read_record(runners[0].run(2, 2, 64).read())
        with NoHostReads():
            record = runners[1].program.run(2, 2, 64)
    assert read_record(record.tolist()) == expected


@pytest.mark.usefixtures("four_lengths")
def test_costs_of_ngram_drafts_are_measured_with_different_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture routes equal tokens to the same experts, and would read too few."""
    forward, drafts = Decoder.forward, list[Tensor]()

    def watched(decoder: Decoder, tokens: Tensor, *given: Any, **more: Any) -> Tensor:
        drafts.extend(tokens[:, 1:] if tokens.shape[1] == 8 else ())
        return forward(decoder, tokens, *given, **more)

    monkeypatch.setattr(Decoder, "forward", watched)
    engine_on("device", drafter="ngram", num_speculative_tokens="auto", max_batch_size=2)
    assert drafts
    assert all(len(set(tokens.tolist())) > 2 for tokens in drafts)


@pytest.mark.parametrize(
    ("rule", "model", "attention"),
    [
        *((rule, "llama", "padded") for rule in RULES),
        ("coupled", "dspark", "ragged"),
        ("rejection", "dflash2", "ragged"),
    ],
)
def test_kernels_and_reference_run_equal_rounds(rule: str, model: str, attention: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    kernels, torchs = (TritonOps(), attention), (ReferenceOps(), "padded")
    rows, lengths = (3, (2, 0, 1)) if attention == "padded" else (2, (2, 1))
    runners = [runner(ops, RULES[rule], model, rows, attention=backend) for ops, backend in (kernels, torchs)]
    with torch.inference_mode():
        for k in lengths:
            one, other = (read_record(p.run(rows, k, 60).read()) for p in runners)
            assert one == other


def test_kernels_and_reference_run_equal_tree_rounds() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    runners = [runner(ops, DeviceAcceptance(), width=2) for ops in (TritonOps(), ReferenceOps())]
    with torch.inference_mode():
        for k in (2, 3, 1):
            one, other = (read_trees(p.run(3, k, 60).read(), 2) for p in runners)
            assert one == other
            runners[0].batch.length.copy_(runners[1].batch.length)


@pytest.mark.parametrize("model", ["llama", "dspark"])
def test_idle_rows_keep_their_text_and_caches(model: str) -> None:
    rounds = runner(ReferenceOps(), DeviceAcceptance(), model)
    batch = rounds.batch
    batch.set_live(range(2))  # row 2 is not live
    batch.limit[1] = batch.lengths[1]  # row 1 has no room
    draft = rounds.drafter.decoder
    assert draft is not None
    text, seen = batch.text.clone(), draft.num_computed_tokens.clone()
    with torch.inference_mode():
        gains = read_record(rounds.run(2, 3, 60).read()).gained
    assert gains[0] > 0
    assert gains[1:] == [0] * (len(gains) - 1)
    assert batch.length.tolist() == [batch.lengths[0] + gains[0], batch.lengths[1], batch.length_of(2)]
    assert torch.equal(batch.text[1:], text[1:])
    assert draft.num_computed_tokens[2] == seen[2]


def test_a_round_with_all_rows_idle_changes_nothing() -> None:
    rounds = runner(ReferenceOps(), DeviceAcceptance())
    draft = rounds.drafter.decoder
    assert draft is not None
    before = rounds.batch.text.clone(), rounds.batch.length.clone(), draft.num_computed_tokens.clone()
    with torch.inference_mode(), rounds._all_rows_idle():
        rounds.program.run(3, 3, 64)
    after = rounds.batch.text, rounds.batch.length, draft.num_computed_tokens
    assert all(torch.equal(b, a) for b, a in zip(before, after, strict=True))
    assert rounds.batch.live.item() == 3


@pytest.mark.parametrize(("live", "bucket"), [(1, 1), (3, 4), (5, 8), (33, 40), (40, 40)])
def test_rows_run_in_buckets(live: int, bucket: int) -> None:
    batch = new_batch(40, POSITIONS, VOCAB)
    from paceline.kernels.attention import make_backend

    target = Decoder(ToyModel(), make_backend("padded", torch.device("cpu")), 40, POSITIONS, VOCAB)
    program = RoundProgram(target, DeviceDrafter(), batch, DeviceAcceptance())
    assert DeviceRound(program).bucket(live) == bucket


# --- what carries it --------------------------------------------------------------------------------------------------


def test_a_record_stays_readable_while_later_ones_arrive() -> None:
    ring = Ring(torch.device("cpu"), 12)
    tickets = [ring.push(torch.full((2, 3), number)) for number in range(4)]
    assert [ticket.read() for ticket in tickets] == [[[number] * 3] * 2 for number in range(4)]


def test_an_upload_reaches_a_tensor_that_never_moves() -> None:
    upload = Upload(torch.device("cpu"), [1, 2])
    place = upload.device.data_ptr()
    for numbers in ([3, 4], [3, 4], [5, 6], [1, 2], [7, 8], [9, 9]):
        upload.set(numbers)
        assert upload.device.tolist() == numbers
    assert upload.device.data_ptr() == place


# --- what is refused and what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"attention": "split"}, "split"),
        ({"drafter": "hybrid", "documents": [[1, 2]]}, "the drafter runs on the host"),
        ({"drafter": "ngram", "speculation_width": 2}, "the drafter runs on the host"),
    ],
)
def test_rounds_that_the_device_cannot_run_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ParameterError, match=f"rounds='device'.*{why}.*'host' is"):
        engine_on("device", **options)


def test_device_rounds_are_refused_for_the_cpu_kernels() -> None:
    with pytest.raises(ParameterError, match="CPU kernels"):
        make_engine(FlatToy(), rounds="device")


def test_the_start_line_says_where_rounds_run() -> None:
    assert "rounds by the device (uncaptured, torch kernels)" in engine_on("device").describe()
    assert "rounds by" not in engine_on("auto").describe()


@pytest.mark.parametrize("part", [{"drafter": Scripted({})}, {"policy": RandomSelection()}])
def test_the_start_line_follows_exchanged_parts(part: dict[str, Any]) -> None:
    engine = engine_on("device")
    for name, other in part.items():
        setattr(engine.parts, name, other)
    assert "rounds by the device" not in engine.describe()


def test_a_length_policy_that_reads_draft_tokens_is_refused_on_the_device() -> None:
    with pytest.raises(ParameterError, match="reads draft tokens"):
        engine_on("device", num_speculative_tokens=RandomSelection())
