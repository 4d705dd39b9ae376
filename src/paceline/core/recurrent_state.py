"""Per-slot state of recurrent layers, beside a KV cache.

A KV cache is cut by a length; a recurrent state is not, so a slot keeps its state as of its last certain token, and of
the tokens after it only their inputs. The next forward pass begins at some position: it applies the inputs before that
position, token by token, while it reads the state, and then goes on with its own tokens without storing the state.
A rejected draft token is an input that is never applied. There are no snapshots of draft positions and no rollback.

On CPUs token by token is the only order in which a state is ever computed, so a token's bits do not depend on whether
it was prefilled, decoded or verified. On a GPU gated delta nets read prompts in chunks of ``CHUNK`` tokens, except with
``deterministic``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.config import MAX_SPECULATION_LENGTH
from paceline.core.cache import KVCache, KVHeads
from paceline.core.row_tables import return_pages, zeros_by_page

CHUNK = 16  # tokens of a prompt that a GPU runs at once, from multiples of it on (``kernels.gpu.delta_chunks``)
WINDOW = MAX_SPECULATION_LENGTH  # inputs that a slot keeps: those of a round's draft tokens


@dataclass(frozen=True)
class StateShape:
    """Sizes of what a slot keeps of a model's recurrent layers, which are all of one kind and one shape.

    layers: number of these layers. taps: inputs of their causal convolution, the token's own included.
    channels: of the convolution. gates: numbers that a token gives to a layer's state beside its channels.
    state: shape of a layer's state besides the convolution's inputs; (0,): it has none.
    """

    layers: int
    taps: int
    channels: int
    gates: int = 0
    state: tuple[int, ...] = (0,)

    @property
    def input_width(self) -> int:
        """Numbers that a token gives to a layer's state: its channels, then its gates."""
        return self.channels + self.gates

    @property
    def state_bytes(self) -> int:
        """Bytes of one state after some token, of all layers."""
        return 4 * self.layers * (math.prod(self.state) + (self.taps - 1) * self.channels)

    def slot_bytes(self, window: int = WINDOW) -> int:
        """Bytes of one slot whose rounds have at most ``window`` draft tokens, and of one saved state."""
        return 2 * self.state_bytes + 4 * self.layers * window * self.input_width


class RecurrentStates:
    """States of all slots, float32. L recurrent layers, R slots.

    Padded passes (``RowsPass``) read and write them without a read by the host, so that they can be captured.

    state [L, R, *shape.state]: after the first ``base[slot]`` tokens.
    tail [L, R, taps - 1, channels]: convolution inputs of the last of these tokens; zeros before the text.
    inputs [L, R, WINDOW, input_width]: of the tokens from position ``base`` on, ``count[slot]`` of them, by slot of the
        KV cache: the input at index i belongs to the token in cache slot base + i.
    base, count: [R] int64, where the states are. On a device, ``reusable``, ``save`` and ``copy`` wait for it.
    kept: upper bound of ``count`` after padded passes.

    Besides, states at some lengths of the slots' texts can be saved, ``max_saved`` at most, one more than there are
    slots unless that is changed: they let another text begin with a part of this one.
    """

    def __init__(self, shape: StateShape, slots: int, device: torch.device | str = "cpu") -> None:
        self.shape, self.slots = shape, slots

        def zeros(*sizes: int) -> Tensor:
            return zeros_by_page(shape.layers, slots, *sizes, dtype=torch.float32, device=device)

        self.state = zeros(*shape.state)
        self.tail = zeros(shape.taps - 1, shape.channels)
        self.inputs = zeros(WINDOW, shape.input_width)  # few rounds fill the window
        self.base, self.count = (torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(2))
        self.kept = 0
        self.max_saved = slots + 1  # a single slot keeps where its prompt ended and where others parted
        # slot -> tokens of its text -> state and tail after them; the least recently used slots and states first
        self._saved: dict[int, OrderedDict[int, tuple[Tensor, Tensor]]] = {}

    def reusable(self, slot: int, tokens: int) -> int:
        """Return how many of the slot's first ``tokens`` tokens a text can go on from, at most ``tokens``."""
        base, count = int(self.base[slot]), int(self.count[slot])
        if tokens >= base:
            return min(tokens, base + count)
        return max((at for at in self._saved.get(slot, ()) if at <= tokens), default=0)

    def save(self, slot: int, *, apart: int = 0) -> None:
        """Save the slot's state, which has no inputs behind it, for texts that begin in the same way.

        apart: tokens that must lie between saved states. Where there are too many, the slot with most of them gives up
        the one that it used least recently, so that a long text does not cost others theirs.
        """
        tokens = int(self.base[slot])
        if tokens - self.reusable(slot, tokens - 1) < apart:
            return
        saved = self._saved.setdefault(slot, OrderedDict())
        saved[tokens] = self.state[:, slot].clone(), self.tail[:, slot].clone()
        self._use(slot, tokens)
        while sum(map(len, self._saved.values())) > self.max_saved:
            self._drop_one()

    def _use(self, slot: int, tokens: int) -> None:
        """Mark a saved state as used now, and its slot."""
        self._saved[slot] = self._saved.pop(slot)
        self._saved[slot].move_to_end(tokens)

    def _drop_one(self) -> None:
        """Drop a saved state: of the slots that have most, the one used least recently, and of its states as well."""
        owner = max(self._saved, key=lambda slot: len(self._saved[slot]))
        self._saved[owner].popitem(last=False)
        if not self._saved[owner]:
            del self._saved[owner]

    def cut(self, slot: int, tokens: int) -> None:
        """Begin a new text in a slot, of which its first ``tokens`` tokens are a part. They must be ``reusable``."""
        saved = self._saved.pop(slot, OrderedDict())
        if kept := OrderedDict((at, state) for at, state in saved.items() if at <= tokens):
            self._saved[slot] = kept
        if tokens > 0:
            self.copy(slot, slot, tokens)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Give ``target`` the state of ``source`` after ``tokens`` tokens, which must be ``reusable``."""
        assert self.reusable(source, tokens) == tokens
        base = int(self.base[source])
        if tokens < base:
            self._use(source, tokens)
            self.state[:, target], self.tail[:, target] = self._saved[source][tokens]
            self.base[target], self.count[target] = tokens, 0
            return
        applied = tokens - base
        if source != target:
            self.state[:, target], self.tail[:, target] = self.state[:, source], self.tail[:, source]
            self.inputs[:, target, :applied] = self.inputs[:, source, :applied]
        self.base[target], self.count[target] = base, applied

    def erase(self, slot: int) -> None:
        """Set a slot to its first state, which has no text."""
        self.cut(slot, 0)
        for table in (self.state, self.tail, self.inputs):
            table[:, slot] = 0
        self.base[slot] = self.count[slot] = 0

    @property
    def held(self) -> set[int]:
        """The slots that hold a state. Synchronises with the device."""
        return {*self.base.nonzero().flatten().tolist(), *self._saved}

    @property
    def largest_bytes(self) -> int:
        """Most bytes that a slot may hold."""
        return (self.slots + 1) * self.shape.state_bytes + self.shape.slot_bytes()

    def row(self, slot: int, length: int) -> dict[str, Tensor]:
        """Return a copy of what a slot holds of a text of ``length`` tokens.

        positions: int64, ``base`` and ``count`` of the slot, then the tokens after which states are saved. state, tail,
        inputs: the slot's, without the dimension of slots. saved_state, saved_tail: one after the other.
        """
        base, saved = int(self.base[slot]), self._saved.get(slot, OrderedDict())
        count = length - base  # without the inputs of rejected draft tokens
        assert 0 <= count <= int(self.count[slot])
        found = {
            "positions": torch.tensor([base, count, *saved]),
            "state": self.state[:, slot].clone(),
            "tail": self.tail[:, slot].clone(),
            "inputs": self.inputs[:, slot, :count].clone(),
        }
        if saved:
            found |= {"saved_state": torch.stack([state for state, _ in saved.values()])}
            found |= {"saved_tail": torch.stack([tail for _, tail in saved.values()])}
        return found

    def is_row(self, tensors: Mapping[str, Tensor], length: int) -> bool:
        """Whether these are what ``row`` returns for a slot with a text of ``length`` tokens."""
        positions = tensors.get("positions")
        if positions is None or positions.dtype != torch.int64 or positions.dim() != 1 or len(positions) < 2:
            return False
        base, count, *saved = positions.tolist()
        if not (0 <= count <= WINDOW and base >= 0 and base + count == length and all(0 < at < length for at in saved)):
            return False
        state, tail, inputs = (tuple(table[:, 0].shape) for table in (self.state, self.tail, self.inputs))
        wanted = {"state": state, "tail": tail, "inputs": (inputs[0], count, inputs[2])}
        if saved:
            wanted |= {"saved_state": (len(saved), *state), "saved_tail": (len(saved), *tail)}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor.dtype == torch.float32}
        return {name: found.get(name) for name in wanted} == wanted

    def set_row(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Let a slot hold what ``row`` returned."""
        base, count, *saved = tensors["positions"].tolist()
        self._saved.pop(slot, None)
        self.base[slot], self.count[slot] = base, count
        self.state[:, slot], self.tail[:, slot] = tensors["state"], tensors["tail"]
        self.inputs[:, slot, :count] = tensors["inputs"]
        if saved:
            states = zip(tensors["saved_state"].clone(), tensors["saved_tail"].clone(), strict=True)
            self._saved[slot] = OrderedDict(zip(saved, states, strict=True))

    def free(self, slot: int) -> None:
        """Drop all that a slot holds, with its memory where slots grow."""
        if slot in self._saved:
            self.cut(slot, 0)
        if int(self.base[slot]) == 0:
            return
        self.base[slot] = self.count[slot] = 0
        for table in (self.state, self.tail, self.inputs):
            for layer in table:
                return_pages(layer[slot])

    def pretend(self, slots: Sequence[int], position: int) -> None:
        """Let slots continue at ``position`` from whatever state they hold, to measure times."""
        self.base[list(slots)], self.count[list(slots)] = position, 0

    def keep(self, slots: Tensor, text: Tensor, paths: Tensor) -> None:
        """Move the inputs of accepted tree nodes behind the text; arguments as for ``RowTables.keep``."""
        order = torch.arange(paths.shape[1], device=paths.device)
        ran = text == self.base[slots]  # idle rows of a captured program did not
        self.inputs[:, slots[:, None], order] = self.inputs[:, slots[:, None], torch.where(ran[:, None], paths, order)]


@dataclass(frozen=True)
class RowsPass:
    """A padded forward pass over states: B rows of L nodes, each row in its own slot.

    slots, start, counts: [B] int64: of each row, its slot, the position of its first node, and its real nodes. A row
        without any is idle: its slot does not change.
    nodes: L. text: whether no node can be rejected, as in prefill; else the inputs of the last ``WINDOW`` are kept, all
        but the first's, which is text. A tree has no more.
    positions, paths: [B, L] int64 and [B, L, L] int32, of trees: each node's position, and the nodes on the path to it,
        itself last, then L as padding. None: the nodes are a chain.
    """

    states: RecurrentStates
    slots: Tensor
    start: Tensor
    counts: Tensor
    nodes: int
    text: bool
    positions: Tensor | None = None
    paths: Tensor | None = None

    @cached_property
    def certain(self) -> Tensor:
        """[B] int64: leading nodes whose inputs become part of the stored state."""
        return self.counts if self.text else torch.minimum(self.counts, (self.counts - WINDOW).clamp(min=1))

    @property
    def kept(self) -> int:
        """Upper bound of the inputs that a slot keeps of this pass."""
        return 0 if self.text else min(self.nodes - 1, WINDOW)

    @cached_property
    def applied(self) -> Tensor:
        """[B] int64: inputs of each slot's last pass that lie before ``start``, as of the first call; 0: it is idle."""
        between = (self.start - self.states.base[self.slots]).clamp(0, WINDOW)
        return between.masked_fill((self.start == 0) | (self.counts == 0), 0)

    @cached_property
    def parents(self) -> Tensor | None:
        """[B, L] int64, of trees: the number of each node's parent, -1: the text."""
        if self.positions is None or self.paths is None:
            return None
        depth = (self.positions - self.start[:, None])[..., None]
        return self.paths.long().gather(2, (depth - 1).clamp(min=0)).masked_fill(depth == 0, -1).squeeze(2)

    def finish(self) -> None:
        """Note what the slots hold after the pass, once all layers have run."""
        states, certain, busy = self.states, self.certain, self.counts > 0
        for table, now in ((states.base, self.start + certain), (states.count, self.counts - certain)):
            table[self.slots] = torch.where(busy, now, table[self.slots])
        states.kept = max(states.kept, self.kept)


class StatefulCache(KVCache):
    """A KV cache of the attention layers, with the states of the recurrent layers between them."""

    def __init__(
        self,
        shape: StateShape,
        layers: Sequence[KVHeads],
        rows: int,
        positions: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        paged: bool = False,
        pool: int | None = None,
    ) -> None:
        super().__init__(layers, rows, positions, dtype, device, paged=paged, pool=pool)
        self.states = RecurrentStates(shape, rows, device)

    def keep(self, rows: Tensor, text: Tensor, paths: Tensor) -> None:
        super().keep(rows, text, paths)
        self.states.keep(rows, text, paths)

    def copy_row(self, source: int, destination: int, length: int) -> None:
        super().copy_row(source, destination, length)
        self.states.copy(source, destination, length)

    def erase_row(self, row: int) -> None:
        super().erase_row(row)
        self.states.erase(row)

    def resize(self, row: int, positions: int) -> None:
        super().resize(row, positions)
        if positions == 0:
            self.states.free(row)
