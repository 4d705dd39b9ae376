"""A model with its KV cache and attention: tokens in, logits out. The target and the draft model each have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from paceline.core.batch import Batch
from paceline.core.draft_tensors import DraftTensors
from paceline.core.nodes import Tree
from paceline.core.slots import Slots
from paceline.core.values import Accepted
from paceline.kernels.attention import AttentionBackend
from paceline.models.base import AnyModel, FlatModel, Model, RowAdapters
from paceline.models.decoding.cached_rows import CachedRows
from paceline.models.decoding.passes import FeatureReader, FlatPasses, PaddedPasses, Part, Passes

__all__ = ["Decoder", "FeatureReader"]


class Decoder(CachedRows):
    """Runs a model over the rows of a batch, each at its own position. B rows, L tokens per row, V vocabulary.

    backend: attention backend; not used by a FlatModel, which runs its own attention.
    rows, positions, kv_dtype, pool: see ``CachedRows``.
    vocab_size: vocabulary of the batch, if the model's head is padded to another size.
    passes: runs its forward passes.
    adapters: the adapters that the model was loaded with; None for most models.
    """

    def __init__(
        self,
        model: AnyModel,
        backend: AttentionBackend,
        rows: int,
        positions: int,
        vocab_size: int | None = None,
        kv_dtype: torch.dtype | None = None,
        *,
        pool: int | None = None,
    ) -> None:
        super().__init__(model, rows, positions, kv_dtype, pool)
        self.model = model
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size
        self.backend = backend
        self.adapters: RowAdapters | None = getattr(model, "adapters", None)
        self.passes = self._new_passes()

    def _new_passes(self) -> Passes:
        if isinstance(self.model, FlatModel):
            return FlatPasses(self.model, self.cache, self.vocab_size)
        return PaddedPasses(cast(Model, self.model), self.cache, self.backend, self.vocab_size, self.adapters)

    @property
    def reader(self) -> FeatureReader | None:
        """What gets the features of every token that is run; None: features are not computed."""
        return self.passes.reader

    def attach_reader(self, reader: FeatureReader) -> None:
        """Pass the features of every token that is run from now on to ``reader``."""
        self.passes.attach(reader)

    def forward(
        self,
        tokens: Tensor,
        start: Tensor,
        longest: int,
        rows: Slots | None = None,
        counts: Tensor | None = None,
        tree: Tree | None = None,
        *,
        adapted: bool = True,
    ) -> Tensor:
        """Run tokens [B, L] int64 at positions start [B], ... of rows of the cache -> hidden [B, L, width].

        longest: upper bound of all positions except those of padding, known to the host.
        rows: the rows of the cache; None: its first ones.
        counts [B]: number of real tokens per row. The others are padding, whose hidden states are undefined. Recurrent
            states of a row without any do not change.
        tree: parents and depths of the tokens if they are no chain. Not for a FlatModel.
        adapted: False if the host knows that no row has an adapter, whose launches are then left out.
        """
        rows = Slots.listed(range(len(tokens)), tokens.device) if rows is None else rows
        return self.passes.forward(tokens, start, longest, rows, counts, tree, adapted=adapted)

    def verify(self, batch: Batch, draft: DraftTensors) -> Tensor:
        """Run each row's pending token and its k draft tokens in one pass -> logits [B, k + 1, V] of the next tokens.

        The logits after the last draft token of a row are undefined. A FlatModel does not compute them: if the rows
        have different numbers of draft tokens, it returns [N, V] for the N real tokens, row by row. With draft
        probabilities it always returns [B, k + 1, V], which the acceptance rule needs.
        """
        return self.logits(self.passes.verify(batch, draft))

    def keep(self, batch: Batch, accepted: Accepted) -> None:
        """Move the accepted path of each draft tree behind the row's text. Called before the commit.

        The accepted tokens of a chain are in place already.
        """
        if (path := accepted.path) is None:
            return
        moved, width = list(range(batch.rows)), path.shape[1]
        if path.device.type == "cpu":  # skip rows that stay in place, unless that needs a device read
            order, width = list(range(width)), int(accepted.accepted.max())
            moved = [row for row, line in enumerate(path.tolist()) if line != order]
        if moved and width > 0:
            self.keep_paths(batch.live_slots.index[moved], batch.live_length[moved], path[moved, :width])

    def keep_paths(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        """Move the accepted paths of draft trees in rows of the cache; arguments as for ``KVCache.keep``."""
        self.cache.keep(rows, text, paths)
        if self.reader is not None:
            self.reader.keep_paths(rows, text, paths)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V], float32, of hidden states [..., width].

        The output of a larger head is cut; that of a smaller one is padded with -inf.
        """
        logits = self.model.logits(hidden)
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits if missing == 0 else logits[..., : self.vocab_size]

    def prefill(self, batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        """Run tokens starts[i] .. stops[i] - 1 of the sequence in slot rows[i], without logits.

        A FlatModel runs them in one pass, other models in one padded pass with ragged attention. With other attention
        each group of consecutive rows is a pass.
        """
        parts = [part for part in zip(rows, starts, stops, strict=True) if part[1] < part[2]]
        if parts:
            self.passes.fill([Part(row, start, batch.text[row, start:stop]) for row, start, stop in parts])
        for row, _, stop in parts:
            self.num_computed_tokens[row].fill_(stop)

    def read(self, batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> list[Tensor]:
        """Run tokens as ``prefill`` does -> hidden [stops[i] - starts[i], width] of each slot, which has some."""
        parts = zip(rows, starts, stops, strict=True)
        hidden = self.passes.read([Part(row, start, batch.text[row, start:stop]) for row, start, stop in parts])
        for row, stop in zip(rows, stops, strict=True):
            self.num_computed_tokens[row] = stop
        return hidden

    @property
    def reads_ends(self) -> bool:
        """Whether ``end_prompts`` may be called."""
        return self.passes.reads_ends and self.cuts_anywhere

    def end_prompts(
        self, batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int], count: int
    ) -> Tensor:
        """Run tokens as ``prefill`` does -> hidden [count, width] at the last tokens of the last ``count`` slots."""
        parts = zip(rows, starts, stops, strict=True)
        hidden = self.passes.end([Part(row, start, batch.text[row, start:stop]) for row, start, stop in parts], count)
        for row, stop in zip(rows, stops, strict=True):
            self.num_computed_tokens[row] = stop
        return hidden

    def copy_row(self, source: int, destination: int, length: int) -> None:
        super().copy_row(source, destination, length)
        if self.reader is not None:
            self.reader.copy_row(source, destination, length)

    def set_adapter(self, slot: int, name: str | None) -> None:
        """Set the adapter of a slot; None for the model itself."""
        if self.adapters is not None:
            self.cache.adapter_of[slot].fill_(self.adapters.number(name))
