"""Drafting on the CPU kernels in one call: it reads the text that a cache misses, and makes all draft tokens.

``csrc/head.cpp`` draws chains of a draft model, and chains and trees of a trained head.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from ctypes import pointer
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch, StopDrafting
from paceline.core.draft import SIBLING_KIND, Draft, branching
from paceline.core.values import Purpose
from paceline.errors import ParameterError
from paceline.kernels import abi, native, structs
from paceline.kernels.attention import AttentionBackend
from paceline.kernels.cpu import described
from paceline.models.decoding.draft_decoder import DraftDecoder
from paceline.models.decoding.draft_vocabulary import NEVER, DraftVocabulary
from paceline.models.native.model import NativeModel
from paceline.models.native.short_head import PackedShortHead

T = TypeVar("T")


class NativeDrafting:
    """Drafts for the rows of a decoder; rows may differ in missing tokens, text and number of draft tokens.

    owner: the decoder, whose cache the calls use.
    library: the head or draft model in the kernels' library.
    first: number of the first token that is read: 1 for a head, which has no hidden state before token 0.
    kept: the hidden states that a head reads, and what owns their memory.
    scratch: logits [lines of the largest call so far, V], which each call overwrites.
    """

    def __init__(
        self,
        owner: DraftDecoder,
        library: native.NativeDecoder,
        *,
        first: int = 0,
        kept: tuple[abi.CKept, object] | None = None,
    ) -> None:
        self.library, self.cache = library, structs.cache(owner.cache)
        self.branches = kept is not None  # the kernels draw trees of heads only
        self._first = first
        self._kept, states = kept or (abi.CKept(), None)
        self._memory = owner.cache, states  # a planned draft may outlive the decoder
        self._computed, self._vocab_size = owner.num_computed_tokens.numpy().data, owner.vocab_size
        self.scratch = self._empty_logits(0)
        self._vocabulary: DraftVocabulary | None = None
        self._shortened = abi.CShortHead()  # the vocabulary, as the kernels read it
        self._version = 0  # of the vocabulary in ``scratch``

    def shorten(self, vocabulary: DraftVocabulary) -> None:
        """See ``DraftDecoder.shorten``."""
        assert isinstance(vocabulary.head, PackedShortHead)
        self._vocabulary = vocabulary
        self._shortened = abi.CShortHead(head=vocabulary.head.linear, targets=vocabulary.tokens.data_ptr())

    def _empty_logits(self, lines: int) -> Tensor:
        """Logits [lines, V] of ``NEVER``. The kernels overwrite those of the tokens that are scored."""
        return torch.full((lines, self._vocab_size), NEVER, dtype=torch.float32)

    def missing_tokens(self, batch: Batch) -> list[int]:
        """See ``DraftDecoder.missing_tokens``."""
        rows = zip(batch.slots, batch.lengths, strict=True)
        return [length - max(self._first, self._computed[slot]) for slot, length in rows]

    def rewind(self, batch: Batch) -> None:
        """See ``DraftDecoder.rewind``."""
        for slot, length in zip(batch.slots, batch.lengths, strict=True):
            self._computed[slot] = min(self._computed[slot], length - 1)

    def read(self, batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        """Read tokens of a head's text; arguments as for ``Decoder.prefill``."""
        parts = [(row, max(self._first, start), stop) for row, start, stop in zip(rows, starts, stops, strict=True)]
        lines = [part for part in parts if part[1] < part[2]]
        if lines:
            numbers = array("q", [number for column in zip(*lines, strict=True) for number in column])
            self.run(self._call(batch, len(lines), numbers))
        for row, _, stop in parts:
            self._computed[row] = max(self._first, stop)

    def draft(
        self,
        batch: Batch,
        counts: Sequence[int],
        stop_drafting: StopDrafting | None,
        *,
        distributions: bool,
        width: int = 1,
    ) -> Draft:
        """Read the missing tokens and draft. A head makes no draft tokens for rows of one token.

        counts: [B], draft tokens of each row, not all 0; the depth if ``width`` is above 1.
        stop_drafting: called after each draft token, for all rows together; None: never stop early.
        distributions: sample with the drafter's own noise, and return the distributions.
        width: above 1, trees as ``Growth`` grows them, without distributions.

        A draft of chains whose numbers of draft tokens are known is made when its tokens are first read: a round of
        the kernels makes it in its own call.

        Raises ParameterError if the kernels refuse the call.
        """
        rows, deepest = batch.rows, max(counts)
        most = deepest if width == 1 else min(MAX_SPECULATION_LENGTH, deepest * width)
        slots, lengths = batch.slots, batch.lengths
        columns = [*slots, *(max(self._first, self._computed[slot]) for slot in slots), *lengths, *counts]
        tables = 1 if width == 1 else 3
        numbers = array("q", [*columns, *bytes(rows * (1 + tables * most))])
        chances = None if stop_drafting is None and width == 1 else array("f", bytes(4 * rows * most))
        probabilities = torch.zeros(most, rows, self._vocab_size, dtype=torch.float32) if distributions else None
        found = (_DraftTable if width == 1 else _TreeTable)(memoryview(numbers)[4 * rows :], chances, rows, most)
        call = self._call(batch, rows, numbers)
        call.draft_stride, call.probabilities = most, structs.address(probabilities)
        if len(self.scratch) < rows * width:
            self.scratch = self._empty_logits(rows * width)
        if width > 1:
            self._branch(call, rows, width)
        self._set_sampling(call, batch, Purpose.DRAFT if distributions else Purpose.DRAW)
        self._set_vocabulary(call)
        call.chances = None if chances is None else chances.buffer_info()[0]
        if chances is None and probabilities is None and not batch.sampling.any_constraint:
            return PlannedDraft(self, call, found, batch, counts)
        callbacks = _Callbacks()
        if stop_drafting is not None:
            call.continue_drafting = callbacks.callback(lambda: not stop_drafting(batch, found.scores, found.parents))
        if batch.sampling.any_constraint:
            masked = _MaskedLogits(batch, counts, found, self.scratch, width)
            call.before_draw, call.instead = callbacks.callback(masked.mask_next), masked.addresses.buffer_info()[0]
        self.run(call)
        callbacks.raise_failure()
        self.note_drafted(slots, lengths, found.drawn)
        return found.draft(probabilities)

    def note_drafted(self, slots: Sequence[int], lengths: Sequence[int], drawn: Sequence[int]) -> None:
        """Count what a draft has read: the text, and of a draft model all draft tokens but the last.

        A head reads its draft tokens without hidden states, so they never count.
        """
        for slot, length, count in zip(slots, lengths, drawn, strict=True):
            if count > 0:
                self._computed[slot] = length + (0 if self._first else count - 1)

    def _call(self, batch: Batch, rows: int, numbers: array[int]) -> abi.CDraftCall:
        """The call's arguments. numbers: slots, starts, stops; for a draft also counts, tokens drawn, draft tokens."""
        start, size = numbers.buffer_info()[0], 8 * rows
        drafts, counts = len(numbers) > 3 * rows, start + 3 * size
        return abi.CDraftCall(
            text=batch.text.data_ptr(),
            text_stride=batch.text.stride(0),
            kept=self._kept,
            rows=rows,
            slots=start,
            start=start + size,
            stop=start + 2 * size,
            counts=counts if drafts else None,
            drawn=counts + size if drafts else None,
            draft_tokens=counts + 2 * size if drafts else None,
        )

    def _branch(self, call: abi.CDraftCall, rows: int, width: int) -> None:
        """Ask for trees: parents and ranks are stored behind the draft tokens."""
        call.width = width
        call.parents = call.draft_tokens + 8 * rows * call.draft_stride
        call.ranks = call.parents + 8 * rows * call.draft_stride

    def _set_vocabulary(self, call: abi.CDraftCall) -> None:
        """Score the draft vocabulary only. Logits of tokens that have left it become ``NEVER`` again."""
        vocabulary = self._vocabulary
        if vocabulary is None:
            return
        if self._version != vocabulary.version:
            self._version = vocabulary.version
            with torch.inference_mode():  # they may have been made in it, and rounds of the kernels run outside of it
                self.scratch.fill_(NEVER)
        call.shortened = pointer(self._shortened)

    def _set_sampling(self, call: abi.CDraftCall, batch: Batch, purpose: Purpose) -> None:
        call.by = described(batch.sampling.drawing(batch.text, batch.length))
        call.logits, call.purpose = self.scratch.data_ptr(), purpose

    def run(self, call: abi.CDraftCall) -> None:
        """Run a call. Raises ParameterError if the kernels refuse it."""
        problem = self.library.draft(call, self.cache)
        if problem is not None:
            raise ParameterError("tokens", f"[{call.rows} rows]", problem)


class PlannedDraft(Draft):
    """A draft of chains that has not been made: reading its draft tokens makes it, or a round that begins with it.

    planned: number of draft tokens of each row. A head makes none for rows of one token.
    is_made: whether the call has run.
    drafting, call: what makes it, and the kernels' call.
    """

    def __init__(
        self, drafting: NativeDrafting, call: abi.CDraftCall, found: _DraftTable, batch: Batch, planned: Sequence[int]
    ) -> None:
        self.drafting, self.call, self.planned, self.is_made = drafting, call, planned, False
        self._found, self._slots, self._lengths = found, batch.slots, batch.lengths[:]
        drawing = batch.sampling.drawing(batch.text, batch.length)
        self._memory = batch, drawing, drafting.scratch  # the call points to it
        self._made: list[list[int]] = []

    @property
    def draft_tokens(self) -> list[list[int]]:
        if not self.is_made:
            self.drafting.run(self.call)
            self.note_made()
        return self._made

    def note_made(self) -> None:
        """Take the draft tokens after the call."""
        self.is_made, self._made = True, self._found.draft_tokens
        self.drafting.note_drafted(self._slots, self._lengths, self._found.drawn)

    @property
    def k(self) -> int:
        return super().k if self.is_made else max(self.planned)

    def capped(self, caps: Sequence[int] | None) -> Draft:
        if caps is None or all(count <= cap for count, cap in zip(self.planned, caps, strict=True)):
            return self
        return super().capped(caps)


class NativeDraftDecoder(DraftDecoder):
    """The decoder of a draft model on the CPU kernels, which drafts chains in one call."""

    native: NativeDrafting

    def __init__(
        self,
        model: NativeModel,
        backend: AttentionBackend,
        rows: int,
        positions: int,
        vocab_size: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, backend, rows, positions, vocab_size, kv_dtype)
        self.native = NativeDrafting(self, model.packed_decoder.decoder)

    def missing_tokens(self, batch: Batch) -> list[int]:
        return self.native.missing_tokens(batch)

    def rewind(self, batch: Batch) -> None:
        self.native.rewind(batch)


class _DraftTable:
    """Draft tokens that a call has made so far. numbers: counts [rows], then draft tokens [rows, width].

    drawn: number of draft tokens of each row.
    """

    def __init__(self, numbers: memoryview, chances: array[float] | None, rows: int, width: int) -> None:
        self.drawn, self._draft_tokens = numbers[:rows], numbers[rows:]
        self._chances, self._width = chances, width

    def _lines(self, table: Sequence[T]) -> list[list[T]]:
        starts = range(0, len(self.drawn) * self._width, self._width)
        return [list(table[at : at + count]) for at, count in zip(starts, self.drawn, strict=True)]

    @property
    def scores(self) -> list[list[float]]:
        assert self._chances is not None
        return self._lines(self._chances)

    @property
    def draft_tokens(self) -> list[list[int]]:
        return self._lines(self._draft_tokens)

    @property
    def parents(self) -> list[list[int]] | None:
        """Parents of each row's draft tokens; None for chains."""
        return None

    def paths(self, row: int, known: int) -> list[list[int]]:
        """Paths of token ids to each new node of a row. known: number of its draft tokens that are not new."""
        return [self.draft_tokens[row]]

    def draft(self, distributions: Tensor | None) -> Draft:
        """The finished draft. distributions: [width, B, V], or None."""
        scores = None if self._chances is None else self.scores
        draft = Draft(self.draft_tokens, confidence=scores)
        if distributions is None or draft.k == 0:
            return draft
        return replace(draft, probabilities=distributions[: draft.k].transpose(0, 1).contiguous())


class _TreeTable(_DraftTable):
    """Draft tokens of trees; behind them, parents and ranks among siblings, [rows, width] each."""

    def __init__(self, numbers: memoryview, chances: array[float] | None, rows: int, width: int) -> None:
        super().__init__(numbers, chances, rows, width)
        size = rows * width
        self._parents, self._ranks = self._draft_tokens[size : 2 * size], self._draft_tokens[2 * size :]

    @property
    def parents(self) -> list[list[int]]:
        return self._lines(self._parents)

    def paths(self, row: int, known: int) -> list[list[int]]:
        paths: list[list[int]] = [[]]
        for token, parent in zip(self.draft_tokens[row], self.parents[row], strict=True):
            paths.append([*paths[parent + 1], token])
        return paths[1 + known :] if len(paths) > 1 else paths

    def draft(self, distributions: Tensor | None) -> Draft:
        kinds = [[SIBLING_KIND if rank else 0 for rank in line] for line in self._lines(self._ranks)]
        return branching(self.draft_tokens, self.parents, self.scores, kinds)


class _MaskedLogits:
    """Logits for rows with a constraint: copies without the tokens that the constraint forbids.

    addresses: [B, width], memory address of the copy for each node that is sampled from; 0: no copy.
    """

    def __init__(self, batch: Batch, counts: Sequence[int], found: _DraftTable, logits: Tensor, width: int) -> None:
        self._constraints, self._counts = batch.sampling.constraints, counts
        self._found, self._logits, self._width, self._step = found, logits, width, 0
        self._known = [0] * batch.rows  # draft tokens of each row at the last call
        self._copies: dict[int, Tensor] = {}
        self.addresses = array("q", bytes(8 * batch.rows * width))

    def mask_next(self) -> bool:
        """Mask the logits of the next draw."""
        for row, constraint in enumerate(self._constraints):
            if constraint is None or self._counts[row] <= self._step:
                continue
            for number, path in enumerate(self._found.paths(row, self._known[row])):
                if len(path) == self._step:
                    line = self._width * row + number
                    copy = self._copies[line] = self._logits[line : line + 1].clone()
                    constraint.mask(path, self._step, copy)
                    self.addresses[line] = copy.data_ptr()
        self._known = [len(draft_tokens) for draft_tokens in self._found.draft_tokens]
        self._step += 1
        return True


class _Callbacks:
    """Callbacks of the library while it drafts. An exception in one ends the draft, and is raised after the call."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None

    def callback(self, function: Callable[[], bool]) -> Any:
        """A C callback for ``function``. The library does not keep it alive; the call structure does."""
        answers = self._answers(function)
        next(answers)
        return abi.Callback(answers.__next__)

    def _answers(self, function: Callable[[], bool]) -> Iterator[int]:
        """Yield 0 once, then the answers of ``function`` up to its first exception, then 0.

        A Ctrl-C during the library's work raises where Python code goes on: on entering a function, before any ``try``
        of it, from where ctypes would print and drop it. A generator goes on within its ``try``.
        """
        try:
            yield 0
            while True:
                yield int(function())
        except GeneratorExit:
            raise
        except BaseException as failure:  # noqa: BLE001 it is raised after the call
            self._failure = failure
        yield 0

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
