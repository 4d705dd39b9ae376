"""A model with its cache and its attention: tokens in, logits out. Target and draft model are two of these."""

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
from paceline.models.base import AnyModel, FlatModel, Model, SharedModel

USUAL_LAG = 2  # of a draft model after all draft tokens were kept: the last of them and the bonus token
CATCH_UP_CHUNK = 256  # tokens fed at once, all rows together, when a cache has fallen behind


class Reader(Protocol):
    """Keeps what a target's inner streams say of each token: they exist only while the target reads it.

    taps: the layers whose entering streams it reads. Rows are the batch's, slots those of the target's cache.
    """

    @property
    def taps(self) -> Sequence[int]: ...

    def read(self, rows: Tensor, slots: Tensor, features: Tensor) -> None:
        """N tokens that the target has just read: rows, slots [N], features [N, taps, width]."""
        ...

    def keep_paths(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        """Of trees the accepted paths stay; as ``KVCache.keep``."""
        ...

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """The target's row is copied, its first ``length`` positions."""
        ...

    def swap_rows(self, one: int, other: int, length: int) -> None:
        """Two of the target's rows change places, ``length`` positions of them."""
        ...


class Decoder:
    """Runs a model over the rows of a batch, each at its own position. B rows, L tokens a row, V vocabulary.

    backend: how attention is run; a FlatModel runs its own and leaves it idle.
    seen [R] int64: how many tokens of each row the cache holds. For the target that is length - 1 between rounds; a
    draft model may lag further behind.
    reader: gets the streams of every token that is read; None: nobody does.
    reads: how many tokens of a row a draft on a device reads before its first draft token; of more, those before are
    fed
        beforehand.
    """

    reads = USUAL_LAG

    def __init__(
        self, model: AnyModel, backend: AttentionBackend, rows: int, positions: int, vocab_size: int | None = None
    ) -> None:
        self.model = model
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size  # the batch's; the head may be padded
        self.backend = backend
        self._flat = model if isinstance(model, FlatModel) else None  # asked once: the answer takes 20 microseconds
        self.cache = _cache_for(model, rows, positions)
        self._places = list(
            range(rows)
        )  # of the rows in the cache; only a FlatModel, told each token's row, has others
        self.seen = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self.reader: Reader | None = None
        self._taps: tuple[int, ...] = ()
        self.packs = backend.name == "ragged" and model.device.type == "cuda"  # the cache is written by Triton, too

    def forward(
        self,
        tokens: Tensor,
        start: Tensor,
        longest: int,
        first_row: int = 0,
        counts: Tensor | None = None,
        tree: Tree | None = None,
    ) -> Tensor:
        """Feed tokens [B, L] of rows first_row, ... at positions start [B], start + 1, ... -> hidden [B, L, width].

        longest: no query stands at or beyond this position, padding at a row's tail excepted (the host knows it).
        counts [B]: how many of a row's tokens are real, the rest being padding whose hidden states mean nothing.
        tree: which of the tokens follow which, and how deep they stand, if they are no chain; for a ``Model`` alone.
        """
        if self.model.vocab_size < self.vocab_size:  # ids that only the other model's padded head can draw
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
        streams = model.streams(tokens, positions, attend, self._taps)
        if self.reader is not None and streams.features is not None:
            rows = torch.arange(first_row, first_row + len(tokens), device=tokens.device)
            rows = rows[:, None].expand_as(tokens).flatten()
            self.reader.read(rows, plan.slots.flatten(), streams.features.flatten(0, 1))
        return streams.hidden

    def _forward_flat(
        self, model: FlatModel, tokens: Tensor, positions: Tensor, first_row: int, counts: Tensor | None
    ) -> Tensor:
        """Only the real tokens are run."""
        real = None if counts is None else real_places(counts, tokens.shape[1])
        rows = torch.tensor(self._places[first_row : first_row + tokens.shape[0]])[:, None].expand_as(tokens)
        if real is None or bool(real.all()):
            flat = self._read(model, Nodes(tokens.flatten(), rows.flatten(), positions.flatten()))
            return flat.view(*tokens.shape, -1)
        flat = self._read(model, Nodes(tokens[real], rows[real], positions[real]))
        return flat.new_zeros(*tokens.shape, flat.shape[-1]).masked_scatter_(real[..., None], flat)

    def _read(self, model: FlatModel, nodes: Nodes) -> Tensor:
        """-> hidden [N, width]."""
        streams = model.forward(nodes, self.cache, self._taps)
        self._show_streams(nodes, streams.features)
        return streams.hidden

    def _show_streams(self, nodes: Nodes, features: Tensor | None) -> None:
        if self.reader is not None and features is not None:
            rows = torch.tensor(self._places).argsort()[nodes.rows]
            self.reader.read(rows, nodes.positions if nodes.slots is None else nodes.slots, features)

    def show(self, reader: Reader) -> None:
        """From now on ``reader`` gets the streams of every token that is read."""
        self.reader, self._taps = reader, tuple(reader.taps)

    def verify(self, batch: Batch, draft: Draft) -> Tensor:
        """Each row's unseen token and its draft tokens in one pass -> logits [B, k + 1, V] of the tokens that follow.

        Where a row has fewer than k draft tokens, the logits beyond them mean nothing. A FlatModel leaves them out, for
        its
        head would take as long for them as for real ones: if rows differ, it gives [N, V] for the N real tokens, row
        after row; not for draft tokens with probabilities, whose rule needs the rectangle.
        """
        if self._flat is not None and draft.probabilities is None:
            return self._verify_flat(self._flat, batch, draft)
        tokens = torch.cat([batch.pending(), draft.tokens], dim=1)
        start, longest = batch.live_length - 1, batch.longest + draft.k
        hidden = self.forward(tokens, start, longest, counts=draft.counts + 1, tree=draft.tree)
        return self.logits(hidden)

    def _verify_flat(self, model: FlatModel, batch: Batch, draft: Draft) -> Tensor:
        """The real tokens alone, listed by the host: it knows all lengths, and tensor operators would take longer."""
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
        logits = self.logits(self._read(model, nodes))
        return logits.view(batch.rows, draft.k + 1, -1) if len(tokens) == batch.rows * (draft.k + 1) else logits

    def keep(self, batch: Batch, verdict: Verdict) -> None:
        """Of a tree the accepted path stays, behind the text; of a chain it is there already. Before the commit."""
        if verdict.path is None:
            return
        moved, width = list(range(batch.rows)), verdict.path.shape[1]
        if verdict.path.device.type == "cpu":  # the host looks who moves; a device is not read
            width, order = max(verdict.host.accepted), list(range(verdict.path.shape[1]))
            moved = [row for row, path in enumerate(verdict.path.tolist()) if path != order]
        if moved and width > 0:
            places = torch.tensor([self._places[batch.first + row] for row in moved], device=self.cache.keys.device)
            text, paths = batch.live_length[moved], verdict.path[moved, :width]
            self.cache.keep(places, text, paths)
            if self.reader is not None:
                self.reader.keep_paths(batch.first + places.new_tensor(moved), text, paths)

    def places(self, rows: int) -> list[int]:
        """Where the first rows lie in the cache."""
        return self._places[:rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden [..., width] -> float32 [..., vocab_size]; a head of another size is cut or filled with -inf."""
        logits = self.model.logits(hidden)
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits if missing == 0 else logits[..., : self.vocab_size]

    def prefill(self, batch: Batch, first_row: int, starts: Sequence[int], stops: Sequence[int]) -> None:
        """Feed tokens starts[i] .. stops[i] - 1 of rows first_row + i, no logits."""
        self.prefill_rows(batch, range(first_row, first_row + len(starts)), starts, stops)

    def prefill_rows(self, batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        """The same for any rows.

        A FlatModel takes them in one pass; for others neighbouring rows run side by side, padded to the longest.
        """
        parts = [part for part in zip(rows, starts, stops, strict=True) if part[1] < part[2]]
        if self._flat is not None and parts:
            self._prefill_flat(self._flat, batch, parts)
        else:
            for _, run in groupby(enumerate(parts), lambda entry: entry[1][0] - entry[0]):
                self._prefill_side_by_side(batch, [part for _, part in run])
        for row, _, stop in parts:
            self.seen[row] = stop

    def _prefill_flat(self, model: FlatModel, batch: Batch, parts: Sequence[tuple[int, int, int]]) -> None:
        tokens = torch.cat([batch.tokens[row - batch.first, start:stop] for row, start, stop in parts])
        if model.vocab_size < self.vocab_size:
            tokens = tokens.clamp(max=model.vocab_size - 1)
        places = torch.cat([torch.full((stop - start,), self._places[row]) for row, start, stop in parts])
        nodes = Nodes(tokens, places, torch.cat([torch.arange(*part[1:]) for part in parts]))
        self._show_streams(nodes, model.fill(nodes, self.cache, self._taps))

    def _prefill_side_by_side(self, batch: Batch, parts: Sequence[tuple[int, int, int]]) -> None:
        """Neighbouring rows."""
        first_row, width = parts[0][0], max(stop - start for _, start, stop in parts)
        start = torch.tensor([start for _, start, _ in parts], device=batch.device)
        place = start[:, None] + torch.arange(width, device=batch.device)
        rows = slice(first_row - batch.first, first_row - batch.first + len(parts))
        tokens = batch.tokens[rows].gather(1, place.clamp(max=batch.tokens.shape[1] - 1))
        counts = torch.tensor([stop - start for _, start, stop in parts], device=batch.device)
        self.forward(tokens, start, max(start for _, start, _ in parts) + width, first_row, counts)

    def read_rows(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
        """Feed rows tokens that no batch knows: (row, position of the first, tokens) -> hidden [tokens, width] of each.

        As ``prefill_rows``; rows in their order.
        """
        if self._flat is not None:
            return self._read_rows_flat(self._flat, parts)
        hidden: list[Tensor] = []
        for _, run in groupby(enumerate(parts), lambda entry: entry[1][0] - entry[0]):
            hidden += self._read_side_by_side([part for _, part in run])
        return hidden

    def _read_rows_flat(self, model: FlatModel, parts: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
        tokens = [token for *_, own in parts for token in own]
        rows = [self._places[row] for row, _, own in parts for _ in own]
        positions = [first + place for _, first, own in parts for place in range(len(own))]
        hidden = self._read(model, Nodes(*torch.tensor([tokens, rows, positions])))
        return list(torch.split(hidden, [len(own) for *_, own in parts]))

    def _read_side_by_side(self, parts: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
        """Neighbouring rows, padded to the longest."""
        width, device = max(len(own) for *_, own in parts), self.model.device
        tokens = torch.tensor([[*own, *[own[-1]] * (width - len(own))] for *_, own in parts], device=device)
        start = torch.tensor([first for _, first, _ in parts], device=device)
        counts = torch.tensor([len(own) for *_, own in parts], device=device)
        longest = max(first for _, first, _ in parts) + width
        hidden = self.forward(tokens, start, longest, parts[0][0], counts)
        return [hidden[place, : len(own)] for place, (*_, own) in enumerate(parts)]

    def seen_by(self, batch: Batch) -> Tensor:
        """[B]: how many tokens of each of the batch's decoding rows the cache holds; a view."""
        return self.seen[batch.first : batch.first + batch.rows]

    def lags(self, batch: Batch) -> list[int]:
        """How many tokens of each row the cache lacks; reads the device."""
        return (batch.live_length - self.seen_by(batch)).tolist()

    def catch_up(self, batch: Batch) -> None:
        """Feed what the cache lacks except each row's last token: in chunks, and only to rows that lack something.

        Of the answers to one prompt that which has read most of it reads the rest, and the others copy it.
        """
        for rows, stop in self._unread_by_siblings(batch):
            reader = rows[-1]
            self._feed_all(batch, [reader], self.seen_by(batch).tolist(), [stop])
            for row in rows[:-1]:
                self.copy_row(batch.first + reader, batch.first + row, stop)
        seen = self.seen_by(batch).tolist()
        for lacks, group in groupby(range(batch.rows), lambda row: seen[row] < batch.lengths[row] - 1):
            if lacks:
                rows = list(group)
                self._feed_all(batch, rows, seen, [batch.lengths[row] - 1 for row in rows])

    def spared(self, batch: Batch) -> int:
        """Of what all rows lack, how many tokens are copied from siblings and need not be read."""
        unread = self._unread_by_siblings(batch)
        seen = self.seen_by(batch).tolist() if unread else []
        return sum(stop - seen[row] for rows, stop in unread for row in rows[:-1])

    def _unread_by_siblings(self, batch: Batch) -> list[tuple[list[int], int]]:
        """Of answers to one prompt those that lack some of it, but for its last token, and its stop.

        The row that is to be copied comes last: that which has read most.
        """
        siblings = batch.siblings
        seen, found = self.seen_by(batch).tolist() if siblings else [], []
        for rows, prompt in siblings:
            stop, reader = prompt - 1, max(rows, key=seen.__getitem__)
            lack = [row for row in rows if seen[row] < stop and row != reader]
            if lack:
                found.append(([*lack, reader], stop))
        return found

    def _feed_all(self, batch: Batch, rows: list[int], seen: list[int], ends: list[int]) -> None:
        """Neighbouring rows, side by side."""
        starts = [min(seen[row], end) for row, end in zip(rows, ends, strict=True)]
        width = max(1, CATCH_UP_CHUNK // len(rows))
        while starts != ends:
            stops = [min(start + width, end) for start, end in zip(starts, ends, strict=True)]
            self.prefill(batch, batch.first + rows[0], starts, stops)
            starts = stops

    def next_hidden(self, batch: Batch, lag: int) -> Tensor:
        """Feed what the cache lacks, at most ``lag`` tokens a row -> hidden [B, width] at each row's last token."""
        seen = self.seen_by(batch)
        place = seen[:, None] + torch.arange(lag, device=batch.device)
        tokens = batch.tokens[: batch.rows].gather(1, place.clamp(max=batch.tokens.shape[1] - 1))
        hidden = self.forward(tokens, seen, batch.longest, batch.first, batch.live_length - seen)
        last = (batch.live_length - seen - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        seen.copy_(batch.live_length)
        return hidden.gather(1, last).squeeze(1)

    def begin_draft(self, text: Tensor, before: Tensor, span: int) -> Tensor:
        """On a device: feed text [B, reads], each row's from ``seen`` on -> hidden [B, 1, width] at its last token.

        before [B]: the rows' lengths; what lies beyond them means nothing. span: as ``longest`` of ``forward``.
        """
        seen = self.seen[: len(text)]
        return at(self.forward(text, seen, span), before - seen - 1)

    def go_on_drafting(self, draft_token: Tensor, step: int, before: Tensor, span: int) -> Tensor:
        """Likewise of draft token number ``step`` [B, 1], from 1 on, those before it being fed."""
        return self.forward(draft_token, before + step - 1, span)

    def read_after(self, before: Tensor, kept: Tensor) -> Tensor:
        """[B]: how much of the text is read after a round, of whose draft tokens that were fed so many were kept."""
        return before + kept

    def lag_after(self, k: int) -> int:
        """Tokens of a row that may be lacking after a round with so many draft tokens."""
        return USUAL_LAG

    def hidden_after(self, batch: Batch, draft_tokens: Tensor) -> Tensor:
        """Feed the last of draft_tokens [B, n], those before it being fed -> hidden [B, width] at it."""
        step = draft_tokens.shape[1]
        start, longest = batch.live_length + step - 1, batch.longest + step
        return self.forward(draft_tokens[:, -1:], start, longest, batch.first)[:, 0]

    def hidden_after_branches(self, batch: Batch, draft: Draft, read: Sequence[int]) -> Tensor:
        """Feed draft tokens behind texts that are read, but the first read[i] of each row -> hidden [N, width] of
        these.

        Row after row. They stand side by side behind their row's text, and are no part of it.
        """
        new = [range(known, count) for known, count in zip(read, draft.drafted, strict=True)]
        if self._flat is not None:
            return self._feed_branches(self._flat, batch, draft, new)
        hidden = self._read_tree(batch, draft)
        row = [row for row, draft_tokens in enumerate(new) for _ in draft_tokens]
        return hidden[row, [draft_token + 1 for draft_tokens in new for draft_token in draft_tokens]]

    def _read_tree(self, batch: Batch, draft: Draft) -> Tensor:
        """All of it, and what it stands on -> hidden [B, k + 1, width]."""
        tokens = torch.cat([batch.pending(), draft.tokens], dim=1)
        start, longest = batch.live_length - 1, batch.longest + draft.k
        return self.forward(tokens, start, longest, batch.first, draft.counts + 1, draft.tree)

    def _feed_branches(self, model: FlatModel, batch: Batch, draft: Draft, new: Sequence[range]) -> Tensor:
        """Those that were fed before are listed first: the others follow them."""
        order = [
            (row, draft_token) for row, draft_tokens in enumerate(new) for draft_token in range(draft_tokens.start)
        ]
        read = len(order)
        order += [(row, draft_token) for row, draft_tokens in enumerate(new) for draft_token in draft_tokens]
        number = {place: at for at, place in enumerate(order)}
        follows = draft.host_parents or [list(range(-1, draft.k - 1))] * batch.rows
        parents = [number.get((row, follows[row][draft_token]), -1) for row, draft_token in order]
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        tokens = [draft.draft_tokens[row][draft_token] for row, draft_token in order]
        rows = [self._places[batch.first + row] for row, _ in order]
        positions = [batch.lengths[row] + depth for (row, _), depth in zip(order, depths, strict=True)]
        slots = [batch.lengths[row] + draft_token for row, draft_token in order]
        nodes = Nodes(*torch.tensor([tokens, rows, positions, slots, parents]))._replace(read=read)
        if model.vocab_size < self.vocab_size:
            nodes.tokens.clamp_(max=model.vocab_size - 1)
        return self._read(model, nodes)

    def keep_draft_tokens(self, batch: Batch, text: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Of draft tokens fed behind texts of so many tokens these were kept: they move up and count as read."""
        width = max(map(len, paths))
        moved = [row for row, path in enumerate(paths) if list(path) != list(range(len(path)))]
        if moved:
            device = self.cache.keys.device
            wide = torch.tensor([[*paths[row], *range(len(paths[row]), width)] for row in moved], device=device)
            places = torch.tensor([self._places[batch.first + row] for row in moved], device=device)
            self.cache.keep(places, torch.tensor([text[row] for row in moved], device=device), wide)
        held = [known + len(path) for known, path in zip(text, paths, strict=True)]
        self.seen_by(batch).copy_(torch.tensor(held))

    def note_draft_tokens(self, batch: Batch, count: int) -> None:
        """So many draft tokens a row were drawn, of which the last was not fed."""
        self.seen_by(batch).add_(count - 1)

    def rewind(self, batch: Batch) -> None:
        """Forget draft tokens that were not kept: nothing moves, the row is just shorter."""
        seen = self.seen_by(batch)
        torch.minimum(seen, batch.live_length - 1, out=seen)

    def copy_row(self, source: int, destination: int, length: int) -> None:
        """Put the first ``length`` positions of a row in the place of another row."""
        self.cache.copy_row(self._places[source], self._places[destination], length)
        if self.reader is not None:
            self.reader.copy_row(source, destination, length)
        self.seen[destination] = self.seen[source].clamp(max=length)

    def swap_rows(self, one: int, other: int, length: int) -> None:
        """Exchange two rows, ``length`` positions of their caches; a FlatModel's caches stay where they are."""
        if self._flat is None:
            self.cache.swap_rows(one, other, length)
        else:
            self._places[one], self._places[other] = self._places[other], self._places[one]
        if self.reader is not None:
            self.reader.swap_rows(one, other, length)
        self.seen[[one, other]] = self.seen[[other, one]]

    def resize_row(self, row: int, positions: int) -> None:
        """From now on the row has room for so many tokens; memory beyond it is given back. See ``RowTables``."""
        self.cache.resize(self._places[row], positions)

    @property
    def grows(self) -> bool:
        """Whether rows take the memory that they use."""
        return self.cache.grows

    def room_of(self, row: int) -> int:
        """Tokens that the row has room for."""
        return self.cache.sizes[self._places[row]]

    def cut_row(self, row: int, length: int) -> None:
        """A new text begins: of what the cache holds of the row before, no more than ``length`` tokens belong to it."""
        self.seen[row].clamp_(max=length)

    def held(self, row: int) -> int:
        """How many tokens of a row a draft model's cache holds; reads the device."""
        return int(self.seen[row])

    def clear(self) -> None:
        """No row is in use: whatever an interrupt left behind."""
        self._places = list(range(self.cache.rows))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every row has a place in the cache, and one of its own."""
        assert sorted(self._places) == list(range(self.cache.rows)), "two rows share a place in the cache"


def _cache_for(model: AnyModel, rows: int, positions: int) -> KVCache:
    if isinstance(model, SharedModel):
        return model.new_cache(rows, positions)
    return KVCache(model.layers, rows, model.kv_heads, positions, model.head_dim, model.dtype, model.device)


def _tree_of(parents: list[list[int]], draft_tokens: list[list[int]], slots: list[int]) -> list[list[int]]:
    """Positions, slots and parents of each row's unseen token and its draft tokens, row after row."""
    follows: list[int] = []
    for line, real in zip(parents, draft_tokens, strict=True):
        root = len(follows)
        follows += [-1, *(root + 1 + parent for parent in line[: len(real)])]
    positions: list[int] = []
    for slot, parent in zip(slots, follows, strict=True):
        positions.append(slot if parent < 0 else positions[parent] + 1)
    return [positions, slots, follows]


def at(hidden: Tensor, place: Tensor) -> Tensor:
    """hidden [B, L, width] at place [B] -> [B, 1, width]; beyond the ends at the nearest."""
    place = place.clamp(0, hidden.shape[1] - 1)
    return hidden.gather(1, place[:, None, None].expand(-1, 1, hidden.shape[-1]))
