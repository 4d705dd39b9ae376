"""openvino-genai's continuous batching, one mode per worker (its pipeline takes one speculative configuration).

This worker drives the pipeline's own step loop; prefill: until the end of the step that gave the last row its first
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from common import FirstTokens, Run, Setup, serve, versions


class OpenVino:
    """One pipeline in one mode; int8 weights, activations and cache as the CPU plugin chooses."""

    def __init__(self, setup: Setup) -> None:
        (self._mode,) = setup.modes
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup.threads, **setup.options}
        if self._mode == "draft":
            properties["draft_model"] = genai.draft_model(setup.draft, "CPU", INFERENCE_NUM_THREADS=setup.threads)
        if self._mode == "ngram":
            properties["prompt_lookup"] = True
        self._pipeline = genai.ContinuousBatchingPipeline(setup.target, _scheduler(setup), "CPU", properties)
        self._requests = 0
        self.info = {
            "versions": versions("openvino", "openvino-genai"),
            "precision": f"int8 weights (nncf), activations and cache as the CPU plugin chooses: {_chosen()}",
        }

    def run(self, mode: str, prompts: Sequence[Sequence[int]], max_tokens: int, k: int) -> Run:
        config = self._config(max_tokens, k)
        first = FirstTokens()
        handles = [self._add(prompt, config) for prompt in prompts]
        rows: list[list[int]] = [[] for _ in prompts]
        steps = row_steps = 0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            steps += 1
            for row, handle in enumerate(handles):
                row_steps += _drain(handle, rows[row])
                if rows[row]:
                    first.seen(row)
        return self._result(first, rows, steps, row_steps, k)

    def _result(self, first: FirstTokens, rows: list[list[int]], steps: int, row_steps: int, k: int) -> Run:
        """The result of a run.

        The pipeline does not report drafted tokens. With a draft model they are k per row and step after the first.
        """
        decoding_steps = row_steps - len(rows)
        return Run(
            prefill_s=first.prefill(),
            total_s=first.total(),
            output_ids=rows,
            rounds=steps,
            drafted=k * decoding_steps if self._mode == "draft" else None,
            accepted=sum(map(len, rows)) - row_steps if self._mode != "plain" else None,
            notes=["acceptance derived from the number of steps"] if self._mode == "draft" else [],
        )

    def _add(self, prompt: Sequence[int], config: Any) -> Any:
        self._requests += 1
        return self._pipeline.add_request(self._requests, ov.Tensor(np.array([prompt], dtype=np.int64)), config)

    def _config(self, max_tokens: int, k: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        if self._mode != "plain":
            config.num_assistant_tokens = k
        if self._mode == "ngram":
            config.max_ngram_size = 3
        return config


def _drain(handle: Any, row: list[int]) -> bool:
    """Take a row's tokens of a step; returns whether there were any."""
    before = len(row)
    while handle.can_read():
        for output in handle.read().values():
            row.extend(output.generated_ids)
    return len(row) > before


def _scheduler(setup: Setup) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.cache_size, scheduler.enable_prefix_caching = setup.max_batch, 1, False
    return scheduler


def _chosen() -> str:
    core = ov.Core()
    names = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
    return ", ".join(f"{name.lower()}={core.get_property('CPU', name)}" for name in names)


if __name__ == "__main__":
    serve(OpenVino)
