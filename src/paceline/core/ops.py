"""Operations on logits and rows that a round needs, by host and by device, with the values that they take and return.

Shapes: B rows, L positions, V vocabulary, G draft tokens. Position j of a call follows the first ``first + j`` draft
tokens of its row. ``core`` holds the plain torch implementation of each operation. ``paceline.kernels`` has faster
ones, which an engine passes to its batch: ``Batch(ops=...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paceline.core.draft import Draft
    from paceline.core.rows import RowState, StepFeatures
    from paceline.core.sampling import Purpose


class Entries(NamedTuple):
    """Sparse values per token of B rows in CSR form: row i has the entries starts[i] to starts[i + 1] - 1 of N.

    starts [B + 1] int64, tokens [N] int64, values [N] float32.
    """

    starts: Tensor
    tokens: Tensor
    values: Tensor

    @staticmethod
    def of(rows: Sequence[dict[int, float]], device: torch.device) -> Entries:
        """Build from one mapping, token id to value, per row."""
        ends = [0]
        for row in rows:
            ends.append(ends[-1] + len(row))
        tokens = [token for row in rows for token in row]
        values = [value for row in rows for value in row.values()]
        starts = torch.tensor(ends, dtype=torch.int64, device=device)
        return Entries(
            starts,
            torch.tensor(tokens, dtype=torch.int64, device=device),
            torch.tensor(values, dtype=torch.float32, device=device),
        )

    @property
    def rows(self) -> Tensor:
        """Row of each entry, [N] int64."""
        return torch.arange(len(self.starts) - 1, device=self.starts.device).repeat_interleave(self.starts.diff())


class Penalties(NamedTuple):
    """presence, frequency, repetition [R] float32; text [R, P] int64 and prompt_length [R] int64 of the rows."""

    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    text: Tensor
    prompt_length: Tensor


class Cuts(NamedTuple):
    """floor [R] float32 (logarithm of min_p, -inf for none), top_k [R] int64 (0 for none), top_p [R] float32."""

    floor: Tensor
    top_k: Tensor
    top_p: Tensor


class Truncation(NamedTuple):
    """Cuts by the shape of the distribution, float32 [R] each (see core.truncation); 0 is none, for typical_p 1."""

    typical_p: Tensor
    epsilon_cutoff: Tensor
    eta_cutoff: Tensor
    top_n_sigma: Tensor


class Minimum(NamedTuple):
    """length [R] int64: positions before which none of a row's stop tokens may come. stops: those tokens."""

    length: Tensor
    stops: Entries


@dataclass(frozen=True, eq=False)
class DrawRows:
    """Sampling parameters of R slots, and the slots of B rows, as a draw reads them.

    temperature [R] float32 (0 selects the largest logit), seeds [R] int64, positions [R] int64 of the next tokens.
    bias and the stop tokens of ``minimum`` are by row, all others by slot; each is None if no row uses it.
    slots: [B] int64; None: row i is in slot i. All tensors are contiguous and on the CPU.
    """

    temperature: Tensor
    seeds: Tensor
    positions: Tensor
    cuts: Cuts | None = None
    truncation: Truncation | None = None
    penalties: Penalties | None = None
    minimum: Minimum | None = None
    bias: Entries | None = None
    slots: Tensor | None = None


class DrawInputs:
    """Float32 logits and the arguments of a draw. It owns the memory that a native call points to.

    logits: [B, L, V], or [N, V] for the pending tokens and real draft tokens only, row after row.
    rows: sampling parameters.
    draft: [B, G] int64 draft tokens, of which the first counts[i] of row i are real. counts: [B] int64.
    parents: [B, G] int64 index of each draft token's parent, -1 for the pending token. None: the token before.
    masked_logits: per row, logits [positions, V] that replace the row's own; None where the row has no constraint.
    """

    def __init__(
        self,
        logits: Tensor,
        rows: DrawRows,
        draft: Tensor | None = None,
        counts: Tensor | None = None,
        first: int = 0,
        masked_logits: Sequence[Tensor | None] | None = None,
        parents: Tensor | None = None,
    ) -> None:
        self.logits = logits = evenly_spaced(logits)
        self.draw_rows, self.masked_logits, self.first = rows, masked_logits, first
        self.draft = None if draft is None else draft.contiguous()
        self.counts = None if counts is None else counts.contiguous()
        self.parents = None if parents is None else parents.contiguous()
        self.packed = logits.dim() == 2
        if self.packed:
            assert draft is not None
            self.rows, self.block = draft.shape[0], draft.shape[1] + 1
        else:
            self.rows, self.block = logits.shape[0], logits.shape[1]
        self.vocabulary = logits.shape[-1]

    def identity_path(self) -> Tensor | None:
        """Path [B, G] int64 that leaves the draft tokens of trees in place; None for chains."""
        if self.parents is None:
            return None
        return torch.arange(self.block - 1).repeat(self.rows, 1)


def evenly_spaced(logits: Tensor) -> Tensor:
    """Return logits [B, L, V] or [N, V] with a single stride between positions, across rows as well; copy if needed.

    The stride may exceed V, because an LM head may be padded.
    """
    even = logits.stride(-1) == 1 and logits.stride(-2) >= logits.shape[-1]
    even = even and (logits.dim() == 2 or logits.stride(0) == logits.shape[1] * logits.stride(1))
    # contiguous() would not fix the stride of a dimension of size 1.
    return logits if even else logits.clone(memory_format=torch.contiguous_format)


class Accepted(NamedTuple):
    """Result of ``HostOps.accept``.

    tokens: [B, G + 1] int64, of which the first accepted[i] + 1 of row i were drawn; the others are 0.
    accepted: [B] int64. path: [B, G] int64, see ``Verdict``; None for chains.
    own: [B, G + 1] float32 log-probabilities of the drawn tokens; None if not requested.
    """

    tokens: Tensor
    accepted: Tensor
    path: Tensor | None
    own: Tensor | None


class Gained(NamedTuple):
    """Tokens that rows gain: the first accepted[i] + 1 of tokens [B, k + 1]. counts: [B], real draft tokens."""

    tokens: Tensor
    accepted: Tensor
    counts: Tensor


class HostOps(Protocol):
    """Operations that replace torch operators in host rounds, one call each. Logits are float32, on the CPU."""

    def draw(self, places: DrawInputs, purpose: int) -> Tensor:
        """Draw a token for every position: [B, L] int64. purpose: a ``sampling.Purpose``."""
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

    def logprobs(self, logits: Tensor, gained: Gained, wanted: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the gained tokens and of the m most likely ones.

        logits: [B, k + 1, V] or [N, V]. wanted: number of most likely tokens for each row, -1 for no log-probabilities
        at all; m is the maximum. Returns own [B, k + 1], ids and values [B, k + 1, m]. Entries that no row wants are 0;
        ties go to the smaller token id.
        """
        ...

    def gain(self, rows: TextRows, slots: Tensor, tokens: Tensor, accepted: Tensor) -> list[int]:
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

    def shaped(self, logits: Tensor, rows: RowState, asks: StepFeatures, draft_tokens: Tensor, first: int) -> Tensor:
        """Apply penalties, bias and cuts (``sampling.shaped``): raw logits [B, L, V] -> shaped logits [B, L, V]."""
        ...

    def draw(self, logits: Tensor, rows: RowState, first: int, purpose: Purpose) -> Tensor:
        """logits [B, L, V] -> [B, L] int64; position j stands at length + first + j."""
        ...

    def top_candidates(self, logits: Tensor, rows: RowState, first: int, width: int) -> Tensor:
        """Draw ``width`` different tokens, the best first, with the target's noise: logits [B, 1, V] -> [B, width]."""
        ...

    def coupled(self, draft: Draft, logits: Tensor, rows: RowState, synthetic: float | None) -> Tensor:
        """Accept and commit chains -> the record [B, k + 4] (``gpu.accept.coupled``)."""
        ...

    def coupled_trees(self, draft: Draft, logits: Tensor, rows: RowState, width: int) -> Tensor:
        """Accept and commit trees of k = N draft tokens, ``width`` per depth -> the record [B, 2 N + 4]."""
        ...

    def rejection(self, draft: Draft, logits: Tensor, rows: RowState) -> Tensor:
        """Accept and commit chains -> the record [B, k + 4] (``gpu.accept.rejection``)."""
        ...

    def own_logprobs(self, logits: Tensor, record: Tensor) -> Tensor:
        """Log-probabilities of a record's tokens -> [B, k + 1] float32 (``gpu.accept.own_logprobs``)."""
        ...

    def top_logprobs(self, logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """The most likely tokens: logits [B, L, V] -> ids, log-probabilities at temperature 1, [B, L, most] each."""
        ...


class TextRows(NamedTuple):
    """Tables that a commit reads and writes: text [R, P], length, prompt_length, limit [R], stops [R, S]; int64."""

    text: Tensor
    length: Tensor
    prompt_length: Tensor
    limit: Tensor
    stops: Tensor
