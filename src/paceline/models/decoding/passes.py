"""Forward passes over the rows of a cache: padded ones for models whose attention is ours, flat ones for ``FlatModel``.

B rows, L tokens per row, N nodes, k draft tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.core.batch import Batch
from paceline.core.cache import KVCache
from paceline.core.draft import Draft, depths_of, first_of
from paceline.core.draft_tensors import DraftTensors, real_places
from paceline.core.eight_bits import LARGEST
from paceline.core.nodes import Nodes, Tree
from paceline.core.recurrent_state import RowsPass, StatefulCache
from paceline.core.slots import Slots
from paceline.core.uploads import uploaded
from paceline.kernels.attention import AttentionBackend, Plan
from paceline.kernels.attention.cached import CachedAttend, PackedCachedAttend
from paceline.models.base import AnyModel, FlatModel, Model, RowAdapters


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


class Part(NamedTuple):
    """Consecutive tokens of a slot's text: slot, position of the first one, token ids [n] int64."""

    slot: int
    first: int
    tokens: Tensor


class Passes(ABC):
    """Runs tokens through a model and stores their keys and values.

    vocab_size: vocabulary of the batch. Ids beyond the model's own are clamped: only another model's padded head can
        sample them.
    reader: gets the features of every token that is run; None: features are not computed.
    reads_ends: whether ``end`` may be called: hidden states must not depend on the other tokens of a pass.
    """

    reads_ends = False

    def __init__(self, model: AnyModel, cache: KVCache, vocab_size: int) -> None:
        self.cache, self.reader = cache, None
        self._taps: tuple[int, ...] = ()
        self._last_token = model.vocab_size - 1 if model.vocab_size < vocab_size else None

    reader: FeatureReader | None

    def attach(self, reader: FeatureReader) -> None:
        """Pass the features of every token that is run from now on to ``reader``."""
        self.reader, self._taps = reader, tuple(reader.taps)

    @abstractmethod
    def forward(
        self,
        tokens: Tensor,
        start: Tensor,
        longest: int,
        rows: Slots,
        counts: Tensor | None = None,
        tree: Tree | None = None,
        *,
        adapted: bool = True,
    ) -> Tensor:
        """See ``Decoder.forward``."""

    @abstractmethod
    def verify(self, batch: Batch, draft: DraftTensors) -> Tensor:
        """Run each row's pending token and its draft tokens -> hidden [B, k + 1, width].

        Or [N, width] of the N real tokens, row by row, if rows differ in draft tokens and none has probabilities.
        """

    @abstractmethod
    def read(self, parts: Sequence[Part]) -> list[Tensor]:
        """Run the parts, by ascending slot -> hidden [tokens, width] of each."""

    @abstractmethod
    def fill(self, parts: Sequence[Part]) -> None:
        """Run the parts as ``read`` does, for their keys, values and features only."""

    def end(self, parts: Sequence[Part], count: int) -> Tensor:
        """Run the parts as ``fill`` does -> hidden [count, width] at the last token of each of the last ``count``."""
        raise NotImplementedError

    @abstractmethod
    def branches(self, batch: Batch, draft: Draft, new: Sequence[range]) -> Tensor:
        """Run the draft tokens new[i] of each row's tree, whose earlier ones were run -> hidden [N, width] of them."""

    def block(self, batch: Batch, draft: DraftTensors) -> Tensor:
        """Run each row's pending token and all of its draft tokens, padded -> hidden [B, k + 1, width]."""
        tokens = torch.cat([batch.pending(), draft.tokens], dim=1)
        start, longest = batch.live_length - 1, batch.longest + draft.k
        self.cache.cover(batch.slots, [length - 1 for length in batch.lengths], batch.ends_after(draft.k))
        return self.forward(tokens, start, longest, batch.live_slots, draft.counts + 1, draft.tree)

    def _known(self, tokens: Tensor) -> Tensor:
        return tokens if self._last_token is None else tokens.clamp(max=self._last_token)


class PaddedPasses(Passes):
    """Passes of a ``Model``: rows are padded to the longest, and an attention backend reads the cache."""

    def __init__(
        self, model: Model, cache: KVCache, backend: AttentionBackend, vocab_size: int, adapters: RowAdapters | None
    ) -> None:
        super().__init__(model, cache, vocab_size)
        self._model, self._backend, self._adapters = model, backend, adapters
        on_triton = backend.name == "ragged" and model.device.type == "cuda"
        self.packs = on_triton and cache.dtype not in LARGEST  # Triton also writes caches of 16 bits

    def forward(
        self,
        tokens: Tensor,
        start: Tensor,
        longest: int,
        rows: Slots,
        counts: Tensor | None = None,
        tree: Tree | None = None,
        *,
        adapted: bool = True,
        text: bool = False,
    ) -> Tensor:
        """See ``Decoder.forward``. text: whether no token can be rejected later."""
        depths = torch.arange(tokens.shape[1], device=tokens.device) if tree is None else tree.depths
        ancestors = None if tree is None else tree.ancestors
        plan = self._backend.plan(start[:, None] + depths, min(longest, self.cache.positions + 1), ancestors)
        states = self._over_states(plan, start, rows, counts, text=text)
        attend = (PackedCachedAttend if self.packs else CachedAttend)(self.cache, self._backend, plan, rows, states)
        if self._adapters is not None:
            self._adapters.use(rows.of(self.cache.adapter_of) if adapted else None)
        found = self._model.hidden_states(self._known(tokens), plan.positions, attend, self._taps)
        if states is not None:
            states.finish()
        if self.reader is not None and found.features is not None:
            of_tokens = rows.index[:, None].expand_as(tokens).flatten()
            self.reader.read(of_tokens, plan.slots.flatten(), found.features.flatten(0, 1))
        return found.hidden

    def _over_states(
        self, plan: Plan, start: Tensor, rows: Slots, counts: Tensor | None, *, text: bool
    ) -> RowsPass | None:
        """Return the pass over the recurrent states; None if the model has none."""
        if not isinstance(self.cache, StatefulCache):
            return None
        nodes = plan.positions.shape[1]
        counts = torch.full_like(start, nodes) if counts is None else counts
        part = RowsPass(self.cache.states, rows.index, start, counts, nodes, text)
        return part if plan.ancestors is None else replace(part, positions=plan.positions, paths=plan.paths)

    def verify(self, batch: Batch, draft: DraftTensors) -> Tensor:
        return self.block(batch, draft)

    def read(self, parts: Sequence[Part]) -> list[Tensor]:
        return self._run(parts, text=False)

    def fill(self, parts: Sequence[Part]) -> None:
        self._run(parts, text=True)

    def _run(self, parts: Sequence[Part], *, text: bool) -> list[Tensor]:
        """Ragged attention takes all slots in one pass; others each group of consecutive ones, a view of the cache."""
        if self._backend.name == "ragged":
            return self._run_at_once(parts, text=text)
        hidden: list[Tensor] = []
        for _, run in groupby(enumerate(parts), lambda entry: entry[1].slot - entry[0]):
            hidden += self._run_at_once([part for _, part in run], text=text)
        return hidden

    def _run_at_once(self, parts: Sequence[Part], *, text: bool) -> list[Tensor]:
        slots, firsts, texts = zip(*parts, strict=True)
        device, sizes = texts[0].device, [len(text) for text in texts]
        tokens = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
        start, counts = uploaded(firsts, device), uploaded(sizes, device)
        self.cache.cover(slots, firsts, [first + size for first, size in zip(firsts, sizes, strict=True)])
        longest = max(firsts) + max(sizes)
        hidden = self.forward(tokens, start, longest, Slots.listed(slots, device), counts, text=text)
        return [of_row[:size] for of_row, size in zip(hidden, sizes, strict=True)]

    def branches(self, batch: Batch, draft: Draft, new: Sequence[range]) -> Tensor:
        hidden = self.block(batch, DraftTensors.of(draft, batch.device))
        row = [row for row, indices in enumerate(new) for _ in indices]
        return hidden[row, [index + 1 for indices in new for index in indices]]


class FlatPasses(Passes):
    """Passes of a ``FlatModel``: lists of real tokens only, which run their own attention."""

    reads_ends = True

    def __init__(self, model: FlatModel, cache: KVCache, vocab_size: int) -> None:
        super().__init__(model, cache, vocab_size)
        self._model = model

    def _run(self, nodes: Nodes) -> Tensor:
        """Run N nodes and store their features -> hidden [N - read - text, width]."""
        states = self._model.forward(self._checked(nodes), self.cache, self._taps)
        self._pass_on(nodes, states.features)
        return states.hidden

    def _checked(self, nodes: Nodes) -> Nodes:
        return nodes if self._last_token is None else nodes._replace(tokens=self._known(nodes.tokens))

    def _pass_on(self, nodes: Nodes, features: Tensor | None) -> None:
        if self.reader is not None and features is not None:
            self.reader.read(nodes.rows, nodes.positions if nodes.slots is None else nodes.slots, features)

    def forward(
        self,
        tokens: Tensor,
        start: Tensor,
        longest: int,
        rows: Slots,
        counts: Tensor | None = None,
        tree: Tree | None = None,
        *,
        adapted: bool = True,
    ) -> Tensor:
        """See ``Decoder.forward``. Hidden states of padding are zero."""
        assert tree is None, "the nodes of a tree are listed"
        positions = start[:, None] + torch.arange(tokens.shape[1])
        slots = rows.index[:, None].expand_as(tokens)
        real = None if counts is None else real_places(counts, tokens.shape[1])
        if real is None or bool(real.all()):
            flat = self._run(Nodes(tokens.flatten(), slots.flatten(), positions.flatten()))
            return flat.view(*tokens.shape, -1)
        flat = self._run(Nodes(tokens[real], slots[real], positions[real]))
        return flat.new_zeros(*tokens.shape, flat.shape[-1]).masked_scatter_(real[..., None], flat)

    def verify(self, batch: Batch, draft: DraftTensors) -> Tensor:
        """The host lists the real tokens, which is faster than tensor operations."""
        if draft.probabilities is not None:
            return self.block(batch, draft)
        pending, drafted = batch.pending_on_host(), first_of(draft.tokens.tolist(), draft.counts.tolist())
        tokens: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        for row, draft_tokens in enumerate(drafted):
            tokens += [pending[row], *draft_tokens]
            rows += [batch.slots[row]] * (len(draft_tokens) + 1)
            positions += range(batch.lengths[row] - 1, batch.lengths[row] + len(draft_tokens))
        tree = [] if draft.parents is None else _tree_of(draft.parents.tolist(), drafted, positions)
        hidden = self._run(Nodes(*torch.tensor([tokens, rows, *(tree or [positions])])))
        full = len(tokens) == batch.rows * (draft.k + 1)
        return hidden.view(batch.rows, draft.k + 1, -1) if full else hidden

    def read(self, parts: Sequence[Part]) -> list[Tensor]:
        """All parts are one pass."""
        return list(torch.split(self._run(_listed(parts)), [len(part.tokens) for part in parts]))

    def fill(self, parts: Sequence[Part]) -> None:
        nodes = self._checked(_listed(parts))
        self._pass_on(nodes, self._model.fill(nodes, self.cache, self._taps))

    def end(self, parts: Sequence[Part], count: int) -> Tensor:
        last = [stop - 1 for stop in accumulate(len(part.tokens) for part in parts)][-count:]
        return self._run(_listed(parts)._replace(text=last[0]))[[place - last[0] for place in last]]

    def branches(self, batch: Batch, draft: Draft, new: Sequence[range]) -> Tensor:
        """The node list begins with the draft tokens that were run before, as parents of the new ones."""
        order = [(row, index) for row, indices in enumerate(new) for index in range(indices.start)]
        read = len(order)
        order += [(row, index) for row, indices in enumerate(new) for index in indices]
        node_of = {draft_token: node for node, draft_token in enumerate(order)}
        draft_parents = draft.parents or [list(range(-1, draft.k - 1))] * batch.rows
        parents = [node_of.get((row, draft_parents[row][index]), -1) for row, index in order]
        depths = depths_of(parents)
        tokens = [draft.draft_tokens[row][index] for row, index in order]
        rows = [batch.slots[row] for row, _ in order]
        positions = [batch.lengths[row] + depth - 1 for (row, _), depth in zip(order, depths, strict=True)]
        slots = [batch.lengths[row] + index for row, index in order]
        return self._run(Nodes(*torch.tensor([tokens, rows, positions, slots, parents]))._replace(read=read))


def _listed(parts: Sequence[Part]) -> Nodes:
    sizes = torch.tensor([len(part.tokens) for part in parts])
    rows = torch.tensor([part.slot for part in parts]).repeat_interleave(sizes)
    positions = torch.cat([torch.arange(part.first, part.first + len(part.tokens)) for part in parts])
    return Nodes(torch.cat([part.tokens for part in parts]), rows, positions)


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
