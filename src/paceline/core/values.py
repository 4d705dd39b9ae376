"""Values that operations on logits and rows take and return.

Shapes: R slots, B rows, L positions, V vocabulary, G draft tokens. Position j of a call follows the first ``first + j``
draft tokens of its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.core.uploads import uploaded


class Purpose(IntEnum):
    """Purpose of a random number. Different purposes use independent numbers."""

    DRAW = 1  # the target's own token; under the coupled rule the drafter uses it, too
    DRAFT = 2  # a drafter's independent draft token (rejection rule)
    ACCEPT = 3  # acceptance of a draft token (rejection rule)
    RECOVER = 4  # recovered or bonus token (rejection rule)
    SYNTHETIC = 5  # acceptance in benchmarks with synthetic acceptance


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
        starts = uploaded(ends, device)
        return Entries(
            starts,
            uploaded(tokens, device),
            uploaded(values, device, torch.float32),
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


class LogprobTensors(NamedTuple):
    """Log-probabilities under the target's unmodified distribution.

    own: [B, G + 1] float32, of the drawn tokens. top_ids: [B, G + 1, m] int64, the m most likely tokens. top_values:
    [B, G + 1, m] float32, of these.
    """

    own: Tensor
    top_ids: Tensor
    top_values: Tensor

    @staticmethod
    def alone(own: Tensor) -> LogprobTensors:
        """Log-probabilities ``own`` [B, G + 1] of the drawn tokens only (m = 0)."""
        nothing = own.new_empty(*own.shape, 0)
        return LogprobTensors(own, nothing.long(), nothing)


class Accepted(NamedTuple):
    """Result of an acceptance rule: row i gains the first accepted[i] + 1 of its tokens.

    tokens: [B, G + 1] int64; the last one that a row gains may be ``Undrawn``, those behind it are undefined.
    accepted: [B] int64, accepted draft tokens.
    path: [B, G] int64, for trees: indices of the accepted draft tokens in order, then each position's own index. None
        for chains, whose first draft tokens are accepted.
    logprobs: log-probabilities of the tokens; None if no row requests them.
    """

    tokens: Tensor
    accepted: Tensor
    path: Tensor | None = None
    logprobs: LogprobTensors | None = None


@dataclass(frozen=True)
class DeviceAcceptance:
    """The acceptance rule of a device round; "coupled" if neither field is set.

    independent: the rejection rule, for draft tokens drawn independently of the target.
    synthetic: accept at random at this rate, for benchmarks.
    """

    independent: bool = False
    synthetic: float | None = None


class Gained(NamedTuple):
    """Tokens that rows gain: the first accepted[i] + 1 of tokens [B, k + 1]. counts: [B], real draft tokens."""

    tokens: Tensor
    accepted: Tensor
    counts: Tensor


class TextRows(NamedTuple):
    """Tables that a commit reads and writes: text [R, P], length, prompt_length, limit [R], stops [R, S]; int64."""

    text: Tensor
    length: Tensor
    prompt_length: Tensor
    limit: Tensor
    stops: Tensor
