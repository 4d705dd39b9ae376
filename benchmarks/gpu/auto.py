"""The engine with ``auto`` compared with the engine without speculation, on the same requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from benchmarks.gpu.cells import Setting

from paceline.config import SYNTHETIC, EngineConfig, SamplingParams
from paceline.engine.engine import Engine, Models, Request
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.config import Length
    from paceline.models.transformer import Transformer

_REPEATS = 2


@dataclass(frozen=True)
class AutoRun:
    """Tokens per second of all rows together, without prefill: the better of two runs each."""

    plain: float
    auto: float
    acceptance: float | None  # accepted / drafted in the run of auto; None if nothing was drafted

    @property
    def over_plain(self) -> float:
        return self.auto / self.plain


def auto_over_plain(target: Transformer, draft: Transformer, setting: Setting, tokens: int) -> AutoRun:
    """Generate ``tokens`` tokens per row, once plainly and once with auto; acceptance is synthetic."""
    models = Models(target, draft)
    plain, _ = _tokens_a_second(models, setting, tokens, 0)
    auto, acceptance = _tokens_a_second(models, setting, tokens, "auto")
    return AutoRun(plain, auto, acceptance)


def _tokens_a_second(models: Models, setting: Setting, tokens: int, length: Length) -> tuple[float, float | None]:
    config = EngineConfig(
        drafter="model",
        num_speculative_tokens=length,
        acceptance=f"{SYNTHETIC}{setting.rate}",
        benchmark=True,
        attention=setting.attention,
        rounds="device",
        max_batch_size=setting.rows,
        max_model_len=setting.context + tokens,
        device=str(models.target.device),
    )
    engine = Engine(models, config)
    runs = [_run(engine, setting, tokens) for _ in range(_REPEATS)]
    return max(runs, key=lambda run: run[0])


def _run(engine: Engine, setting: Setting, tokens: int) -> tuple[float, float | None]:
    """Tokens per second from the step after which all rows decode to the last token, and the acceptance rate."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = _prompts(setting, engine.models.target.vocab_size)
    outputs = [engine.add(Request(prompt, params)) for prompt in prompts]
    if not _all_decode(engine, setting.rows):
        raise ParameterError("tokens", tokens, "enough tokens that all rows decode at the same time")
    answers = [output.outputs[0] for output in outputs]
    before, began = sum(len(answer.token_ids) for answer in answers), time.perf_counter()
    while engine.busy:
        engine.step()
    took = time.perf_counter() - began
    drafted = sum(answer.metrics.drafted for answer in answers)
    accepted = sum(answer.metrics.accepted for answer in answers)
    rate = (sum(len(answer.token_ids) for answer in answers) - before) / took
    return rate, accepted / drafted if drafted else None


def _all_decode(engine: Engine, rows: int) -> bool:
    """Step until ``rows`` rows decode at once; False if that never happens."""
    while engine.busy and len(engine.scheduler.running) < rows:
        engine.step()
    return len(engine.scheduler.running) == rows


def _prompts(setting: Setting, vocab_size: int) -> Sequence[list[int]]:
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(vocab_size, (setting.rows, setting.context), generator=generator)
    lines: list[list[int]] = table.tolist()
    return lines
