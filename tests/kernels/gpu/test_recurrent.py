"""Recurrent layers over padded passes, in the kernels and in torch, against a plain walk along each row's path."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from engine.test_device_round import NoHostReads
from kernels.gpu.test_elementwise import counted
from paceline.core.nodes import Tree
from paceline.core.recurrent_state import CHUNK, WINDOW, RecurrentStates, RowsPass
from paceline.core.slots import Slots
from paceline.kernels.attention import make_backend
from paceline.kernels.attention.base import Plan
from paceline.kernels.delta import DeltaHeads, DeltaNet
from paceline.kernels.gpu.delta_net import delta_net
from paceline.kernels.gpu.launch import interpreted
from paceline.kernels.gpu.steps import LayerSteps, TorchSteps, TritonSteps
from paceline.kernels.mamba2 import Mamba2, Mamba2Heads
from paceline.kernels.short_conv import ShortConv
from paceline.kernels.spec import LinearWeights, RecurrentMixer
from paceline.models.decoding.decoder import Decoder
from recurrent_support import in_torch, tiny_qwen3_5

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:overflow")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, LAYERS = 3, 2
HEADS = {
    "grouped": DeltaHeads(1, 2, 16, 16, 4),
    "two blocks": DeltaHeads(1, 1, 24, 48, 2),
    "many taps": DeltaHeads(2, 2, 8, 12, 5),
}


def delta(heads: DeltaHeads, dtype: torch.dtype = torch.float32) -> DeltaNet:
    return DeltaNet(
        heads=heads,
        gates=LinearWeights(torch.empty(0)),
        conv=normal(heads.channels, heads.taps).to(dtype),
        rate=-normal(heads.value_heads).exp() / 4,  # states that decay slowly enough to matter
        bias=normal(heads.value_heads).to(dtype),
        norm=normal(heads.value_dim).to(dtype),
        epsilon=1e-6,
    )


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).to(DEVICE)


def mamba2() -> Mamba2:
    heads = Mamba2Heads(4, 8, 2, 16, 3)
    vectors = -normal(4).exp() / 4, normal(4), normal(4), normal(heads.width)
    gates = LinearWeights(torch.empty(0))
    return Mamba2(heads, gates, normal(heads.channels, 3), normal(heads.channels), *vectors, 1e-6)


MIXERS: dict[str, Callable[[], RecurrentMixer]] = {
    **{f"delta {name}": lambda heads=heads: delta(heads) for name, heads in HEADS.items()},  # type: ignore[misc]
    "mamba-2": mamba2,
    "short convolution": lambda: ShortConv(normal(24, 3)),
}
WAYS = {f"triton, {name}": (TritonSteps(), name) for name in MIXERS}
WAYS |= {f"torch, {name}": (TorchSteps(), name) for name in MIXERS}
ONE_OF_EACH_KIND = [way for way, (_, name) in WAYS.items() if name not in ("delta grouped", "delta two blocks")]


def width_of(mixer: RecurrentMixer) -> int:
    """Outputs of a layer's first matrix."""
    if isinstance(mixer, DeltaNet):
        return mixer.heads.channels + mixer.heads.value_heads * mixer.heads.value_dim
    if isinstance(mixer, Mamba2):
        return mixer.heads.channels + mixer.heads.width
    return 3 * mixer.shape(1).channels


class Walk:
    """The texts of slots, each with its state and last inputs after its tokens so far: the truth, token by token."""

    def __init__(self, mixer: RecurrentMixer, dtype: torch.dtype = torch.float32) -> None:
        self.mixer, shape = mixer, mixer.shape(1)
        sizes = shape.state, (shape.taps - 1, shape.channels)
        start = torch.zeros(sizes[0], dtype=dtype, device=DEVICE), torch.zeros(sizes[1], dtype=dtype, device=DEVICE)
        self.after = [start] * SLOTS
        self.length, self._start = [0] * SLOTS, start

    def begin(self, slot: int) -> None:
        self.after[slot], self.length[slot] = self._start, 0

    def run(
        self, slot: int, inputs: Tensor, parents: Sequence[int]
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Run nodes after a slot's text -> their outputs, and what lies behind each. parents: -1 is the text."""
        reached, outputs = [], []
        for own, parent in zip(inputs, parents, strict=True):
            state, tail = self.after[slot] if parent < 0 else reached[parent]
            channels = tail.shape[1]
            window = torch.cat([tail, own[None, :channels]])
            output, state = self.mixer.append(state, window, own[channels:])
            reached.append((state, window[1:]))
            outputs.append(output)
        return outputs, reached


class Passes:
    """Padded passes of random rows through a layer of states, each checked against ``Walk``."""

    def __init__(self, steps: LayerSteps, mixer: RecurrentMixer, chance: random.Random) -> None:
        self.steps, self.mixer, self.chance = steps, mixer, chance
        self.states = RecurrentStates(mixer.shape(LAYERS), SLOTS, DEVICE)
        for table in (self.states.state, self.states.tail, self.states.inputs):
            table.normal_()  # what earlier texts left
        self.walk = Walk(mixer)

    def run(self, slots: list[int], parents: list[list[int]], *, text: bool, tree: bool) -> list[list[Any]]:
        """Run nodes with these parents -> what lies behind each. A slot with no nodes is idle, and stays as it is."""
        counts, longest = [len(each) for each in parents], max(map(len, parents))
        projected = normal(len(slots) * longest, width_of(self.mixer))
        gates = None if self.mixer.gates is None else normal(len(projected), self.mixer.shape(1).gates)
        start = torch.tensor([self.walk.length[slot] for slot in slots], device=DEVICE)
        part = RowsPass(
            self.states, torch.tensor(slots, device=DEVICE), start, torch.tensor(counts, device=DEVICE), longest, text
        )
        if tree:
            padded = [[*each[1:], *[-1] * (longest - len(each))][: longest - 1] for each in parents]
            below = torch.tensor([[max(-1, parent - 1) for parent in each] for each in padded], device=DEVICE)
            ancestors, depths = Tree.of(below, part.counts.clamp(min=1) - 1)
            plan = Plan(start[:, None] + depths, 0, ancestors)
            part = replace(part, positions=plan.positions, paths=plan.paths)
        before = [table.clone() for table in (self.states.state, self.states.tail, self.states.inputs)]
        found = self.steps.recurrent(self.mixer, part, 1, projected, gates).view(len(slots), longest, -1)
        part.finish()
        idle = [slot for slot in range(SLOTS) if slot not in slots or not counts[slots.index(slot)]]
        for table, old in zip((self.states.state, self.states.tail, self.states.inputs), before, strict=True):
            assert torch.equal(table[0], old[0]), "another layer's"
            assert torch.equal(table[1, idle], old[1, idle])
        inputs, kept = self.mixer.split(projected, gates)
        after = []
        for row, slot in enumerate(slots):
            lines = slice(row * longest, row * longest + counts[row])
            outputs, reached = self.walk.run(slot, inputs[lines], parents[row])
            if outputs:
                wanted = self.mixer.finish(torch.stack(outputs), kept[lines])
                torch.testing.assert_close(found[row, : counts[row]], wanted, atol=1e-4, rtol=1e-4)
            after.append(reached)
        return after

    def prefill(self, slots: list[int]) -> None:
        sizes = [self.chance.choice([1, 2, 6]) for _ in slots]
        after = self.run(slots, [list(range(-1, size - 1)) for size in sizes], text=True, tree=False)
        for slot, size, reached in zip(slots, sizes, after, strict=True):
            self.walk.after[slot] = reached[-1]
            self.walk.length[slot] += size

    def verify(self, slots: list[int], *, tree: bool) -> None:
        """A round: a path from the root on is accepted. Rows have different numbers of draft tokens; some are idle."""
        chance = self.chance
        sizes = [chance.choice([0, 1, 3, 4]) for _ in slots]
        parents = [
            [chance.randrange(max(0, node - 3), node) if tree and node else node - 1 for node in range(size)]
            for size in sizes
        ]
        if not any(sizes):
            return
        after = self.run(slots, parents, text=False, tree=tree)
        paths = []
        for slot, own, reached in zip(slots, parents, after, strict=True):
            path = []
            if own:
                place = chance.randrange(len(own))
                self.walk.after[slot] = reached[place]
                while place > 0:
                    path.append(place - 1)
                    place = own[place]
                self.walk.length[slot] += len(path) + 1
            paths.append(path[::-1])
        if tree and (width := max(sizes) - 1):
            lines = [[*path, *range(len(path), width)] for path in paths]
            length = [self.walk.length[slot] - len(path) for slot, path in zip(slots, paths, strict=True)]
            self.states.keep(*(torch.tensor(each, device=DEVICE) for each in (slots, length, lines)))


@pytest.mark.parametrize(("way", "seed"), [(way, seed) for seed, way in enumerate(WAYS)])
def test_passes_give_what_a_walk_along_the_accepted_tokens_gives(way: str, seed: int) -> None:
    """Chunked prompts, rounds of chains and trees, idle rows; texts begin anew in slots that others had."""
    steps, name = WAYS[way]
    torch.manual_seed(seed)
    passes = Passes(steps, MIXERS[name](), random.Random(seed))
    for turn in range(6):
        slots = passes.chance.sample(range(SLOTS), passes.chance.randint(1, SLOTS))
        for slot in slots:
            if passes.chance.random() < 0.15:
                passes.walk.begin(slot)
        if turn % 3 == 0:
            passes.prefill(slots)
        else:
            passes.verify(slots, tree=turn % 2 == 0)


@pytest.mark.parametrize("way", ONE_OF_EACH_KIND)
def test_after_more_tokens_than_a_window_a_text_goes_on_from_one_of_the_last(way: str) -> None:
    """A prompt is read beyond its window for its hidden states, and its text is cut afterwards."""
    steps, name = WAYS[way]
    torch.manual_seed(0)
    passes = Passes(steps, MIXERS[name](), random.Random(0))
    after = passes.run([0, 2], [list(range(-1, WINDOW + 2)), [-1, 0]], text=False, tree=False)
    for slot, reached, accepted in zip((0, 2), after, (5, 1), strict=True):
        passes.walk.after[slot] = reached[accepted - 1]
        passes.walk.length[slot] += accepted
    assert passes.states.base.tolist() == [3, 0, 1]
    passes.run([0, 2], [[-1], [-1, 0, 1]], text=False, tree=False)


@pytest.mark.parametrize("way", ONE_OF_EACH_KIND)
def test_an_idle_row_applies_its_accepted_inputs_when_it_goes_on_and_not_before(way: str) -> None:
    steps, name = WAYS[way]
    torch.manual_seed(0)
    passes = Passes(steps, MIXERS[name](), random.Random(0))
    for slot, reached in enumerate(passes.run([0, 1], [[-1, 0, 1]] * 2, text=False, tree=False)):
        passes.walk.after[slot] = reached[-1]
        passes.walk.length[slot] = 3
    passes.run([0, 1], [[-1], []], text=False, tree=False)
    passes.run([1], [[-1, 0]], text=False, tree=False)


BOUND = 1e-5  # of the largest number: what rounding may change in outputs and states


@dataclass
class Prompt:
    """Tokens of a slot's text from ``start`` on, whose states and outputs float64 gives one by one."""

    mixer: DeltaNet
    start: int
    projected: Tensor
    gates: Tensor
    before: tuple[Tensor, Tensor]

    @classmethod
    def random(cls, mixer: DeltaNet, start: int, size: int) -> Prompt:
        """Half of its tokens are the same, and half of them forget much of the state, which a chunk must tell apart."""
        projected, gates = normal(size, width_of(mixer)), 6 * normal(size, 2 * mixer.heads.value_heads)
        projected[size // 2 :] = projected[:1]
        shape = mixer.shape(1)
        before = normal(*shape.state), normal(shape.taps - 1, shape.channels)
        return cls(mixer, start, projected, gates, before if start else (before[0] * 0, before[1] * 0))

    def check(self, found: Tensor, state: Tensor) -> None:
        walk = Walk(self.mixer, torch.float64)
        walk.after[0] = self.before[0].double(), self.before[1].double()
        inputs, kept = self.mixer.split(self.projected.double(), self.gates.double())
        outputs, reached = walk.run(0, inputs, range(-1, len(inputs) - 1))
        wanted = self.mixer.finish(torch.stack(outputs).float(), kept.float())
        for own, exact in ((found, wanted), (state, reached[-1][0].float())):
            torch.testing.assert_close(own, exact, atol=BOUND * float(exact.abs().max()), rtol=0)


def read(prompts: Sequence[Prompt], sizes: Sequence[int], *, in_chunks: bool = True) -> tuple[Tensor, RecurrentStates]:
    """Run prompts, each in its slot, in passes of at most so many tokens -> outputs [B, L, H V], and the states."""
    mixer, rows = prompts[0].mixer, torch.arange(len(prompts), device=DEVICE)
    states = RecurrentStates(mixer.shape(1), len(prompts), DEVICE)
    for slot, prompt in enumerate(prompts):
        states.state[0, slot], states.tail[0, slot] = prompt.before
        states.base[slot] = prompt.start
    longest, first, found = max(len(prompt.projected) for prompt in prompts), 0, []
    projected, gates = (
        torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        for parts in ([prompt.projected for prompt in prompts], [prompt.gates for prompt in prompts])
    )
    for size in [*sizes, longest - sum(sizes)]:
        start = torch.tensor([prompt.start + first for prompt in prompts], device=DEVICE)
        counts = torch.tensor([min(size, max(0, len(prompt.projected) - first)) for prompt in prompts], device=DEVICE)
        part = RowsPass(states, rows, start, counts, size, text=True)
        own = (table[:, first : first + size].flatten(0, 1) for table in (projected, gates))
        found.append(delta_net(mixer, part, 0, *own, in_chunks=in_chunks).view(len(prompts), size, -1))
        part.finish()
        first += size
    return torch.cat(found, 1), states


@pytest.mark.parametrize("name", HEADS)
def test_chunks_are_the_recurrence_in_float64_but_for_rounding(name: str) -> None:
    """Rows that begin at a chunk and within one, rows without a whole chunk, and tokens behind the last one."""
    torch.manual_seed(0)
    mixer = delta(HEADS[name])
    prompts = [Prompt.random(mixer, *sizes) for sizes in ((0, 2 * CHUNK + 1), (3 * CHUNK - 2, CHUNK + 3), (5, 4))]
    found, states = read(prompts, ())
    for row, prompt in enumerate(prompts):
        prompt.check(found[row, : len(prompt.projected)], states.state[0, row])


def test_bits_do_not_depend_on_how_a_prompt_is_divided_at_multiples_or_on_other_rows() -> None:
    torch.manual_seed(0)
    prompt, other = (Prompt.random(delta(HEADS["many taps"]), 0, size) for size in (2 * CHUNK + 1, CHUNK))
    whole, states = read([prompt], ())
    for found, own in (read([prompt], (CHUNK,)), read([prompt, other], (2 * CHUNK,))):
        assert torch.equal(found[0], whole[0])
        assert torch.equal(own.state[:, 0], states.state[:, 0])


def test_token_by_token_bits_do_not_depend_on_how_a_prompt_is_divided() -> None:
    """As with ``deterministic``."""
    torch.manual_seed(0)
    prompt = Prompt.random(delta(HEADS["two blocks"]), 0, CHUNK + 1)
    (whole, states), (found, own) = (read([prompt], sizes, in_chunks=False) for sizes in ((), (3,)))
    assert torch.equal(found, whole)
    assert torch.equal(own.state, states.state)
    prompt.check(whole[0], states.state[0, 0])


def test_inputs_of_drafts_are_applied_before_the_first_chunk() -> None:
    torch.manual_seed(0)
    passes = Passes(TritonSteps(), delta(HEADS["many taps"]), random.Random(0))
    for slot, reached in enumerate(passes.run([0, 1], [[-1, 0, 1]] * 2, text=False, tree=False)):
        passes.walk.after[slot], passes.walk.length[slot] = reached[-1], 3
    passes.states.base += CHUNK - 3  # as if the texts were longer: then the next token begins a chunk
    passes.walk.length = [CHUNK] * SLOTS
    passes.run([0, 1], [list(range(-1, CHUNK - 1)), [-1]], text=True, tree=False)


@pytest.mark.skipif(not interpreted(), reason="counted in the interpreter, without a device")
@pytest.mark.parametrize(
    ("name", "sizes", "most"),
    [
        ("delta grouped", (1, 7), 4),
        ("delta many taps", (WINDOW + CHUNK, WINDOW + CHUNK + 1), 8),
        ("mamba-2", (1, 7), 18),
        ("short convolution", (1, 7), 8),
    ],
)
def test_launches_do_not_depend_on_the_tokens_and_none_is_waited_for(
    name: str, sizes: Sequence[int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixer, found = MIXERS[name](), []
    for nodes in sizes:
        states = RecurrentStates(mixer.shape(1), 2, DEVICE)
        slots, start, counts = (torch.tensor(each) for each in ([0, 1], [4, 4], [nodes, nodes]))
        part = RowsPass(states, slots, start, counts, nodes, text=False)
        part.applied, part.certain  # noqa: B018 - common to all layers
        projected = normal(2 * nodes, width_of(mixer))
        gates = None if mixer.gates is None else normal(2 * nodes, mixer.shape(1).gates)
        with NoHostReads(), counted(monkeypatch) as launches:
            TritonSteps().recurrent(mixer, part, 0, projected, gates)
        found.append(launches)
    assert found[0] == found[1]
    assert found[0].total() <= most, found[0]


@pytest.mark.skipif(DEVICE == "cuda", reason="the tiny model is on the CPU; test_device.py compares whole models")
def test_a_hybrid_on_the_kernels_gives_the_hidden_states_of_torch() -> None:
    """Gated attention with partial rotary positions and norms, written to the cache in one launch, beside the states.

    The last pass is a tree. Padding is not compared.
    """
    model = in_torch(tiny_qwen3_5(kinds="df"))
    on_kernels = copy(model)
    on_kernels.steps = TritonSteps()
    decoders = [Decoder(each, make_backend("ragged", torch.device("cpu")), 3, 40) for each in (model, on_kernels)]
    decoders[1].passes.packs = True  # type: ignore[attr-defined]
    rows, tokens = Slots.listed([2, 0], torch.device("cpu")), torch.arange(10).view(2, 5)
    tree = Tree.of(torch.tensor([[-1, -1, 0, 2], [-1, 0, 0, -1]]), torch.tensor([4, 3]))
    for start, counts, shape in (([0, 0], [5, 3], None), ([3, 1], [1, 5], None), ([4, 5], [5, 4], tree)):
        arguments = torch.tensor(start), 40, rows, torch.tensor(counts), shape
        hidden = [decoder.forward(tokens, *arguments) for decoder in decoders]
        real = torch.arange(5) < torch.tensor(counts)[:, None]
        torch.testing.assert_close(hidden[1][real], hidden[0][real], atol=1e-4, rtol=1e-4)
