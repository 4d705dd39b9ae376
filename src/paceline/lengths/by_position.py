"""Lengths of ``auto`` where one length serves all rows: by position in the draft, since no draft is seen beforehand.

These are rounds on a device, each length captured at its first use, and rounds in which every row takes as long as the
longest draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest

from paceline.lengths.auto_round import AutoRound
from paceline.lengths.base import CapturedRounds
from paceline.lengths.cost import CostModel
from paceline.lengths.scores import LONGEST_AUTO, bins_of
from paceline.lengths.sources import DraftSource

# A GPU captures each of these for each number of rows. They lose at most 1 % of the speed of all 16; 1, 2, 4, 8, 16
# would lose up to 2.7 % (docs/log.md).
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)


class LengthsByPosition:
    """Chooses among ``DEPTHS``. source: of the draft tokens. device: None: no length needs a capture."""

    def __init__(self, costs: CostModel, source: DraftSource, device: CapturedRounds | None) -> None:
        self._costs, self._source, self._device = costs, source, device
        self._missed_ms = 0.0  # what a better length that is not captured would have saved since the last capture

    def best(self, round_: AutoRound) -> int:
        """The best number of draft tokens per row; at least 1.

        A length that is not captured is used once it would have saved, since the last capture, as much time as a
        capture takes. Captures therefore cost at most what they could have saved.
        """
        bins = [bins_of(min(LONGEST_AUTO, most)) for most in round_.batch.max_draft_tokens]
        survivals = map(self._source.calibration.survivals, round_.slots, bins)
        tokens = list(accumulate(map(sum, zip_longest(*survivals, fillvalue=0.0))))
        values = {
            k: tokens[k - 1]
            - round_.price * (round_.times.extra(round_.rows * k) + self._costs.draft_ms(round_.rows, k))
            for k in DEPTHS
            if k <= len(tokens)
        }
        best = max(values, key=values.__getitem__, default=1)
        captured = [k for k in self._without_capture() if k in values]
        if self._device is None or best in captured or not captured:
            return best
        second = max(captured, key=values.__getitem__)
        self._missed_ms += (values[best] - values[second]) / round_.price
        if self._missed_ms < self._device.capture_ms:
            return second
        self._missed_ms = 0.0
        return best

    def at_most(self, k: int) -> int:
        """The longest length up to ``k`` that needs no capture, for rows near their ends; 0 if there is none."""
        return max((length for length in self._without_capture() if length <= k), default=0)

    def _without_capture(self) -> Sequence[int]:
        """The lengths that need no capture first; all of them if there is none with draft tokens."""
        if self._device is None:
            return (0, *DEPTHS)
        captured = [k for k in (0, *DEPTHS) if self._device.is_captured(k)]
        return captured if any(captured) else (0, *DEPTHS)
