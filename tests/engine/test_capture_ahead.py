"""Rounds captured before requests come: which, in which order, until when; and that nothing else changes.

There is no CUDA here: the replacement of a graph runs its program again at each replay.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batches import new_batch
from engine.test_device_round import EOS, PARAMS, PROMPTS, engine_on, with_grammars
from paceline.config import MAX_SPECULATION_LENGTH, SamplingParams
from paceline.core.outputs import RequestOutput
from paceline.core.rows import NOTHING, StepFeatures
from paceline.core.values import DeviceAcceptance
from paceline.engine.engine import Engine, Request
from paceline.engine.rounds.device_drafters import device_drafter
from paceline.engine.rounds.device_round import DeviceRound
from paceline.engine.rounds.likely import MISSED, likely_lengths, likely_programs
from paceline.engine.rounds.program import RoundProgram
from paceline.engine.sharing import SharedEngine
from paceline.kernels.attention import make_backend
from paceline.kernels.gpu import ahead
from paceline.kernels.gpu.graphs import Graphs, Named, Program
from paceline.lengths import FixedLength, LengthPolicy
from paceline.lengths.auto import AutoLength
from paceline.lengths.base import FIRST, BassLength, ProfiledLength
from paceline.lengths.by_position import DEPTHS
from paceline.lengths.calibration import Grid
from paceline.lengths.cost import CostModel
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.draft_decoder import DraftDecoder
from simulation import linear_costs
from toy import VOCAB, ToyModel, answers, make_engine, run

pytestmark = pytest.mark.usefixtures("one_thread")

CUTS = StepFeatures(cuts=True)
PLENTY = 1e9  # seconds
CHATS = [replace(each, top_p=0.8) if place % 3 == 1 else each for place, each in enumerate(PARAMS)]


class Practised:
    """Replaces a CUDA graph: a replay runs the program again and writes into the result of its first run."""

    def __init__(self, program: Program) -> None:
        self.program, self.result = program, program()

    def replay(self) -> None:
        self.result.copy_(self.program())


class Machine:
    """Counts captures: each takes a second and a byte of ``memory``."""

    def __init__(self) -> None:
        self.captures, self.memory = 0, 10**6

    def capture(self, graphs: Graphs, program: Program) -> tuple[Practised, torch.Tensor, int]:
        self.captures += 1
        with graphs._idle():
            graph = Practised(program)
        return graph, graph.result, 0


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Capture rounds of the device with known time and memory."""
    made, begin = Machine(), Graphs.__init__

    def begin_capturing(graphs: Graphs, *given: Any, **more: Any) -> None:
        begin(graphs, *given, **more)
        graphs.captures = True

    monkeypatch.setattr(Graphs, "__init__", begin_capturing)
    monkeypatch.setattr(Graphs, "_capture", lambda graphs, program: made.capture(graphs, program))
    monkeypatch.setattr(ahead, "available_memory", lambda _device: made.memory - made.captures)
    monkeypatch.setattr(ahead, "time", SimpleNamespace(perf_counter=lambda: float(made.captures)))
    return made


def graphs_of(engine: Engine) -> Graphs:
    assert engine._device_round is not None
    return engine._device_round.graphs


def runner(rows: int, positions: int = 96, draft: bool = True) -> DeviceRound:
    backend = make_backend("padded", torch.device("cpu"))
    sizes = backend, rows, positions, VOCAB
    target = Decoder(ToyModel(max_positions=positions), *sizes)
    drafting = DraftDecoder(ToyModel(max_positions=positions), *sizes)
    batch = new_batch(rows, positions, VOCAB)
    drafter = device_drafter(target, drafting if draft else None, batch)
    return DeviceRound(RoundProgram(target, drafter, batch, DeviceAcceptance()))


def likely(rounds: DeviceRound, policy: LengthPolicy) -> list[Hashable]:
    return [key for key, _ in likely_programs(rounds, policy)]


# --- what comes first -------------------------------------------------------------------------------------------------


def test_one_row_and_all_rows_come_first_and_all_buckets_share_each_length() -> None:
    keys = likely(runner(5), FixedLength(2))
    lines = [(k, bucket, asks) for asks in (NOTHING, CUTS) for k in (2, 1, 0) for bucket in (1, 5, 2, 4)]
    assert keys == [(bucket, k, 97, asks) for k, bucket, asks in lines]


def test_short_spans_come_first_with_padded_attention() -> None:
    keys = likely(runner(1, positions=600), FixedLength(1))
    assert keys == [(1, k, span, asks) for span in (256, 512, 601) for asks in (NOTHING, CUTS) for k in (1, 0)]


def test_catch_up_programs_come_before_rarer_requests() -> None:
    keys = likely(runner(2), LengthPolicy())
    rounds = [(bucket, k, 97) for k in range(MAX_SPECULATION_LENGTH + 1) for bucket in (1, 2)]
    missed = [("catch up", bucket, width, 97) for width in MISSED for bucket in (1, 2)]
    assert keys == [*((*each, NOTHING) for each in rounds), *missed, *((*each, CUTS) for each in rounds)]


def test_without_a_draft_model_only_plain_rounds_are_captured() -> None:
    assert likely(runner(1, draft=False), LengthPolicy()) == [(1, 0, 97, NOTHING), (1, 0, 97, CUTS)]
    assert likely(runner(1), FixedLength(0)) == [(1, 0, 97, NOTHING), (1, 0, 97, CUTS)]


@pytest.mark.parametrize(
    ("policy", "first", "all_lengths"),
    [
        (FixedLength(4), [4, 3, 2, 1, 0], range(5)),
        (BassLength(), [FIRST, FIRST - 1, FIRST + 1, FIRST - 2], range(MAX_SPECULATION_LENGTH + 1)),
        (ProfiledLength({1: 5, 8: 2}), [2, 1, 3, 0, 4, 5], range(6)),
        (AutoLength(CostModel(linear_costs()), ranks=False), [0, 1, 2, 3], (0, *DEPTHS)),
    ],
)
def test_all_lengths_of_a_policy_are_listed_the_likeliest_first(
    policy: LengthPolicy, first: list[int], all_lengths: Sequence[int]
) -> None:
    told = likely_lengths(policy, 8)
    assert told[: len(first)] == first
    assert sorted(told) == list(all_lengths)


# --- until when -------------------------------------------------------------------------------------------------------


def programs(count: int) -> list[Named]:
    return [(number, lambda: torch.zeros(1)) for number in range(count)]


@pytest.fixture
def graphs() -> Graphs:
    return Graphs(torch.device("cpu"))


def test_all_programs_are_captured_given_time_and_memory(graphs: Graphs) -> None:
    done = ahead.capture_ahead(graphs, programs(5), PLENTY)
    assert done == ahead.Ahead(5, 5.0)
    assert str(done) == "5 programs captured ahead as graphs in 5.0 s: all likely ones"
    assert sorted(graphs.keys, key=str) == list(range(5))


@pytest.mark.parametrize(("seconds", "captured"), [(0, 0), (2.5, 3), (3, 3)])
def test_capture_ends_when_time_is_up(graphs: Graphs, seconds: float, captured: int) -> None:
    done = ahead.capture_ahead(graphs, programs(5), seconds)
    assert (done.captured, done.left) == (captured, 5 - captured)
    assert len(graphs.keys) == captured
    assert f"{5 - captured} likely ones will be captured at first use" in str(done)
    assert str(done).endswith(f"the limit of {seconds:g} s was reached")


def test_capture_ends_when_memory_is_short(graphs: Graphs, machine: Machine) -> None:
    machine.memory = 10
    done = ahead.capture_ahead(graphs, programs(9), PLENTY)
    assert (done.captured, done.left) == (6, 3), "the one that takes it below half is the last"
    assert "less than 50% of the memory" in str(done)


def test_no_used_graph_is_evicted_for_one_captured_ahead(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.kernels.gpu.graphs.MOST_GRAPHS", 4)
    graphs.run("used", lambda: torch.zeros(1))
    done = ahead.capture_ahead(graphs, programs(9), PLENTY)
    assert (done.captured, done.left) == (3, 6)
    assert "graphs are kept at a time" in str(done)
    assert graphs.keys == [2, 1, 0, "used"], "of unused graphs the likeliest is evicted last"


def test_captured_programs_are_not_captured_again(graphs: Graphs, machine: Machine) -> None:
    for key in (1, 3):
        graphs.run(key, lambda: torch.zeros(1))
    assert ahead.capture_ahead(graphs, programs(5), PLENTY).captured == 3
    assert ahead.capture_ahead(graphs, programs(5), PLENTY) == ahead.Ahead(0, 0.0)
    assert machine.captures == 5


def test_progress_gets_the_list_of_programs(graphs: Graphs) -> None:
    seen: list[Hashable] = []

    def progress(wanted: Sequence[Named]) -> Iterable[Named]:
        seen.extend(key for key, _ in wanted)
        return wanted

    graphs.run(1, lambda: torch.zeros(1))
    ahead.capture_ahead(graphs, programs(3), PLENTY, progress)
    assert seen == [0, 2]


# --- then requests come -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_requests_need_no_further_captures(machine: Machine, drafter: str, k: int) -> None:
    """First one request per row, then more, then a single one; all end at different times."""
    engine = engine_on("device", drafter=drafter, num_speculative_tokens=k, max_batch_size=5)
    done = engine.capture_ahead(PLENTY)
    assert done is not None
    assert done.left == 0
    known = machine.captures
    for some in (slice(5), slice(None), slice(3, 4)):
        run(engine, PROMPTS[some], [replace(each, n=1) for each in CHATS[some]])
    assert machine.captures == known == len(graphs_of(engine).keys)


@pytest.mark.parametrize(("model", "k"), [("toy", 0), ("toy", 2), ("llama", 4)])
def test_outputs_are_the_same_after_captures(machine: Machine, model: str, k: int) -> None:
    """Includes prompts that reuse prefixes of free rows, some of which are full."""
    full = SamplingParams(max_tokens=500, ignore_eos=True, seed=3)
    found = []
    for seconds in (PLENTY, 0):
        engine = engine_on("device", model, num_speculative_tokens=k, prefix_cache=True)
        before = answers(run(engine, [*PROMPTS[:3], PROMPTS[5]], [*CHATS[:3], full]))
        captured, state = machine.captures, [engine.batch.text.clone(), engine.batch.length.clone()]
        done = engine.capture_ahead(seconds)
        assert done is not None
        assert done.captured == machine.captures - captured
        assert (done.captured == 0) == (seconds == 0)
        assert all(map(torch.equal, state, [engine.batch.text, engine.batch.length]))
        more = [prompt + answer[0][:-1] for prompt, answer in zip(PROMPTS[:3], before, strict=False)]
        found.append([before, answers(run(engine, [*more, *PROMPTS], [*CHATS[:3], *CHATS]))])
    assert found[0] == found[1]


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_rounds_with_grammars_are_captured_in_parts(machine: Machine, drafter: str) -> None:
    """What one part leaves to the next survives the captures between; and a second time nothing is captured."""
    plain, captures = make_engine(ToyModel(), eos=EOS), []
    expected = answers(run_all(plain, with_grammars(PROMPTS, PARAMS)))
    engine = engine_on("device", drafter=drafter, num_speculative_tokens=3, max_batch_size=4)
    for _ in range(2):
        captures.append(machine.captures)
        assert answers(run_all(engine, with_grammars(PROMPTS, PARAMS))) == expected
    assert captures[1] > captures[0] or drafter == "ngram"
    parts = {key[0] for key in graphs_of(engine).keys if isinstance(key, tuple)}
    assert parts >= {"draft", "forward", "accept"}
    assert machine.captures == captures[1]


def run_all(engine: Engine, requests: Iterable[Request]) -> list[RequestOutput]:
    outputs = [engine.add(request) for request in requests]
    while engine.busy:
        engine.step()
    return outputs


def test_costs_are_measured_before_and_after(machine: Machine) -> None:
    """Programs captured by calibration are not captured again, and its rows are freed."""
    engine = engine_on("device", num_speculative_tokens="auto")
    measured = machine.captures
    assert measured > 0
    done = engine.capture_ahead(PLENTY)
    assert done is not None
    assert machine.captures == len(graphs_of(engine).keys) == measured + done.captured
    engine.measure_costs(Grid((1, 4), (0, 3), seconds=0))
    assert machine.captures == measured + done.captured
    plain = engine_on("host", drafter=None, num_speculative_tokens=0)
    assert answers(run(engine, PROMPTS, PARAMS)) == answers(run(plain, PROMPTS, PARAMS))


def test_the_number_of_graphs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.kernels.gpu.graphs.MOST_GRAPHS", 12)
    engine = engine_on("device")
    done = engine.capture_ahead(PLENTY)
    assert done is not None
    assert done.left > 0
    found = answers(run(engine, PROMPTS, CHATS))
    assert len(graphs_of(engine).keys) == done.captured == 12
    assert found == answers(run(engine_on("host"), PROMPTS, CHATS))


def test_an_engine_without_captures_reports_none() -> None:
    engine = engine_on("device")
    graphs_of(engine).captures = False
    assert engine.capture_ahead(PLENTY) is None
    assert make_engine(ToyModel(), eos=EOS, rounds="host").capture_ahead(PLENTY) is None


def test_a_call_of_an_llm_captures_the_rounds_that_it_will_need(machine: Machine) -> None:
    """Up to its number of rows, and for a part of the time that it takes; the next call needs no more of them."""
    engine = engine_on("device", num_speculative_tokens=2, max_batch_size=8)
    shared = SharedEngine(engine)

    def call(rows: int, tokens: int) -> set[int]:
        params = SamplingParams(temperature=0, max_tokens=tokens)
        with shared.call([Request(PROMPTS[1], params) for _ in range(rows)]) as begun:
            found = {key[0] for key in graphs_of(engine).keys if isinstance(key[0], int)}  # type: ignore[index]
            for _ in begun:
                pass
        return found

    assert call(1, 500) == {1}
    assert call(2, 9000) == call(2, 9000) == {1, 2}
    before = machine.captures
    assert before == 12  # three lengths, with and without cuts, in two calls of at most ten
    call(2, 9000)
    assert machine.captures == before
    assert call(8, 9000) == {1, 2, 4, 8}
