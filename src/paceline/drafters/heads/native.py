"""Heads on the CPU kernels: one native call reads the missing text and makes all draft tokens.

``csrc/head.cpp`` computes what ``heads.feature`` does, with packed weights; ``csrc/forward.cpp`` runs the layers. Keys,
values and fused hidden states are stored as for a head in torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from ctypes import addressof
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.batch import Batch, StopDrafting
from paceline.core.draft import SIBLING_KIND, Draft, branching
from paceline.core.sampling import Purpose
from paceline.drafters.heads.decoder import FusedStates, HeadDecoder, HeadModel
from paceline.drafters.heads.feature import FeatureHead
from paceline.drafters.heads.head import Head
from paceline.drafters.heads.mtp import MtpHead
from paceline.errors import ModelFormatError, ParameterError
from paceline.kernels import abi, native
from paceline.kernels.attention import AttentionBackend
from paceline.kernels.cpu import described
from paceline.kernels.pack import INPUT_MULTIPLE
from paceline.kernels.spec import FusionWeights, LayerWeights, LinearWeights, NativeSpec
from paceline.models.draft_vocabulary import NEVER
from paceline.models.native import (
    HEAD_FORMAT,
    LAYER_FORMAT,
    NativeModel,
    Quantization,
    check_description,
    check_spec,
    gate_last,
)
from paceline.models.packing import PackedDecoder, packed_size
from paceline.models.short_head import PackedShortHead, PassBytes, column_bytes

T = TypeVar("T")


class NativeHead(HeadModel):
    """A head with packed weights: bf16 (quantization None), int8 or int4. It keeps no reference to the torch head.

    target: a target on the CPU kernels whose embedding and output head it uses; None: it has its own.

    Raises ModelFormatError if the kernels cannot run it.
    """

    def __init__(
        self,
        head: Head,
        name: str,
        taps: Sequence[int],
        max_positions: int,
        *,
        quantization: Quantization | None = None,
        kernels: native.Kernels | None = None,
        target: NativeModel | None = None,
    ) -> None:
        super().__init__(head, name, taps, max_positions)
        spec = spec_of_head(head, max_positions)
        ends = None if target is None else target.packed_decoder
        kernels = kernels or native.select()
        if kernels is None:
            raise ModelFormatError(f"the CPU kernels are not available: {native.why_none()}")
        formats = LAYER_FORMAT[quantization], HEAD_FORMAT[quantization]
        self._packed = PackedDecoder(spec, formats, kernels, torch.get_num_threads(), ends_of=ends)
        self._bytes = packed_size(spec, *formats, shares_ends=ends is not None)
        self._layer_bytes = packed_size(spec, *formats, shares_ends=True)
        self.drafted = len(head.targets)  # size of its vocabulary
        self._targets = head.targets.sort().values
        self.precision = f"{quantization or 'bfloat16'} on the CPU kernels {kernels.name}"

    @property
    def decoder(self) -> native.NativeDecoder:
        return self._packed.decoder

    def logits(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, self.width).float().contiguous()
        own = flat.new_empty(flat.shape[0], self.drafted)
        self.decoder.logits(flat, own)
        logits = own.new_full((flat.shape[0], self.vocab_size), NEVER).index_copy_(-1, self._targets, own)
        return logits.view(*hidden.shape[:-1], self.vocab_size)

    def weight_bytes(self) -> int:
        return self._bytes

    @property
    def pass_bytes(self) -> PassBytes | None:
        if self.drafted < self.vocab_size:
            return None
        return PassBytes(self._layer_bytes, column_bytes(self._packed.model.head))

    def short_head(self, size: int) -> PackedShortHead:
        return PackedShortHead(self._packed, size)


def spec_of_head(head: Head, max_positions: int) -> NativeSpec:
    """Weights and sizes of a head for the kernels. Raises ModelFormatError if they cannot run it."""
    shape, config, state = head.config.decoder, head.config, head.state_dict()
    if not isinstance(head, FeatureHead | MtpHead):
        raise ModelFormatError("hidden transfer heads run in torch only")
    check_description(shape)
    own = isinstance(head, MtpHead)
    first, inner = shape.layers[0].attention, shape.layers[0].dense.width
    assert first.rotary is not None
    order = head.targets.argsort()  # ties are broken by token id, which must be the target's

    def linear(*names: str) -> LinearWeights:
        biases = [state.get(f"{name}.bias") for name in names]
        bias = torch.cat([each for each in biases if each is not None]) if biases[0] is not None else None
        return LinearWeights(torch.cat([state[f"{name}.weight"] for name in names]), bias)

    def layer(index: int) -> LayerWeights:
        name = f"layers.{index}"
        qkv = linear(*(f"{name}.self_attn.{part}_proj" for part in "qkv"))
        return LayerWeights(
            qkv=gate_last(_halves_padded(qkv) if index == 0 and not own else qkv, shape.layers[index].mixer),
            gated=shape.layers[index].attention.gated,
            attention_out=linear(f"{name}.self_attn.o_proj"),
            gate_up=linear(f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"),
            down=linear(f"{name}.mlp.down_proj"),
            input_norm=state[f"{name}.input_layernorm.weight"],
            post_norm=state[f"{name}.post_attention_layernorm.weight"],
            q_norm=state.get(f"{name}.self_attn.q_norm.weight"),
            k_norm=state.get(f"{name}.self_attn.k_norm.weight"),
            window=shape.layers[index].attention.window,
        )

    norms = [state[f"fc_norm.{stream}.weight"] for stream in range(config.streams)] if config.fc_norm else None
    spec = NativeSpec(
        width=shape.width,
        heads=first.heads,
        kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        ffn=inner,
        vocab_size=config.draft_vocab_size,
        max_positions=max_positions,
        rotary=first.rotary,
        embedding=state["embed_tokens.weight"],
        final_norm=state["norm.weight"],
        layers=[layer(index) for index in range(len(shape.layers))],
        head=LinearWeights(state["lm_head.weight"][order]),
        epsilon=shape.norm.eps,
        fusion=FusionWeights(
            fuse=_halves_padded(linear("fc")) if own else linear("fc"),
            hidden_norm=state["pre_fc_norm_hidden.weight" if own else "layers.0.hidden_norm.weight"],
            embedding_norm=state["pre_fc_norm_embedding.weight"] if own else None,
            targets=head.targets[order],
            vocabulary=shape.vocab_size,
            streams=config.streams,
            stream_width=config.target_width,
            stream_norms=None if norms is None else torch.stack(norms),
            joint_norm=state["input_norm.weight"] if config.norm_before_fc else None,
            mask=None if isinstance(head, MtpHead) else head.mask(),
            mask_token=config.mask_token or 0,
            normed_residual=config.norm_before_residual,
            normed_state=config.norm_output,
        ),
    )
    check_spec(spec)
    return spec


def _halves_padded(linear: LinearWeights) -> LinearWeights:
    """The weights with both halves of their input padded, as the kernels pad embedding and hidden state."""
    halves = [pad(half, (0, -half.shape[1] % INPUT_MULTIPLE)) for half in linear.weight.chunk(2, dim=1)]
    return LinearWeights(torch.cat(halves, dim=1), linear.bias)


class NativeFusedStates(FusedStates):
    """Hidden states fused by the kernels. Native rounds store them in the same call (``pl_round`` in ``csrc``)."""

    def __init__(self, model: NativeHead, rows: int, positions: int) -> None:
        super().__init__(model, rows, positions)
        self.model = model  # its weights fuse them
        self.described = abi.CKept(
            self.fused.data_ptr(), self.fused.shape[1] - 1, int(self.fused.dtype == torch.bfloat16)
        )

    def read(self, rows: Tensor, slots: Tensor, features: Tensor) -> None:
        columns = rows.contiguous(), slots.contiguous(), features.float().contiguous()
        self.model.decoder.keep_streams(self.described, *columns)


class NativeHeadDecoder(HeadDecoder):
    """Reads and drafts in one call; rows may differ in missing tokens, text and number of draft tokens."""

    streams: NativeFusedStates

    def __init__(
        self, model: NativeHead, backend: AttentionBackend, rows: int, positions: int, vocab_size: int | None = None
    ) -> None:
        super().__init__(model, backend, rows, positions, vocab_size)
        self._head, self.streams = model, NativeFusedStates(model, rows, positions)
        self._cache = abi.CCache.of(self.cache)
        self._seen = self.num_computed_tokens.numpy().data
        self._logits = self._empty_logits(rows)
        self._shortened: abi.CShortHead | None = None  # the draft vocabulary, as the kernels read it
        self._version = 0  # of the draft vocabulary in ``_logits``

    def _empty_logits(self, lines: int) -> Tensor:
        """Logits [lines, V] of ``NEVER``. The kernels overwrite those of the tokens that the head scores."""
        return torch.full((lines, self.model.vocab_size), NEVER, dtype=torch.float32)

    def rewind(self, batch: Batch) -> None:
        """Nothing to rewind: draft tokens never count as read, and the last token is read again when needed."""

    def lags(self, batch: Batch) -> list[int]:
        rows = zip(batch.slots, batch.lengths, strict=True)
        return [length - max(1, self._seen[slot]) for slot, length in rows]

    def prefill(self, batch: Batch, rows: Sequence[int], starts: Sequence[int], stops: Sequence[int]) -> None:
        parts = [(row, max(1, start), stop) for row, start, stop in zip(rows, starts, stops, strict=True)]
        lines = [part for part in parts if part[1] < part[2]]
        if lines:
            numbers = array("q", [number for column in zip(*lines, strict=True) for number in column])
            self._run(self._call(batch, len(lines), numbers), len(lines))
        for row, _, stop in parts:
            self._seen[row] = max(1, stop)

    def draft(
        self,
        batch: Batch,
        counts: Sequence[int],
        stop_drafting: StopDrafting | None,
        *,
        distributions: bool,
        width: int = 1,
    ) -> Draft:
        """Read the missing tokens and draft. Rows of one token get no draft tokens.

        counts: [B], draft tokens of each row, not all 0; the depth if ``width`` is above 1.
        stop_drafting: called after each draft token, for all rows together; None: never stop early.
        distributions: sample with the drafter's own noise, and return the distributions.
        width: above 1, trees as ``Growth`` grows them, without distributions.

        Raises ParameterError if the kernels refuse the call.
        """
        rows, deepest = batch.rows, max(counts)
        most = deepest if width == 1 else min(MAX_SPECULATION_LENGTH, deepest * width)
        slots, lengths = batch.slots, batch.lengths
        columns = [*slots, *(max(1, self._seen[slot]) for slot in slots), *lengths, *counts]
        tables = 1 if width == 1 else 3
        numbers = array("q", [*columns, *bytes(rows * (1 + tables * most))])
        chances = None if stop_drafting is None and width == 1 else array("f", bytes(4 * rows * most))
        probabilities = torch.zeros(most, rows, self.vocab_size, dtype=torch.float32) if distributions else None
        found = (_DraftTable if width == 1 else _TreeTable)(memoryview(numbers)[4 * rows :], chances, rows, most)
        call = self._call(batch, rows, numbers)
        call.draft_stride, call.probabilities = most, abi.address(probabilities)
        if width > 1:
            self._branch(call, rows, width)
        self._set_sampling(call, batch, Purpose.DRAFT if distributions else Purpose.DRAW)
        self._shorten(call)
        call.chances = None if chances is None else chances.buffer_info()[0]
        callbacks = _Callbacks()
        if stop_drafting is not None:
            call.continue_drafting = callbacks.callback(lambda: not stop_drafting(batch, found.scores, found.parents))
        if batch.sampling.any_constraint:
            masked = _MaskedLogits(batch, counts, found, self._logits, width)
            call.before_draw, call.instead = callbacks.callback(masked.mask_next), masked.addresses.buffer_info()[0]
        self._run(call, rows)
        callbacks.raise_failure()
        for slot, length, count in zip(slots, lengths, counts, strict=True):
            if count > 0 and length > 1:
                self._seen[slot] = length
        return found.draft(batch, probabilities)

    def _call(self, batch: Batch, rows: int, numbers: array[int]) -> abi.CDraft:
        """The call's arguments. numbers: slots, starts, stops; for a draft also counts, tokens drawn, draft tokens."""
        start, size = numbers.buffer_info()[0], 8 * rows
        more = [start + size * column for column in (3, 4, 5)] if len(numbers) > 3 * rows else [None] * 3
        return abi.CDraft(
            text=batch.text.data_ptr(),
            text_stride=batch.text.stride(0),
            kept=self.streams.described,
            rows=rows,
            slots=start,
            start=start + size,
            stop=start + 2 * size,
            counts=more[0],
            drawn=more[1],
            draft_tokens=more[2],
        )

    def _branch(self, call: abi.CDraft, rows: int, width: int) -> None:
        """Ask for trees: parents and ranks are stored behind the draft tokens."""
        call.width = width
        call.parents = call.draft_tokens + 8 * rows * call.draft_stride
        call.ranks = call.parents + 8 * rows * call.draft_stride
        if len(self._logits) < rows * width:
            self._logits = self._empty_logits(rows * width)

    def _shorten(self, call: abi.CDraft) -> None:
        """Score the draft vocabulary only. Logits of tokens that have left it become ``NEVER`` again."""
        vocabulary = self.vocabulary
        if vocabulary is None:
            return
        if self._shortened is None:
            assert isinstance(vocabulary.head, PackedShortHead)
            self._shortened = abi.CShortHead(vocabulary.head.linear, vocabulary.tokens.data_ptr())
        if self._version != vocabulary.version:
            self._version = vocabulary.version
            with torch.inference_mode():  # they may have been made in it, and rounds of the kernels run outside of it
                self._logits.fill_(NEVER)
        call.shortened = addressof(self._shortened)

    def _set_sampling(self, call: abi.CDraft, batch: Batch, purpose: Purpose) -> None:
        call.by = described(batch.sampling.drawing(batch.text, batch.length))
        call.logits, call.purpose = self._logits.data_ptr(), purpose

    def _run(self, call: abi.CDraft, rows: int) -> None:
        problem = self._head.decoder.draft(call, self._cache)
        if problem is not None:
            raise ParameterError("tokens", f"[{rows} rows]", problem)


class _DraftTable:
    """Draft tokens that a call has made so far. numbers: counts [rows], then draft tokens [rows, width]."""

    def __init__(self, numbers: memoryview, chances: array[float] | None, rows: int, width: int) -> None:
        self._drawn, self._draft_tokens = numbers[:rows], numbers[rows:]
        self._chances, self._width = chances, width

    def _lines(self, table: Sequence[T]) -> list[list[T]]:
        starts = range(0, len(self._drawn) * self._width, self._width)
        return [list(table[at : at + count]) for at, count in zip(starts, self._drawn, strict=True)]

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

    def draft(self, batch: Batch, distributions: Tensor | None) -> Draft:
        """The finished draft. distributions: [width, B, V], or None."""
        scores = None if self._chances is None else self.scores
        read = Draft.of(self.draft_tokens, batch.device, scores)
        if distributions is None or read.k == 0:
            return read
        return Draft(read.tokens, read.counts, distributions[: read.k].transpose(0, 1).contiguous(), scores)


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

    def draft(self, batch: Batch, distributions: Tensor | None) -> Draft:
        kinds = [[SIBLING_KIND if rank else 0 for rank in line] for line in self._lines(self._ranks)]
        return branching(self.draft_tokens, self.parents, batch.device, self.scores, kinds)


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
        """Mask the logits of the next draw. All queries are sent before the first result is awaited."""
        asked = {
            self._width * row + number: constraint.ask(path, self._step, 1)
            for row, constraint in enumerate(self._constraints)
            if constraint is not None and self._counts[row] > self._step
            for number, path in enumerate(self._found.paths(row, self._known[row]))
            if len(path) == self._step
        }
        for question in asked.values():
            question.send()
        for line, question in asked.items():
            copy = self._copies[line] = self._logits[line : line + 1].clone()
            question.mask(copy)
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

        def called() -> int:
            try:
                return int(function())
            except BaseException as failure:  # noqa: BLE001 it is raised after the call
                self._failure = failure
                return 0

        return abi.Callback(called)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
