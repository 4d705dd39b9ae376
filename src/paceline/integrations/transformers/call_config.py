"""transformers' ``GenerationConfig`` in paceline's parameters; options that cannot be honoured are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import logits_process as made

from paceline.config import MAX_SPECULATION_LENGTH, DrafterName, SamplingParams
from paceline.config.ranges import Whole
from paceline.errors import ParameterError
from paceline.integrations.transformers.hooks import Processor

NEW_TOKENS = 20  # transformers' default length of an answer
TOP_K = 50  # transformers' default for sampling

# Fields whose neutral values are accepted; every other value is refused. None is neutral everywhere.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "guidance_scale": (1,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "use_cache": (True,),
    "cache_implementation": ("dynamic",),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "penalty_alpha": (0,),
    "low_memory": (False,),
    "token_healing": (False,),
    "is_assistant": (False,),
    "use_mtp": (False,),
    "num_assistant_tokens_schedule": ("constant",),
}
# Fields without effect here: metadata, compilation, and options of encoder-decoder models.
OTHERS = frozenset({"transformers_version", "_from_model_config", "disable_compile", "decoder_start_token_id"})
HONOURED = frozenset(
    {
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "do_sample",
        "eos_token_id",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "max_length",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_return_sequences",
        "output_logits",
        "output_scores",
        "pad_token_id",
        "prompt_lookup_num_tokens",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "return_dict_in_generate",
        "sequence_bias",
        "stop_strings",
        "suppress_tokens",
        "temperature",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
    }
)


_THEIR_NAMES = {  # of what paceline calls otherwise
    "stop_token_ids": "eos_token_id",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "time_budget": "max_time",
    "num_speculative_tokens": "num_assistant_tokens",
    "draft_model": "assistant_model",
    "prompt_token_ids": "input_ids",
}


@contextmanager
def by_their_names() -> Iterator[None]:
    """Rename refused parameters to the names that the caller of transformers' ``generate`` used."""
    try:
        yield
    except ParameterError as error:
        if error.field not in _THEIR_NAMES:
            raise
        raise ParameterError(_THEIR_NAMES[error.field], error.value, error.allowed) from error


def merged(
    model: PreTrainedModel, given: GenerationConfig | None, fields: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """The configuration of a call, and the ``fields`` that do not belong to it.

    Fields of the call come first, then those of the given configuration, then the model's own. Raises ParameterError.
    """
    if given is not None and not isinstance(given, GenerationConfig):
        raise ParameterError("generation_config", given, "a transformers GenerationConfig")
    config = GenerationConfig() if given is None else copy.deepcopy(given)
    if model.generation_config is not None:
        own = model.generation_config.to_dict()
        if own.get("cache_implementation") == "hybrid":  # of older checkpoints with windows; transformers drops it, too
            del own["cache_implementation"]
        config.update(**own, defaults_only=True)
    rest: dict[str, Any] = config.update(**fields)
    config.top_k = TOP_K if config.top_k is None else config.top_k
    for name, value in config.to_dict().items():
        fine = value is None or name in HONOURED or name in OTHERS or value in NEUTRAL.get(name, ())
        if not fine:
            raise ParameterError(name, value, "left at its default: only model.generate of transformers supports it")
    return config, rest


@dataclass(frozen=True)
class CallConfig:
    """A call's configuration and the width of its prompts in tokens, padding included."""

    config: GenerationConfig
    width: int

    def _is(self, name: str, *neutral: object) -> bool:
        value = getattr(self.config, name, None)
        return value is not None and value not in neutral

    @property
    def sampled(self) -> bool:
        return bool(self.config.do_sample)

    @property
    def answers(self) -> int:
        return int(self.config.num_return_sequences or 1)

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return _tokens("eos_token_id", self.config.eos_token_id)

    @property
    def pad(self) -> int:
        """The token that fills up answers."""
        padding = _tokens("pad_token_id", self.config.pad_token_id) or self.ends or (0,)
        return padding[0]

    @property
    def records(self) -> bool:
        """Whether logits of every token are returned."""
        return bool(self.config.output_scores or self.config.output_logits)

    @property
    def max_tokens(self) -> int:
        """Longest answer in tokens. ``max_length`` counts the padded prompt, as in transformers."""
        config = self.config
        if config.max_new_tokens is not None:
            return int(config.max_new_tokens)
        if config.max_length is None:
            return NEW_TOKENS
        if config.max_length <= self.width:
            raise ParameterError("max_length", config.max_length, f"more than the prompts' {self.width} tokens")
        return int(config.max_length) - self.width

    @property
    def min_tokens(self) -> int:
        """Shortest answer in tokens."""
        config = self.config
        least = (
            max(0, (config.min_length or 0) - self.width) if config.min_new_tokens is None else config.min_new_tokens
        )
        return min(int(least), self.max_tokens)

    @property
    def drafting(self) -> tuple[DrafterName, int | None]:
        """The drafter without an assistant, and its draft tokens per round; None: chosen by ``auto``."""
        config = self.config
        looked = config.prompt_lookup_num_tokens
        if looked is not None:
            Whole(0, MAX_SPECULATION_LENGTH).take("prompt_lookup_num_tokens", looked)
        return ("ngram", int(looked)) if looked is not None else ("auto", config.num_assistant_tokens)

    def processed(self, own: Sequence[Processor], allowed: Callable[[int, Tensor], list[int]] | None) -> bool:
        """Whether logits go through transformers' processors; the engine itself applies what SamplingParams can
        express.
        """
        both = self.sampled and self._is("min_p") and self._is("top_p", 1.0)  # the two apply them in different orders
        asked = any(self._is(name, *neutral) for name, neutral, _ in _PROCESSORS if name not in _NATIVE)
        cut = self.sampled and any(self._is(name, *neutral) for name, neutral, _ in _WARPERS if name not in _NATIVE)
        return bool(own) or allowed is not None or asked or cut or both or self.records

    def params(self, seed: int | None, processed: bool) -> SamplingParams:
        """Sampling parameters of one prompt. With processors the engine samples from the logits that they return."""
        config = self.config
        common: dict[str, Any] = {
            "n": self.answers,
            "max_tokens": self.max_tokens,
            "seed": seed,
            "stop_token_ids": self.ends,
            "ignore_eos": True,  # the configuration's own tokens end answers
            "time_budget": config.max_time,
        }
        if processed:
            return SamplingParams(temperature=float(self.sampled), **common)
        penalty = 1.0 if config.repetition_penalty is None else config.repetition_penalty
        common |= {"repetition_penalty": penalty, "min_tokens": self.min_tokens}
        if not self.sampled:
            return SamplingParams(temperature=0.0, **common)
        return SamplingParams(
            temperature=1.0 if config.temperature is None else config.temperature,
            top_k=config.top_k,
            top_p=1.0 if config.top_p is None else config.top_p,
            min_p=config.min_p or 0.0,
            **common,
        )

    def processors(
        self, row: int, padding: int, own: Sequence[Processor], allowed: Callable[[int, Tensor], list[int]] | None
    ) -> list[Processor]:
        """transformers' own processors, in its order, for a row whose prompt begins with ``padding`` padding tokens."""
        chosen = [make(self, padding) for name, neutral, make in _PROCESSORS if self._is(name, *neutral)]
        if self.min_tokens and self.ends:
            chosen.append(made.MinNewTokensLengthLogitsProcessor(self.width, self.min_tokens, list(self.ends)))
        if allowed is not None:
            chosen.append(made.PrefixConstrainedLogitsProcessor(lambda _, text: allowed(row, text), 1))
        chosen += own
        if self.sampled:
            chosen += [make(self, padding) for name, neutral, make in _WARPERS if self._is(name, *neutral)]
        if self.config.renormalize_logits:
            chosen.append(made.LogitNormalization())
        return chosen


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    """The token ids in a number, a list or a tensor; none for None. Raises ParameterError for other values."""
    if value is None:
        return ()
    try:
        tokens = torch.as_tensor(value).flatten()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ParameterError(name, value, "a token id, or several") from error
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ParameterError(name, value, "a token id, or several")
    return tuple(int(token) for token in tokens.tolist())


Make = Callable[[CallConfig, int], Processor]

_NATIVE = {"repetition_penalty", "temperature", "top_k", "top_p", "min_p"}  # fields that SamplingParams can express
_PROCESSORS: Sequence[tuple[str, tuple[object, ...], Make]] = (
    ("sequence_bias", (), lambda w, _: made.SequenceBiasLogitsProcessor(w.config.sequence_bias)),
    (
        "repetition_penalty",
        (1.0,),
        lambda w, padding: made.RepetitionPenaltyLogitsProcessor(
            w.config.repetition_penalty, prompt_ignore_length=padding or None
        ),
    ),
    ("no_repeat_ngram_size", (0,), lambda w, _: made.NoRepeatNGramLogitsProcessor(w.config.no_repeat_ngram_size)),
    ("bad_words_ids", (), lambda w, _: made.NoBadWordsLogitsProcessor(w.config.bad_words_ids, list(w.ends))),
    ("forced_bos_token_id", (), lambda w, _: made.ForcedBOSTokenLogitsProcessor(w.config.forced_bos_token_id)),
    (
        "forced_eos_token_id",
        (),
        lambda w, _: made.ForcedEOSTokenLogitsProcessor(w.width + w.max_tokens, w.config.forced_eos_token_id),
    ),
    ("remove_invalid_values", (False,), lambda _, __: made.InfNanRemoveLogitsProcessor()),
    (
        "exponential_decay_length_penalty",
        (),
        lambda w, _: made.ExponentialDecayLengthPenalty(
            w.config.exponential_decay_length_penalty, list(w.ends), w.width
        ),
    ),
    ("suppress_tokens", (), lambda w, _: made.SuppressTokensLogitsProcessor(w.config.suppress_tokens)),
    (
        "begin_suppress_tokens",
        (),
        lambda w, _: made.SuppressTokensAtBeginLogitsProcessor(w.config.begin_suppress_tokens, w.width),
    ),
)
_WARPERS: Sequence[tuple[str, tuple[object, ...], Make]] = (
    ("temperature", (1.0,), lambda w, _: made.TemperatureLogitsWarper(float(w.config.temperature))),
    ("top_h", (), lambda w, _: made.TopHLogitsWarper(w.config.top_h)),
    ("top_k", (0,), lambda w, _: made.TopKLogitsWarper(w.config.top_k)),
    ("top_p", (1.0,), lambda w, _: made.TopPLogitsWarper(w.config.top_p)),
    ("min_p", (), lambda w, _: made.MinPLogitsWarper(w.config.min_p)),
    ("typical_p", (1.0,), lambda w, _: made.TypicalLogitsWarper(w.config.typical_p)),
    ("epsilon_cutoff", (0.0,), lambda w, _: made.EpsilonLogitsWarper(w.config.epsilon_cutoff)),
    ("eta_cutoff", (0.0,), lambda w, _: made.EtaLogitsWarper(w.config.eta_cutoff)),
)
