"""Offline throughput: one batch at a time, speculation against plain decoding and, if wanted, against transformers.

Prefill and decoding are separated: all answers have their first token after P + r seconds (prefill and one round), and
    all have N tokens after P + R x r seconds in R rounds, so r = (long - short) / (R - 1), P = short - r, and decoding
    took R x r. (For a side that does not report its first tokens, a run of one token is timed first.) Prompts that need
    several prefill chunks blur this on all sides: tokens that the first rows gain meanwhile count as prefill. Every
    answer has exactly N tokens (no end-of-text token ends it), or as many as the longest sequence has positions for;
    all sides are compared by their time per token. Sides take turns within one process, after a warm-up of each, and
    each repeat begins with another one. The speed-up is that of all repeats together, by their total times: a ratio of
    medians, or a median of ratios, of few repeats is a draw among them.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from paceline.config import Length, SamplingParams
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft
from paceline.core.hardware import cpu_name, resolve_dtype
from paceline.core.outputs import Latency
from paceline.drafters.base import Wrapper
from paceline.engine.utilisation import Arithmetic
from paceline.models.native.model import NativeModel
from paceline.tools.bench.measure import run_batch, split_times, turns
from paceline.tools.bench.prompts import COPYING, OPEN
from paceline.tools.bench.recording import Recorder, Round
from paceline.tools.bench.sets import SETS, SetName
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.llm import LLM

Ids = list[int]
PROMPTS = {
    "copying": COPYING,
    "open": OPEN,
    "mixed": tuple(prompt for pair in zip(COPYING, OPEN, strict=True) for prompt in pair),
}
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Timing:
    """One batch on one side, once. tokens: of all its answers.

    acceptance_rate: accepted / drafted; mean_acceptance_length: tokens per round; drafted_a_round: draft tokens
        verified per round; saved_by_sibling: fraction of rounds that accepted a draft token with a higher-ranked
        sibling; drafted_per_position, accepted_per_position: as in ``outputs.Metrics``, over all sequences.
        latency: of its first, last and all sequences. None where a side does not report it.
    """

    prefill_seconds: float
    decode_seconds: float
    rounds: int
    tokens: int
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    latency: Latency | None = None
    drafted_a_round: float | None = None
    saved_by_sibling: float | None = None
    drafted_per_position: list[int] | None = None
    accepted_per_position: list[int] | None = None


@dataclass(frozen=True)
class OfflineResult:
    """One side at one batch size: the repeat with the median decoding time, and the decoding times of all repeats.

    output_tokens: mean length of an answer, below ``max_tokens`` if prompts leave fewer positions.
    ms_per_token: per sequence, decode_seconds / output_tokens; tokens_per_second: of the whole batch.
    speed_up: over the first side, plain decoding, by the total time per token of all repeats.
    utilisation: fraction from 0 to 1 (``utilisation``); None if unknown.
    """

    side: str
    batch_size: int
    prompt_tokens: int
    max_tokens: int
    median: Timing
    decode_seconds_of_all: list[float]
    speed_up: float
    utilisation: float | None = None

    @property
    def output_tokens(self) -> float:
        return self.median.tokens / self.batch_size

    @property
    def tokens_per_second(self) -> float:
        return self.median.tokens / self.median.decode_seconds

    @property
    def ms_per_token(self) -> float:
        return 1000 * self.median.decode_seconds / self.output_tokens

    def as_document(self) -> dict[str, Any]:
        """All fields, for JSON."""
        document = asdict(self) | asdict(self.median)
        del document["median"]
        names = ("output_tokens", "tokens_per_second", "ms_per_token")
        return document | {name: getattr(self, name) for name in names}


class Side(Protocol):
    """An implementation that continues a batch of prompts."""

    @property
    def name(self) -> str: ...

    def time(self, prompts: Sequence[Ids], tokens: int) -> Timing: ...


@dataclass(frozen=True)
class Paceline:
    """paceline with or without speculation. references: per prompt, texts to copy from.

    temperature: 0 is greedy; otherwise every prompt's seed is its place in the batch. recorder: records the rounds of
    its runs. runs: those of each run, the warm-up first.
    """

    name: str
    llm: LLM
    references: Sequence[Sequence[str]] | None = None
    temperature: float = 0.0
    recorder: Recorder | None = None
    runs: list[list[Round]] = field(default_factory=list)

    def recorded(self) -> Paceline:
        """Return the side with a record of its rounds, which run as before."""
        engine = self.llm.engine
        return replace(self, recorder=engine.use_policy(Recorder(engine.parts.policy)))

    def time(self, prompts: Sequence[Ids], tokens: int) -> Timing:
        params = [
            SamplingParams(temperature=self.temperature, max_tokens=tokens, ignore_eos=True, seed=place)
            for place in range(len(prompts))
        ]
        run = run_batch(self.llm, prompts, params, references=self.references)
        if self.recorder is not None:
            self.runs.append([*self.recorder.rounds])
            self.recorder.rounds.clear()
        prefill, decode = run.prefill_and_decode_seconds
        return Timing(
            prefill,
            decode,
            run.rounds,
            run.tokens,
            run.acceptance_rate,
            run.mean_acceptance_length,
            run.latency,
            run.drafted_a_round,
            run.saved_by_sibling,
            run.drafted_per_position,
            run.accepted_per_position,
        )


class Transformers:
    """The same checkpoint in transformers' ``generate``, greedy, the batch padded on the left.

    Its dtype is the target's or, beside the CPU kernels, torch's fastest: float32 without bfloat16 instructions.
    """

    def __init__(self, source: str, like: LLM) -> None:
        import transformers
        from transformers import AutoModelForCausalLM

        from paceline.models.files.hub import resolve

        target, path = like.engine.models.target, resolve(source)
        where = path.parent if path.is_file() else path
        extra: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
        packs = getattr(transformers, "GgufConfig", None)  # newer versions keep a GGUF packed, slow in bfloat16
        if extra and packs is not None:
            extra["quantization_config"] = packs(dequantize=True)
        on_kernels = isinstance(target, NativeModel)
        dtype = resolve_dtype("auto", target.device) if on_kernels else target.dtype
        self.name = f"transformers, {str(dtype).removeprefix('torch.')}"
        self._model = AutoModelForCausalLM.from_pretrained(str(where), dtype=dtype, **extra).to(target.device)
        self._model.generation_config.eos_token_id = None  # every answer gets its full length

    def time(self, prompts: Sequence[Ids], tokens: int) -> Timing:
        prefill, decode = split_times(self._run(prompts, 1), self._run(prompts, tokens), tokens)
        return Timing(prefill, decode, tokens, len(prompts) * tokens)

    def _run(self, prompts: Sequence[Ids], tokens: int) -> float:
        width = max(map(len, prompts))
        padded = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts], device=self._model.device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=self._model.device)
        started = time.perf_counter()
        with torch.inference_mode():
            answer = self._model.generate(
                padded, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=0
            )
        seconds = time.perf_counter() - started
        assert answer.shape[1] == width + tokens, "transformers stopped early"
        return seconds


class WrongDraftTokens(Wrapper):
    """A drafter's draft tokens, each changed into another one: the cost of speculation with almost no acceptance."""

    name = "wrong draft tokens"

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = self.inner.propose(batch, plan)
        wrong = [[(token + 1) % batch.vocab_size for token in line] for line in draft.draft_tokens]
        return Draft(wrong, confidence=draft.confidence, parents=draft.parents, kinds=draft.kinds)


def sides_for(
    llm: LLM,
    batch_size: int,
    lengths: Sequence[Length] = (),
    wrong: bool = False,
    others: Sequence[Side] = (),
    references: Sequence[Sequence[str]] | None = None,
) -> list[Side]:
    """Plain decoding; with a drafter, speculation at the engine's length or at each of ``lengths``; and the others.

    references: per prompt, for drafters that look them up.
    """
    plain = Paceline("plain", llm.plain().with_options(max_batch_size=batch_size))
    if llm.config.drafter is None or not (lengths or llm.config.draft_tokens):
        return [plain, *others]
    named = {f"k={length}": length for length in lengths} or {"speculation": llm.config.num_speculative_tokens}
    sides = []
    for name, length in named.items():
        side = llm.with_options(max_batch_size=batch_size, num_speculative_tokens=length)
        if wrong:
            side.engine.parts.drafter = WrongDraftTokens(side.engine.parts.drafter)
        copied = references if side.config.looks_up else None
        sides.append(Paceline(f"{name}, wrong drafts" if wrong else name, side, copied))
    return [plain, *sides, *others]


def has_references(kind: str) -> bool:
    """Whether a built-in set comes with reference texts that its answers repeat."""
    return any(asked.references for asked in SETS.get(cast("SetName", kind), ()))


def prompts_for(llm: LLM, kind: str, batch_size: int) -> tuple[list[Ids], list[Sequence[str]]]:
    """``batch_size`` of the built-in prompts, repeated from the first one if there are fewer; their references.

    Sets of conversations go through the model's chat template, the others are texts to be continued.
    """
    if kind in PROMPTS:
        texts = [PROMPTS[kind][number % len(PROMPTS[kind])] for number in range(batch_size)]
        return [llm.requests.tokenizer.encode(text) for text in texts], [()] * batch_size
    conversations = SETS[cast("SetName", kind)]
    asked = [conversations[number % len(conversations)] for number in range(batch_size)]
    return [llm.tokens_of_chat(each.messages) for each in asked], [each.references for each in asked]


def measure(
    sides: Sequence[Side], prompts: Sequence[Ids], tokens: int, repeats: int, arithmetic: Arithmetic | None = None
) -> Iterator[OfflineResult]:
    """Time all sides on one batch: warm-up first, then in turn; speed-ups are over the first side.

    arithmetic: paceline's, for its sides' utilisation; others may multiply in another precision.
    """
    for side in sides:
        side.time(prompts, WARM_UP_TOKENS)
    timings: dict[str, list[Timing]] = {side.name: [] for side in sides}
    for turn in turns(sides, repeats):
        for side in turn:
            timings[side.name].append(side.time(prompts, tokens))
    prompt_tokens = round(statistics.fmean(map(len, prompts)))
    base = [timing.decode_seconds / timing.tokens for timing in timings[sides[0].name]]
    ours = {side.name for side in sides if isinstance(side, Paceline)}
    for name, repeated in timings.items():
        ordered = sorted(repeated, key=lambda timing: timing.decode_seconds)
        every = [timing.decode_seconds for timing in repeated]
        pace = [timing.decode_seconds / timing.tokens for timing in repeated]
        speed_up = sum(base) / sum(pace)
        median = ordered[(len(ordered) - 1) // 2]
        known = arithmetic if name in ours else None
        used = None if known is None else known.utilisation(median.tokens, median.decode_seconds)
        yield OfflineResult(name, len(prompts), prompt_tokens, tokens, median, every, speed_up, used)


def logged_rounds(sides: Sequence[Side], batch_size: int) -> Iterator[dict[str, Any]]:
    """The rounds of all timed runs of recorded sides, for JSON. Numbers of tokens are per row."""
    for side in sides:
        runs = side.runs[1:] if isinstance(side, Paceline) else []
        for repeat, rounds in enumerate(runs):
            for number, made in enumerate(rounds):
                yield {
                    "side": side.name,
                    "batch_size": batch_size,
                    "repeat": repeat,
                    "round": number,
                    "ms": made.ms,
                    "k": made.k,
                    "drafted": made.drafted,
                    "accepted": made.accepted,
                    "depths": made.depths,
                }


def machine(threads: int | None = None) -> dict[str, Any]:
    """Description of the machine. threads: CPU threads used; None: torch's number."""
    import psutil

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads or torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Versions of everything that affects speed."""
    import transformers

    return {
        "paceline": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def document(
    llm: LLM,
    command: str,
    prompts: str,
    results: Sequence[OfflineResult],
    references: bool = False,
    arithmetic: Arithmetic | None = None,
) -> dict[str, Any]:
    """The benchmark as one JSON document. prompts: the set's name; references: whether its texts were given."""
    target = llm.engine.models.target
    return {
        "command": command,
        "prompts": prompts,
        "references": references,
        "machine": machine(llm.engine.threads),
        "arithmetic": None if arithmetic is None else arithmetic.as_document(),
        "versions": versions(),
        "engine": llm.engine.describe(),
        "model": target.name,
        "draft_model": None if llm.engine.models.draft is None else llm.engine.models.draft.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "options": llm.config.as_json(),
        "results": [result.as_document() for result in results],
    }
