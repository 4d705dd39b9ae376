"""Tokens from logits, natively: what ``paceline.core.sampling`` and ``acceptance`` do in torch, a pass or two a row.

Shapes: B rows, L places, V vocabulary, G guesses. Place j of a call follows the first ``first + j`` guesses of its row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels import abi, native


def kernels_for(logits: Tensor) -> native.Kernels | None:
    """What can draw from these logits; None: torch does."""
    on_cpu = logits.device.type == "cpu" and logits.dtype == torch.float32
    return chosen() if on_cpu else None


@cache
def chosen() -> native.Kernels | None:
    """What PACELINE_KERNELS said when it was first asked: to look each round takes a small model 20 microseconds."""
    return native.select()


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


@dataclass(frozen=True)
class Rows:
    """How R >= B rows draw.

    temperature [R] float32 (0: the largest), seeds [R] int64, positions [R] int64 of their next tokens. What is None no
    row asks for. All tensors are contiguous and on the CPU.
    """

    temperature: Tensor
    seeds: Tensor
    positions: Tensor
    cuts: Cuts | None = None
    penalties: Penalties | None = None
    minimum: Minimum | None = None
    bias: Entries | None = None

    @cached_property
    def described(self) -> abi.CDrawRows:
        """For the library: addresses, so it is made once."""
        made = abi.CDrawRows(self.temperature.data_ptr(), self.seeds.data_ptr(), self.positions.data_ptr())
        if self.cuts is not None:
            made.deepest, made.top_k, made.top_p = (t.data_ptr() for t in (self._deepest, *self.cuts[1:]))
        if self.penalties is not None:
            made.presence, made.frequency, made.repetition, made.text, made.prompt_length = (
                tensor.data_ptr() for tensor in self.penalties
            )
            made.text_stride = self.penalties.text.stride(0)
        if self.minimum is not None:
            made.min_length, made.stops = self.minimum.length.data_ptr(), _described(self.minimum.stops)
        if self.bias is not None:
            made.bias = _described(self.bias)
        return made

    @cached_property
    def _deepest(self) -> Tensor:
        """Under the leader tokens lie so far, and no farther."""
        assert self.cuts is not None
        return -self.cuts.floor


def _described(entries: Entries) -> abi.CEntries:
    return abi.CEntries(*(tensor.data_ptr() for tensor in entries))


class Places:
    """Logits float32 and what else a call needs to know of them; it keeps alive what the call points to.

    logits: [B, L, V], or [N, V] of the unseen tokens and the real guesses alone, row after row.
    guesses [B, G] int64, of which the first counts [B] of each row are real. parents [B, G]: the guess that each guess
        follows, -1 for the unseen token; None: the one before.
    instead: of some rows the logits [places, V] that count in the place of those.
    """

    def __init__(
        self,
        logits: Tensor,
        rows: Rows,
        guesses: Tensor | None = None,
        counts: Tensor | None = None,
        first: int = 0,
        instead: Sequence[Tensor | None] | None = None,
        parents: Tensor | None = None,
    ) -> None:
        self.logits = logits = _evenly_spaced(logits)
        self._rows, self._instead = rows, instead
        self._guesses = None if guesses is None else guesses.contiguous()
        self._counts = None if counts is None else counts.contiguous()
        self._parents = None if parents is None else parents.contiguous()
        self.packed = logits.dim() == 2
        if self.packed:
            assert guesses is not None
            self.rows, self.block = guesses.shape[0], guesses.shape[1] + 1
        else:
            self.rows, self.block = logits.shape[0], logits.shape[1]
        self.vocabulary = logits.shape[-1]
        self._first = first

    def unmoved(self) -> Tensor | None:
        """Of trees, the numbers of their guesses [B, G]; None for chains."""
        if self._parents is None:
            return None
        return torch.arange(self.block - 1).repeat(self.rows, 1)

    def call(self, purpose: int) -> abi.CDraw:
        """For the library."""
        self._addresses = None if self._instead is None else _addresses(self._instead)
        return abi.CDraw(
            self._rows.described,
            self.logits.data_ptr(),
            abi.address(self._addresses),
            abi.address(self._guesses),
            abi.address(self._counts),
            abi.address(self._parents),
            rows=self.rows,
            block=self.block,
            stride=self.logits.stride(-2),
            vocabulary=self.vocabulary,
            guess_stride=0 if self._guesses is None else self._guesses.shape[1],
            first=self._first,
            packed=self.packed,
            purpose=purpose,
        )


def _evenly_spaced(logits: Tensor) -> Tensor:
    """[B, L, V] or [N, V] with one stride from place to place, from row to row as well; a head may be wider than V."""
    even = logits.stride(-1) == 1 and logits.stride(-2) >= logits.shape[-1]
    even = even and (logits.dim() == 2 or logits.stride(0) == logits.shape[1] * logits.stride(1))
    # contiguous() would leave the stride of a dimension of one place as it is.
    return logits if even else logits.clone(memory_format=torch.contiguous_format)


def _addresses(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.tensor([0 if tensor is None else tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def draw_tokens(kernels: native.Kernels, places: Places, purpose: int) -> Tensor:
    """A token for every place: [B, L] int64."""
    tokens = torch.empty(places.rows, places.block, dtype=torch.int64)
    call = places.call(purpose)
    kernels.library.pl_draw(kernels.handle, _pool(kernels), ctypes.addressof(call), tokens.data_ptr())
    return tokens


class Accepted(NamedTuple):
    """tokens [B, G + 1] int64, the first accepted [B] + 1 of them drawn, the others 0; path: see ``Verdict``.

    own: [B, G + 1] float32, the drawn tokens' log-probabilities, where they are wanted.
    """

    tokens: Tensor
    accepted: Tensor
    path: Tensor | None
    own: Tensor | None


def accept_guesses(kernels: native.Kernels, places: Places, purpose: int, scored: Tensor | None = None) -> Accepted:
    """Draw each row's tokens up to the first that no guess foresaw. ``places`` has guesses and counts.

    Of siblings with the same token the first is kept.
    scored: [B] int64, not 0 for the rows whose tokens' log-probabilities are wanted, too, under the softmax of the
        logits as they were given (temperature 1).
    """
    tokens = torch.zeros(places.rows, places.block, dtype=torch.int64)
    accepted = torch.zeros(places.rows, dtype=torch.int64)
    path = places.unmoved()
    call = places.call(purpose)
    own = None if scored is None else torch.zeros(places.rows, places.block, dtype=torch.float32)
    place = ctypes.addressof(call), tokens.data_ptr(), accepted.data_ptr()
    more = (abi.address(tensor) for tensor in (path, scored, own))
    kernels.library.pl_accept(kernels.handle, _pool(kernels), *place, *more)
    return Accepted(tokens, accepted, path, own)


def law_of(kernels: native.Kernels, places: Places) -> Tensor:
    """What tokens are drawn from: probabilities [B, L, V]."""
    law = torch.empty(places.rows, places.block, places.vocabulary, dtype=torch.float32)
    call = places.call(0)
    kernels.library.pl_law(kernels.handle, _pool(kernels), ctypes.addressof(call), law.data_ptr())
    return law


def likelihood_of(kernels: native.Kernels, places: Places, tokens: Tensor) -> Tensor:
    """The softmax of the adjusted logits, neither divided nor cut, at tokens [B, L] int64 -> [B, L] float32."""
    tokens, chances = tokens.contiguous(), torch.empty(places.rows, places.block, dtype=torch.float32)
    call = places.call(0)
    place = ctypes.addressof(call), tokens.data_ptr(), chances.data_ptr()
    kernels.library.pl_likelihood(kernels.handle, _pool(kernels), *place)
    return chances


class Gained(NamedTuple):
    """Of each row: tokens [B, k + 1], of which the first accepted [B] + 1 count, and counts [B] of real guesses."""

    tokens: Tensor
    accepted: Tensor
    counts: Tensor


def logprobs_of(
    kernels: native.Kernels, logits: Tensor, gained: Gained, wanted: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax of logits [B, k + 1, V] or [N, V] at the tokens gained, [B, k + 1], and ids and values [B, k + 1, m].

    wanted: of each row, how many of its most likely tokens; -1: nothing. What no row wants is 0; ties go to the smaller
    token.
    """
    logits = _evenly_spaced(logits)
    rows, block = gained.tokens.shape
    vocabulary = logits.shape[-1]
    most = min(max(wanted), vocabulary)
    own, values = (torch.zeros(shape, dtype=torch.float32) for shape in ((rows, block), (rows, block, most)))
    ids = torch.zeros(rows, block, most, dtype=torch.int64)
    asked = torch.tensor([min(count, vocabulary) for count in wanted])
    inputs = [tensor.contiguous() for tensor in (gained.tokens, gained.accepted, asked, gained.counts)]
    call = abi.CLogprobs(
        logits.data_ptr(),
        *(tensor.data_ptr() for tensor in inputs),
        rows=rows,
        block=block,
        stride=logits.stride(-2),
        vocabulary=vocabulary,
        most=most,
        packed=logits.dim() == 2,
        own=own.data_ptr(),
        ids=ids.data_ptr(),
        values=values.data_ptr(),
    )
    kernels.library.pl_logprobs(kernels.handle, _pool(kernels), ctypes.addressof(call))
    return own, ids, values


def _pool(kernels: native.Kernels) -> int:
    return int(native.current_pool(kernels).handle)
