"""The programs that requests will need, the likeliest first, to be captured before the requests come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest

from paceline.core.rows import NOTHING, StepFeatures
from paceline.engine.rounds.device_round import ROW_BUCKETS, SPAN, DeviceRound
from paceline.kernels.gpu.graphs import Named
from paceline.lengths.base import LengthPolicy

MISSED = (1, 2, 4, 8, 16, 32, 64)  # buckets of tokens likely to be missing in a draft model's cache after plain rounds


def likely_programs(device_round: DeviceRound, policy: LengthPolicy, rows: int | None = None) -> Iterator[Named]:
    """Yield the programs that requests will need, the likeliest first. rows: the most; None: all.

    Short spans come before long ones, if attention depends on the span. For each span, rounds for temperature alone
    come first, then catch-up programs of the draft model. Rounds with cuts (top-p, top-k, min-p) come later; chats
    often ask for them. Those with adapters come last. Penalties and log-probabilities are rare.

    All row buckets are captured for their likeliest length, then all for the next length. The number of rows changes
    with every request that comes or ends; other lengths occur mostly as rows end.
    """
    buckets = _buckets(device_round, device_round.batch.capacity if rows is None else rows)
    lengths = {bucket: likely_lengths(policy, bucket) for bucket in buckets}
    target = device_round.program.target
    for span in dict.fromkeys(map(device_round.span, range(SPAN, target.cache.positions + 1 + SPAN, SPAN))):
        yield from _rounds(device_round, lengths, span, NOTHING)
        yield from _catch_ups(device_round, lengths, span)
        yield from _rounds(device_round, lengths, span, StepFeatures(cuts=True))
        if target.adapters is not None:
            yield from _rounds(device_round, lengths, span, StepFeatures(adapters=True))


def likely_lengths(policy: LengthPolicy, rows: int) -> list[int]:
    """Return every draft length that rounds of ``rows`` rows may have, the likeliest first."""
    usual = policy.length_for(rows)
    return sorted(policy.possible_lengths, key=lambda k: abs(k - usual))


def _buckets(device_round: DeviceRound, rows: int) -> list[int]:
    """Return the buckets of up to ``rows`` rows: one row first (an idle server), then all, then the others."""
    known = sorted({device_round.bucket(size) for size in (*ROW_BUCKETS, rows) if size <= rows})
    return list(dict.fromkeys((known[0], known[-1], *known)))


def _rounds(
    device_round: DeviceRound, lengths: Mapping[int, list[int]], span: int, features: StepFeatures
) -> Iterator[Named]:
    """Yield rounds of the lengths by bucket, those of all buckets for each length."""
    longest = device_round.drafter.longest
    feasible = [dict.fromkeys(min(k, longest) for k in ks) for ks in lengths.values()]
    for ks in zip_longest(*feasible):
        for bucket, k in zip(lengths, ks, strict=True):
            if k is not None:
                yield device_round.named_round(bucket, k, span, features)


def _catch_ups(device_round: DeviceRound, lengths: Mapping[int, list[int]], span: int) -> Iterator[Named]:
    """Yield catch-up programs for the buckets whose likeliest round is plain, but which may draft later."""
    for width in MISSED if device_round.drafter.decoder is not None else ():
        for bucket, (first, *others) in lengths.items():
            if first == 0 and others:
                yield device_round.named_catch_up(bucket, width, span)
