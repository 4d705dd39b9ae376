"""The offline benchmark: prefill and decoding separated, every side timed in turn."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from paceline.core.outputs import Latency, Metrics
from paceline.tools.bench.measure import split_times
from paceline.tools.bench.offline import Timing, measure


@dataclass
class Scripted:
    """A side with scripted decoding times."""

    name: str
    seconds: list[float]
    log: list[str]
    room: int = 1000

    def time(self, prompts: Sequence[list[int]], tokens: int) -> Timing:
        self.log.append(f"{self.name} {tokens}")
        return Timing(0.5, self.seconds.pop(0), rounds=tokens, tokens=len(prompts) * min(tokens, self.room))


def test_latency_is_of_the_first_the_last_and_all_sequences() -> None:
    def ended(seconds: float, tokens: int) -> Metrics:
        return Metrics(first_token=1.0, finished=1.0 + seconds, output_tokens=tokens)

    found = Latency.of([ended(1.0, 11), ended(3.0, 11), ended(2.0, 11), ended(0.0, 1), Metrics()])
    assert found is not None
    assert (found.first, found.last, found.all) == pytest.approx((100.0, 300.0, 200.0))
    assert Latency.of([Metrics()]) is None


def test_prefill_and_decoding_are_separated() -> None:
    prefill, a_round, rounds = 2.0, 0.1, 30
    assert split_times(prefill + a_round, prefill + rounds * a_round, rounds) == pytest.approx((2.0, 3.0))


def test_timing_noise_gives_no_negative_times() -> None:
    assert min(split_times(1.0, 0.9, 10)) >= 0


def test_sides_take_turns_after_a_warm_up_and_the_median_counts() -> None:
    log: list[str] = []
    sides = [Scripted("a", [9.0, 3.0, 1.0, 2.0], log), Scripted("b", [9.0, 4.0, 4.0, 1.0], log)]
    results = list(measure(sides, [[1, 2], [3, 4, 5, 6]], tokens=16, repeats=3))
    assert log == ["a 4", "b 4", "a 16", "b 16", "b 16", "a 16", "a 16", "b 16"], "each turn begins with another side"
    assert [result.median.decode_seconds for result in results] == [2.0, 4.0]
    assert [result.speed_up for result in results] == [1.0, 2 / 3], "of the totals; turn by turn it is 0.75, 0.25 and 2"
    assert results[0].decode_seconds_of_all == [3.0, 1.0, 2.0]
    assert (results[0].prompt_tokens, results[0].tokens_per_second, results[0].ms_per_token) == (3, 16.0, 125.0)


def test_generated_tokens_are_counted_not_requested_ones() -> None:
    sides = [Scripted("a", [9.0, 2.0], [], room=10), Scripted("b", [9.0, 4.0], [], room=40)]
    short, long = measure(sides, [[1, 2], [3, 4]], tokens=4000, repeats=1)
    assert (short.max_tokens, short.output_tokens, short.tokens_per_second, short.ms_per_token) == (4000, 10, 10, 200)
    assert (long.output_tokens, long.tokens_per_second) == (40, 20)
    assert long.speed_up == 2.0, "token for token"
