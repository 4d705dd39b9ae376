"""A model with its KV cache and attention: tokens in, logits out. The target and the draft model each have one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol, cast

import torch
from torch import Tensor

from paceline.core.batch import Batch
from paceline.core.cache import KVCache
from paceline.core.draft import Draft, Verdict, real_places
from paceline.core.nodes import Nodes, Tree
from paceline.kernels.attention import AttentionBackend
from paceline.kernels.attention.base import Plan
from paceline.kernels.attention.cached import CachedAttend, PackedCachedAttend
from paceline.models.base import AnyModel, FlatModel, Model, RowAdapters, SharedModel

USUAL_LAG = 2  # tokens missing in a draft model's cache if all are accepted: the last draft token and the bonus token
CATCH_UP_CHUNK = 256  # tokens per pass over all rows when a cache has fallen behind


class FeatureReader(Protocol):
    """Stores the hidden states of tapped target layers, which exist only during the target's forward pass.

    taps: layers whose input it stores. Rows are those of the batch, slots those of the target's cache.
    """

    @property
    def taps(self) -> Sequence[int]:
        """The layers whose input is stored."""
        ...

    def read(self, rows: Tensor, slots: Tensor, features: Tensor) -> None:
        """Store the features of N tokens of a forward pass: rows, slots [N] int64, features [N, taps, width]."""
        ...

    def keep_paths(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        """Keep the accepted paths of draft trees; arguments as for ``KVCache.keep``."""
        ...

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of a row to another."""
        ...

    def swap_rows(self, one: int, other: int, length: int) -> None:
        """Exchange ``length`` positions of two rows."""
        ...


class Decoder:
    """Runs a model over the rows of a batch, each at its own position. B rows, L tokens per row, V vocabulary.

    backend: attention backend; not used by a FlatModel, which runs its own attention.
    rows, positions: size of the KV cache, in rows and tokens per row.
    vocab_size: vocabulary of the batch, if the model's head is padded to another size.

    num_computed_tokens [rows] int64: number of tokens of each row whose keys and values are in the cache. Between
        rounds it is length - 1 for the target; for a draft model it may be less.
    reader: gets the features of every token that is run; None: features are not computed.
    reads: tokens per row that a device draft feeds before its first draft token. If more are missing, the earlier ones
        are fed beforehand.
    """

    reads = USUAL_LAG

    def __init__(
        self, model: AnyModel, backend: AttentionBackend, rows: int, positions: int, vocab_size: int | None = None
    ) -> None:
        self.model = model
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size
        self.backend = backend
        self._flat = model if isinstance(model, FlatModel) else None  # stored because isinstance takes 20 us here
        self.cache = _cache_for(model, rows, positions)
        # Cache row of each batch row. It differs from the batch row only for a FlatModel, which takes a row per token.
        self._places = list(range(rows))
        self.num_computed_tokens = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self.reader: FeatureReader | None = None
        self._taps: tuple[int, ...] = ()
        self.adapters: RowAdapters | None = getattr(model, "adapters", None)
        self._adapter_of = [0] * rows  # number of each row's adapter
        self.packs = backend.name == "ragged" and model.device.type == "cuda"  # Triton also writes the cache

    def forward(
        self,
        tokens: Tensor,
        start: Tensor,
        longest: int,
        first_row: int = 0,
        counts: Tensor | None = None,
        tree: Tree | None = None,
    ) -> Tensor:
        """Run tokens [B, L] int64 of rows first_row, ... at positions start [B], ... -> hidden [B, L, width].

        longest: upper bound of all positions except those of padding, known to the host.
        counts [B]: number of real tokens per row. The others are padding, whose hidden states are undefined.
        tree: parents and depths of the tokens if they are no chain. Not for a FlatModel.
        """
        if self.model.vocab_size < self.vocab_size:  # clamp ids that only the other model's padded head can sample
            tokens = tokens.clamp(max=self.model.vocab_size - 1)
        depths = torch.arange(tokens.shape[1], device=tokens.device) if tree is None else tree.depths
        positions = start[:, None] + depths
        if self._flat is not None:
            return self._forward_flat(self._flat, tokens, positions, first_row, counts)
        ancestors = None if tree is None else tree.ancestors
        plan = self.backend.plan(positions, min(longest, self.cache.positions + 1), ancestors)
        return self._forward_padded(tokens, plan, first_row)

    def _forward_padded(self, tokens: Tensor, plan: Plan, first_row: int) -> Tensor:
        model, positions = cast(Model, self.model), plan.positions
        attend = (PackedCachedAttend if self.packs else CachedAttend)(self.cache, self.backend, plan, first_row)
        if self.adapters is not None:
            self.adapters.use(self._adapter_of[first_row : first_row + len(tokens)])
        states = model.hidden_states(tokens, positions, attend, self._taps)
        if self.reader is not None and states.features is not None:
            rows = torch.arange(first_row, first_row + len(tokens), device=tokens.device)
            rows = rows[:, None].expand_as(tokens).flatten()
            self.reader.read(rows, plan.slots.flatten(), states.features.flatten(0, 1))
        return states.hidden

    def _forward_flat(
        self, model: FlatModel, tokens: Tensor, positions: Tensor, first_row: int, counts: Tensor | None
    ) -> Tensor:
        """Run only the real tokens -> hidden [B, L, width], zero for padding."""
        real = None if counts is None else real_places(counts, tokens.shape[1])
        rows = torch.tensor(self._places[first_row : first_row + tokens.shape[0]])[:, None].expand_as(tokens)
        if real is None or bool(real.all()):
            flat = self._run_nodes(model, Nodes(tokens.flatten(), rows.flatten(), positions.flatten()))
            return flat.view(*tokens.shape, -1)
        flat = self._run_nodes(model, Nodes(tokens[real], rows[real], positions[real]))
        return flat.new_zeros(*tokens.shape, flat.shape[-1]).masked_scatter_(real[..., None], flat)

    def _run_nodes(self, model: FlatModel, nodes: Nodes) -> Tensor:
        """Run N nodes and store their features -> hidden [N, width]."""
        states = model.forward(nodes, self.cache, self._taps)
        self._pass_to_reader(nodes, states.features)
        return states.hidden

    def _pass_to_reader(self, nodes: Nodes, features: Tensor | None) -> None:
        if self.reader is not None and features is not None:
            rows = torch.tensor(self._places).argsort()[nodes.rows]
            self.reader.read(rows, nodes.positions if nodes.slots is None else nodes.slots, features)

    def attach_reader(self, reader: FeatureReader) -> None:
        """Pass the features of every token that is run from now on to ``reader``."""
        self.reader, self._taps = reader, tuple(reader.taps)

    def verify(self, batch: Batch, draft: Draft) -> Tensor:
        """Run each row's pending token and its k draft tokens in one pass -> logits [B, k + 1, V] of the next tokens.

        The logits after the last draft token of a row are undefined. A FlatModel does not compute them: if the rows
        have different numbers of draft tokens, it returns [N, V] for the N real tokens, row by row. With draft
        probabilities it always returns [B, k + 1, V], which the acceptance rule needs.
        """
        if self._flat is not None and draft.probabilities is None:
            return self._verify_flat(self._flat, batch, draft)
        tokens = torch.cat([batch.pending(), draft.tokens], dim=1)
        start, longest = batch.live_length - 1, batch.longest + draft.k
        hidden = self.forward(tokens, start, longest, counts=draft.counts + 1, tree=draft.tree)
        return self.logits(hidden)

    def _verify_flat(self, model: FlatModel, batch: Batch, draft: Draft) -> Tensor:
        """Run the real tokens only. The host lists them, which is faster than tensor operations."""
        pending = batch.pending_on_host()
        tokens: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        for row, draft_tokens in enumerate(draft.draft_tokens):
            tokens += [pending[row], *draft_tokens]
            rows += [self._places[batch.first + row]] * (len(draft_tokens) + 1)
            positions += range(batch.lengths[row] - 1, batch.lengths[row] + len(draft_tokens))
        tree = [] if draft.parents is None else _tree_of(draft.parents.tolist(), draft.draft_tokens, positions)
        nodes = Nodes(*torch.tensor([tokens, rows, *(tree or [positions])]))
        if model.vocab_size < self.vocab_size:
            nodes.tokens.clamp_(max=model.vocab_size - 1)
        logits = self.logits(self._run_nodes(model, nodes))
        return logits.view(batch.rows, draft.k + 1, -1) if len(tokens) == batch.rows * (draft.k + 1) else logits

    def keep(self, batch: Batch, verdict: Verdict) -> None:
        """Move the accepted path of each draft tree behind the row's text. Called before the commit.

        The accepted tokens of a chain are in place already.
        """
        if verdict.path is None:
            return
        moved, width = list(range(batch.rows)), verdict.path.shape[1]
        if verdict.path.device.type == "cpu":  # skip rows that stay in place, unless that needs a device read
            width, order = max(verdict.host.accepted), list(range(verdict.path.shape[1]))
            moved = [row for row, path in enumerate(verdict.path.tolist()) if path != order]
        if moved and width > 0:
            places = torch.tensor([self._places[batch.first + row] for row in moved], device=self.cache.keys.device)
            text, paths = batch.live_length[moved], verdict.path[moved, :width]
            self.cache.keep(places, text, paths)
            if self.reader is not None:
                self.reader.keep_paths(batch.first + places.new_tensor(moved), text, paths)

    def places(self, rows: int) -> list[int]:
        """Return the cache rows of the first ``rows`` batch rows."""
        return self._places[:rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V], float32, of hidden states [..., width].

        The output of a larger head is cut; that of a smaller one is padded with -inf.
        """
        logits = self.model.logits(hidden)
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits if missing == 0 else logits[..., : self.vocab_size]

    def prefill(self, batch: Batch, first_row: int, starts: Sequence[int], stops: Sequence[int]) -> None:
        """Run tokens starts[i] .. stops[i] - 1 of rows first_row + i, without logits."""
        self.prefill_rows(batch, range(first_row, first_row + len(starts)), starts, stops)

    def prefill_rows(self, batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        """Run tokens starts[i] .. stops[i] - 1 of row rows[i], without logits.

        A FlatModel runs them in one pass. Other models run each group of consecutive rows in one padded pass.
        """
        parts = [part for part in zip(rows, starts, stops, strict=True) if part[1] < part[2]]
        if self._flat is not None and parts:
            self._prefill_flat(self._flat, batch, parts)
        else:
            for _, run in groupby(enumerate(parts), lambda entry: entry[1][0] - entry[0]):
                self._prefill_consecutive(batch, [part for _, part in run])
        for row, _, stop in parts:
            self.num_computed_tokens[row] = stop

    def _prefill_flat(self, model: FlatModel, batch: Batch, parts: Sequence[tuple[int, int, int]]) -> None:
        tokens = torch.cat([batch.tokens[row - batch.first, start:stop] for row, start, stop in parts])
        if model.vocab_size < self.vocab_size:
            tokens = tokens.clamp(max=model.vocab_size - 1)
        places = torch.cat([torch.full((stop - start,), self._places[row]) for row, start, stop in parts])
        nodes = Nodes(tokens, places, torch.cat([torch.arange(*part[1:]) for part in parts]))
        self._pass_to_reader(nodes, model.fill(nodes, self.cache, self._taps))

    def _prefill_consecutive(self, batch: Batch, parts: Sequence[tuple[int, int, int]]) -> None:
        """Run (row, start, stop) of consecutive rows in one padded pass."""
        first_row, width = parts[0][0], max(stop - start for _, start, stop in parts)
        start = torch.tensor([start for _, start, _ in parts], device=batch.device)
        place = start[:, None] + torch.arange(width, device=batch.device)
        rows = slice(first_row - batch.first, first_row - batch.first + len(parts))
        tokens = batch.tokens[rows].gather(1, place.clamp(max=batch.tokens.shape[1] - 1))
        counts = torch.tensor([stop - start for _, start, stop in parts], device=batch.device)
        self.forward(tokens, start, max(start for _, start, _ in parts) + width, first_row, counts)

    def read_rows(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
        """Run tokens that are in no batch -> hidden [tokens, width] of each part.

        parts: (row, position of the first token, tokens), by ascending row. Passes as in ``prefill_rows``.
        """
        if self._flat is not None:
            return self._run_rows_flat(self._flat, parts)
        hidden: list[Tensor] = []
        for _, run in groupby(enumerate(parts), lambda entry: entry[1][0] - entry[0]):
            hidden += self._run_consecutive([part for _, part in run])
        return hidden

    def _run_rows_flat(self, model: FlatModel, parts: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
        tokens = [token for *_, text in parts for token in text]
        rows = [self._places[row] for row, _, text in parts for _ in text]
        positions = [first + offset for _, first, text in parts for offset in range(len(text))]
        hidden = self._run_nodes(model, Nodes(*torch.tensor([tokens, rows, positions])))
        return list(torch.split(hidden, [len(text) for *_, text in parts]))

    def _run_consecutive(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
        """Run consecutive rows in one pass, padded to the longest."""
        width, device = max(len(text) for *_, text in parts), self.model.device
        tokens = torch.tensor([[*text, *[text[-1]] * (width - len(text))] for *_, text in parts], device=device)
        start = torch.tensor([first for _, first, _ in parts], device=device)
        counts = torch.tensor([len(text) for *_, text in parts], device=device)
        longest = max(first for _, first, _ in parts) + width
        hidden = self.forward(tokens, start, longest, parts[0][0], counts)
        return [hidden[index, : len(text)] for index, (*_, text) in enumerate(parts)]

    def num_computed_view(self, batch: Batch) -> Tensor:
        """Return a view [B] int64 of ``num_computed_tokens`` for the batch's decoding rows."""
        return self.num_computed_tokens[batch.first : batch.first + batch.rows]

    def lags(self, batch: Batch) -> list[int]:
        """Return the number of tokens of each row that are missing in the cache. Synchronises with the device."""
        return (batch.live_length - self.num_computed_view(batch)).tolist()

    def catch_up(self, batch: Batch) -> None:
        """Run the missing tokens of each row except its last token, in chunks.

        Among parallel samples of one prompt, the row with the most computed tokens runs the rest of the prompt, and the
        others copy it.
        """
        for rows, stop in self._incomplete_groups(batch):
            source = rows[-1]
            self._run_chunks(batch, [source], self.num_computed_view(batch).tolist(), [stop])
            for row in rows[:-1]:
                self.copy_row(batch.first + source, batch.first + row, stop)
        computed = self.num_computed_view(batch).tolist()
        for incomplete, group in groupby(range(batch.rows), lambda row: computed[row] < batch.lengths[row] - 1):
            if incomplete:
                rows = list(group)
                self._run_chunks(batch, rows, computed, [batch.lengths[row] - 1 for row in rows])

    def spared(self, batch: Batch) -> int:
        """Return the number of missing tokens that ``catch_up`` copies from parallel samples instead of running."""
        groups = self._incomplete_groups(batch)
        computed = self.num_computed_view(batch).tolist() if groups else []
        return sum(stop - computed[row] for rows, stop in groups for row in rows[:-1])

    def _incomplete_groups(self, batch: Batch) -> list[tuple[list[int], int]]:
        """Return (rows, stop) of each group of parallel samples in which rows miss prompt tokens before ``stop``.

        The last row is the source of the copy, the one with the most computed tokens. The last prompt token is not
        counted.
        """
        siblings = batch.siblings
        computed, groups = self.num_computed_view(batch).tolist() if siblings else [], []
        for rows, prompt in siblings:
            stop, source = prompt - 1, max(rows, key=computed.__getitem__)
            incomplete = [row for row in rows if computed[row] < stop and row != source]
            if incomplete:
                groups.append(([*incomplete, source], stop))
        return groups

    def _run_chunks(self, batch: Batch, rows: list[int], computed: list[int], ends: list[int]) -> None:
        """Run tokens computed[row] .. end - 1 of consecutive rows, in chunks of at most CATCH_UP_CHUNK tokens."""
        starts = [min(computed[row], end) for row, end in zip(rows, ends, strict=True)]
        width = max(1, CATCH_UP_CHUNK // len(rows))
        while starts != ends:
            stops = [min(start + width, end) for start, end in zip(starts, ends, strict=True)]
            self.prefill(batch, batch.first + rows[0], starts, stops)
            starts = stops

    def next_hidden(self, batch: Batch, lag: int) -> Tensor:
        """Run the missing tokens, at most ``lag`` per row -> hidden [B, width] at each row's last token."""
        computed = self.num_computed_view(batch)
        place = computed[:, None] + torch.arange(lag, device=batch.device)
        tokens = batch.tokens[: batch.rows].gather(1, place.clamp(max=batch.tokens.shape[1] - 1))
        hidden = self.forward(tokens, computed, batch.longest, batch.first, batch.live_length - computed)
        last = (batch.live_length - computed - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        computed.copy_(batch.live_length)
        return hidden.gather(1, last).squeeze(1)

    def begin_draft(self, text: Tensor, before: Tensor, span: int) -> Tensor:
        """Run the missing tokens text [B, reads] int64 of each row -> hidden [B, 1, width] at its last token.

        This is the first step of a draft on a device. The text of a row begins at its ``num_computed_tokens``.
        before [B]: lengths of the rows; tokens beyond them are padding. span: ``longest`` of ``forward``.
        """
        computed = self.num_computed_tokens[: len(text)]
        return at(self.forward(text, computed, span), before - computed - 1)

    def continue_draft(self, draft_token: Tensor, step: int, before: Tensor, span: int) -> Tensor:
        """Run draft token number ``step`` (from 1 on) [B, 1] int64 -> hidden [B, 1, width]. Earlier ones were run."""
        return self.forward(draft_token, before + step - 1, span)

    def read_after(self, before: Tensor, kept: Tensor) -> Tensor:
        """Return the computed tokens [B] of each row after a round.

        before [B]: lengths before the round. kept [B]: accepted draft tokens among those that were run.
        """
        return before + kept

    def lag_after(self, k: int) -> int:
        """Return the most tokens of a row that may be missing after a round with ``k`` draft tokens."""
        return USUAL_LAG

    def hidden_after(self, batch: Batch, draft_tokens: Tensor) -> Tensor:
        """Run the last of draft_tokens [B, n] int64 -> hidden [B, width] at it. The earlier ones were run."""
        step = draft_tokens.shape[1]
        start, longest = batch.live_length + step - 1, batch.longest + step
        return self.forward(draft_tokens[:, -1:], start, longest, batch.first)[:, 0]

    def hidden_after_branches(self, batch: Batch, draft: Draft, read: Sequence[int]) -> Tensor:
        """Run the draft tokens of trees, except the first read[i] of row i -> hidden [N, width] of the N new ones.

        The text of each row must have been run. Draft tokens are stored in the slots behind it. The result is row by
        row.
        """
        new = [range(run, count) for run, count in zip(read, draft.drafted, strict=True)]
        if self._flat is not None:
            return self._run_branches(self._flat, batch, draft, new)
        hidden = self._run_tree(batch, draft)
        row = [row for row, indices in enumerate(new) for _ in indices]
        return hidden[row, [index + 1 for indices in new for index in indices]]

    def _run_tree(self, batch: Batch, draft: Draft) -> Tensor:
        """Run the pending token and all draft tokens of each row -> hidden [B, k + 1, width]."""
        tokens = torch.cat([batch.pending(), draft.tokens], dim=1)
        start, longest = batch.live_length - 1, batch.longest + draft.k
        return self.forward(tokens, start, longest, batch.first, draft.counts + 1, draft.tree)

    def _run_branches(self, model: FlatModel, batch: Batch, draft: Draft, new: Sequence[range]) -> Tensor:
        """Run the new draft tokens. The node list begins with those that were run before, as their parents."""
        order = [(row, index) for row, indices in enumerate(new) for index in range(indices.start)]
        read = len(order)
        order += [(row, index) for row, indices in enumerate(new) for index in indices]
        node_of = {draft_token: node for node, draft_token in enumerate(order)}
        draft_parents = draft.host_parents or [list(range(-1, draft.k - 1))] * batch.rows
        parents = [node_of.get((row, draft_parents[row][index]), -1) for row, index in order]
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        tokens = [draft.draft_tokens[row][index] for row, index in order]
        rows = [self._places[batch.first + row] for row, _ in order]
        positions = [batch.lengths[row] + depth for (row, _), depth in zip(order, depths, strict=True)]
        slots = [batch.lengths[row] + index for row, index in order]
        nodes = Nodes(*torch.tensor([tokens, rows, positions, slots, parents]))._replace(read=read)
        if model.vocab_size < self.vocab_size:
            nodes.tokens.clamp_(max=model.vocab_size - 1)
        return self._run_nodes(model, nodes)

    def keep_draft_tokens(self, batch: Batch, text: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep the draft tokens of ``paths`` in each row: move them behind the text and count them as computed.

        text: tokens of each row's text. paths: indices of the draft tokens to keep in each row, in order.
        """
        width = max(map(len, paths))
        moved = [row for row, path in enumerate(paths) if list(path) != list(range(len(path)))]
        if moved:
            device = self.cache.keys.device
            wide = torch.tensor([[*paths[row], *range(len(paths[row]), width)] for row in moved], device=device)
            places = torch.tensor([self._places[batch.first + row] for row in moved], device=device)
            self.cache.keep(places, torch.tensor([text[row] for row in moved], device=device), wide)
        computed = [length + len(path) for length, path in zip(text, paths, strict=True)]
        self.num_computed_view(batch).copy_(torch.tensor(computed))

    def note_draft_tokens(self, batch: Batch, count: int) -> None:
        """Count the draft tokens of each row as computed, except the last one, which was not run."""
        self.num_computed_view(batch).add_(count - 1)

    def rewind(self, batch: Batch) -> None:
        """Drop rejected draft tokens, and each row's last token, from the computed ones. No memory moves."""
        computed = self.num_computed_view(batch)
        torch.minimum(computed, batch.live_length - 1, out=computed)

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of a row to another row."""
        self.cache.copy_row(self._places[source], self._places[destination], length)
        if self.reader is not None:
            self.reader.copy_row(source, destination, length)
        self.num_computed_tokens[destination] = self.num_computed_tokens[source].clamp(max=length)

    def swap_rows(self, one: int, other: int, length: int) -> None:
        """Exchange ``length`` positions of two rows. For a FlatModel only the row numbers are exchanged."""
        if self._flat is None:
            self.cache.swap_rows(one, other, length)
        else:
            self._places[one], self._places[other] = self._places[other], self._places[one]
        if self.reader is not None:
            self.reader.swap_rows(one, other, length)
        self._adapter_of[one], self._adapter_of[other] = self._adapter_of[other], self._adapter_of[one]
        self.num_computed_tokens[[one, other]] = self.num_computed_tokens[[other, one]]

    def set_adapter(self, row: int, name: str | None) -> None:
        """Set the adapter of a row; None for the model itself."""
        if self.adapters is not None:
            self._adapter_of[row] = self.adapters.number(name)

    def resize_row(self, row: int, positions: int) -> None:
        """Set the capacity of a row in tokens; memory beyond it is freed. See ``RowTables``."""
        self.cache.resize(self._places[row], positions)

    @property
    def grows(self) -> bool:
        """Whether memory is allocated per row as it grows."""
        return self.cache.grows

    def capacity_of(self, row: int) -> int:
        """Return the capacity of a row in tokens."""
        return self.cache.sizes[self._places[row]]

    def cut_row(self, row: int, length: int) -> None:
        """Begin a new text in a row, of which at most ``length`` tokens are in the cache already."""
        self.num_computed_tokens[row].clamp_(max=length)

    def num_computed(self, row: int) -> int:
        """Return the number of computed tokens of a row. Synchronises with the device."""
        return int(self.num_computed_tokens[row])

    def clear(self) -> None:
        """Reset the mapping of rows; called when no row is in use, such as after an interrupt."""
        self._places = list(range(self.cache.rows))
        self._adapter_of = [0] * len(self._adapter_of)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every batch row has a cache row of its own."""
        assert sorted(self._places) == list(range(self.cache.rows)), "two batch rows share a cache row"


def _cache_for(model: AnyModel, rows: int, positions: int) -> KVCache:
    if isinstance(model, SharedModel):
        return model.new_cache(rows, positions)
    return KVCache(model.layers, rows, model.kv_heads, positions, model.head_dim, model.dtype, model.device)


def _tree_of(parents: list[list[int]], draft_tokens: list[list[int]], slots: list[int]) -> list[list[int]]:
    """Return positions, slots and parents of each row's pending token and draft tokens, row by row.

    parents: parent of each draft token within its row, -1 for the pending token. slots: cache slot of each token.
    """
    node_parents: list[int] = []
    for row_parents, real in zip(parents, draft_tokens, strict=True):
        root = len(node_parents)
        node_parents += [-1, *(root + 1 + parent for parent in row_parents[: len(real)])]
    positions: list[int] = []
    for slot, parent in zip(slots, node_parents, strict=True):
        positions.append(slot if parent < 0 else positions[parent] + 1)
    return [positions, slots, node_parents]


def at(hidden: Tensor, place: Tensor) -> Tensor:
    """Select hidden [B, L, width] at index place [B], clamped to the range -> [B, 1, width]."""
    place = place.clamp(0, hidden.shape[1] - 1)
    return hidden.gather(1, place[:, None, None].expand(-1, 1, hidden.shape[-1]))
