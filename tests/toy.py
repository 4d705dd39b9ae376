"""Toy models whose logits depend on the whole prefix, scripted drafters, and a slow reference sampler."""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kernels.reference import seen_by
from kernels.tools import in_parallel, random_spec, with_experts, with_latent, with_orders, with_sinks
from paceline.config import EngineConfig, SamplingParams
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.cache import KVCache
from paceline.core.draft import Draft
from paceline.core.nodes import Nodes
from paceline.core.outputs import CompletionOutput, RequestOutput
from paceline.core.processors import processed_row
from paceline.core.rows import Constraint
from paceline.core.sampling import noise_key, sequence_seed, uniform
from paceline.core.values import Purpose
from paceline.drafters import Drafter
from paceline.drafters.lookup import LONGEST_SUFFIX
from paceline.engine.engine import Engine, Models, Request
from paceline.engine.rounds.kernels import KernelsPlace
from paceline.kernels.attention.base import Attend
from paceline.kernels.attention.reference import ReferenceAttention
from paceline.lengths.base import LengthPolicy
from paceline.models.base import HiddenStates, Model
from paceline.models.decoding.decoder import Decoder
from paceline.models.native.model import NativeModel, Quantization

VOCAB = 24
POSITIONS = 96


class ToyModel:
    """Model with exact arithmetic whose logits change if any cached value is wrong.

    Queries and keys are zero, so attention is the mean of the visible values; multiplied by their number it is their
    exact sum. Values are small whole numbers that hash (layer, head, token, position). A cache that is off by one token
    or holds one stale value gives another sum, which selects another row of a fixed table of logits. Logits are equal
    to the bit however the work is batched.

    blur: part of a second table that is mixed into the logits, for draft models that are right only sometimes.
    """

    HEADS = 4
    LINES = 251

    def __init__(
        self,
        vocab_size: int = VOCAB,
        *,
        max_positions: int = POSITIONS,
        table_seed: int = 0,
        blur: float = 0.0,
        scale: float = 2.0,
    ) -> None:
        self.name = f"toy(blur={blur})"
        self.vocab_size = vocab_size
        self.layers, self.kv_heads, self.head_dim = 2, 2, 4
        self.max_positions = max_positions
        self.dtype, self.device = torch.float32, torch.device("cpu")
        generator = torch.Generator().manual_seed(table_seed)
        table = torch.randn(self.LINES, vocab_size, generator=generator)
        other = torch.randn(self.LINES, vocab_size, generator=generator)
        self.table = scale * ((1 - blur) * table + blur * other)

    def _code(self, layer: int, tokens: Tensor, positions: Tensor) -> Tensor:
        """Values [B, G, L, D]: whole numbers from 0 to 15."""
        place = torch.arange(1, self.kv_heads * self.head_dim + 1).view(1, self.kv_heads, 1, self.head_dim)
        mixed = (tokens[:, None, :, None] + 3) * (positions[:, None, :, None] + 7) * (place + 11 * layer) * 2654435761
        return ((mixed >> 13) % 16).float()

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Sequence[int] = ()
    ) -> HiddenStates:
        rows, length = tokens.shape
        total = torch.zeros(rows, self.HEADS, length, self.head_dim, dtype=torch.float32)
        nothing = torch.zeros_like(total[:, : self.kv_heads])
        for layer in range(self.layers):
            out = attend(layer, torch.zeros_like(total), nothing, self._code(layer, tokens, positions))
            sums = (out * (positions + 1)[:, None, :, None]).round()
            total += (layer + 1) * sums
        return HiddenStates(total.transpose(1, 2).reshape(rows, length, -1), self._features(tokens, positions, taps))

    def _features(self, tokens: Tensor, positions: Tensor, taps: Sequence[int]) -> Tensor | None:
        """Hidden states [B, L, taps, G x D] that depend on the token and its position; None without taps."""
        if not taps:
            return None
        return torch.stack([self._code(tap, tokens, positions).transpose(1, 2).flatten(2) / 8 - 1 for tap in taps], 2)

    def logits(self, hidden: Tensor) -> Tensor:
        weights = torch.arange(1, hidden.shape[-1] + 1) * 40503 % 997
        line = (hidden.long() * weights).sum(-1).remainder(self.LINES)
        return self.table[line].clone()

    def weight_bytes(self) -> int:
        return self.table.nbytes


class FlatToy(ToyModel):
    """Toy model with its own attention over the KV cache, on a flat list of real tokens (``FlatModel``)."""

    kernels = "toy"
    quantization = None

    def forward(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> HiddenStates:
        tokens, rows, positions = (tensor[nodes.read :] for tensor in nodes[:3])
        slots, all_seen = self._slots(nodes)[nodes.read :], seen_by(nodes)[nodes.read :]
        seen = [(text, torch.tensor(tail).clamp(max=cache.positions)) for text, tail in all_seen]
        real = slots < cache.positions  # writes beyond a row's end are dropped
        total = torch.zeros(len(tokens), self.HEADS, self.head_dim, dtype=torch.float32)
        for layer in range(self.layers):
            code = self._code(layer, tokens[None], positions[None])[0].transpose(0, 1)
            values = cache.values[layer]
            values[rows[real], :, slots[real]] = code[real]
            for i, (row, (text, tail)) in enumerate(zip(rows.tolist(), seen, strict=True)):
                sums = values[row, :, :text].sum(1) + values[row][:, tail].sum(1)
                total[i] += (layer + 1) * sums.repeat_interleave(self.HEADS // self.kv_heads, 0)
        features = self._features(tokens[None], positions[None], taps)
        return HiddenStates(total.reshape(len(tokens), -1)[nodes.text :], None if features is None else features[0])

    def fill(self, nodes: Nodes, cache: KVCache, taps: Sequence[int] = ()) -> Tensor | None:
        return self.forward(nodes, cache, taps).features

    def _slots(self, nodes: Nodes) -> Tensor:
        """Slot of each node, [N]. Raises AssertionError if the list violates the rules of ``Nodes``."""
        rows, positions = nodes.rows.tolist(), nodes.positions.tolist()
        if nodes.slots is None or nodes.parents is None:
            last: dict[int, int] = {}
            for row, position in zip(rows, positions, strict=True):
                assert position == last.get(row, position - 1) + 1, "a row's tokens are consecutive"
                last[row] = position
            return nodes.positions
        for i, parent in enumerate(nodes.parents.tolist()):
            assert parent < i, "a node comes after its parent"
            assert parent < 0 or (rows[parent], positions[parent] + 1) == (rows[i], positions[i])
        assert len(set(zip(rows, nodes.slots.tolist(), strict=True))) == len(rows), "two nodes share a slot"
        return nodes.slots


@functools.cache
def tiny_llama(seed: int = 0, vocab_size: int = VOCAB) -> Model:
    """Random Llama in float32 on the native transformer, with logits so spread that near-ties are rare."""
    from paceline.models.load.loading import load_model

    return load_model(tiny_llama_of_transformers(seed, vocab_size), dtype=torch.float32)


def tiny_llama_of_transformers(seed: int = 0, vocab_size: int = VOCAB) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.35,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


# --- running ----------------------------------------------------------------------------------------------------------


@functools.cache
def tiny_native(seed: int, layers: int = 2) -> NativeModel:
    """Random model on the CPU kernels, whose results do not depend on the other rows of a batch."""
    spec = random_spec(vocab_size=VOCAB, layers=layers, max_positions=POSITIONS, tied=False, seed=seed)
    return NativeModel(spec, f"native-{layers}", quantization="int8", threads=1)


def tiny_native_experts(quantization: Quantization | None = "int8") -> NativeModel:
    """The same with mixtures of experts, an MLP beside them, biases and sinks. In int4 inputs have an order."""
    spec = random_spec(vocab_size=VOCAB, max_positions=POSITIONS, tied=False, bias=True, seed=2)
    mixed = with_orders(with_sinks(with_experts(spec, shared=True)))
    return NativeModel(mixed, "experts", quantization=quantization, threads=1)


def tiny_native_narrow() -> NativeModel:
    """The same with values that are narrower than keys."""
    spec = random_spec(vocab_size=VOCAB, max_positions=POSITIONS, head_dim=32, value_dim=16, tied=False, seed=4)
    return NativeModel(spec, "narrow values", quantization="int8", threads=1)


def tiny_native_latent() -> NativeModel:
    """The same with latent attention."""
    spec = random_spec(vocab_size=VOCAB, max_positions=POSITIONS, tied=False, seed=3)
    return NativeModel(with_latent(spec), "latent", quantization="int8", threads=1)


def tiny_native_parallel(*, experts: bool) -> NativeModel:
    """The same with MLPs beside attention, layer norms, capped scores, and perhaps experts in groups."""
    spec = random_spec(vocab_size=VOCAB, max_positions=POSITIONS, tied=False, bias=True, qk_norm=True, seed=3)
    spec = with_experts(spec, shared=True, count=12, sigmoid=True, groups=4) if experts else spec
    return NativeModel(in_parallel(spec), "in parallel", quantization="int8", threads=1)


def make_engine(
    target: Model,
    draft: Model | None = None,
    *,
    eos: tuple[int, ...] = (),
    documents: Sequence[Sequence[int]] = (),
    **options: Any,
) -> Engine:
    plain = {"drafter": None, "max_batch_size": 4, "max_model_len": POSITIONS, "dtype": "float32", "device": "cpu"}
    options = plain | {"num_speculative_tokens": 4, "longest_pause": None} | options  # no timing
    return Engine(Models(target, draft, eos, documents), EngineConfig(**options))


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """Run all prompts through the engine; check its integrity after every step."""
    outputs = [engine.add(make_request(prompt, each)) for prompt, each in zip(prompts, params, strict=True)]
    while engine.busy:
        engine.step()
        engine.scheduler.check_integrity()
    return outputs


def kernels_of(engine: Engine) -> KernelsPlace:
    """What runs the engine's rounds on the CPU kernels."""
    kernels = engine.rounds.choice.kernels
    assert isinstance(kernels, KernelsPlace)
    return kernels


def make_request(prompt: Sequence[int], params: SamplingParams) -> Request:
    """Make a request; any structured output is ``ToyConstraint``."""
    make_constraint: Callable[[], Constraint] | None = None
    if params.structured_outputs is not None:
        make_constraint = ToyConstraint
    elif params.restriction:
        make_constraint = processed_row(params, toy_encode, params.stop_token_ids, VOCAB)
    return Request(list(prompt), params, make_constraint=make_constraint)


def toy_encode(text: str) -> list[int]:
    """Encode letters as tokens from 1 on ("a" is 1) and a space as 21."""
    return [21 if letter == " " else ord(letter) - ord("a") + 1 for letter in text]


def is_bad(words: Sequence[str], answer: Sequence[int], token: int) -> bool:
    """Whether a token would complete a bad word of ``toy_encode``'s, with or without a space before it."""
    text = [*answer, token]
    spelled = [toy_encode(word) for each in words for word in (each.lstrip(" "), " " + each.lstrip(" "))]
    return any(text[-len(word) :] == word for word in spelled)


@dataclass
class ToyConstraint:
    """Constraint on the whole answer: the sum of its tokens must not become 1 modulo 4.

    The first two tokens must not be 0.
    """

    answer: list[int] = field(default_factory=list)
    reads_logits = False

    def forbids(self, answer: Sequence[int], token: int) -> bool:
        return (sum(answer) + token) % 4 == 1 or (len(answer) < 2 and token < 1)

    def mask(self, draft_tokens: Sequence[int], first: int, logits: Tensor) -> None:
        for place, own in enumerate(logits):
            before = [*self.answer, *draft_tokens[: first + place]]
            for token in range(logits.shape[-1]):
                if self.forbids(before, token):
                    own[token] = -math.inf

    def advance(self, tokens: Sequence[int]) -> None:
        self.answer += tokens

    def is_free(self, draft_tokens: Sequence[int]) -> bool:
        return False


def answers(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """Token ids of all samples of each request, in the order of sampling."""
    return [[answer.token_ids for answer in output.candidates] for output in outputs]


# --- slow reference sampler -------------------------------------------------------------------------------------------


def logits_after(model: Model, tokens: Sequence[int]) -> list[float]:
    """Logits after these tokens, computed at once with an empty cache and the reference attention."""
    decoder = Decoder(model, ReferenceAttention(), 1, len(tokens))
    hidden = decoder.forward(torch.tensor([list(tokens)]), torch.zeros(1, dtype=torch.int64), len(tokens))
    return [float(x) for x in decoder.logits(hidden[:, -1])[0]]


def slow_processed(logits: Sequence[float], params: SamplingParams, answer: Sequence[int]) -> list[float]:
    """Apply allowed tokens, bad words and logits processors."""
    processed = [
        -math.inf
        if token not in (params.allowed_token_ids or (token,)) or is_bad(params.bad_words, answer, token)
        else logit
        for token, logit in enumerate(logits)
    ]
    for process in params.logits_processors:
        processed = process(list(answer), torch.tensor(processed)).tolist()
    return processed


def slow_adjust(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], answer: Sequence[int], stops: frozenset[int]
) -> list[float]:
    """Apply restrictions, bias, penalties and minimum length, one token at a time."""
    adjusted = []
    for token, logit in enumerate(slow_processed(logits, params, answer)):
        x = logit + params.logit_bias.get(token, 0.0)
        count = list(answer).count(token)
        if count or token in prompt:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
        if token in stops and len(answer) < params.min_tokens:
            x = -math.inf
        if params.structured_outputs is not None and ToyConstraint().forbids(answer, token):
            x = -math.inf
        adjusted.append(x)
    return adjusted


def slow_warp(adjusted: Sequence[float], params: SamplingParams) -> list[float]:
    """Apply temperature, truncation, min-p, top-k, top-p; cut tokens become -inf. Temperature 0 changes nothing."""
    if params.temperature == 0:
        return list(adjusted)
    x = slow_truncation([value / params.temperature for value in adjusted], params)
    if params.min_p > 0:
        floor = max(x) + math.log(params.min_p)
        x = [value if value >= floor else -math.inf for value in x]
    if params.top_k > 0:
        floor = sorted(x, reverse=True)[: params.top_k][-1]
        x = [value if value >= floor else -math.inf for value in x]
    if params.top_p < 1:
        distribution, before, floor = softmax(x), 0.0, max(x)
        for token in sorted(range(len(x)), key=lambda t: -x[t]):
            if before >= params.top_p:
                break
            floor, before = min(floor, x[token]), before + distribution[token]
        x = [value if value >= floor else -math.inf for value in x]
    return x


def slow_truncation(x: Sequence[float], params: SamplingParams) -> list[float]:
    """Apply typical sampling, epsilon, eta and top-n-sigma as their papers define them, each to the whole distribution.

    x: logits after temperature. Cut tokens become -inf.
    """
    p, leader = softmax(x), max(x)
    surprise = [-math.log(each) if each > 0 else math.inf for each in p]
    entropy = sum(each * own for each, own in zip(p, surprise, strict=True) if each > 0)
    least = max(params.epsilon_cutoff, min(params.eta_cutoff, math.sqrt(params.eta_cutoff) * math.exp(-entropy)))
    floor, finite = -math.inf, [value for value in x if value > -math.inf]
    if params.top_n_sigma > 0:
        floor = leader - params.top_n_sigma * statistics.pstdev(finite)
    typical = [True] * len(x)
    if params.typical_p < 1:
        mass, radius = 0.0, 0.0
        for away, each in sorted((abs(own - entropy), each) for own, each in zip(surprise, p, strict=True)):
            if mass >= params.typical_p:
                break
            mass, radius = mass + each, away
        typical = [abs(own - entropy) <= radius for own in surprise]
    likeliest = max(value for value, stays in zip(x, typical, strict=True) if stays)
    kept = [
        stays and ((each >= least and value >= floor) or value == likeliest)
        for stays, each, value in zip(typical, p, x, strict=True)
    ]
    return [value if stays else -math.inf for value, stays in zip(x, kept, strict=True)]


def softmax(x: Sequence[float]) -> list[float]:
    leader = max(x)
    weights = [math.exp(value - leader) for value in x]
    return [weight / sum(weights) for weight in weights]


def slow_distribution(adjusted: Sequence[float], params: SamplingParams) -> list[float]:
    if params.temperature == 0:
        leader = max(range(len(adjusted)), key=lambda t: (adjusted[t], -t))
        return [float(token == leader) for token in range(len(adjusted))]
    return softmax(slow_warp(adjusted, params))


def slow_draw(adjusted: Sequence[float], params: SamplingParams, row_seed: int, position: int) -> int:
    """Draw the argmax of the warped logits plus Gumbel noise of all tokens; ties go to the smaller token."""
    scores = slow_warp(adjusted, params)
    if params.temperature > 0:
        key = noise_key(torch.tensor(row_seed), torch.tensor(position), Purpose.DRAW)
        u = uniform(key, torch.arange(len(scores))).tolist()
        scores = [s - math.log(-math.log(v)) for s, v in zip(scores, u, strict=True)]
    return max(range(len(scores)), key=lambda t: (scores[t], -t))


def slow_answer(
    model: Model, prompt: Sequence[int], params: SamplingParams, index: int = 0, eos: tuple[int, ...] = ()
) -> list[int]:
    """Decode one answer without cache, batch and speculation: every token from the whole text."""
    assert params.seed is not None or params.temperature == 0
    row_seed = sequence_seed(params.seed or 0, index)
    stops = frozenset((*(() if params.ignore_eos else eos), *params.stop_token_ids))
    answer: list[int] = []
    while len(answer) < params.max_tokens:
        adjusted = slow_adjust(logits_after(model, [*prompt, *answer]), params, prompt, answer, stops)
        answer.append(slow_draw(adjusted, params, row_seed, len(prompt) + len(answer)))
        if answer[-1] in stops:
            break
    return answer


# --- scripted drafters and policies -----------------------------------------------------------------------------------


def never(rng: random.Random, right: int, vocab: int) -> int:
    return (right + 1 + rng.randrange(vocab - 1)) % vocab


def always(rng: random.Random, right: int, vocab: int) -> int:
    return right


def sometimes(rng: random.Random, right: int, vocab: int) -> int:
    return right if rng.random() < 0.7 else never(rng, right, vocab)


@dataclass
class Scripted(Drafter):
    """Drafter that knows every row's answer and proposes correct or wrong tokens as a script decides.

    truth: row seed -> prompt and answer. script(rng, correct token, vocabulary size) -> draft token.
    ragged: whether the number of draft tokens varies by row, 0 included. short: whether k may be below the plan's.
    """

    truth: Mapping[int, Sequence[int]]
    script: Callable[[random.Random, int, int], int] = always
    ragged: bool = False
    short: bool = False
    seed: int = 0

    name = "scripted"

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.asked: list[int] = []

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        self.asked.append(plan.k)
        k = self.rng.randint(0, plan.k) if self.short else plan.k
        tokens, counts = [], []
        for row in range(batch.rows):
            text = self.truth[int(batch.sampling.seed[batch.slots[row]])]
            right = [*text[batch.lengths[row] :], *([0] * k)][:k]
            tokens.append([self.script(self.rng, token, batch.vocab_size) for token in right])
            counts.append(self.rng.randint(0, k) if self.ragged else k)
        shape = torch.tensor(tokens, dtype=torch.int64).view(batch.rows, k)
        return Draft(shape, torch.tensor(counts, dtype=torch.int64))


Shape = Callable[[random.Random, int], list[int]]  # (rng, k) -> parent of each draft token, -1 for the root

SHAPES: dict[str, Shape] = {
    "chain": lambda _, k: list(range(-1, k - 1)),
    "two roots": lambda _, k: [max(-1, draft_token - 2) for draft_token in range(k)],
    "chain and siblings": lambda _, k: [
        draft_token // 2 * 2 - 2 if draft_token > 1 else -1 for draft_token in range(k)
    ],
    "binary": lambda _, k: [draft_token // 2 - 1 for draft_token in range(k)],
    "star": lambda _, k: [-1] * k,
    "random": lambda rng, k: [rng.randint(-1, draft_token - 1) for draft_token in range(k)],
}


@dataclass
class ScriptedTrees(Scripted):
    """Drafter of trees in which one random child of each node follows the script; the other children are wrong.

    Children of wrong nodes may be correct for their depth, but must not be accepted.
    """

    shape: Shape = SHAPES["random"]
    scored: bool = False  # with random confidences

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        self.asked.append(plan.k)
        k = self.rng.randint(0, plan.k) if self.short else plan.k
        rows = [
            self._row(self.truth[int(batch.sampling.seed[batch.slots[row]])][batch.lengths[row] :], k)
            for row in range(batch.rows)
        ]
        tokens, parents = torch.tensor(rows, dtype=torch.int64).view(batch.rows, 2, k).unbind(1)
        counts = [self.rng.randint(0, k) if self.ragged else k for _ in rows]
        scores = [[self.rng.random() for _ in range(k)] for _ in rows] if self.scored else None
        return Draft(tokens, torch.tensor(counts, dtype=torch.int64), confidence=scores, parents=parents)

    def _row(self, right: Sequence[int], k: int) -> tuple[list[int], list[int]]:
        """Draft tokens of one row, and their parents."""
        parents, tokens, depths = self.shape(self.rng, k), [], []
        lucky = {parent: self.rng.choice([g for g, p in enumerate(parents) if p == parent]) for parent in parents}
        for draft_token, parent in enumerate(parents):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            token = right[depths[-1]] if depths[-1] < len(right) else 0
            script = self.script if lucky[parent] == draft_token else never
            tokens.append(script(self.rng, token, VOCAB))
        return tokens, parents


def truth_of(
    prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], tokens: Sequence[Sequence[Sequence[int]]]
) -> dict[int, list[int]]:
    """Mapping from row seed to prompt and answer, for ``Scripted``. All params need different seeds."""
    return {
        sequence_seed(s.seed or 0, index): [*prompt, *answer]
        for prompt, s, each in zip(prompts, params, tokens, strict=True)
        for index, answer in enumerate(each)
    }


def script_drafts(engine: Engine, truth: dict[int, list[int]], shape: str) -> None:
    """Let an engine draft what is sometimes true: trees of a shape of ``SHAPES``, or "caps": random chains."""
    if shape == "caps":
        engine.parts.drafter = Scripted(truth, sometimes, ragged=True)
        engine.use_policy(RandomCaps())
    else:
        engine.parts.drafter = ScriptedTrees(truth, sometimes, shape=SHAPES[shape])


class RandomLength(LengthPolicy):
    """Policy with a random speculation length every round, 0 included."""

    name = "random"

    def __init__(self, seed: int = 0, longest: int = 6) -> None:
        self.rng, self.longest = random.Random(seed), longest
        self._of_matches = random.Random(seed)

    def choose(self, batch: Batch) -> SpeculationPlan:
        matches = [self._of_matches.randint(1, LONGEST_SUFFIX + 1) for _ in range(batch.rows)]  # for drafts on a device
        return SpeculationPlan(self.rng.randint(0, self.longest), least_matches=matches)


class RandomCaps(RandomLength):
    """Policy with a random speculation length for every row and round."""

    name = "caps"

    def choose(self, batch: Batch) -> SpeculationPlan:
        caps = [self.rng.randint(0, self.longest) for _ in range(batch.rows)]
        return SpeculationPlan(max(caps), caps)


class RandomSources(RandomCaps):
    """The same, with drafts of the search in some rows and of the draft model in others, where a drafter has both."""

    name = "sources"

    def choose(self, batch: Batch) -> SpeculationPlan:
        fallback = lambda batch, _draft: [self.rng.choice([0, self.longest]) for _ in range(batch.rows)]  # noqa: E731
        return replace(super().choose(batch), fallback=fallback)


class RandomSelection(RandomLength):
    """Policy with a random length every round that verifies a random part of each row's draft."""

    name = "selection"

    def select(self, batch: Batch, draft: Draft) -> Draft:
        return draft.first([self.rng.randint(0, count) for count in draft.drafted])


class RandomStops(RandomLength):
    """Policy with a random length every round that stops drafting at random."""

    name = "stops"

    def choose(self, batch: Batch) -> SpeculationPlan:
        return replace(super().choose(batch), stop_drafting=self._stops)

    def _stops(self, _batch: Batch, scores: Sequence[Sequence[float]], _parents: Any = None) -> bool:
        return self.rng.random() < 0.4 or not all(0 <= line[-1] <= 1 for line in scores if line)


def kinds(answer: CompletionOutput) -> dict[str, int]:
    return {kind: answer.token_kinds.count(kind) for kind in ("accepted", "recovered", "bonus", "plain")}  # type: ignore[arg-type]
