"""The model class "paceline" of lm-evaluation-harness.

Common prefixes of texts are computed once (``LLM.score``), and all answers are decoded in one ragged batch, with
speculation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from paceline.config import DEFAULT_MODEL, EngineConfig, SamplingParams
from paceline.errors import ParameterError
from paceline.llm import LLM
from paceline.models.text.tokenizer import Tokenizer

MAX_ANSWER = 256  # tokens of an answer unless the task sets a limit: the harness's own default
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "top_n_sigma",
    "repetition_penalty",
)
_TRANSLATED = {"do_sample", "until", "max_gen_toks"}  # passed to SamplingParams under other names


@register_model("paceline")
class PacelineLM(TemplateLM):  # type: ignore[misc]
    """An ``LLM`` behind the harness's interface.

    pretrained, draft_model: see ``LLM``. batch_size: rows. max_length: tokens of a text. max_gen_toks: tokens of an
    answer. seed: of sampled answers. options: fields of EngineConfig.
    Raises ParameterError for an unknown option, and what ``LLM`` raises.
    """

    def __init__(
        self,
        pretrained: str = DEFAULT_MODEL,
        draft_model: str | None = None,
        batch_size: int | str | None = None,
        max_length: int | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = MAX_ANSWER,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        known = {field.name for field in fields(EngineConfig)}
        if unknown := sorted(options.keys() - known):
            raise ParameterError(unknown[0], options[unknown[0]], f"one of {', '.join(sorted(known))}")
        is_usual = batch_size in (None, 1, "1") or str(batch_size).partition(":")[0] == "auto"  # "auto:4": four trials
        rows = max_batch_size if is_usual else int(str(batch_size))
        limits = {"max_batch_size": rows, "max_model_len": max_length, "device": device}
        options |= {name: value for name, value in limits.items() if value is not None}
        self.llm = LLM(pretrained, draft_model, **options)
        self._answer, self._seed, self._name = max_gen_toks, seed, pretrained

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> PacelineLM:
        extra = {name: value for name, value in (additional_config or {}).items() if value is not None}
        return cls(**{**arg_dict, **extra})

    # Texts and tokens

    @property
    def _tokenizer(self) -> Tokenizer:
        return self.llm.requests.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The context of a text that has none: the beginning-of-text token, or else the end-of-text token."""
        begins = self._tokenizer.huggingface.bos_token_id
        return self.eot_token_id if begins is None else int(begins)

    @property
    def tokenizer_name(self) -> str:
        return self._name.replace("/", "__")

    @property
    def max_length(self) -> int:
        return self.llm.engine.max_model_len

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Encode a text. It gets no second beginning-of-text token if it starts with one."""
        begins = self._tokenizer.huggingface.bos_token
        spelled = begins is not None and string.startswith(begins)
        return self._tokenizer.encode(string, not spelled if add_special_tokens is None else add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if isinstance(chat_template, str):
            raise ParameterError("apply_chat_template", chat_template, "given without a name: the model's own template")
        return str(self._tokenizer.huggingface.chat_template) if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise ParameterError("add_generation_prompt", False, "True: the last message cannot be continued here")
        return self._tokenizer.render(chat_history)

    # Measurements

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **others: object
    ) -> list[tuple[float, bool]]:
        """Score continuations. Long contexts are cut at the beginning, as in the harness's own backends."""
        room = self.max_length + 1  # the last token is never an input
        pairs = [(context[-max(1, room - len(text)) :], text) for _, context, text in requests]
        prompts, continuations = [context for context, _ in pairs], [text for _, text in pairs]
        scores = self.llm.score(prompts, continuations, use_tqdm=not disable_tqdm)
        results = [(score.logprob, score.greedy) for score in scores]
        for (texts, _, _), answer in zip(requests, results, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows = [
            (number, None, *window)
            for number, request in enumerate(requests)
            for window in self._windows(request.args[0])
        ]
        scores = self._loglikelihood_tokens([window[1:] for window in windows], disable_tqdm)
        totals = [0.0] * len(requests)
        for (number, *_), (logprob, _) in zip(windows, scores, strict=True):
            totals[number] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """Contexts and continuations in which each token of the text is scored once."""
        rolling = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
        return [make_disjoint_window(window) for window in rolling]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        params = [self._params(request.args[1], number) for number, request in enumerate(requests)]
        prompts = [self._fitting(request.args[0], sampling) for request, sampling in zip(requests, params, strict=True)]
        texts = []
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        for request, output in zip(requests, outputs, strict=True):
            if output.error is not None:
                raise output.error
            texts.append(output.outputs[0].text)
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _params(self, generation_kwargs: Mapping[str, Any], number: int) -> SamplingParams:
        kwargs = dict(normalize_gen_kwargs(dict(generation_kwargs), self._answer))
        if unknown := sorted(kwargs.keys() - {*_SAMPLING, *_TRANSLATED}):
            raise ParameterError(
                unknown[0], kwargs[unknown[0]], f"left out of a task's generation_kwargs: {_SAMPLING} are known"
            )
        sampling = {name: kwargs[name] for name in _SAMPLING if name in kwargs}
        stop = [text for text in kwargs["until"] if text]
        return SamplingParams(
            seed=self._seed + number, max_tokens=kwargs["max_gen_toks"], stop=stop, **{"temperature": 0.0, **sampling}
        )

    def _fitting(self, text: str, params: SamplingParams) -> list[int]:
        """Encode a prompt, and cut its beginning if there is no room for the answer."""
        room = self.max_length - params.max_tokens
        if room < 1:
            raise ParameterError("max_gen_toks", params.max_tokens, f"fewer than max_length, {self.max_length}")
        return self.tok_encode(text)[-room:]
