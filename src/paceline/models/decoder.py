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
from paceline.core.recurrent_state import StatefulCache
from paceline.core.slots import Slots
from paceline.kernels.attention import AttentionBackend
from paceline.kernels.attention.base import Plan
from paceline.kernels.attention.cached import CachedAttend, PackedCachedAttend
from paceline.models.base import AnyModel, FlatModel, Model, RowAdapters, SharedModel
from paceline.models.draft_vocabulary import DraftVocabulary
from paceline.models.recurrent import cache_of

USUAL_LAG = 2  # tokens missing in a draft model's cache if all are accepted: the last draft token and the bonus token
CATCH_UP_CHUNK = 256  # tokens per pass over all rows when a cache has fallen behind


class FeatureReader(Protocol):
    """Stores the hidden states of tapped target layers, which exist only during the target's forward pass.

    taps: layers whose input it stores. Rows and slots are those of the target's cache.
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


class Decoder:
    """Runs a model over the rows of a batch, each at its own position. B rows, L tokens per row, V vocabulary.

    A sequence's keys and values are in the row of the cache that is its slot (``Batch.slots``).

    backend: attention backend; not used by a FlatModel, which runs its own attention.
    rows, positions: size of the KV cache, in rows and tokens per row.
    vocab_size: vocabulary of the batch, if the model's head is padded to another size.

    num_computed_tokens [rows] int64: number of tokens of each row whose keys and values are in the cache. Between
        rounds it is length - 1 for the target; for a draft model it may be less.
    vocabulary: of a draft model, the tokens that it scores; None: all.
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
        self._recurrent = self.cache.states if isinstance(self.cache, StatefulCache) else None
        self.num_computed_tokens = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self.reader: FeatureReader | None = None
        self.vocabulary: DraftVocabulary | None = None
        self._taps: tuple[int, ...] = ()
        self.adapters: RowAdapters | None = getattr(model, "adapters", None)
        self._adapter_of = [0] * rows  # number of each row's adapter
        self.packs = backend.name == "ragged" and model.device.type == "cuda"  # Triton also writes the cache

    def forward(
        self,
        tokens: Tensor,
        start: Tensor,
        longest: int,
        rows: Slots | None = None,
        counts: Tensor | None = None,
        tree: Tree | None = None,
    ) -> Tensor:
        """Run tokens [B, L] int64 at positions start [B], ... of rows of the cache -> hidden [B, L, width].

        longest: upper bound of all positions except those of padding, known to the host.
        rows: the rows of the cache; None: its first ones.
        counts [B]: number of real tokens per row. The others are padding, whose hidden states are undefined.
        tree: parents and depths of the tokens if they are no chain. Not for a FlatModel.
        """
        if self.model.vocab_size < self.vocab_size:  # clamp ids that only the other model's padded head can sample
            tokens = tokens.clamp(max=self.model.vocab_size - 1)
        depths = torch.arange(tokens.shape[1], device=tokens.device) if tree is None else tree.depths
        positions = start[:, None] + depths
        rows = Slots.listed(range(len(tokens)), tokens.device) if rows is None else rows
        if self._flat is not None:
            return self._forward_flat(self._flat, tokens, positions, rows, counts)
        ancestors = None if tree is None else tree.ancestors
        plan = self.backend.plan(positions, min(longest, self.cache.positions + 1), ancestors)
        return self._forward_padded(tokens, plan, rows)

    def _forward_padded(self, tokens: Tensor, plan: Plan, rows: Slots) -> Tensor:
        model, positions = cast(Model, self.model), plan.positions
        attend = (PackedCachedAttend if self.packs else CachedAttend)(self.cache, self.backend, plan, rows)
        if self.adapters is not None:
            assert rows.numbers is not None, "captured programs know no adapters"
            self.adapters.use([self._adapter_of[slot] for slot in rows.numbers])
        states = model.hidden_states(tokens, positions, attend, self._taps)
        if self.reader is not None and states.features is not None:
            of_tokens = rows.index[:, None].expand_as(tokens).flatten()
            self.reader.read(of_tokens, plan.slots.flatten(), states.features.flatten(0, 1))
        return states.hidden

    def _forward_flat(
        self, model: FlatModel, tokens: Tensor, positions: Tensor, slots: Slots, counts: Tensor | None
    ) -> Tensor:
        """Run only the real tokens -> hidden [B, L, width], zero for padding."""
        real = None if counts is None else real_places(counts, tokens.shape[1])
        rows = slots.index[:, None].expand_as(tokens)
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
            self.reader.read(nodes.rows, nodes.positions if nodes.slots is None else nodes.slots, features)

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
        hidden = self.forward(tokens, start, longest, batch.live_slots, draft.counts + 1, draft.tree)
        return self.logits(hidden)

    def _verify_flat(self, model: FlatModel, batch: Batch, draft: Draft) -> Tensor:
        """Run the real tokens only. The host lists them, which is faster than tensor operations."""
        pending = batch.pending_on_host()
        tokens: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        for row, draft_tokens in enumerate(draft.draft_tokens):
            tokens += [pending[row], *draft_tokens]
            rows += [batch.slots[row]] * (len(draft_tokens) + 1)
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
            rows = batch.live_slots.index[moved]
            text, paths = batch.live_length[moved], verdict.path[moved, :width]
            self.cache.keep(rows, text, paths)
            if self.reader is not None:
                self.reader.keep_paths(rows, text, paths)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V], float32, of hidden states [..., width].

        The output of a larger head is cut; that of a smaller one is padded with -inf.
        """
        if self.vocabulary is not None:
            return self.vocabulary.logits(hidden)
        logits = self.model.logits(hidden)
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits if missing == 0 else logits[..., : self.vocab_size]

    def prefill(self, batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        """Run tokens starts[i] .. stops[i] - 1 of the sequence in slot rows[i], without logits.

        A FlatModel runs them in one pass. Other models run each group of consecutive rows in one padded pass.
        """
        parts = [part for part in zip(rows, starts, stops, strict=True) if part[1] < part[2]]
        if not parts:
            return
        if self._flat is not None:
            self._prefill_flat(self._flat, batch, parts)
        else:
            self._run_padded([(row, start, batch.text[row, start:stop]) for row, start, stop in parts])
        for row, _, stop in parts:
            self.num_computed_tokens[row] = stop

    def _prefill_flat(self, model: FlatModel, batch: Batch, parts: Sequence[tuple[int, int, int]]) -> None:
        tokens = torch.cat([batch.text[row, start:stop] for row, start, stop in parts])
        if model.vocab_size < self.vocab_size:
            tokens = tokens.clamp(max=model.vocab_size - 1)
        rows = torch.cat([torch.full((stop - start,), row) for row, start, stop in parts])
        nodes = Nodes(tokens, rows, torch.cat([torch.arange(*part[1:]) for part in parts]))
        self._pass_to_reader(nodes, model.fill(nodes, self.cache, self._taps))

    def read_rows(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
        """Run tokens that are in no batch -> hidden [tokens, width] of each part.

        parts: (row of the cache, position of the first token, tokens), by ascending row. Passes as in ``prefill``.
        """
        if self._flat is not None:
            return self._run_rows_flat(self._flat, parts)
        device = self.model.device
        return self._run_padded([(row, first, torch.tensor(text, device=device)) for row, first, text in parts])

    def _run_rows_flat(self, model: FlatModel, parts: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
        tokens = [token for *_, text in parts for token in text]
        rows = [row for row, _, text in parts for _ in text]
        positions = [first + offset for _, first, text in parts for offset in range(len(text))]
        hidden = self._run_nodes(model, Nodes(*torch.tensor([tokens, rows, positions])))
        return list(torch.split(hidden, [len(text) for *_, text in parts]))

    def _run_padded(self, parts: Sequence[tuple[int, int, Tensor]]) -> list[Tensor]:
        """Run (row, position of the first token, tokens) -> hidden [tokens, width] of each part.

        Each group of consecutive rows is one padded pass over a view of the cache.
        """
        hidden: list[Tensor] = []
        for _, run in groupby(enumerate(parts), lambda entry: entry[1][0] - entry[0]):
            hidden += self._run_consecutive([part for _, part in run])
        return hidden

    def _run_consecutive(self, parts: Sequence[tuple[int, int, Tensor]]) -> list[Tensor]:
        """Run consecutive rows in one pass, padded to the longest."""
        device, sizes = self.model.device, [len(text) for *_, text in parts]
        tokens = torch.nn.utils.rnn.pad_sequence([text for *_, text in parts], batch_first=True)
        firsts, rows = [first for _, first, _ in parts], Slots.listed([row for row, *_ in parts], device)
        start, counts = torch.tensor(firsts, device=device), torch.tensor(sizes, device=device)
        hidden = self.forward(tokens, start, max(firsts) + max(sizes), rows, counts)
        return [of_row[:size] for of_row, size in zip(hidden, sizes, strict=True)]

    def lags(self, batch: Batch) -> list[int]:
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

    def next_hidden(self, batch: Batch, lag: int) -> Tensor:
        """Run the missing tokens, at most ``lag`` per row -> hidden [B, width] at each row's last token."""
        computed, length = self.num_computed_tokens[batch.live_slots.where], batch.live_length
        tokens = batch.text_at(computed[:, None] + torch.arange(lag, device=batch.device))
        hidden = self.forward(tokens, computed, batch.longest, batch.live_slots, length - computed)
        last = (length - computed - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        self.num_computed_tokens[batch.live_slots.where] = length
        return hidden.gather(1, last).squeeze(1)

    def begin_draft(self, text: Tensor, before: Tensor, span: int, rows: Slots) -> Tensor:
        """Run the missing tokens text [B, reads] int64 of each row -> hidden [B, 1, width] at its last token.

        This is the first step of a draft on a device. The text of a row begins at its ``num_computed_tokens``.
        before [B]: lengths of the rows; tokens beyond them are padding. span, rows: as ``longest`` and ``rows`` of
            ``forward``.
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

    def lag_after(self, k: int) -> int:
        """Return the most tokens of a row that may be missing after a round with ``k`` draft tokens."""
        return USUAL_LAG

    def hidden_after(self, batch: Batch, draft_tokens: Tensor) -> Tensor:
        """Run the last of draft_tokens [B, n] int64 -> hidden [B, width] at it. The earlier ones were run."""
        step = draft_tokens.shape[1]
        start, longest = batch.live_length + step - 1, batch.longest + step
        return self.forward(draft_tokens[:, -1:], start, longest, batch.live_slots)[:, 0]

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
        return self.forward(tokens, start, longest, batch.live_slots, draft.counts + 1, draft.tree)

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
        rows = [batch.slots[row] for row, _ in order]
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
            behind = torch.tensor([text[row] for row in moved], device=device)
            self.cache.keep(batch.live_slots.index[moved], behind, wide)
        computed = torch.tensor([length + len(path) for length, path in zip(text, paths, strict=True)])
        self.num_computed_tokens[batch.live_slots.where] = computed.to(batch.device)

    def note_draft_tokens(self, batch: Batch, count: int) -> None:
        """Count the draft tokens of each row as computed, except the last one, which was not run."""
        self.num_computed_tokens[batch.live_slots.where] = self.num_computed_tokens[batch.live_slots.where] + count - 1

    def rewind(self, batch: Batch) -> None:
        """Drop rejected draft tokens, and each row's last token, from the computed ones. No memory moves."""
        kept = torch.minimum(self.num_computed_tokens[batch.live_slots.where], batch.live_length - 1)
        self.num_computed_tokens[batch.live_slots.where] = kept

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of a row to another row."""
        self.cache.copy_row(source, destination, length)
        if self.reader is not None:
            self.reader.copy_row(source, destination, length)
        self.num_computed_tokens[destination] = self.num_computed_tokens[source].clamp(max=length)

    def set_adapter(self, slot: int, name: str | None) -> None:
        """Set the adapter of a slot; None for the model itself."""
        if self.adapters is not None:
            self._adapter_of[slot] = self.adapters.number(name)

    def resize_row(self, row: int, positions: int) -> None:
        """Set the capacity of a row in tokens; memory beyond it is freed. See ``RowTables``."""
        self.cache.resize(row, positions)

    @property
    def grows(self) -> bool:
        """Whether memory is allocated per row as it grows."""
        return self.cache.grows

    def capacity_of(self, row: int) -> int:
        """Return the capacity of a row in tokens."""
        return self.cache.sizes[row]

    def cut_row(self, row: int, length: int) -> None:
        """Begin a new text in a row, of which at most ``length`` tokens are in the cache already."""
        self.num_computed_tokens[row].clamp_(max=length)
        if self._recurrent is not None:
            self._recurrent.cut(row, length)

    def save_state(self, slot: int, *, apart: int) -> None:
        """Save the recurrent state after a slot's prefilled tokens, unless one was saved less than ``apart`` before.

        Models without recurrent layers need none: their caches can be cut anywhere.
        """
        if self._recurrent is not None:
            self._recurrent.save(slot, apart=apart)

    def num_computed(self, row: int) -> int:
        """Return the number of computed tokens of a row. Synchronises with the device."""
        return int(self.num_computed_tokens[row])

    def reusable(self, slot: int, tokens: int) -> int:
        """Return how many of a slot's first ``tokens`` computed tokens another text can start from.

        Keys and values can be cut anywhere; a recurrent state only where it is kept.
        """
        return tokens if self._recurrent is None else self._recurrent.reusable(slot, tokens)

    @property
    def cuts_anywhere(self) -> bool:
        """Whether a slot can be cut at any token; recurrent states cannot."""
        return self._recurrent is None

    def pretend(self, rows: int, computed: int) -> None:
        """Count ``computed`` tokens of the first slots as computed, whatever their caches hold, to measure times."""
        self.num_computed_tokens[:rows] = computed
        if self._recurrent is not None:
            self._recurrent.pretend(range(rows), computed)


def _cache_for(model: AnyModel, rows: int, positions: int) -> KVCache:
    if isinstance(model, SharedModel):
        return model.new_cache(rows, positions)
    return cache_of(model, rows, positions)


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
