"""Everything between the model's logits and a token, native and in torch: the same tokens, bit for bit."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import new_batch
from covering import in_pairs
from paceline.config import MIN_TEMPERATURE, SamplingParams
from paceline.core.batch import Batch, RowStart
from paceline.core.sampling import Choices, _draw_adjusted, adjust, masses, probabilities, warp
from paceline.core.values import DrawInputs, Gained, Purpose
from paceline.kernels import native
from paceline.kernels.cpu import CpuOps

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native.available(), reason=f"no kernels here: {native.why_none()}"),
]
on_every_isa = pytest.mark.parametrize("kernels", native.available(), ids=lambda kernels: kernels.name)
VOCABULARIES = [7, 49152, 151936]
DRAFT_LENGTH = 2


def batch_of(params: list[SamplingParams], vocab: int, seed: int = 0) -> Batch:
    """Rows with a prompt and the beginning of an answer, of a few repeated tokens. Slots 0 and 2 are free."""
    rng = random.Random(seed)
    batch, slots = new_batch(len(params) + 2, 200, vocab), [1 + row + (row > 0) for row in range(len(params))]
    for slot, one in zip(slots, params, strict=True):
        prompt = [rng.randrange(min(vocab, 30)) for _ in range(rng.randint(1, 60))]
        batch.set_row(slot, RowStart(prompt, one, rng.getrandbits(62), (1, vocab - 1)))
        answer = [rng.randrange(min(vocab, 30)) for _ in range(rng.randint(0, 60))]
        batch.text[slot, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer, dtype=torch.int64)
        batch.length[slot] += len(answer)
    batch.set_live(slots)
    return batch


def logits_of(rows: int, places: int, vocab: int, spread: float, seed: int, kind: str = "plain") -> torch.Tensor:
    """tied: few different numbers. cut: every third token is masked. one: all but one are."""
    logits = torch.randn(rows, places, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    if kind == "tied":
        logits = (logits * 2 / max(spread, 1e-3)).round()
    if kind == "cut":
        logits[..., 1::3] = -math.inf
    if kind == "one":
        logits[..., 1:] = -math.inf
    return logits


def draft_tokens_of(batch: Batch, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, min(batch.vocab_size, 30), (batch.rows, DRAFT_LENGTH), generator=generator)


def reference_tokens(logits: torch.Tensor, batch: Batch, draft_tokens: torch.Tensor) -> torch.Tensor:
    return _draw_adjusted(adjust(logits, batch, draft_tokens), batch, 0, Purpose.DRAW)


def rows_of(batch: Batch):
    return batch.sampling.drawing(batch.text, batch.length)


CUTS = [
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"top_p": 0.3},
    {"top_p": 1e-6},
    {"top_p": 1e-30},
    {"top_p": 0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 5000},
    {"top_k": 10**9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_p": 0.9, "min_p": 0.01},
    {"top_k": 300, "min_p": 0.001},
    {"top_k": 100, "top_p": 0.95, "min_p": 0.02},
    {"typical_p": 0.9},
    {"typical_p": 0.2, "top_p": 0.9},
    {"typical_p": 1e-6},
    {"epsilon_cutoff": 3e-4},
    {"eta_cutoff": 0.002, "min_p": 0.01},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 2.5, "top_k": 40},
    {"typical_p": 0.95, "epsilon_cutoff": 1e-4, "eta_cutoff": 1e-3, "top_n_sigma": 3.0},
    {},
]
ADJUSTMENTS = [
    {},
    {"repetition_penalty": 1.1},
    {"presence_penalty": 0.7, "frequency_penalty": -0.3},
    {"logit_bias": {3: 5.0, 5: -100.0}, "min_tokens": 90, "max_tokens": 100},
    {"repetition_penalty": 0.8, "presence_penalty": -2.0, "frequency_penalty": 0.5, "logit_bias": {0: -1.5}},
]
ALL = [
    SamplingParams(temperature=heat, **cut, **adjustment)
    for (heat, cut), adjustment in zip(
        itertools.product([1.0, 0.6, 2.5], CUTS), itertools.cycle(ADJUSTMENTS), strict=False
    )
]


def assert_all_draw_the_reference_tokens(logits: torch.Tensor, batch: Batch, draft_tokens: torch.Tensor) -> None:
    expected, before = reference_tokens(logits, batch, draft_tokens), logits.clone()
    for kernels in native.available():
        found = CpuOps(kernels).draw(DrawInputs(logits, rows_of(batch), draft_tokens), Purpose.DRAW)
        assert torch.equal(found, expected), kernels.name
        assert torch.equal(logits, before), "the caller's logits are the caller's"


@in_pairs(vocab=VOCABULARIES, kind=["plain", "tied", "cut"], spread=[3.0, 0.7])
def test_tokens_equal_the_references_for_each_parameter(vocab: int, kind: str, spread: float) -> None:
    params = ALL if vocab < 1000 else ALL[VOCABULARIES.index(vocab) + len(kind) :: 13]
    batch = batch_of(params, vocab)
    places = DRAFT_LENGTH + 1 if vocab < 1000 else 1
    assert_all_draw_the_reference_tokens(
        logits_of(len(params), places, vocab, spread, 7, kind), batch, draft_tokens_of(batch, 8)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "tied", "cut"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_tokens_equal_the_references_for_all_parameters_together(vocab: int, kind: str) -> None:
    for seed, spread in enumerate((3.0, 0.7)):
        params = ALL[seed::2]
        batch, logits = batch_of(params, vocab), logits_of(len(params), 2, vocab, spread, seed, kind)
        assert_all_draw_the_reference_tokens(logits, batch, draft_tokens_of(batch, 8))


sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, MIN_TEMPERATURE, 1e-3, 0.3, 0.8, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 699, 700, 10**9]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.95, 0.5, 0.05, 1e-6, 1e-30, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.05, 0.5, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 1.0, 0.95, 0.4, 1e-6]),
    epsilon_cutoff=st.sampled_from([0.0, 0.0, 0.0, 1e-4, 0.3, 1.0]),
    eta_cutoff=st.sampled_from([0.0, 0.0, 0.0, 1e-3, 0.5]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.0, 0.7, 2.0, 100.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.1, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, 2), st.sampled_from([-100.0, -1.5, 2.0, 50.0]), max_size=2),
    min_tokens=st.sampled_from([0, 0, 30]),
)


@settings(max_examples=80, deadline=None)
@given(
    params=st.lists(sampling_params, min_size=1, max_size=6),
    vocab=st.sampled_from([3, 16, 17, 100, 700, 1024, 2500]),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 4.0, 30.0, 1e4]),
    kind=st.sampled_from(["plain", "plain", "tied", "cut", "one"]),
    seed=st.integers(0, 10**6),
)
def test_tokens_equal_the_references_for_any_logits(
    params: list[SamplingParams], vocab: int, spread: float, kind: str, seed: int
) -> None:
    batch = batch_of(params, vocab, seed)
    logits = logits_of(len(params), DRAFT_LENGTH + 1, vocab, spread, seed, kind)
    assert_all_draw_the_reference_tokens(logits, batch, draft_tokens_of(batch, seed))


@on_every_isa
@pytest.mark.parametrize("packed", [False, True])
def test_draft_tokens_are_accepted_like_the_references_for_any_parameters(
    kernels: native.Kernels, packed: bool
) -> None:
    vocab = 300
    batch = batch_of(ALL, vocab)
    counts = torch.arange(len(ALL)) % (DRAFT_LENGTH + 1)
    logits = logits_of(len(ALL), DRAFT_LENGTH + 1, vocab, 3.0, 3)
    draft_tokens = draft_tokens_of(batch, 4)
    for place in range(DRAFT_LENGTH):  # most draft tokens are right, so that later places are reached
        right = reference_tokens(logits, batch, draft_tokens)[:, place]
        draft_tokens[:, place] = torch.where(torch.arange(len(ALL)) % 5 == place, draft_tokens[:, place], right)
    draws = reference_tokens(logits, batch, draft_tokens)
    real = torch.arange(DRAFT_LENGTH + 1) < counts[:, None] + 1
    kept = ((draft_tokens == draws[:, :-1]) & real[:, 1:]).cumprod(1).sum(1)
    given_logits = logits[real] if packed else logits
    places, scored = DrawInputs(given_logits, rows_of(batch), draft_tokens, counts), torch.arange(len(ALL)) % 2
    tokens, accepted, _, logprobs_of = CpuOps(kernels).accept(places, Purpose.DRAW, scored)
    assert torch.equal(accepted, kept)
    assert len(set(kept.tolist())) == DRAFT_LENGTH + 1
    drawn = torch.arange(DRAFT_LENGTH + 1) <= kept[:, None]
    assert torch.equal(tokens, draws * drawn)
    assert logprobs_of is not None
    own = logprobs_of.own
    logprobs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]  # the model's own, for any parameters
    assert torch.allclose(own, logprobs * drawn * scored[:, None], atol=2e-5)
    wanted = [0 if each else -1 for each in scored.tolist()]
    assert torch.equal(own, CpuOps(kernels).logprobs(given_logits, Gained(tokens, accepted, counts), wanted)[0])
    assert CpuOps(kernels).accept(places, Purpose.DRAW).logprobs is None


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_probabilities_equal_the_references(vocab: int) -> None:
    params = [*(ALL if vocab < 1000 else ALL[::16]), SamplingParams(temperature=0.0)]
    batch, places = batch_of(params, vocab), DRAFT_LENGTH + 1 if vocab < 1000 else 1
    logits, draft_tokens = logits_of(len(params), places, vocab, 3.0, 7), draft_tokens_of(batch, 8)
    adjusted = adjust(logits, batch, draft_tokens)
    expected = probabilities(adjusted, batch)
    far = warp(adjusted, batch) < -80  # the kernels give 0 below e^-87; torch gives denormals
    for kernels in native.available():
        found = CpuOps(kernels).probabilities(DrawInputs(logits, rows_of(batch), draft_tokens))
        assert torch.allclose(found, expected, rtol=2e-5, atol=1e-12), kernels.name
        assert torch.equal((found > 0) | far, (expected > 0) | far), kernels.name
        sums = found.double().sum(-1)
        assert torch.allclose(sums, torch.ones(len(params), places).double(), atol=1e-5), kernels.name


@on_every_isa
def test_a_likelihood_is_of_the_adjusted_logits_before_temperature_and_cuts(kernels: native.Kernels) -> None:
    batch = batch_of(ALL, 300)
    logits, draft_tokens = logits_of(len(ALL), DRAFT_LENGTH + 1, 300, 3.0, 7), draft_tokens_of(batch, 8)
    tokens = torch.randint(0, 300, (len(ALL), DRAFT_LENGTH + 1), generator=torch.Generator().manual_seed(0))
    expected = adjust(logits, batch, draft_tokens).softmax(-1).gather(-1, tokens[..., None])[..., 0]
    found = CpuOps(kernels).likelihood(DrawInputs(logits, rows_of(batch), draft_tokens), tokens)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-30)


@pytest.mark.skipif(len(native.available()) < 2, reason="this CPU has one instruction set")
def test_all_instruction_sets_give_the_same_probabilities_to_the_bit() -> None:
    batch = batch_of(ALL, 5000)
    logits, draft_tokens = logits_of(len(ALL), DRAFT_LENGTH + 1, 5000, 3.0, 7), draft_tokens_of(batch, 8)
    found = [
        CpuOps(kernels).probabilities(DrawInputs(logits, rows_of(batch), draft_tokens))
        for kernels in native.available()
    ]
    assert all(torch.equal(found[0], each) for each in found)


def test_masses_are_probabilities_as_integers() -> None:
    depth = torch.cat([torch.zeros(1), torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 25])
    expected = (-depth.double()).exp()
    found = masses(-depth).double() * 2.0**-30
    assert found[0] == 1.0
    assert ((found - expected).abs() <= 4e-6 * expected + 2.0**-31).all()
    assert masses(torch.tensor([-math.inf, -22.0])).tolist() == [0, 0]


@on_every_isa
def test_the_boundary_equals_the_references_where_masses_tie_with_top_p(kernels: native.Kernels) -> None:
    """Equal logits: the mass before the n-th is n whole leaders, and top_p of 512 of them is a whole number, too."""
    vocab = 512
    params = [SamplingParams(top_p=n / vocab) for n in range(1, vocab, 7)]
    batch = batch_of(params, vocab)
    logits = -torch.arange(vocab).float().remainder(8)[None, None].expand(len(params), 1, vocab).contiguous() * 1e-7
    found = CpuOps(kernels).probabilities(DrawInputs(logits, rows_of(batch)))
    assert torch.equal(found > 0, probabilities(logits, batch) > 0)


@in_pairs(kernels=native.available(), vocab=VOCABULARIES, packed=[False, True])
def test_log_probabilities_are_torchs_and_ties_go_to_the_smaller_token(
    kernels: native.Kernels, vocab: int, packed: bool
) -> None:
    wanted = [5, -1, 0, 20, 1]
    logits = logits_of(5, 3, vocab, 3.0, 7)
    logits[3] = logits[3].round()
    counts, accepted = torch.tensor([2, 2, 1, 1, 0]), torch.tensor([2, 1, 0, 1, 0])
    tokens = torch.randint(0, vocab, (5, 3), generator=torch.Generator().manual_seed(0))
    real = torch.arange(3) < counts[:, None] + 1
    own, ids, values = CpuOps(kernels).logprobs(
        logits[real] if packed else logits, Gained(tokens, accepted, counts), wanted
    )
    logprobs = logits.double().log_softmax(-1)  # torch's own float32 is 7e-5 off at this vocabulary with AVX2
    assert ids.shape[-1] == min(20, vocab)
    for row, count in enumerate(wanted):
        for place in range(int(accepted[row]) + 1 if count >= 0 else 0):
            line = logprobs[row, place]
            best = sorted(range(vocab), key=lambda t, line=line: (-line[t].item(), t)) if vocab < 10 else None
            most = min(count, vocab)
            assert own[row, place] == pytest.approx(line[tokens[row, place]].item(), abs=2e-5)
            assert values[row, place, :most].tolist() == pytest.approx(line.topk(most).values.tolist(), abs=2e-5)
            assert logits[row, place, ids[row, place, :most]].tolist() == logits[row, place].topk(most).values.tolist()
            if best is not None:
                assert ids[row, place, :most].tolist() == best[:most]


@on_every_isa
def test_log_probabilities_of_nan_logits_stay_inside_the_vocabulary(kernels: native.Kernels) -> None:
    logits = torch.full((4, 1, 50), -math.inf)
    logits[0, 0, 7] = 1.0
    logits[2], logits[3] = math.inf, math.nan
    zeros = torch.zeros(4, 1, dtype=torch.int64)
    _, ids, values = CpuOps(kernels).logprobs(logits, Gained(zeros, zeros[:, 0], zeros[:, 0]), [5] * 4)
    assert ids[0, 0].tolist() == [7, 0, 1, 2, 3]
    assert values[0, 0, 0] == pytest.approx(0.0, abs=1e-5)
    assert ids.min() >= 0
    assert ids.max() < 50


def test_a_row_with_a_constraint_leaves_its_neighbours_to_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Even:
        """A constraint that records how it is called."""

        def mask(self, draft_tokens: list[int], first: int, logits: torch.Tensor) -> None:
            assert (len(draft_tokens), first) == (DRAFT_LENGTH, 0)
            assert logits.shape == (DRAFT_LENGTH + 1, 100)
            logits[:, 1::2] = -math.inf

        def advance(self, tokens: list[int]) -> None: ...

        def is_free(self, draft_tokens: list[int]) -> bool:
            return False

    batch = batch_of([SamplingParams(temperature=5.0), SamplingParams(temperature=5.0, top_p=0.9)] * 20, 100)
    for row in range(0, 40, 2):
        batch.sampling.constraints[row] = Even()
    batch.sampling.any_constraint = True
    logits, draft_tokens = logits_of(40, DRAFT_LENGTH + 1, 100, 1.0, 7), draft_tokens_of(batch, 8)
    expected = reference_tokens(logits, batch, draft_tokens)
    monkeypatch.setattr("paceline.core.sampling.adjust", lambda *_: pytest.fail("no torch"))
    counts = torch.full((40,), DRAFT_LENGTH)
    for choices in (
        Choices(logits, batch, draft_tokens),
        Choices(logits.flatten(0, 1), batch, draft_tokens, counts=counts),
    ):
        found = choices.draw()
        assert torch.equal(found, expected)
    assert not (expected[::2] % 2).any()
    assert (expected[1::2] % 2).any()


@on_every_isa
def test_rows_of_one_place_may_have_any_stride(kernels: native.Kernels) -> None:
    """A dimension of size one may have any stride."""
    batch = batch_of([SamplingParams(temperature=0)] * 3, 131)
    logits = logits_of(1, 3, 131, 3.0, 9).transpose(0, 1)
    assert logits.stride(1) == 3 * 131
    assert torch.equal(CpuOps(kernels).draw(DrawInputs(logits, rows_of(batch)), Purpose.DRAW), logits.argmax(-1))
