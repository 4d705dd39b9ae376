"""transformers ``generate``: plain, with an assistant model, with prompt lookup (the last two: batch 1 only).

Prefill: until the first call of a stopping criterion, at the end of the first step (with an assistant: the first round,
    which prefills both models). Rounds are the criterion's calls; acceptance is derived from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from common import FirstTokens, Run, Setup, serve, versions
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

PAD = 0


class Clock(StoppingCriteria):
    """A criterion that never stops; counts the steps and records the end of the first."""

    def __init__(self) -> None:
        self.first, self.steps = FirstTokens(), 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.first.seen(0)
        self.steps += 1
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Transformers:
    """Target and, for the mode "draft", the assistant, both in bfloat16."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self._target = _load(setup.target)
        self._draft = _load(setup.draft) if setup.draft is not None and "draft" in setup.modes else None
        self.info = {"versions": versions("transformers", "torch"), "precision": "bfloat16 weights and activations"}

    @torch.inference_mode()
    def run(self, mode: str, prompts: Sequence[Sequence[int]], max_tokens: int, k: int) -> Run:
        ids, mask = _left_padded(prompts)
        speculation = self._speculation(mode, k)
        clock = Clock()
        output = self._target.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([clock]),
            **speculation,
        )
        total = clock.first.total()
        rows = output[:, ids.shape[1] :].tolist()
        return _result(clock, total, rows, k if speculation else 0)

    def _speculation(self, mode: str, k: int) -> Mapping[str, Any]:
        if mode == "ngram":
            return {"prompt_lookup_num_tokens": k}
        if mode == "draft":
            assert self._draft is not None
            settings = self._draft.generation_config
            settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = k, "constant"
            settings.assistant_confidence_threshold = 0.0
            return {"assistant_model": self._draft}
        return {}


def _result(clock: Clock, total: float, rows: list[list[int]], k: int) -> Run:
    gained = sum(map(len, rows)) - clock.steps * len(rows)
    return Run(
        prefill_s=clock.first.prefill(),
        total_s=total,
        output_ids=rows,
        rounds=clock.steps,
        drafted=clock.steps * k if k else None,
        accepted=gained if k else None,
        notes=["acceptance derived from the number of rounds"] if k else [],
    )


def _load(path: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


if __name__ == "__main__":
    serve(Transformers)
