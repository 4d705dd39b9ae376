"""Heads with their caches: the ``DraftDecoder`` for models that read a target's hidden states beside the text.

The target's hidden states exist only during its forward pass. They are fused and stored for every position of every
row, so a head's cache can fall behind the text, be cut and be copied like a draft model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.core.batch import Batch
from paceline.core.cache import KVHeads
from paceline.core.draft_tensors import DraftTensors
from paceline.core.nodes import Tree
from paceline.core.row_tables import RowTables, grows_on
from paceline.core.slots import Slots
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.layers import HeadStep
from paceline.kernels.attention import AttentionBackend
from paceline.kernels.attention.cached import CachedAttend
from paceline.models.base import PassBytes, ShortHead
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.draft_decoder import ComputeLogits, DraftDecoder, at
from paceline.models.decoding.draft_vocabulary import NEVER
from paceline.models.decoding.passes import PaddedPasses, Passes
from paceline.models.torch.short_head import TorchShortHead


class HeadModel:
    """A head with the interface of a draft model. V is the target's vocabulary.

    taps: the target's layers whose input hidden states it reads.
    kind: see ``HeadConfig``. one_pass: whether one pass makes all draft tokens. captured: whether captured rounds on a
        device can draft with it; of heads that draft in one pass, only block drafters can.
    max_draft_tokens: longest draft; None: no limit.
    slots_behind: slots of a row's cache behind its text, for what one pass reads there.
    paying_rows: see ``HeadConfig``; for its device.
    max_positions: the target's. A head trained on shorter texts predicts worse beyond them, but still runs.
    dtype: of its keys, values and fused hidden states.
    """

    slots_behind = 0

    def __init__(self, head: Head, name: str, taps: Sequence[int], max_positions: int) -> None:
        shape = head.config.decoder
        self.name, self.taps, self.max_positions = name, tuple(taps), max_positions
        self.vocab_size, self.layers = shape.vocab_size, len(shape.layers)
        attention, self.width = shape.layers[0].attention, shape.width
        self.kv_heads, self.head_dim = attention.kv_heads, attention.head_dim
        self.kv_layers: Sequence[KVHeads] = shape.kv_layers
        self.dtype, self.device = head.dtype, head.device
        self.kind, self.max_draft_tokens = head.config.kind, head.config.max_draft_tokens
        self.one_pass = self.kind not in ("feature", "mtp")
        self.captured = not self.one_pass
        self.paying_rows = head.config.paying_rows.get(self.device.type)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] in float32, from normed states [..., width]. Tokens outside its vocabulary get ``NEVER``."""
        raise NotImplementedError

    def weight_bytes(self) -> int:
        """Bytes of its tensors."""
        raise NotImplementedError

    @property
    def pass_bytes(self) -> PassBytes | None:
        """See ``Shortenable``. A head with a vocabulary of its own has a short one already."""
        raise NotImplementedError

    def short_head(self, size: int) -> ShortHead:
        """See ``Shortenable``."""
        raise NotImplementedError

    @property
    def fused_width(self) -> int:
        """Width of its fused hidden states."""
        return self.width

    def fused_bytes(self, positions: int) -> int:
        """Bytes of a row's fused hidden states for ``positions`` tokens, beside keys and values."""
        if grows_on(self.device):
            return RowTables.row_bytes((1, 1, self.fused_width), positions, self.dtype)
        return (positions + 1) * self.fused_width * self.dtype.itemsize


class TorchHead(HeadModel):
    """A head in torch: for machines without the CPU kernels, and their reference."""

    def __init__(self, head: Head, name: str, taps: Sequence[int], max_positions: int) -> None:
        super().__init__(head, name, taps, max_positions)
        self.head, self._targets = head, head.targets

    @property
    def fused_width(self) -> int:
        return self.head.fused_width

    def logits(self, hidden: Tensor) -> Tensor:
        return self.by_target(self.head.logits(hidden).float())

    def by_target(self, draft_logits: Tensor) -> Tensor:
        """Logits [..., V] from those over its vocabulary [..., Vd], in float32."""
        logits = draft_logits.new_full((*draft_logits.shape[:-1], self.vocab_size), NEVER)
        return logits.index_copy_(-1, self._targets, draft_logits)

    def weight_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.head.state_dict().values())

    @property
    def pass_bytes(self) -> PassBytes | None:
        output, embedding = self.head.lm_head.weight, self.head.embed_tokens.weight
        if len(output) < self.vocab_size:
            return None
        return PassBytes(self.weight_bytes() - output.nbytes - embedding.nbytes, output.nbytes // self.vocab_size)

    def short_head(self, size: int) -> ShortHead:
        return TorchShortHead(self.head.lm_head.weight, None, size)


class DraftPass:
    """Result of a pass of a head that makes all draft tokens at once. states: [B, k, width], normed, one each."""

    def __init__(self, decoder: HeadDecoder, states: Tensor) -> None:
        self._decoder, self._states = decoder, states

    def logits(self, rows: Tensor, path: Tensor) -> Tensor:
        """Logits [N, V] of the draft tokens that come next.

        rows: [N], their rows in the batch. path: [N, n + 1], the text's last token and the n draft tokens before each.
        """
        return self._decoder.logits(self._states[rows, path.shape[1] - 1])

    def chain(self, pending: Tensor) -> ComputeLogits:
        """Return the function that computes the logits of every row's next draft token.

        pending: [B, 1], each text's last token.
        """
        everyone = torch.arange(len(pending), device=pending.device)
        return lambda draft_tokens: self.logits(everyone, torch.cat([pending, draft_tokens], dim=1))[:, None]

    def confidence(self, path: Tensor) -> Tensor | None:
        """Probability [B] that the target accepts each row's next draft token, by the head's own estimate.

        path: [B, n + 1], as for ``logits``. None: the head has no estimate.
        """
        return None


class FusedStates:
    """The target's hidden states at every position of every slot, fused.

    fused: [R, P + 1 or a few more, fused width], for R rows of P positions. Writes beyond a row's end go to the extra
        ones.
    table: holds them.
    """

    def __init__(self, model: HeadModel, rows: int, positions: int) -> None:
        self.taps = model.taps
        self.table = RowTables([(1, 1, model.fused_width)], rows, positions, model.dtype, model.device)
        self.fused = self.table.tables[0][0, :, 0]

    def read(self, rows: Tensor, slots: Tensor, features: Tensor) -> None:
        """Fuse and store N tokens. rows, slots: [N], row and position. features: [N, taps, target width]."""
        raise NotImplementedError

    def keep_paths(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        self.table.keep(rows, text, paths)

    def copy_row(self, source: int, destination: int, length: int) -> None:
        self.table.copy_row(source, destination, length)

    def resize_row(self, row: int, positions: int) -> None:
        self.table.resize(row, positions)

    def at(self, rows: Slots, places: Tensor) -> Tensor:
        """Fused hidden states [B, L, fused width] at ``places`` [B, L] of the rows."""
        return self.fused[rows.index[:, None], places.clamp(max=self.table.positions)]


class TorchFusedStates(FusedStates):
    """Hidden states fused by torch."""

    def __init__(self, model: TorchHead, rows: int, positions: int) -> None:
        super().__init__(model, rows, positions)
        self._head = model.head

    def read(self, rows: Tensor, slots: Tensor, features: Tensor) -> None:
        self.fused[rows, self.table.within(rows, slots)] = self._head.fuse(features)

    def at(self, rows: Slots, places: Tensor) -> Tensor:
        """See ``FusedStates.at``; followed by those of the place before, for a head that looks back."""
        here = super().at(rows, places)
        return torch.cat((here, super().at(rows, (places - 1).clamp(min=0))), -1) if self._head.looks_back else here


class HeadDecoder(DraftDecoder):
    """Reads token j of a row at position j - 1, with the hidden states of token j - 1. The first token is never read.

    unread: tokens at the beginning of a text that are never read, and count as read.
    """

    unread = 1
    fused_states: FusedStates
    fed_tokens = 8  # accepted draft tokens were read without hidden states, and are read again

    def __init__(
        self,
        model: HeadModel,
        backend: AttentionBackend,
        rows: int,
        positions: int,
        vocab_size: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, backend, rows, positions, vocab_size, kv_dtype)
        self.longest_draft = model.max_draft_tokens
        self.num_computed_tokens.fill_(self.unread)

    def read_from(self, target: Decoder) -> None:
        """Learn which decoder it drafts for. Heads with keys of their own do not read its cache."""

    def read_after(self, before: Tensor, kept: Tensor) -> Tensor:
        return before

    def missing_after(self, k: int) -> int:
        return k + 1

    def note_draft_tokens(self, batch: Batch, counts: int | Tensor) -> None:
        """Nothing to note: draft tokens were read without hidden states, so accepted ones are read again."""

    def keep_draft_tokens(self, batch: Batch, text: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Nothing to keep, see ``note_draft_tokens``."""

    def prefill(self, batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        """See ``Decoder``. The target must have read these tokens before."""
        least = self.unread
        super().prefill(batch, rows, [max(least, start) for start in starts], [max(least, stop) for stop in stops])

    def copy_row(self, source: int, destination: int, length: int) -> None:
        super().copy_row(source, destination, length)
        self.num_computed_tokens[destination].clamp_(min=self.unread)

    def resize_row(self, row: int, positions: int) -> None:
        super().resize_row(row, positions)
        self.fused_states.resize_row(row, positions)

    def row(self, slot: int, length: int, text: int) -> dict[str, Tensor]:
        (fused,) = self.fused_states.table.row(slot, text)
        return {**super().row(slot, length, text), "fused": fused}

    def is_row(self, tensors: Mapping[str, Tensor], length: int, text: int) -> bool:
        has_fused = "fused" in tensors and self.fused_states.table.is_row([tensors["fused"]], text)
        return has_fused and super().is_row(tensors, length, text)

    def restore_row(self, slot: int, tensors: Mapping[str, Tensor], length: int, text: int) -> None:
        super().restore_row(slot, tensors, length, text)
        self.fused_states.table.set_row(slot, [tensors["fused"]], text)
        self.num_computed_tokens[slot].clamp_(min=self.unread)

    def cut_row(self, row: int, length: int) -> None:
        super().cut_row(row, max(self.unread, length))


class HeadPasses(PaddedPasses):
    """Passes of a ``TorchHead``: each token is read one position early, with a hidden state.

    last: output of the last pass, [B, L, width].
    states [B, n, width]: own states at the text's last token and at the draft tokens, read with the next ones.
    """

    last: HeadStep
    states: Tensor

    def __init__(self, model: TorchHead, decoder: HeadDecoder) -> None:
        super().__init__(model, decoder.cache, decoder.backend, decoder.vocab_size, None)  # type: ignore[arg-type]
        self._head, self._fused_states, self._last_token = model.head, decoder.fused_states, model.vocab_size - 1

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
        """Read tokens of the text, [B, L], from position ``start``, [B], on. Returns normed states [B, L, width]."""
        assert tree is None, "a head reads trees in ``block``"
        places = (start[:, None] - 1 + torch.arange(tokens.shape[1], device=tokens.device)).clamp(min=0)
        return self.run(tokens, self._fused_states.at(rows, places), places, longest, rows)

    def run(
        self, tokens: Tensor, hidden: Tensor, places: Tensor, longest: int, rows: Slots, ancestors: Tensor | None = None
    ) -> Tensor:
        """Read tokens with hidden states [B, L, width] at ``places`` [B, L]. Returns normed states [B, L, width]."""
        plan = self._backend.plan(places, min(longest, self.cache.positions + 1), ancestors)
        attend = CachedAttend(self.cache, self._backend, plan, rows)
        self.last = self._head.step(self._known(tokens), hidden, places, attend)
        return self.last.normed

    def run_last(self, draft_token: Tensor, places: Tensor, longest: int, rows: Slots) -> Tensor:
        """Read draft tokens [B, 1], each with the head's own state before it. Returns normed states [B, 1, width]."""
        normed = self.run(draft_token, self.states, places, longest, rows)
        self.states = self.last.state
        return normed

    def block(self, batch: Batch, draft: DraftTensors) -> Tensor:
        """Read the text's last token with its hidden states, and each draft token with the state at its parent.

        Returns normed states [B, k + 1, width].
        """
        root = (batch.live_length - 2).clamp(min=0)[:, None]
        chain = torch.arange(draft.k + 1, device=root.device).expand(batch.rows, -1)
        tree, places = draft.tree, chain[:, :-1] if draft.parents is None else draft.parents + 1
        before = self.states.gather(1, places[..., None].expand(-1, -1, self.states.shape[-1]))
        hidden = torch.cat([self._fused_states.at(batch.live_slots, root), before], dim=1)
        tokens = torch.cat([batch.pending(), draft.tokens], dim=1)
        depths, ancestors = (chain, None) if tree is None else (tree.depths, tree.ancestors)
        normed = self.run(tokens, hidden, root + depths, batch.longest + draft.k, batch.live_slots, ancestors)
        self.states = self.last.state
        return normed


class TorchHeadDecoder(HeadDecoder):
    """Decoder of a ``TorchHead``."""

    model: TorchHead
    passes: HeadPasses

    def __init__(
        self,
        model: TorchHead,
        backend: AttentionBackend,
        rows: int,
        positions: int,
        vocab_size: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.head, self.fused_states = model.head, TorchFusedStates(model, rows, positions)
        super().__init__(model, backend, rows, positions, vocab_size, kv_dtype)

    def _new_passes(self) -> Passes:
        return HeadPasses(self.model, self)

    def next_hidden(self, batch: Batch, missing: int) -> Tensor:
        """Read at most ``missing`` tokens per row. Returns normed states [B, width] at each row's last token.

        A row of one token has nothing to read yet; its result has no meaning.
        """
        return self.read_ahead(batch, missing, 1)[:, 0]

    def draft_pass(self, batch: Batch, missing: int, k: int) -> DraftPass:
        """Read at most ``missing`` tokens per row, and what stands for k draft tokens. For one-pass heads."""
        return DraftPass(self, self.read_ahead(batch, missing, k))

    def read_ahead(self, batch: Batch, missing: int, k: int) -> Tensor:
        """Like ``next_hidden``, with positions after the text in the same pass. Returns normed states [B, k, width].

        State i gives the logits of draft token i. k > 1: only for heads that draft in one pass. Positions after the
        text do not count as read.
        """
        seen, more = self.num_computed_tokens[batch.live_slots.where], self.head.positions_after(k)
        place = seen[:, None] + torch.arange(max(1, missing) + more, device=batch.device)
        before = (place - 1).clamp(min=0)
        read = batch.text_at(place), self.fused_states.at(batch.live_slots, before)
        tokens, hidden = read if more == 0 else self._with_ahead(batch, place, *read, more)
        self.passes.run(tokens, hidden, before, batch.longest + more, batch.live_slots)
        ahead = torch.arange(self.head.late, more + 1, device=batch.device)
        last = (batch.live_length - seen - 1).clamp(min=0)[:, None] + ahead
        self.num_computed_tokens[batch.live_slots.where] = batch.live_length
        last = last[..., None].expand(-1, -1, self.head.config.width)
        state, normed = (part.gather(1, last) for part in self.passes.last)
        self.passes.states = state[:, -1:]
        return self.head.spread(normed, k)

    def begin_draft(self, text: Tensor, before: Tensor, span: int, rows: Slots) -> Tensor:
        normed = super().begin_draft(text, before, span, rows)
        self.passes.states = at(self.passes.last.state, before - rows.of(self.num_computed_tokens) - 1)
        return normed

    def continue_draft(self, draft_token: Tensor, step: int, before: Tensor, span: int, rows: Slots) -> Tensor:
        """See ``hidden_after``."""
        return self.passes.run_last(draft_token, (before + step - 2).clamp(min=0)[:, None], span, rows)

    def _with_ahead(
        self, batch: Batch, place: Tensor, tokens: Tensor, hidden: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B, L] and hidden states [B, L, width] at ``place`` [B, L], up to ``count`` positions after the text.

        tokens, hidden: those of the text; entries after its end are replaced by ``Head.ahead``'s.
        """
        end = batch.live_length[:, None]
        last, before = batch.text_at(end - 1), self.fused_states.at(batch.live_slots, (end - 2).clamp(min=0))
        further, behind = self.head.ahead(last[:, 0], before[:, 0], count)
        known, step = place < end, (place - end).clamp(0, count - 1)
        tokens = torch.where(known, tokens, further.gather(1, step))
        step = step[..., None].expand_as(hidden)
        return tokens, torch.where(known[..., None], hidden, behind.gather(1, step))

    def hidden_after(self, batch: Batch, draft_tokens: Tensor) -> Tensor:
        """See ``DraftDecoder``. Draft tokens are read with the head's own state before them; none counts as read."""
        step = draft_tokens.shape[1]
        places = (batch.live_length + step - 2).clamp(min=0)[:, None]
        return self.passes.run_last(draft_tokens[:, -1:], places, batch.longest + step, batch.live_slots)[:, 0]
