"""Operations on logits and rows that a round needs, by host and by device.

Shapes: B rows, L positions, V vocabulary. ``core`` holds the plain torch implementation of each operation.
``paceline.kernels`` has faster ones, which an engine passes to its batch: ``Batch(ops=...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from paceline.core.draft_tensors import DraftTensors
from paceline.core.rows import RowState, StepFeatures
from paceline.core.values import Accepted, DeviceAcceptance, DrawInputs, Gained, LogprobTensors, Purpose, TextRows


class HostOps(Protocol):
    """Operations that replace torch operators in host rounds, one call each. Logits are float32, on the CPU."""

    def draw(self, places: DrawInputs, purpose: int) -> Tensor:
        """Draw a token for every position: [B, L] int64. purpose: a ``Purpose``."""
        ...

    def probabilities(self, places: DrawInputs) -> Tensor:
        """Distribution that tokens are drawn from: [B, L, V] float32."""
        ...

    def likelihood(self, places: DrawInputs, tokens: Tensor) -> Tensor:
        """Softmax of the adjusted logits, before temperature and truncation, at tokens [B, L] int64: [B, L] float32."""
        ...

    def accept(self, places: DrawInputs, purpose: int, scored: Tensor | None = None) -> Accepted:
        """Draw each row's tokens up to the first that no draft token matches. ``places`` has draft tokens and counts.

        Of siblings with the same token the first is accepted. scored: [B] int64, nonzero for rows whose tokens need
        log-probabilities as well, under the softmax of the unmodified logits (temperature 1).
        """
        ...

    def logprobs(self, logits: Tensor, gained: Gained, wanted: Sequence[int]) -> LogprobTensors:
        """Log-probabilities of the gained tokens and of the m most likely ones.

        logits: [B, k + 1, V] or [N, V]. wanted: number of most likely tokens for each row, -1 for no log-probabilities
        at all; m is the maximum. Entries that no row wants are 0; ties go to the smaller token id.
        """
        ...

    def commit(self, rows: TextRows, slots: Tensor, tokens: Tensor, accepted: Tensor) -> list[int]:
        """Commit tokens [B, k + 1] and accepted [B] to the rows in slots [B], all int64.

        Returns the number of tokens that each row gained.
        """
        ...


class RoundOps(Protocol):
    """Operations of rounds on a device, which never wait for it. B rows, k draft tokens, V vocabulary.

    They are those of ``HostOps`` on rows as the device knows them, fused further: acceptance commits, and its result
    stays on the device as a record (``kernels.gpu.state``) that the host reads once.
    """

    name: str

    def shape(self, logits: Tensor, rows: RowState, asks: StepFeatures, draft_tokens: Tensor, first: int) -> Tensor:
        """Apply penalties, bias and cuts (``sampling.shaped``): raw logits [B, L, V] -> shaped logits [B, L, V]."""
        ...

    def draw(self, logits: Tensor, rows: RowState, first: int, purpose: Purpose) -> Tensor:
        """logits [B, L, V] -> [B, L] int64; position j stands at length + first + j."""
        ...

    def top_candidates(self, logits: Tensor, rows: RowState, first: int, width: int) -> Tensor:
        """Draw ``width`` different tokens, the best first, with the target's noise: logits [B, 1, V] -> [B, width]."""
        ...

    def accept(self, draft: DraftTensors, logits: Tensor, rows: RowState, rule: DeviceAcceptance, width: int) -> Tensor:
        """Accept and commit -> the record: [B, k + 4] of chains, [B, 2 k + 4] of trees of ``width`` tokens per depth.

        Trees are accepted by the coupled rule.
        """
        ...

    def logprobs(self, logits: Tensor, record: Tensor, most: int) -> LogprobTensors:
        """Log-probabilities of a record's tokens and of the ``most`` likeliest tokens. logits: [B, k + 1, V]."""
        ...
