"""Operations that a round needs on logits and rows, behind one protocol, and the values that they take and return.

Shapes: B rows, L places, V vocabulary, G draft tokens. Place j of a call follows the first ``first + j`` draft tokens
of its row. ``core`` holds the plain torch implementation of each. ``paceline.kernels`` has faster ones; an engine
hands one in when it is assembled: ``Batch(ops=...)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Entries(NamedTuple):
    """Tokens of B rows, row after row: those of row i are numbers starts[i] .. starts[i + 1] - 1 of N.

    starts [B + 1] int64, tokens [N] int64, values [N] float32.
    """

    starts: Tensor
    tokens: Tensor
    values: Tensor

    @staticmethod
    def of(rows: Sequence[dict[int, float]], device: torch.device) -> Entries:
        """What each row says of some tokens."""
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
        """[N]: the row of each token."""
        return torch.arange(len(self.starts) - 1, device=self.starts.device).repeat_interleave(self.starts.diff())


class Penalties(NamedTuple):
    """presence, frequency, repetition [R] float32 of rows with this text [R, P] int64 and prompt_length [R] int64."""

    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    text: Tensor
    prompt_length: Tensor


class Cuts(NamedTuple):
    """floor [R] float32 (the logarithm of min-p, -inf for none), top_k [R] int64, top_p [R] float32."""

    floor: Tensor
    top_k: Tensor
    top_p: Tensor


class Minimum(NamedTuple):
    """Positions [R] int64 before which none of a row's stop tokens may come."""

    length: Tensor
    stops: Entries


@dataclass(frozen=True, eq=False)
class DrawRows:
    """Sampling parameters of R >= B rows, as a draw reads them.

    temperature [R] float32 (0: the largest), seeds [R] int64, positions [R] int64 of their next tokens. None: no
    row uses it. All tensors are contiguous and on the CPU.
    """

    temperature: Tensor
    seeds: Tensor
    positions: Tensor
    cuts: Cuts | None = None
    penalties: Penalties | None = None
    minimum: Minimum | None = None
    bias: Entries | None = None


class DrawInputs:
    """Logits float32 and what else a call needs to know of them; it keeps alive what the call points to.

    logits: [B, L, V], or [N, V] of the unseen tokens and the real draft tokens alone, row after row.
    draft_tokens [B, G] int64, of which the first counts [B] of each row are real. parents [B, G]: the draft token that
    each draft token
        follows, -1 for the unseen token; None: the one before.
    masked_logits: of some rows the logits [places, V] that count in the place of those.
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
        """Of trees, the numbers of their draft_tokens [B, G]; None for chains."""
        if self.parents is None:
            return None
        return torch.arange(self.block - 1).repeat(self.rows, 1)


def evenly_spaced(logits: Tensor) -> Tensor:
    """[B, L, V] or [N, V] with one stride from place to place, from row to row as well; a head may be wider than V."""
    even = logits.stride(-1) == 1 and logits.stride(-2) >= logits.shape[-1]
    even = even and (logits.dim() == 2 or logits.stride(0) == logits.shape[1] * logits.stride(1))
    # contiguous() would leave the stride of a dimension of one place as it is.
    return logits if even else logits.clone(memory_format=torch.contiguous_format)


class Accepted(NamedTuple):
    """tokens [B, G + 1] int64, the first accepted [B] + 1 of them drawn, the others 0; path: see ``Verdict``.

    own: [B, G + 1] float32, the drawn tokens' log-probabilities, where they are wanted.
    """

    tokens: Tensor
    accepted: Tensor
    path: Tensor | None
    own: Tensor | None


class Gained(NamedTuple):
    """Of each row: tokens [B, k + 1], of which the first accepted [B] + 1 count, and counts [B] of real draft
    tokens.
    """

    tokens: Tensor
    accepted: Tensor
    counts: Tensor


class HostOps(Protocol):
    """What replaces the torch operators of a round on the host: one call each. Logits are float32, on the CPU."""

    def draw(self, places: DrawInputs, purpose: int) -> Tensor:
        """A token for every place: [B, L] int64."""
        ...

    def probabilities(self, places: DrawInputs) -> Tensor:
        """The distribution that tokens are drawn from: [B, L, V] float32."""
        ...

    def likelihood(self, places: DrawInputs, tokens: Tensor) -> Tensor:
        """Softmax of the adjusted logits, neither divided nor cut, at tokens [B, L] int64 -> [B, L] float32."""
        ...

    def accept(self, places: DrawInputs, purpose: int, scored: Tensor | None = None) -> Accepted:
        """Draw each row's tokens up to the first that no draft token matches. ``places`` has draft tokens and counts.

        Of siblings with the same token the first is kept. scored: [B] int64, not 0 for rows whose tokens'
        log-probabilities are wanted too, under the softmax of the logits as they were given (temperature 1).
        """
        ...

    def logprobs(self, logits: Tensor, gained: Gained, wanted: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """log_softmax of logits [B, k + 1, V] or [N, V] at the tokens gained: [B, k + 1]; ids, values [B, k + 1, m].

        wanted: for each row the number of its most likely tokens, -1 for nothing. What no row wants is 0; ties go to
        the smaller token.
        """
        ...

    def gain(self, rows: TextRows, tokens: Tensor, accepted: Tensor) -> list[int]:
        """Commit tokens [B, k + 1], accepted [B], both int64 -> number of tokens that each row gained."""
        ...


class TextRows(NamedTuple):
    """What a commit reads and writes: text [R, P], length, prompt_length, limit [R], stops [R, S], all int64."""

    text: Tensor
    length: Tensor
    prompt_length: Tensor
    limit: Tensor
    stops: Tensor
