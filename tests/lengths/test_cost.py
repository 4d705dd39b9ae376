"""The cost model: tables, interpolation, and correction by real rounds."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from paceline.lengths.cost import GREEDY, CostModel, CostTable, RoundKind, RoundTimes, interpolate
from simulation import linear_costs

TABLE = CostTable((1, 4), (0, 1, 3), 100, ((10, 11, 13), (13, 17, 25)), (2, 2), (1, 4))


@pytest.mark.parametrize(("x", "y"), [(1, 10), (2, 15), (3, 20), (5, 40), (6, 50), (0, 5), (-9, 0)])
def test_interpolation_goes_on_beyond_its_ends_and_never_below_zero(x: float, y: float) -> None:
    assert interpolate((1, 3, 5), (10, 20, 40), x) == y


def test_beyond_the_last_point_the_line_begins_in_the_middle_for_the_last_step_may_be_noise() -> None:
    assert interpolate((0, 1, 2, 3, 4), (10, 11, 12, 12, 16), 8) == 16 + 4 * 2


def test_one_point_is_a_constant() -> None:
    assert interpolate((4,), (7.0,), 100) == 7


@pytest.mark.parametrize(
    ("rows", "k", "ms"),
    [(1, 0, 10), (1, 2, 12), (1, 7, 17), (4, 1, 17), (4, 2, 21), (2, 1, (13 * 2 + 13 * 1) / 3)],
    ids=["measured", "between", "beyond", "measured at 4", "between at 4", "same tokens at both sizes"],
)
def test_verification_is_a_function_of_tokens_and_of_rows(rows: int, k: int, ms: float) -> None:
    assert TABLE.verify_ms(rows, k) == pytest.approx(ms)


def test_drafting_costs_nothing_without_draft_tokens_and_a_step_for_each() -> None:
    assert [TABLE.draft_ms(1, k) for k in (0, 1, 2)] == [0, 3, 4]
    assert TABLE.draft_ms(2, 2) == pytest.approx(2 + 2 * 2)


def test_context_costs_by_row_and_by_token() -> None:
    table = linear_costs(context_once=0.01, context_token=0.001)
    more = table.verify_ms(2, 3, context=300) - table.verify_ms(2, 3, context=100)
    assert more == pytest.approx(2 * 200 * (0.01 + 4 * 0.001))
    assert CostModel(table).times(2, 300).ms[2 * 3] == pytest.approx(table.round_ms(2, 3, 300))


def test_a_round_of_more_draft_tokens_than_the_table_has_changes_nothing() -> None:
    """A trial of a wide tree verifies all of its tokens; it says nothing about other rounds."""
    model = CostModel(TABLE)
    before = model.times(1, 100).ms
    model.observe(1, len(before), 100, 1000 * before[-1])
    assert CostModel(TABLE).times(1, 100).ms == before == model.times(1, 100).ms


def test_a_table_survives_json() -> None:
    import json

    assert CostTable.from_json(json.loads(json.dumps(TABLE.as_json()))) == TABLE


def test_a_table_of_a_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer or more times than sizes"):
        CostTable.from_json(TABLE.as_json() | {"batch_sizes": [1, 2, 3]})


SAMPLED = RoundKind(greedy=False)


def ms(model: CostModel, rows: int, k: int, kind: RoundKind = GREEDY) -> float:
    """Predicted milliseconds of a round with k draft tokens per row."""
    model._times.clear()
    return model.times(rows, 100, kind).ms[rows * k]


def test_real_rounds_correct_the_level_and_the_cost_of_draft_tokens() -> None:
    model = CostModel(linear_costs())
    plain, three, five = (ms(model, 4, k) for k in (0, 3, 5))
    for _ in range(100):
        model.observe(4, 12, 100, 2 * three)
    assert ms(model, 4, 3) == pytest.approx(2 * three, rel=0.05)
    assert ms(model, 4, 5) == pytest.approx(2 * five, rel=0.15)  # nothing else is known of it
    for _ in range(100):
        model.observe(4, 0, 100, plain)
        model.observe(4, 12, 100, 2 * three)
    assert ms(model, 4, 0) == pytest.approx(plain, rel=0.05)
    assert ms(model, 4, 3) == pytest.approx(2 * three, rel=0.05)


def test_the_cost_of_draft_tokens_is_remembered_over_plain_rounds() -> None:
    model = CostModel(linear_costs())
    plain, three = ms(model, 4, 0), ms(model, 4, 3)
    for _ in range(40):
        model.observe(4, 12, 100, 2 * three)
        model.observe(4, 0, 100, plain)
    for _ in range(2000):
        model.observe(4, 0, 100, plain)
    assert ms(model, 4, 3) > 1.7 * three


def test_correction_averages_noise_and_survives_a_pause_of_the_machine() -> None:
    model, rng = CostModel(linear_costs()), random.Random(0)
    true = 1.3 * ms(model, 1, 2)
    for number in range(200):
        pause = 50 if number % 40 == 39 else 1
        model.observe(1, 2, 100, true * math.exp(rng.gauss(0, 0.1)) * pause)
    assert ms(model, 1, 2) == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_three_rounds_that_contradict_the_table_by_more_than_twice_are_believed(factor: float) -> None:
    """Two may be a pause of the machine."""
    costs, after = CostModel(TABLE), []
    plain = costs.times(1, 100).plain
    for _ in range(3):
        costs.observe(1, 0, 100, factor * plain)
        after.append(costs.times(1, 100).plain / plain)
    assert abs(math.log(after[1])) < math.log(2)
    assert after[2] == pytest.approx(factor)


def test_rows_share_what_they_learn_with_batches_of_about_their_size_only() -> None:
    model = CostModel(linear_costs())
    for _ in range(50):
        model.observe(3, 3, 100, 3 * float(model.table.round_ms(3, 1)))
        model.observe(1, 1, 100, float(model.table.round_ms(1, 1)))
    assert ms(model, 4, 1) / model.table.round_ms(4, 1) > 2
    assert ms(model, 1, 1) / model.table.round_ms(1, 1) < 1.2


EXPERTS, USED = 128, 8  # of a layer, and of a token; experts are chosen at random
SHARED_BYTES = 20.0  # of attention and head, in bytes of one expert


def mixture(sizes: tuple[int, ...] = (1, 8), lengths: tuple[int, ...] = (0, 1, 3, 7, 15)) -> CostTable:
    """Costs of a mixture of experts whose rounds take the time of reading its weights."""
    tokens = [[size * (length + 1) for length in lengths] for size in sizes]
    read = tuple(
        tuple(SHARED_BYTES + EXPERTS * (1 - (1 - USED / EXPERTS) ** count) for count in line) for line in tokens
    )
    return CostTable(sizes, lengths, 100, read, (0.0,) * len(sizes), (0.0,) * len(sizes))


def test_a_mixture_of_experts_pays_for_the_experts_that_draft_tokens_add() -> None:
    """Verifying 3 draft tokens for each of 8 rows reads most experts that one token for each did not."""
    dense = CostModel(replace(mixture(), verify=((70.0, 70.1, 70.3, 70.7, 71.5),) * 2))
    costs = CostModel(mixture())
    assert costs.times(8, 100).extra(8 * 3) > 0.6 * costs.times(8, 100).plain
    assert dense.times(8, 100).extra(8 * 3) < 0.01 * dense.times(8, 100).plain
    gains = [[0.3, 0.09, 0.03]] * 8
    rates = [8 / model.times(8, 100).plain for model in (costs, dense)]  # tokens per ms of plain rounds
    counts = [
        model.times(8, 100).best(gains, rate, [0.0] * 8)[1] for model, rate in zip((costs, dense), rates, strict=True)
    ]
    assert counts[1] == [3] * 8
    assert counts[0] == [0] * 8


@pytest.mark.parametrize("rate", [0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("table", [mixture(), linear_costs(token=3.0)])
def test_the_best_set_of_draft_tokens_is_the_best_of_all_prefixes(table: CostTable, rate: float) -> None:
    times = CostModel(table).times(4, 100)
    lines = [[0.9, 0.8, 0.7, 0.2], [0.6, 0.5, 0.1], [0.95], []]
    ranked = sorted((gain for line in lines for gain in line), reverse=True)
    values = [sum(ranked[:n]) - rate * (times.extra(n)) for n in range(len(ranked) + 1)]
    value, counts = times.best(lines, rate, [0.0] * 4)
    assert value == pytest.approx(max(values))
    assert values[sum(counts)] == pytest.approx(max(values))


@pytest.mark.parametrize("first", range(3))
def test_of_equal_gains_those_of_the_row_with_the_earliest_deadline_come_first(first: int) -> None:
    """Only one is worth verifying: the weights are read anyway for one more token."""
    deadlines = [7.0 + (row - first) % 3 for row in range(3)]
    times = RoundTimes([10.0, 10.1, *(30.0 + 20.0 * more for more in range(40))], 0)
    assert times.best([[0.9]] * 3, 0.3, deadlines)[1] == [row == first for row in range(3)]


DRAFTS = linear_costs(draft_once=2.0, draft_step=10.0)


def test_drafts_without_observations_take_the_tables_time() -> None:
    model = CostModel(DRAFTS)
    assert (model.draft_ms(4, 1), model.draft_ms(4, 3), model.next_pass_ms(4)) == (12, 32, 10)


@pytest.mark.parametrize("factor", [1.5, 0.5])
def test_drafts_of_a_batch_size_are_corrected_by_one_ratio(factor: float) -> None:
    model = CostModel(DRAFTS)
    for _ in range(100):
        model.observe_draft(2, 3, factor * 32)
    assert model.draft_ms(2, 1) == pytest.approx(factor * 12, rel=0.03)
    assert model.next_pass_ms(2) == pytest.approx(factor * 10, rel=0.03)
    assert model.draft_ms(4, 1) == 12, "other batch sizes are other drafts"


def test_drafts_change_with_the_speed_of_the_machine_before_any_was_measured() -> None:
    model = CostModel(DRAFTS)
    for _ in range(50):
        model.observe(4, 0, 100, 2 * model.table.verify_ms(4, 0))
    assert model.draft_ms(4, 3) == pytest.approx(2 * 32, rel=0.05)


def test_a_drafting_pass_that_the_table_has_no_time_for_takes_some() -> None:
    assert CostModel(linear_costs(draft_once=10.0)).next_pass_ms(1) == 1
    block = CostModel(replace(linear_costs(draft_once=10.0), one_pass=True))
    assert (block.draft_ms(1, 7), block.next_pass_ms(1)) == (10, 0)


def test_rounds_of_different_kinds_have_times_of_their_own() -> None:
    """Sampled rounds take 1.5 times as long as greedy ones. A new kind begins with what the last one has taught."""
    model, plain = CostModel(linear_costs()), linear_costs().verify_ms(4, 0)
    for _ in range(60):
        model.observe(4, 0, 100, 1.2 * plain, GREEDY)
    assert ms(model, 4, 0, SAMPLED) == pytest.approx(1.2 * plain, rel=0.03)
    model.observe(4, 0, 100, 1.2 * plain, SAMPLED)
    assert ms(model, 4, 0, SAMPLED) == pytest.approx(1.2 * plain, rel=0.03)
    for _ in range(60):
        model.observe(4, 0, 100, 1.5 * plain, SAMPLED)
        model.observe(4, 0, 100, plain, GREEDY)
    assert ms(model, 4, 0, SAMPLED) == pytest.approx(1.5 * plain, rel=0.03)
    assert ms(model, 4, 0, GREEDY) == pytest.approx(plain, rel=0.03)


def test_times_of_different_contexts_are_independent() -> None:
    """Times for short texts (new requests) and for the current rows do not depend on the order of the calls."""
    model = CostModel(linear_costs(context_once=0.01))
    assert model.times(4, 100).plain == pytest.approx(11)
    assert model.times(4, 10_100).plain == pytest.approx(11 + 4 * 10_000 * 0.01)


def test_a_pause_of_the_machine_hardly_moves_the_time_of_drafts() -> None:
    model = CostModel(DRAFTS)
    for _ in range(50):
        model.observe_draft(1, 2, 22.0)
    model.observe_draft(1, 2, 5000.0)
    assert model.next_pass_ms(1) < 10 * 1.12


def test_a_batch_size_that_was_only_asked_about_starts_from_what_others_taught() -> None:
    """The question itself stores nothing: eight rows were asked about before one row's rounds took twice as long."""
    model = CostModel(linear_costs())
    before = model.times(8, 100).plain
    for _ in range(200):
        model.observe(1, 0, 100, 2 * model.table.verify_ms(1, 0))
    assert model.times(8, 100).plain == pytest.approx(2 * before, rel=0.1)


def test_cuts_cost_what_was_measured_and_only_where_rows_ask_for_them() -> None:
    """Also for lengths and sizes between; a table without these times, as of old profiles, has none."""
    table = replace(linear_costs(), batch_sizes=(1, 4), verify=((10.0, 11.0),) * 2, lengths=(0, 4), draft_once=(0, 0),
                    draft_step=(0, 0), cut_once=(1.0, 4.0), cut_step=(0.5, 2.0))  # fmt: skip
    model, cuts = CostModel(table), RoundKind(greedy=False, cuts=True)
    assert ms(model, 4, 3, cuts) - ms(model, 4, 3, SAMPLED) == pytest.approx(4 + 3 * 2)
    assert ms(model, 2, 0, cuts) - ms(model, 2, 0, SAMPLED) == pytest.approx(2)
    old = CostModel(replace(table, cut_once=(), cut_step=()))
    assert ms(old, 4, 3, cuts) == ms(old, 4, 3, SAMPLED) == ms(model, 4, 3, SAMPLED)
    with pytest.raises(ValueError, match="fewer or more times than sizes"):
        replace(table, cut_step=())
