"""Options that several commands share, each defined once; their defaults are those of ``params``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from paceline.cli.console import note, working
from paceline.config import (
    DEFAULT_ACCEPTANCE,
    DEFAULT_MODEL,
    AcceptanceName,
    AttentionName,
    DtypeName,
    EngineConfig,
    EngineOptions,
    QuantizationName,
    RankName,
    RoundsName,
    SamplingParams,
    engine_config,
)
from paceline.config.files import read_text
from paceline.config.ranges import rules_of
from paceline.config.registry import DRAFTERS
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.integrations.ray.cluster import Recipe
    from paceline.llm import LLM

ENGINE, SAMPLING = "Engine", "Sampling"

Model = Annotated[str, typer.Argument(help="A hub name, a directory, a .gguf file or an embedded name.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No start line, no progress bar.")]


def engine_option(*names: str, text: str) -> Any:
    """An option of the panel "Engine"."""
    return typer.Option(*names, help=text, rich_help_panel=ENGINE)


def sampling_option(*names: str, text: str) -> Any:
    """An option of the panel "Sampling"."""
    return typer.Option(*names, help=text, rich_help_panel=SAMPLING)


@dataclass(frozen=True)
class EngineFlags:
    """How the engine runs: ``EngineConfig`` and a draft model, as options."""

    draft_model: Annotated[
        str | None,
        engine_option("--draft-model", text="A smaller model of the same vocabulary, or a trained head, to guess."),
    ] = None
    drafter: Annotated[
        str,
        engine_option(
            "--drafter",
            text="Who guesses: model, feature (a trained head), ngram, hybrid (ngram, else model or head), none, or a "
            "name that a package brings. "
            "auto: hybrid with a draft model, else ngram; on CUDA model, else none.",
        ),
    ] = str(EngineConfig.drafter or "none")
    num_speculative_tokens: Annotated[
        str,
        engine_option(
            "--num-speculative-tokens", "-k", text="Guesses a round: a number, or auto, bass, profiled, or a package's."
        ),
    ] = str(EngineConfig.num_speculative_tokens)
    speculation_width: Annotated[
        str,
        engine_option(
            "--speculation-width", text="Guesses side by side, each for the same place: a number; 1: chains."
        ),
    ] = str(EngineConfig.speculation_width)
    profile: Annotated[
        str | None, engine_option("--profile", text="A file of paceline profile, for auto and profiled.")
    ] = EngineConfig.profile
    acceptance: Annotated[
        AcceptanceName,
        engine_option("--acceptance", text="coupled: same seed, same text. rejection: most guesses kept."),
    ] = DEFAULT_ACCEPTANCE
    attention: Annotated[AttentionName, engine_option("--attention", text="How ragged rows attend.")] = (
        EngineConfig.attention
    )
    deterministic: Annotated[
        bool, engine_option("--deterministic", text="Bits that do not depend on the batch (CUDA; CPU kernels are so).")
    ] = EngineConfig.deterministic
    rounds: Annotated[
        RoundsName, engine_option("--rounds", text="Who runs a round; auto: the device alone, on CUDA.")
    ] = EngineConfig.rounds
    dtype: Annotated[
        DtypeName,
        engine_option("--dtype", text="Precision; auto: bfloat16 where native, else float16 (CUDA), float32 (CPU)."),
    ] = EngineConfig.dtype
    draft_dtype: Annotated[
        Literal["same", "auto", "float32", "bfloat16", "float16"],
        engine_option("--draft-dtype", text="Precision of the draft model."),
    ] = EngineConfig.draft_dtype
    quantization: Annotated[
        QuantizationName | None,
        engine_option("--quantization", text="Weights in fewer bits: int8, int4 (CPU); int8, fp8 (CUDA)."),
    ] = EngineConfig.quantization
    draft_quantization: Annotated[
        Literal["same", "none", "int8", "int4", "fp8"],
        engine_option("--draft-quantization", text="The draft model's weights."),
    ] = "same" if EngineConfig.draft_quantization == "same" else EngineConfig.draft_quantization or "none"
    max_batch_size: Annotated[
        int, engine_option("--max-batch-size", "--max-num-seqs", text="Sequences decoded at once.")
    ] = EngineConfig.max_batch_size
    max_model_len: Annotated[
        int | None, engine_option("--max-model-len", text="Most tokens of a sequence. Default: the model's limit.")
    ] = EngineConfig.max_model_len
    prefix_cache: Annotated[
        bool,
        engine_option(
            "--prefix-cache/--no-prefix-cache", text="Prompts copy what was read before, as far as they agree."
        ),
    ] = EngineConfig.prefix_cache
    device: Annotated[str, engine_option("--device", text="cpu, cuda, cuda:1, ...")] = EngineConfig.device
    tensor_parallel: Annotated[
        int,
        engine_option(
            "--tensor-parallel",
            "--tensor-parallel-size",
            text="Processes that share the target, on CUDA a device each.",
        ),
    ] = EngineConfig.tensor_parallel
    threads: Annotated[
        int | None,
        engine_option("--threads", text="CPU threads. Default: torch's choice, at most a container's quota."),
    ] = EngineConfig.threads
    reference_document: Annotated[
        list[Path] | None,
        engine_option("--reference-document", text="A text file the n-gram drafter may copy from; repeatable."),
    ] = None

    def options(self) -> EngineOptions:
        """The keyword arguments of ``LLM``."""
        return {
            "drafter": _drafter(self.drafter),
            "num_speculative_tokens": speculation_length(self.num_speculative_tokens),
            "speculation_width": speculation_width(self.speculation_width),
            "profile": self.profile,
            "acceptance": self.acceptance,
            "attention": self.attention,
            "deterministic": self.deterministic,
            "rounds": self.rounds,
            "dtype": self.dtype,
            "draft_dtype": self.draft_dtype,
            "quantization": self.quantization,
            "draft_quantization": None if self.draft_quantization == "none" else self.draft_quantization,
            "max_batch_size": self.max_batch_size,
            "max_model_len": self.max_model_len,
            "prefix_cache": self.prefix_cache,
            "device": self.device,
            "tensor_parallel": self.tensor_parallel,
            "threads": self.threads,
        }

    def check(self) -> None:
        """Raise ParameterError for bad values, and for what would have no effect, before anything is loaded."""
        engine_config(self.options(), self.draft_model, self.reference_document or ())

    def recipe(self, model: str) -> Recipe:
        """What other processes make the models of. Raises ParameterError."""
        from paceline.integrations.ray.cluster import Recipe

        documents = [read_text("--reference-document", path) for path in self.reference_document or ()]
        return Recipe(model, self.draft_model, documents, self.options())

    def load(self, model: str, quiet: bool = False) -> LLM:
        """Load the models; says on stderr what runs. Raises PacelineError."""
        self.check()
        documents = [read_text("--reference-document", path) for path in self.reference_document or ()]
        with working(f"loading {model}"):
            from paceline.llm import LLM

            llm = LLM(model, self.draft_model, reference_documents=documents, use_tqdm=False, **self.options())
        if not quiet:
            note(llm.engine.describe())
        return llm


@dataclass(frozen=True)
class SamplingFlags:
    """How to continue a prompt: ``SamplingParams`` as options."""

    n: Annotated[int, sampling_option("--n", "-n", text="Answers to each prompt.")] = SamplingParams.n
    best_of: Annotated[int | None, sampling_option("--best-of", text="Make so many answers and show the best n.")] = (
        SamplingParams.best_of
    )
    rank_by: Annotated[
        RankName | None,
        sampling_option(
            "--rank", text="Best answers first, by their log-probability; cut ones last. Default: as sampled."
        ),
    ] = SamplingParams.rank_by
    time_budget: Annotated[
        float | None,
        sampling_option("--time-budget", text="Seconds after which answers end as they are, waiting included."),
    ] = SamplingParams.time_budget
    max_tokens: Annotated[int, sampling_option("--max-tokens", text="Most tokens of an answer.")] = (
        SamplingParams.max_tokens
    )
    min_tokens: Annotated[int, sampling_option("--min-tokens", text="No end before so many tokens.")] = (
        SamplingParams.min_tokens
    )
    temperature: Annotated[float, sampling_option("--temperature", "-t", text="0 is greedy.")] = (
        SamplingParams.temperature
    )
    top_p: Annotated[float, sampling_option("--top-p", text="Nucleus, in (0, 1].")] = SamplingParams.top_p
    top_k: Annotated[int, sampling_option("--top-k", text="0 keeps all.")] = SamplingParams.top_k
    min_p: Annotated[float, sampling_option("--min-p", text="Relative cut, in [0, 1].")] = SamplingParams.min_p
    seed: Annotated[int | None, sampling_option("--seed", text="The same seed gives the same text.")] = (
        SamplingParams.seed
    )
    stop: Annotated[list[str] | None, sampling_option("--stop", text="A string that ends the answer; repeatable.")] = (
        None
    )
    ignore_eos: Annotated[bool, sampling_option("--ignore-eos", text="Go on after the end-of-text token.")] = (
        SamplingParams.ignore_eos
    )
    presence_penalty: Annotated[float, sampling_option("--presence-penalty", text="In [-2, 2].")] = (
        SamplingParams.presence_penalty
    )
    frequency_penalty: Annotated[float, sampling_option("--frequency-penalty", text="In [-2, 2].")] = (
        SamplingParams.frequency_penalty
    )
    repetition_penalty: Annotated[float, sampling_option("--repetition-penalty", text="Above 0; 1 is none.")] = (
        SamplingParams.repetition_penalty
    )
    logprobs: Annotated[
        int | None, sampling_option("--logprobs", text="With --json: log-probabilities, and so many best tokens.")
    ] = SamplingParams.logprobs

    def params(self) -> SamplingParams:
        """The parameters. Raises ParameterError."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return SamplingParams(**{**given, "stop": tuple(self.stop or ())})


def _drafter(text: str) -> str | None:
    """A drafter's name; None for "none". Raises ParameterError."""
    choices = dataclasses.replace(DRAFTERS, words=(*DRAFTERS.words, "none"))
    return None if text == "none" else str(choices.take("drafter", text))


def speculation_length(text: str) -> int | str:
    """A number or a policy's name. Raises ParameterError."""
    try:
        return int(text)
    except ValueError:
        return str(rules_of(EngineConfig)["num_speculative_tokens"].take("num_speculative_tokens", text))


def speculation_width(text: str) -> int | Literal["auto"]:
    """A number, or "auto". Raises ParameterError."""
    width: int | Literal["auto"] = rules_of(EngineConfig)["speculation_width"].take(
        "speculation_width", int(text) if text.isdecimal() else text
    )
    return width


def whole_numbers(name: str, text: str) -> list[int]:
    """The numbers of a list such as 1,2,4. Raises ParameterError."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ParameterError(name, text, "whole numbers of at least 1, separated by commas")
    return numbers


def refuse_given(context: typer.Context, allowed: str, *names: str) -> None:
    """Raise ParameterError for those of the running command's options that were given: here they would do nothing."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ParameterError("--" + name.replace("_", "-"), context.params[name], allowed)


def check_draft_tokens(llm: LLM, drafter: str) -> None:
    """Raise ParameterError if a loaded engine draft tokens nothing, as "auto" may have decided. drafter: what was
    given.
    """
    if not llm.config.draft_tokens:
        allowed = (
            "one that guesses: 'ngram', or with a draft model 'model' or 'hybrid' (on CUDA 'auto' without a draft "
            "model guesses nothing, as lookup would take rounds off the device)"
        )
        raise ParameterError("--drafter", drafter, allowed)


def with_flags(command: Callable[..., Any], without: Collection[str] = ()) -> Callable[..., Any]:
    """Give a command the fields of its dataclass parameters as options of its own.

    without: fields that the command has no use for; they keep their defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            parameters += [each for each in _as_parameters(groups[parameter.name]) if each.name not in without]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        grouped = {name: group(**_taken(values, group, without)) for name, group in groups.items()}  # type: ignore[operator]
        return command(**values, **grouped)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _taken(values: dict[str, Any], group: Any, without: Collection[str]) -> dict[str, Any]:
    """The values of a group's fields; they leave ``values``. What is in ``without`` is the command's own."""
    names = [field.name for field in dataclasses.fields(group)]
    return {name: values.pop(name) for name in names if name in values and name not in without}


def _as_parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]


__all__ = ["DEFAULT_MODEL", "EngineFlags", "Model", "Quiet", "SamplingFlags", "whole_numbers", "with_flags"]
