"""How an engine runs, and which options need which."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypedDict, get_args

from paceline.config import names
from paceline.config.limits import (
    DEFAULT_ACCEPTANCE,
    MAX_BYTES,
    MAX_COUNT,
    MAX_PREFILL_CHUNK,
    MAX_RANKS,
    MAX_ROWS,
    MAX_THREADS,
    SYNTHETIC,
    AcceptanceName,
    AttentionName,
    DrafterName,
    DtypeName,
    Guesses,
    Length,
    Name,
    QuantizationName,
    RoundsName,
    Seconds,
    Width,
)
from paceline.config.ranges import FileName, Whole, check, check_fields, names_checked
from paceline.config.registry import DRAFTERS, LENGTHS, DrafterKind, LengthKind
from paceline.errors import ParameterError


@names_checked
@dataclass(frozen=True)
class EngineConfig:
    """How the engine runs.

    drafter: "model" (needs a draft model), "feature" (needs a trained head in its place), "ngram" (prompt lookup, no
        model), "hybrid" (prompt lookup where it will do, else the draft model or head), None (plain decoding). "auto"
        is hybrid with either of them, else n-gram; where the device plays rounds alone, which n-gram lookup would end,
        it is model or None, unless other options ask for draft tokens. An engine's own configuration never says "auto".
        Or another package's name, or an object: a ``paceline.drafters.Drafter``, as a class or as a pattern of which
        each engine plays a copy.
    num_speculative_tokens: draft tokens a round: a number, or who chooses it: "auto" (as many as pay at the measured
    cost
        and acceptance, 0 where none does), "bass" (BASS, Algorithm 1) or "profiled" (Synergy: by a profile's table).
        Or another package's name, or an object: a ``paceline.lengths.LengthPolicy``, likewise.
    speculation_width: draft tokens of a row that may stand side by side, each for the same place: its draft tokens are
    then a
        tree, and ``num_speculative_tokens`` is its depth. 1: a chain. "auto": as wide as was counted to pay for this
        drafter. Acceptance must be "coupled"; on a device trees have one shape: at each depth so
        many candidates after the chain of the likeliest.
    profile: a file of ``paceline profile``: needed by "profiled"; "auto" then need not measure costs at the start.
    acceptance: "coupled" (same seed, same text, with or without speculation) or "rejection" (highest acceptance).
        "synthetic:0.8" keeps each draft token with that probability, whatever it is: the speed is real, the text is
        not.
    benchmark: says that texts are not wanted; without it a synthetic acceptance is refused.
    attention: "native" (the C++ kernels for CPUs, ragged and batch-invariant), "ragged" (one Triton launch for all
        rows), "padded" (BASS-PAD) or "split" (BASS-SPLIT). "auto" is native where it can run the model, ragged on CUDA
        devices with Triton, else padded.
    deterministic: kernels whose tiles do not depend on the batch, so that a token's bits do not either: ragged
        attention and Triton's matrix products. The native kernels are so anyway.
    rounds: "device": a round is one program that the host never interrupts (on CUDA a graph), and the host is one round
        behind; requests with a grammar, a bias or many stop tokens are played by the host. "host": it reads every
        round. "auto" is device on CUDA, where models, drafter and attention allow it and no ranks share the target.
    dtype: "auto" is bfloat16 where the machine multiplies it natively, else float16 on CUDA devices, float32 on CPUs.
        "float16", for CUDA devices alone, ends at 65504: a model whose streams pass that needs another.
    quantization: "int8" or "int4" weights, made at load, on the native kernels; on CUDA "int8" or "fp8", on Triton's.
        None leaves them in ``dtype``.
    draft_dtype, draft_quantization: the draft model's; "same" is the target's.
    max_batch_size: rows, that is sequences decoded at once.
    max_model_len: most tokens of a sequence, prompt and answer; None: the model's own limit, at most 4096.
    prefill_chunk: most prompt tokens fed in one step, all rows together.
    longest_pause: seconds between two tokens of a row while prompts are prefilled: chunks are as short as the speed
        measured so far wants it, the shortest prompts first. None: chunks are of ``prefill_chunk`` tokens, as they are
        anyway where nobody sees a pause: in ``LLM.generate`` while no other call runs, and in ``paceline batch``, if no
        request has a time budget.
    prefix_cache: whether a prompt copies the keys and values of the longest beginning that it shares with any text
        whose row has not been needed since. False reads every prompt whole, once for all of its answers.
    device: "cpu", "cuda", "cuda:1", ...; "auto" is the first CUDA device if there is one.
    tensor_parallel: processes (ranks) that share the target, each with a part of every matrix and of the cache: this
        one and others that it starts, or that torchrun has started; on CUDA a device each, from ``device`` on.
        Drafting, sampling and all decisions stay here.
    threads: CPU threads of this engine, of each rank; None: torch's own choice, and no more than a container's CPU
        quota can run, shared by the ranks.
    memory_limit: bytes the engine may take; None is what the machine has free. On Linux's CPUs rows take the memory
        that they use: where not all fit at their longest, requests wait until what they may come to hold does, prompt
        and ``max_tokens``. Elsewhere all rows have to fit at their longest.
    """

    drafter: Annotated[str | DrafterKind | None, DRAFTERS] = "auto"
    num_speculative_tokens: Guesses | Annotated[str | LengthKind, LENGTHS] = "auto"
    speculation_width: Width | Literal["auto"] = "auto"
    profile: Annotated[str, FileName()] | None = None
    acceptance: AcceptanceName | str = DEFAULT_ACCEPTANCE
    benchmark: bool = False
    attention: AttentionName = "auto"
    deterministic: bool = False
    rounds: RoundsName = "auto"
    dtype: DtypeName = "auto"
    quantization: QuantizationName | None = None
    draft_dtype: DtypeName | Literal["same"] = "same"
    draft_quantization: QuantizationName | Literal["same"] | None = "same"
    max_batch_size: Annotated[int, Whole(1, MAX_ROWS)] = 16
    max_model_len: Annotated[int, Whole(2, MAX_COUNT)] | None = None
    prefill_chunk: Annotated[int, Whole(1, MAX_PREFILL_CHUNK)] = 1024
    longest_pause: Seconds | None = 0.1
    prefix_cache: bool = True
    device: Name = "auto"
    tensor_parallel: Annotated[int, Whole(1, MAX_RANKS)] = 1
    threads: Annotated[int, Whole(1, MAX_THREADS)] | None = None
    memory_limit: Annotated[int, Whole(1, MAX_BYTES)] | None = None

    DEFAULT_MAX_MODEL_LEN = 4096
    OTHER_NAMES: ClassVar[Mapping[str, str]] = names.ENGINE

    def __post_init__(self) -> None:
        check_fields(self)
        if self.profile is None and self._length is not None and self._length.needs_profile:
            raise ParameterError("profile", None, "the file of a profile; make one with: paceline profile")
        self._check_acceptance()
        chains = self.speculation_width in ("auto", 1) or self.acceptance == DEFAULT_ACCEPTANCE
        allowed = f"1 or 'auto' with acceptance={self.acceptance!r}, which knows chains alone; or acceptance='coupled'"
        check(chains, "speculation_width", self.speculation_width, allowed)
        if self.tensor_parallel > 1:
            self._check_ranks()

    def _check_ranks(self) -> None:
        """What one process can and several that share a model cannot."""
        one, ranks = "with tensor_parallel=1", f"with tensor_parallel={self.tensor_parallel}"
        whole = f"'auto', 'padded', 'split' or 'ragged' {ranks}: the CPU kernels run whole models"
        check(self.attention != "native", "attention", self.attention, whole)
        check(self.quantization is None, "quantization", self.quantization, f"None {ranks}; others {one}")
        batch = f"False {ranks}: the order in which ranks add up may depend on the batch; True {one}"
        check(not self.deterministic, "deterministic", self.deterministic, batch)

    def _check_acceptance(self) -> None:
        given = self.acceptance
        if not given.startswith(SYNTHETIC):
            known = get_args(AcceptanceName)
            check(given in known, "acceptance", given, "one of " + ", ".join(map(repr, known)))
            return
        rate = self.synthetic_acceptance
        allowed = f"{SYNTHETIC}P, P a probability: for benchmarks alone"
        check(rate is not None and 0 <= rate <= 1, "acceptance", given, allowed)
        allowed = "'coupled' or 'rejection'; for benchmarks, whose texts nobody wants, with benchmark=True"
        check(self.benchmark, "acceptance", given, allowed)

    def resolved(self, *, draft_model: bool, lookup: bool = True) -> EngineConfig:
        """With the drafter that "auto" is. lookup: whether n-gram lookup may be had for nothing."""
        if self.drafter != "auto":
            return self
        lookup = lookup or self.num_speculative_tokens != EngineConfig.num_speculative_tokens
        names: tuple[DrafterName | None, ...] = ("ngram", "hybrid") if lookup else (None, "model")
        return replace(self, drafter=names[draft_model])

    @property
    def reads_profile(self) -> bool:
        """Whether its length policy makes use of one."""
        return self.drafter is not None and self._length is not None and self._length.reads_profile

    @property
    def asks_draft_model(self) -> bool:
        """Whether the drafter runs one."""
        return self.drafter_kind is not None and self.drafter_kind.needs_draft_model

    @property
    def draft_tokens(self) -> bool:
        """Whether any round may have draft tokens; else it is plain decoding."""
        return self.drafter is not None and self.num_speculative_tokens != 0

    @property
    def looks_up(self) -> bool:
        """Whether its drafter copies from text."""
        return self.draft_tokens and self.drafter_kind is not None and self.drafter_kind.copies

    @property
    def drafter_kind(self) -> DrafterKind | None:
        """What stands behind the drafter's name; None where nobody draft tokens, or it is not known yet who
        ("auto").
        """
        return None if self.drafter is None or self.drafter == "auto" else DRAFTERS.get(self.drafter)

    @property
    def _length(self) -> LengthKind | None:
        """What stands behind the length policy's name; None for a number."""
        given = self.num_speculative_tokens
        return None if isinstance(given, int) else LENGTHS.get(given)

    @property
    def max_draft_tokens(self) -> int:
        """Of a row in a round."""
        given = self.num_speculative_tokens
        return given if isinstance(given, int) else LENGTHS.get(given).max_draft_tokens

    @property
    def most_width(self) -> int:
        """Draft tokens of a row for the same place; 1 where they are chains."""
        kind = self.drafter_kind
        return 1 if not self.draft_tokens or kind is None else self.width_of(kind)

    def width_of(self, kind: DrafterKind) -> int:
        """The same of a drafter, which may be a part of this engine's."""
        if kind.auto_width == 0 or self.acceptance != DEFAULT_ACCEPTANCE:
            return 1
        return kind.auto_width if self.speculation_width == "auto" else self.speculation_width

    @property
    def length_name(self) -> str:
        """How many draft tokens a round, in a word: "k=4", "auto"."""
        given = self.num_speculative_tokens
        return f"k={given}" if isinstance(given, int) else given if isinstance(given, str) else given.name

    def as_json(self) -> dict[str, Any]:
        """Its fields; objects by their names."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value if value is None or isinstance(value, (str, int, float)) else value.name
            for name, value in given.items()
        }

    @property
    def synthetic_acceptance(self) -> float | None:
        """The chance with which every draft token is kept; None where draft tokens are judged by the target."""
        if not self.acceptance.startswith(SYNTHETIC):
            return None
        try:
            return float(self.acceptance.removeprefix(SYNTHETIC))
        except ValueError:
            return math.nan


class EngineOptions(TypedDict, total=False):
    """EngineConfig's fields as keyword arguments; their meaning and defaults are EngineConfig's."""

    drafter: str | DrafterKind | None
    num_speculative_tokens: Length
    speculation_width: int | Literal["auto"]
    profile: str | None
    acceptance: AcceptanceName | str
    benchmark: bool
    attention: AttentionName
    deterministic: bool
    rounds: RoundsName
    dtype: DtypeName
    quantization: QuantizationName | None
    draft_dtype: DtypeName | Literal["same"]
    draft_quantization: QuantizationName | Literal["same"] | None
    max_batch_size: int
    max_model_len: int | None
    prefill_chunk: int
    longest_pause: float | None
    prefix_cache: bool
    device: str
    tensor_parallel: int
    threads: int | None
    memory_limit: int | None


_DRAFTS = "a drafter, who guesses; drafter=None is nobody"
_DRAFTS = "a draft model that drafts: drafter='model' or 'hybrid'"
LOOKS_UP = "n-gram lookup, which copies: drafter='ngram' or 'hybrid', and num_speculative_tokens other than 0"

_NEEDS: Mapping[str, tuple[Callable[[EngineConfig], bool], str]] = {
    "num_speculative_tokens": (lambda config: config.drafter is not None, _DRAFTS),
    "speculation_width": (
        lambda config: config.draft_tokens and config.drafter_kind is not None and config.drafter_kind.auto_width > 0,
        "a drafter whose guesses may branch: drafter='ngram', 'model', 'feature' or 'hybrid'",
    ),
    "acceptance": (lambda config: config.drafter is not None, _DRAFTS),
    "profile": (lambda config: config.reads_profile, _DRAFTS + "; and num_speculative_tokens='auto' or 'profiled'"),
    "draft_model": (lambda config: config.asks_draft_model, _DRAFTS),
    "draft_dtype": (lambda config: config.asks_draft_model, _DRAFTS),
    "draft_quantization": (lambda config: config.asks_draft_model, _DRAFTS),
    "reference_documents": (lambda config: config.looks_up, LOOKS_UP),
}
"""What an engine must do for an option to have any effect, and how to say so."""


def check_used(config: EngineConfig, given: Mapping[str, Any]) -> None:
    """Raise ParameterError for what was given, is not as it would be anyway, and changes nothing in this engine.

    given: options of ``EngineConfig``, draft_model, reference_documents.
    """
    usual = {each.name: each.default for each in fields(EngineConfig)} | {
        "draft_model": None,
        "reference_documents": (),
    }
    for name in given.keys() & _NEEDS.keys():
        used, needed = _NEEDS[name]
        nothing = {"num_speculative_tokens": 0, "speculation_width": 1}.get(name, usual[name])
        idle = given[name] in (usual[name], nothing)
        check(idle or used(config), name, given[name], f"left out here; it needs {needed}")


def engine_config(options: EngineOptions, draft_model: Any = None, documents: Sequence[Any] = ()) -> EngineConfig:
    """The configuration of an engine with these models and options.

    Raises ParameterError, also for what would have no effect.
    """
    config = EngineConfig(**options)
    if config.asks_draft_model and draft_model is None:
        raise ParameterError("drafter", config.drafter, "needs a draft_model; or choose 'ngram' or None")
    given = {**options, "draft_model": draft_model, "reference_documents": tuple(documents)}
    check_used(config.resolved(draft_model=draft_model is not None), given)
    return config
