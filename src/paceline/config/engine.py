"""``EngineConfig``, and which options need which."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypedDict, get_args

from paceline.config import names
from paceline.config.help import Help, described
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
    DraftTokenCount,
    DraftVocabulary,
    DtypeName,
    KVCacheDtypeName,
    Length,
    QuantizationName,
    RoundsName,
    Seconds,
    Width,
)
from paceline.config.ranges import FileName, NumaNodes, OneOf, Text, Whole, check, check_fields, names_checked
from paceline.config.registry import DRAFTERS, LENGTHS, DrafterKind, LengthKind
from paceline.errors import ParameterError


@described
@names_checked
@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine. Raises ParameterError for a value outside of its range."""

    drafter: Annotated[
        str | DrafterKind | None,
        DRAFTERS,
        Help(
            "Source of draft tokens: model, feature (a trained head), mtp (the head in the model's own files), ngram "
            "(prompt lookup), hybrid (ngram, else model or head), none (plain decoding), a name that a package adds, "
            "module:Class or path.py:Class. auto is hybrid with a draft model or a head, else ngram; on CUDA model "
            "with a draft model.",
            more='"model", "hybrid" and "feature" need ``draft_model``. In Python None is plain decoding. An object is '
            "a ``paceline.drafters.Drafter``: a class, or a pattern of which each engine uses a copy.",
        ),
    ] = "auto"
    num_speculative_tokens: Annotated[
        DraftTokenCount | Annotated[str | LengthKind, LENGTHS],
        Help(
            "Draft tokens a round: a number, auto (chosen by measured costs and acceptance), bass (by the last round's "
            "acceptance), profiled (by a profile), a length policy that a package adds, module:Class or path.py:Class.",
            "--num-speculative-tokens",
            "-k",
            more='"auto" takes as many as pay at the measured cost and acceptance, 0 where none do. "bass" is BASS, '
            'Algorithm 1 (2404.15778). "profiled" is Synergy, by the table of a profile. An object is a '
            "``paceline.lengths.LengthPolicy``.",
        ),
    ] = "auto"
    speculation_width: Annotated[
        Width | Literal["auto"],
        Help(
            "Draft tokens side by side for the same position, which makes drafts trees: a number, or auto; 1: chains.",
            more='``num_speculative_tokens`` is then the depth of the tree. "auto" is the width measured to pay for '
            'the drafter. Needs ``acceptance="coupled"``. On a device all trees have one shape.',
        ),
    ] = "auto"
    draft_vocab_size: Annotated[
        DraftVocabulary | None,
        Help(
            "Tokens that the draft model or head scores: the most frequent ones. 0: its whole vocabulary. Default: "
            "chosen for the models on CPUs, 0 elsewhere.",
            more='The tokens follow what the engine reads and writes. With ``acceptance="rejection"`` they are always '
            "those with the smallest ids, so that the same call gives the same text. Other tokens have probability 0 "
            "in drafts, so the output's distribution stays the target's. Heads with a vocabulary of their own, other "
            "drafters, and rounds of a device refuse a number above 0.",
        ),
    ] = None
    lookup_tokens: Annotated[
        int,
        Whole(0, MAX_COUNT),
        Help(
            "Tokens of answers, finished and running, that n-gram lookup holds to copy from. 0: none.",
            more="About 110 bytes each; the oldest go first. Answers are for requests of the same client (where the "
            "server keeps clients apart), adapter and ``cache_salt``. Those with ``keep_prefix=False`` are for their "
            "own request alone; so are all without ``prefix_cache``, and with "
            '``acceptance="rejection"``, whose texts depend on the drafts.',
        ),
    ] = 262_144
    lookup_dir: Annotated[
        str | None,
        FileName("the name of a directory"),
        Help(
            "Directory for the answers that n-gram lookup holds: read at the start, written at the end and every five "
            "minutes.",
            more="Its files have the tokens of answers, so the directory must be this user's, and is made for this "
            "user alone. They are for the same model files and tokenizer, and as in memory for the same client, "
            "adapter and ``cache_salt``. Each engine that runs at a time has a file of its own. A server ends so at "
            "SIGTERM, an ``LLM`` with ``close``.",
        ),
    ] = None
    profile: Annotated[
        str | None,
        FileName(),
        Help(
            "A file written by paceline profile, for the length policies auto and profiled.",
            more='"profiled" needs it; "auto" then measures no costs at the start.',
        ),
    ] = None
    acceptance: Annotated[
        AcceptanceName | str,
        Help(
            "Acceptance rule: coupled (same seed, same text, with and without speculation) or rejection (highest "
            "acceptance rate).",
            more='"synthetic:P" accepts each draft token with probability P, for benchmarks: the speed is real, the '
            "text is not.",
        ),
    ] = DEFAULT_ACCEPTANCE
    benchmark: Annotated[bool, Help("Allow a synthetic acceptance rule, whose texts have no meaning.")] = False
    attention: Annotated[
        AttentionName,
        Help(
            "Attention kernel. auto is native on CPUs, ragged on CUDA with Triton, else padded.",
            more='"native" is C++ for CPUs, ragged and batch-invariant; "ragged" is one Triton launch for all rows; '
            '"padded" is BASS-PAD; "split" is BASS-SPLIT.',
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        Help(
            "Results are bit-identical whatever else is in the batch (CUDA; the CPU kernels always work so).",
            more="Kernels then have tiles of a fixed size: ragged attention and Triton's matrix products.",
        ),
    ] = False
    rounds: Annotated[
        RoundsName,
        Help(
            "What runs a round: host, step by step, or device, as one program. auto is device on CUDA where models, "
            "drafter and attention allow it.",
            more='With "device" a round is one program (on CUDA a graph) and the host is one round behind; requests '
            "with a logits processor or many stop tokens still run on the host. Ranks that share a target need the "
            "host.",
        ),
    ] = "auto"
    dtype: Annotated[
        DtypeName,
        Help(
            "Precision. auto: bfloat16 on the CPU kernels and where the device has it; else float16 (CUDA), float32.",
            more='"auto" is decided for each model. "float16" needs CUDA and hidden states that stay below 65504.',
        ),
    ] = "auto"
    quantization: Annotated[
        QuantizationName | None,
        Help(
            "Weights in fewer bits, kept or quantised when the model loads: int8, int4; fp8 (CUDA).",
            more="None leaves weights in ``dtype``.",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str,
        OneOf(get_args(KVCacheDtypeName), names.CACHE_DTYPES),
        Help(
            "Precision of keys and values: auto (that of dtype), bf16, int8 or fp8.",
            more="It holds for the target, the draft model and heads. Texts with int8 differ from those with 16 bits, "
            "but speculation and the batch change nothing: each vector has a scale of its own.",
        ),
    ] = "auto"
    draft_dtype: Annotated[DtypeName | Literal["same"], Help("Precision of the draft model.")] = "same"
    draft_quantization: Annotated[
        QuantizationName | Literal["same"] | None, Help("Quantisation of the draft model's weights.")
    ] = "same"
    max_batch_size: Annotated[
        int | None,
        Whole(1, MAX_ROWS),
        Help(
            "Rows, that is sequences decoded at once. Default: 16, or as many as fit into memory.",
            more="The start line says so if they are fewer than 16. A number that does not fit is refused.",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Whole(2, MAX_COUNT),
        Help(
            "Maximum tokens of a sequence, prompt and answer. Default: the model's own limit; on a GPU at most 4096.",
            more="At most 4096 wherever rows take their memory at the start: not on Linux CPUs. The default is less if "
            "not one row of that length fits into memory, or not the rows asked for; the start line says so. A number "
            "that does not fit is refused.",
        ),
    ] = None
    prefill_chunk: Annotated[
        int, Whole(1, MAX_PREFILL_CHUNK), Help("Maximum prompt tokens fed in one step, all rows together.")
    ] = 1024
    longest_pause: Annotated[
        Seconds | None,
        Help(
            "Maximum seconds between two tokens of a row while prompts are prefilled; none means full chunks.",
            more="Prefill chunks are as short as the measured speed requires, shortest prompts first. Chunks have "
            "``prefill_chunk`` tokens anyway where no client waits for tokens: in ``LLM.generate`` while no other "
            "call runs, and in ``paceline batch``, if no request has a time budget.",
        ),
    ] = 0.1
    prefix_cache: Annotated[
        bool,
        Help(
            "Copy the keys and values of a prompt's longest beginning that was read before.",
            more="Without it each prompt is read whole, once for all of its answers, and nothing is copied from the "
            "answers of other requests (``lookup_tokens``).",
        ),
    ] = True
    prefix_memory: Annotated[
        int | None,
        Whole(0, MAX_BYTES),
        Help(
            "Bytes for prefixes of ended requests, beside the rows'. 0: free rows keep them, and no others. Default: "
            "a quarter of the memory left free.",
            more="The least recently used go first, long ones later than short ones. They also fill what rows do not "
            "need now, and give way to them. Only the CPU kernels on Linux keep more prefixes than rows.",
        ),
    ] = None
    prefix_dir: Annotated[
        str | None,
        FileName("the name of a directory"),
        Help(
            "Directory for prefixes that give way in memory, and for all at the end; later runs read them back.",
            more="Files have the tokens of prompts and answers, so the directory must be this user's, and is made for "
            "this user alone. Only the same models in the same precision read a file. Prefixes of adapters, and those "
            "of fewer than 64 tokens, stay in memory. A server ends so at SIGTERM, an ``LLM`` with ``close``.",
        ),
    ] = None
    prefix_dir_size: Annotated[
        int,
        Whole(1, MAX_BYTES),
        Help(
            "Bytes of all files in the directory of prefixes. Those used longest ago are removed.",
            more="An option of its own, because a directory's name may have any character.",
        ),
    ] = 16 * 2**30
    device: Annotated[
        str,
        Text(filled=True),
        Help("cpu or cuda, the first CUDA device that the process sees; auto is cuda if there is one."),
    ] = "auto"
    tensor_parallel: Annotated[
        int,
        Whole(1, MAX_RANKS),
        Help(
            "Processes (ranks) that share the target, on CUDA one device each.",
            more="Each rank has a part of every matrix and of the cache. The engine starts the others, unless "
            "torchrun has. Drafting, sampling and scheduling stay in the first.",
        ),
    ] = 1
    threads: Annotated[
        int | None,
        Whole(1, MAX_THREADS),
        Help(
            "CPU threads, of each rank. Default: one per core, at most a container's CPU quota.",
            more="Efficiency cores do not count. Above eight the default is measured: as many as make a pass faster.",
        ),
    ] = None
    numa: Annotated[
        str,
        NumaNodes(),
        Help(
            "NUMA nodes (sockets) that the CPU kernels use: auto (all, if there are several), off, or numbers: 0,1.",
            more="Threads are divided between the nodes, and so is every matrix: each thread reads memory that is "
            "near. Linux only.",
        ),
    ] = "auto"
    memory_limit: Annotated[
        int | None,
        Whole(1, MAX_BYTES),
        Help(
            "Bytes that the engine may take. Default: the machine's free memory.",
            more="On Linux CPUs, and with ragged attention on GPUs, rows take memory as they grow: where not all rows "
            "fit at their longest, the last to begin give way, and go on later. Elsewhere all rows have to fit at "
            "their longest.",
        ),
    ] = None

    DEFAULT_MAX_MODEL_LEN = 4096  # where each row takes the memory of its longest text at the start
    DEFAULT_ROWS = 16
    OTHER_NAMES: ClassVar[Mapping[str, str]] = names.ENGINE

    def __post_init__(self) -> None:
        check_fields(self)
        if self.profile is None and self._length is not None and self._length.needs_profile:
            raise ParameterError("profile", None, "the file of a profile; make one with: paceline profile")
        self._check_acceptance()
        chains = self.speculation_width in ("auto", 1) or self.acceptance == DEFAULT_ACCEPTANCE
        allowed = (
            f"1 or 'auto' with acceptance={self.acceptance!r}, which supports chains only; or acceptance='coupled'"
        )
        check(chains, "speculation_width", self.speculation_width, allowed)
        if self.tensor_parallel > 1:
            self._check_ranks()

    def _check_ranks(self) -> None:
        """Raise ParameterError for options that ranks which share a model do not support."""
        one, ranks = "with tensor_parallel=1", f"with tensor_parallel={self.tensor_parallel}"
        caches = f"'auto' {ranks}, whose caches are kept in dtype; others {one}"
        check(self.kv_cache_dtype == "auto", "kv_cache_dtype", self.kv_cache_dtype, caches)
        batch = f"False {ranks}: bits never depend on the batch on the CPU kernels, and may in torch; True {one}"
        check(not self.deterministic, "deterministic", self.deterministic, batch)
        files = f"None {ranks}, each of which has a part of the keys and values; others {one}"
        check(self.prefix_dir is None, "prefix_dir", self.prefix_dir, files)

    def _check_acceptance(self) -> None:
        acceptance = self.acceptance
        if not acceptance.startswith(SYNTHETIC):
            known = get_args(AcceptanceName)
            check(acceptance in known, "acceptance", acceptance, "one of " + ", ".join(map(repr, known)))
            return
        rate = self.synthetic_acceptance
        allowed = f"{SYNTHETIC}P, P a probability: for benchmarks only"
        check(rate is not None and 0 <= rate <= 1, "acceptance", acceptance, allowed)
        allowed = "'coupled' or 'rejection'; a synthetic rule, for benchmarks only, needs benchmark=True"
        check(self.benchmark, "acceptance", acceptance, allowed)

    def resolved(self, *, draft_model: bool, alone: bool = False) -> EngineConfig:
        """The configuration with "auto" replaced by a drafter. alone: whether a draft model has no n-gram lookup."""
        if self.drafter != "auto":
            return self
        with_model: DrafterName = "model" if alone else "hybrid"
        return replace(self, drafter=with_model if draft_model else "ngram")

    @property
    def rows(self) -> int:
        """Rows: ``max_batch_size``, or its default if memory does not limit it."""
        return self.DEFAULT_ROWS if self.max_batch_size is None else self.max_batch_size

    @property
    def reads_profile(self) -> bool:
        """Whether the length policy reads a profile."""
        return self.drafter is not None and self._length is not None and self._length.reads_profile

    @property
    def asks_draft_model(self) -> bool:
        """Whether the drafter needs a draft model."""
        return self.drafter_kind is not None and self.drafter_kind.needs_draft_model

    @property
    def draft_tokens(self) -> bool:
        """Whether rounds may have draft tokens; without them decoding is plain."""
        return self.drafter is not None and self.num_speculative_tokens != 0

    @property
    def looks_up(self) -> bool:
        """Whether the drafter copies from texts (n-gram lookup)."""
        return self.draft_tokens and self.drafter_kind is not None and self.drafter_kind.copies

    @property
    def shares_answers(self) -> bool:
        """Whether requests may copy from the answers of others.

        The rejection rule's texts depend on the drafts: the same call gives the same text only without earlier answers.
        """
        return self.prefix_cache and self.acceptance != "rejection"

    @property
    def drafter_kind(self) -> DrafterKind | None:
        """The drafter's class or object; None for plain decoding and for "auto", which is not resolved yet."""
        return None if self.drafter is None or self.drafter == "auto" else DRAFTERS.get(self.drafter)

    @property
    def _length(self) -> LengthKind | None:
        """The length policy; None for a number of draft tokens."""
        length = self.num_speculative_tokens
        return None if isinstance(length, int) else LENGTHS.get(length)

    @property
    def max_draft_tokens(self) -> int:
        """Maximum draft tokens of a row in a round."""
        length = self.num_speculative_tokens
        return length if isinstance(length, int) else LENGTHS.get(length).max_draft_tokens

    @property
    def most_width(self) -> int:
        """Maximum draft tokens of a row for the same position; 1 for chains."""
        kind = self.drafter_kind
        return 1 if not self.draft_tokens or kind is None else self.width_of(kind)

    def width_of(self, kind: DrafterKind) -> int:
        """``most_width`` of a drafter, which may be a part of this engine's."""
        if kind.auto_width == 0 or self.acceptance != DEFAULT_ACCEPTANCE:
            return 1
        return kind.auto_width if self.speculation_width == "auto" else self.speculation_width

    @property
    def length_name(self) -> str:
        """The number of draft tokens a round, or the length policy's name: "k=4", "auto"."""
        length = self.num_speculative_tokens
        return f"k={length}" if isinstance(length, int) else length if isinstance(length, str) else length.name

    def as_json(self) -> dict[str, Any]:
        """The fields as a dictionary for JSON; objects by their names."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value if value is None or isinstance(value, (str, int, float)) else value.name
            for name, value in given.items()
        }

    @property
    def synthetic_acceptance(self) -> float | None:
        """The probability of a synthetic acceptance rule; None if the target judges draft tokens."""
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
    draft_vocab_size: int | None
    lookup_tokens: int
    lookup_dir: str | None
    profile: str | None
    acceptance: AcceptanceName | str
    benchmark: bool
    attention: AttentionName
    deterministic: bool
    rounds: RoundsName
    dtype: DtypeName
    quantization: QuantizationName | None
    kv_cache_dtype: str
    draft_dtype: DtypeName | Literal["same"]
    draft_quantization: QuantizationName | Literal["same"] | None
    max_batch_size: int | None
    max_model_len: int | None
    prefill_chunk: int
    longest_pause: float | None
    prefix_cache: bool
    prefix_memory: int | None
    prefix_dir: str | None
    prefix_dir_size: int
    device: str
    tensor_parallel: int
    threads: int | None
    numa: str
    memory_limit: int | None


class FamiliarOptions(EngineOptions, total=False):
    """The keyword arguments of ``LLM``: EngineOptions, and names that vLLM and llama.cpp have for some of them."""

    max_num_seqs: int
    tensor_parallel_size: int
    ctx_size: int
    enable_prefix_caching: bool
    speculative_config: Mapping[str, Any]
    gpu_memory_utilization: float


_DRAFTER = "a drafter: drafter other than None"
_DRAFT_MODEL = "a drafter with a draft model: drafter='model' or 'hybrid'"
LOOKS_UP = "n-gram lookup: drafter='ngram' or 'hybrid', and num_speculative_tokens other than 0"
LOOKS_UP_ANSWERS = "n-gram lookup in answers that requests share: lookup_tokens, prefix_cache and acceptance='coupled'"

_NEEDS: Mapping[str, tuple[Callable[[EngineConfig], bool], str]] = {
    "num_speculative_tokens": (lambda config: config.drafter is not None, _DRAFTER),
    "speculation_width": (
        lambda config: config.draft_tokens and config.drafter_kind is not None and config.drafter_kind.auto_width > 0,
        "a drafter whose drafts may branch: drafter='ngram', 'model', 'feature' or 'hybrid'",
    ),
    "acceptance": (lambda config: config.drafter is not None, _DRAFTER),
    "profile": (lambda config: config.reads_profile, _DRAFTER + "; and num_speculative_tokens='auto' or 'profiled'"),
    "draft_model": (lambda config: config.asks_draft_model, _DRAFT_MODEL),
    "draft_vocab_size": (lambda config: config.asks_draft_model and config.draft_tokens, _DRAFT_MODEL),
    "draft_dtype": (lambda config: config.asks_draft_model, _DRAFT_MODEL),
    "draft_quantization": (lambda config: config.asks_draft_model, _DRAFT_MODEL),
    "lookup_tokens": (lambda config: config.looks_up, LOOKS_UP),
    "lookup_dir": (
        lambda config: config.looks_up and config.lookup_tokens > 0 and config.shares_answers,
        LOOKS_UP_ANSWERS,
    ),
    "reference_documents": (lambda config: config.looks_up, LOOKS_UP),
    "prefix_memory": (lambda config: config.prefix_cache, "the prefix cache: prefix_cache=True"),
    "prefix_dir_size": (lambda config: config.prefix_dir is not None, "prefix_dir"),
}
"""Conditions under which an option has an effect, and their descriptions for errors."""


def check_used(config: EngineConfig, given: Mapping[str, Any]) -> None:
    """Raise ParameterError for options that were given, differ from their defaults, and have no effect here.

    given: options of ``EngineConfig``, draft_model, reference_documents.
    """
    usual = {each.name: each.default for each in fields(EngineConfig)} | {
        "draft_model": None,
        "reference_documents": (),
    }
    for name in given.keys() & _NEEDS.keys():
        used, needed = _NEEDS[name]
        nothing = {"num_speculative_tokens": 0, "speculation_width": 1, "draft_vocab_size": 0, "prefix_memory": 0}.get(
            name, usual[name]
        )
        idle = given[name] in (usual[name], nothing)
        check(idle or used(config), name, given[name], f"left out here; it needs {needed}")


OWN_HEAD = "the head in the model's checkpoint"
"""Stands for a draft model where the model has a draft head of its own."""


def uses_own_head(options: EngineOptions) -> bool:
    """Whether an engine with these options drafts with a head in its model's checkpoint, if there is one."""
    config = EngineConfig(**options)
    asked = config.drafter == "auto" or config.asks_draft_model
    return asked and config.draft_tokens and config.tensor_parallel == 1


def engine_config(options: EngineOptions, draft_model: Any = None, documents: Sequence[Any] = ()) -> EngineConfig:
    """The configuration of an engine with these models and options.

    Raises ParameterError, also for options that would have no effect.
    """
    config = EngineConfig(**options)
    if config.asks_draft_model and draft_model is None:
        needs = "a draft head in the model's own files" if config.drafter == "mtp" else "a draft_model"
        raise ParameterError("drafter", config.drafter, f"needs {needs}; or choose 'ngram' or None")
    given = {**options, "draft_model": draft_model, "reference_documents": tuple(documents)}
    check_used(config.resolved(draft_model=draft_model is not None), given)
    return config
