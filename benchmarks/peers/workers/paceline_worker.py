"""paceline through its Python API. Prefill: until the last row's first token, from the results' own metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common import Run, Setup, serve, versions

from paceline import LLM, SamplingParams

DRAFTERS: Mapping[str, str | None] = {"plain": None, "draft": "model", "ngram": "ngram", "hybrid": "hybrid"}
PRECISIONS: Mapping[str, Mapping[str, str]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


class Paceline:
    """One set of weights; an engine for each (mode, batch, k), built before its first run."""

    def __init__(self, setup: Setup) -> None:
        options: dict[str, Any] = {**PRECISIONS[setup.precision], **setup.options}
        self._llm = LLM(
            setup.target,
            draft_model=setup.draft,
            max_batch_size=setup.max_batch,
            max_model_len=setup.max_tokens_of_row,
            threads=setup.threads,
            prefix_cache=False,  # prompts repeat, and prefill is measured
            **options,
        )
        self._engines: dict[tuple[str, int, int | str], LLM] = {}
        self.info = {
            "versions": versions("torch", "transformers") | {"paceline": _version()},
            "precision": str(options),
            "notes": [self._llm.engine.describe()],
        }

    def run(self, mode: str, prompts: Sequence[Sequence[int]], max_tokens: int, k: int) -> Run:
        llm = self._engine(mode, len(prompts), k)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        results = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        outputs = [result.outputs[0] for result in results]
        metrics = [output.metrics for output in outputs]
        start = min(m.arrival_time for m in metrics)
        return Run(
            prefill_s=max(m.first_token for m in metrics) - start,
            total_s=max(m.finished for m in metrics) - start,
            output_ids=[output.token_ids for output in outputs],
            rounds=max(m.rounds for m in metrics),
            drafted=sum(m.drafted for m in metrics),
            accepted=sum(m.accepted for m in metrics),
        )

    def _engine(self, mode: str, batch: int, k: int | str) -> LLM:
        key = (mode, batch, k)
        if key not in self._engines:
            speculation = {} if mode == "plain" else {"num_speculative_tokens": k}
            self._engines[key] = self._llm.with_options(drafter=DRAFTERS[mode], max_batch_size=batch, **speculation)
        return self._engines[key]


def _version() -> str:
    import paceline

    return paceline.__version__


if __name__ == "__main__":
    serve(Paceline)
