"""A draft model's decoder: what drafters read of it, and how its cache follows the text.

B rows, k draft tokens. The cache may lack tokens of the text; draft tokens lie behind it until a round ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from paceline.core.batch import Batch, StopDrafting
from paceline.core.draft import Draft
from paceline.core.slots import Slots
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.draft_vocabulary import DraftVocabulary

USUAL_MISSING = 2  # tokens missing in its cache if all are accepted: the last draft token and the bonus token
CATCH_UP_CHUNK = 256  # tokens per pass over all rows when a cache has fallen behind

ComputeLogits: TypeAlias = Callable[[Tensor], Tensor]
"""From the draft tokens so far, [B, n] int64, to the draft model's logits after them, [B, 1, V] float32."""


class OneCallDrafting(Protocol):
    """Makes all draft tokens of a round in one call of the CPU kernels; ``native_draft`` has the implementation.

    branches: whether it draws trees.
    """

    branches: bool

    def shorten(self, vocabulary: DraftVocabulary) -> None:
        """See ``DraftDecoder.shorten``."""
        ...

    def draft(
        self,
        batch: Batch,
        counts: Sequence[int],
        stop_drafting: StopDrafting | None,
        *,
        distributions: bool,
        width: int = 1,
    ) -> Draft:
        """Run the missing tokens of each row and draft ``counts`` [B] tokens; see ``NativeDrafting.draft``."""
        ...


class DraftDecoder(Decoder):
    """The decoder of a draft model.

    fed_tokens: tokens per row that a device draft feeds before its first draft token. If more are missing, the earlier
        ones are fed beforehand.
    longest_draft: most draft tokens of a row; None: no limit.
    native: drafts in one call of the CPU kernels; None: step by step.
    vocabulary: the tokens that it scores; None: all.
    """

    fed_tokens = USUAL_MISSING
    longest_draft: int | None = None
    native: OneCallDrafting | None = None
    vocabulary: DraftVocabulary | None = None

    def shorten(self, vocabulary: DraftVocabulary) -> None:
        """Score only the tokens of ``vocabulary`` from now on."""
        self.vocabulary = vocabulary
        if self.native is not None:
            self.native.shorten(vocabulary)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) if self.vocabulary is None else self.vocabulary.logits(hidden)

    def missing_tokens(self, batch: Batch) -> list[int]:
        """Return the number of tokens of each row that are missing in the cache. Synchronises with the device."""
        return (batch.live_length - self.num_computed_tokens[batch.live_slots.where]).tolist()

    def catch_up(self, batch: Batch) -> None:
        """Run the missing tokens of each row except its last token, in chunks.

        Among parallel samples of one prompt, the row with the most computed tokens runs the rest of the prompt, and the
        others copy it.
        """
        for rows, stop in self._incomplete_groups(batch):
            source = rows[-1]
            self._run_chunks(batch, [source], self.num_computed_tokens[batch.live_slots.where].tolist(), [stop])
            for row in rows[:-1]:
                self.copy_row(batch.slots[source], batch.slots[row], stop)
        computed = self.num_computed_tokens[batch.live_slots.where].tolist()
        rows = [row for row in range(batch.rows) if computed[row] < batch.lengths[row] - 1]
        if rows:
            self._run_chunks(batch, rows, computed, [batch.lengths[row] - 1 for row in rows])

    def spared(self, batch: Batch) -> int:
        """Return the number of missing tokens that ``catch_up`` copies from parallel samples instead of running."""
        groups = self._incomplete_groups(batch)
        computed = self.num_computed_tokens[batch.live_slots.where].tolist() if groups else []
        return sum(stop - computed[row] for rows, stop in groups for row in rows[:-1])

    def _incomplete_groups(self, batch: Batch) -> list[tuple[list[int], int]]:
        """Return (rows, stop) of each group of parallel samples in which rows miss prompt tokens before ``stop``.

        The last row is the source of the copy, the one with the most computed tokens. The last prompt token is not
        counted.
        """
        siblings = batch.siblings
        computed, groups = self.num_computed_tokens[batch.live_slots.where].tolist() if siblings else [], []
        for rows, prompt in siblings:
            stop, source = prompt - 1, max(rows, key=computed.__getitem__)
            incomplete = [row for row in rows if computed[row] < stop and row != source]
            if incomplete:
                groups.append(([*incomplete, source], stop))
        return groups

    def _run_chunks(self, batch: Batch, rows: list[int], computed: list[int], ends: list[int]) -> None:
        """Run tokens computed[row] .. end - 1 of live rows, in chunks of at most CATCH_UP_CHUNK tokens."""
        starts = [min(computed[row], end) for row, end in zip(rows, ends, strict=True)]
        width = max(1, CATCH_UP_CHUNK // len(rows))
        while starts != ends:
            stops = [min(start + width, end) for start, end in zip(starts, ends, strict=True)]
            self.prefill(batch, [batch.slots[row] for row in rows], starts, stops)
            starts = stops

    def next_hidden(self, batch: Batch, missing: int) -> Tensor:
        """Run at most ``missing`` tokens per row -> hidden [B, width] at each row's last token."""
        computed, length = self.num_computed_tokens[batch.live_slots.where], batch.live_length
        self.cache.cover(batch.slots, [max(0, size - missing) for size in batch.lengths], batch.lengths)
        tokens = batch.text_at(computed[:, None] + torch.arange(missing, device=batch.device))
        hidden = self.forward(tokens, computed, batch.longest, batch.live_slots, length - computed)
        last = (length - computed - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        self.num_computed_tokens[batch.live_slots.where] = length
        return hidden.gather(1, last).squeeze(1)

    def feed(self, text: Tensor, span: int, rows: Slots) -> None:
        """Run missing tokens text [B, L] int64 of each row, from its ``num_computed_tokens`` on, on a device.

        Tokens beyond a row's end are padding. span, rows: as ``longest`` and ``rows`` of ``forward``.
        """
        self.forward(text, rows.of(self.num_computed_tokens), span, rows)

    def drafting(self, text: Tensor, before: Tensor, _k: int, span: int, rows: Slots) -> ComputeLogits:
        """Begin a draft of at most k tokens on a device; the function that is returned computes its logits.

        text, span, rows: as for ``feed``; the text goes up to each row's last token. before [B]: lengths of the rows.
        """

        def compute(draft_tokens: Tensor) -> Tensor:
            if (step := draft_tokens.shape[1]) == 0:
                return self.logits(self.begin_draft(text, before, span, rows))
            return self.logits(self.continue_draft(draft_tokens[:, -1:], step, before, span, rows))

        return compute

    def begin_draft(self, text: Tensor, before: Tensor, span: int, rows: Slots) -> Tensor:
        """Run the missing tokens text [B, L] int64 of each row -> hidden [B, 1, width] at its last token.

        Arguments as for ``drafting``.
        """
        computed = rows.of(self.num_computed_tokens)
        return at(self.forward(text, computed, span, rows), before - computed - 1)

    def continue_draft(self, draft_token: Tensor, step: int, before: Tensor, span: int, rows: Slots) -> Tensor:
        """Run draft token number ``step`` (from 1 on) [B, 1] int64 -> hidden [B, 1, width]. Earlier ones were run."""
        return self.forward(draft_token, before + step - 1, span, rows)

    def read_after(self, before: Tensor, kept: Tensor) -> Tensor:
        """Return the computed tokens [B] of each row after a round.

        before [B]: lengths before the round. kept [B]: accepted draft tokens among those that were run.
        """
        return before + kept

    def missing_after(self, k: int) -> int:
        """Return the most tokens of a row that may be missing after a round with ``k`` draft tokens."""
        return USUAL_MISSING

    def hidden_after(self, batch: Batch, draft_tokens: Tensor) -> Tensor:
        """Run the last of draft_tokens [B, n] int64 -> hidden [B, width] at it. The earlier ones were run."""
        step = draft_tokens.shape[1]
        start, longest = batch.live_length + step - 1, batch.longest + step
        self.cache.cover(batch.slots, [size + step - 1 for size in batch.lengths], batch.ends_after(step))
        return self.forward(draft_tokens[:, -1:], start, longest, batch.live_slots)[:, 0]

    def hidden_after_branches(self, batch: Batch, draft: Draft, read: Sequence[int]) -> Tensor:
        """Run the draft tokens of trees, except the first read[i] of row i -> hidden [N, width] of the N new ones.

        The text of each row must have been run. Draft tokens are stored in the slots behind it. The result is row by
        row.
        """
        new = [range(run, count) for run, count in zip(read, draft.drafted, strict=True)]
        return self.passes.branches(batch, draft, new)

    def keep_draft_tokens(self, batch: Batch, text: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep the draft tokens of ``paths`` in each row: move them behind the text and count them as computed.

        text: tokens of each row's text. paths: indices of the draft tokens to keep in each row, in order.
        """
        width = max(map(len, paths))
        moved = [row for row, path in enumerate(paths) if list(path) != list(range(len(path)))]
        if moved:
            device = self.cache.device
            wide = torch.tensor([[*paths[row], *range(len(paths[row]), width)] for row in moved], device=device)
            behind = torch.tensor([text[row] for row in moved], device=device)
            self.cache.keep(batch.live_slots.index[moved], behind, wide)
        computed = torch.tensor([length + len(path) for length, path in zip(text, paths, strict=True)])
        self.num_computed_tokens[batch.live_slots.where] = computed.to(batch.device)

    def note_draft_tokens(self, batch: Batch, counts: int | Tensor) -> None:
        """Count the draft tokens of each row, or those of all, as computed, except the last one, which was not run.

        counts: [B] int64, at least 1.
        """
        self.num_computed_tokens[batch.live_slots.where] = self.num_computed_tokens[batch.live_slots.where] + counts - 1

    def rewind(self, batch: Batch) -> None:
        """Drop rejected draft tokens, and each row's last token, from the computed ones. No memory moves."""
        kept = torch.minimum(self.num_computed_tokens[batch.live_slots.where], batch.live_length - 1)
        self.num_computed_tokens[batch.live_slots.where] = kept


def at(hidden: Tensor, place: Tensor) -> Tensor:
    """Select hidden [B, L, width] at index place [B], clamped to the range -> [B, 1, width]."""
    place = place.clamp(0, hidden.shape[1] - 1)
    return hidden.gather(1, place[:, None, None].expand(-1, 1, hidden.shape[-1]))
