"""The engine with ``auto`` compared with the engine without speculation, and both with transformers, in turn."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.gpu.cells import Setting

from paceline.config import SYNTHETIC, EngineConfig, SamplingParams
from paceline.engine.engine import Engine, Models, Request
from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.config import Length
    from paceline.models.description.spec import DecoderSpec
    from paceline.models.torch.transformer import Transformer

_REPEATS = 3
_CAPTURE_SECONDS = 60.0  # more than it takes
_FEWEST_TOKENS = 8  # of the call of transformers that is subtracted


@dataclass(frozen=True)
class Captured:
    """Rounds that were captured ahead, the seconds it took, and the bytes of the device's memory."""

    programs: int
    seconds: float
    bytes: int

    def __str__(self) -> str:
        return f"{self.programs} programs captured ahead in {self.seconds:.1f} s, {self.bytes / 2**20:.0f} MiB"


@dataclass(frozen=True)
class Rounds:
    """The rounds of a run that had ``rows`` rows and ``k`` draft tokens for each; seconds: of all of them together."""

    rows: int
    k: int
    rounds: int
    seconds: float


@dataclass(frozen=True)
class AutoRun:
    """Tokens per second of all rows together, without prefill: medians of three runs each, in turn.

    first: auto's first run in a fresh engine, which captures every round that it needs. The other runs come after the
    remaining rounds were captured ahead. acceptance: accepted / drafted; None if nothing was drafted.
    rounds: of auto's last run. fixed: the engine with ``fixed_length`` draft tokens in every round.
    """

    plain: float
    auto: float
    acceptance: float | None
    first: float
    captured: Captured | None = None
    rounds: list[Rounds] = field(default_factory=list)
    fixed: float | None = None
    fixed_length: int | None = None

    @property
    def over_plain(self) -> float:
        return self.auto / self.plain

    @property
    def first_over_plain(self) -> float:
        return self.first / self.plain

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "over_plain": self.over_plain, "first_over_plain": self.first_over_plain}


def auto_over_plain(
    target: Transformer, draft: Transformer, setting: Setting, tokens: int, fixed_length: int | None = None
) -> AutoRun:
    """Generate ``tokens`` tokens per row, plainly, with auto and with a fixed length, in turn; acceptance is synthetic.

    fixed_length: draft tokens per round; None: no such runs.
    """
    models = Models(target, draft)
    plain, auto = (Decoding(models, setting, tokens, length) for length in (0, "auto"))
    runs = {"plain": plain.run, "auto": auto.run}
    if fixed_length is not None:
        runs["fixed"] = Decoding(models, setting, tokens, fixed_length).run
        runs["fixed"]()  # captures
    plain.run()
    first = auto.run()
    captured = auto.capture()
    medians = in_turn(runs)
    fixed = medians.get("fixed")
    return AutoRun(
        medians["plain"], medians["auto"], auto.acceptance, first, captured, auto.rounds, fixed, fixed_length
    )


def in_turn(runs: Mapping[str, Callable[[], float]], repeats: int = _REPEATS) -> dict[str, float]:
    """Call each in turn, ``repeats`` times -> the median of each."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            found[name].append(run())
    return {name: statistics.median(values) for name, values in found.items()}


class Decoding:
    """An engine that decodes the setting's rows: random prompts, greedy, ``tokens`` tokens each."""

    def __init__(self, models: Models, setting: Setting, tokens: int, length: Length) -> None:
        self._setting, self._tokens = setting, tokens
        self.acceptance: float | None = None  # of the last run
        self.rounds: list[Rounds] = []  # of the last run
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
        self._engine = Engine(models, config)

    def run(self) -> float:
        """Tokens per second from the step after which all rows decode to the last token."""
        engine = self._engine
        params = SamplingParams(temperature=0, max_tokens=self._tokens, ignore_eos=True)
        prompts = random_prompts(self._setting, engine.models.target.vocab_size)
        outputs = [engine.add(Request(prompt, params)) for prompt in prompts]
        if not self._all_decode():
            raise ParameterError("tokens", self._tokens, "enough tokens that all rows decode at the same time")
        answers = [output.outputs[0] for output in outputs]
        before, began = sum(len(answer.token_ids) for answer in answers), time.perf_counter()
        self._finish()
        took = time.perf_counter() - began
        drafted = sum(answer.metrics.drafted for answer in answers)
        self.acceptance = sum(answer.metrics.accepted for answer in answers) / drafted if drafted else None
        return (sum(len(answer.token_ids) for answer in answers) - before) / took

    def _finish(self) -> None:
        """Step until all rows have ended; each step processes a round, and takes about as long."""
        engine, found = self._engine, defaultdict[tuple[int, int], list[float]](list)
        while engine.busy:
            began = time.perf_counter()
            engine.step()
            if engine.last_verdict is not None:
                drafted = engine.last_verdict.drafted
                found[len(drafted), max(drafted)].append(time.perf_counter() - began)
        self.rounds = [Rounds(*key, len(seconds), sum(seconds)) for key, seconds in sorted(found.items())]

    def _all_decode(self) -> bool:
        """Step until all rows decode at once; False if that never happens."""
        engine, rows = self._engine, self._setting.rows
        while engine.busy and len(engine.scheduler.running) < rows:
            engine.step()
        return len(engine.scheduler.running) == rows

    def capture(self) -> Captured | None:
        """Capture the likely rounds that are not captured yet; None where nothing is captured."""
        before = _used_bytes()
        ahead = self._engine.capture_ahead(_CAPTURE_SECONDS)
        return None if ahead is None else Captured(ahead.captured, ahead.seconds, _used_bytes() - before)


def _used_bytes() -> int:
    """Bytes of the device's memory that are in use."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def random_prompts(setting: Setting, vocab_size: int) -> Sequence[list[int]]:
    """Prompts of ``setting.context`` random tokens."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(vocab_size, (setting.rows, setting.context), generator=generator)
    lines: list[list[int]] = table.tolist()
    return lines


def beside_transformers(target: Transformer, draft: Transformer, setting: Setting, tokens: int) -> dict[str, float]:
    """Tokens per second of plain decoding, of ``auto`` and of transformers' plain ``generate``, in turn.

    transformers has a Llama of the target's sizes, also with random weights. Its prefill is subtracted: the time of a
    call for few tokens. Likely rounds are captured before; acceptance is synthetic.
    """
    models = Models(target, draft)
    plain, auto = (Decoding(models, setting, tokens, length) for length in (0, "auto"))
    auto.capture()
    generate = _transformers(target.spec, setting, target.device)

    def theirs() -> float:
        few, all_ = generate(_FEWEST_TOKENS), generate(_FEWEST_TOKENS + tokens)
        return setting.rows * tokens / (all_ - few)

    runs = {"plain": plain.run, "auto": auto.run, "transformers": theirs}
    in_turn(runs, 1)  # warms up
    return in_turn(runs)


def _transformers(config: DecoderSpec, setting: Setting, device: torch.device) -> Callable[[int], float]:
    """A function that generates a number of tokens per row and returns the seconds."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    layer = config.layers[0]
    sizes = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=layer.dense.width,
        num_hidden_layers=len(config.layers),
        num_attention_heads=layer.attention.heads,
        num_key_value_heads=layer.attention.kv_heads,
        max_position_embeddings=config.max_positions,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(sizes, dtype=torch.bfloat16).eval()
    prompts = torch.tensor(random_prompts(setting, config.vocab_size), device=device)
    mask = torch.ones_like(prompts)

    @torch.inference_mode()
    def generate(tokens: int) -> float:
        began = time.perf_counter()
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        model.generate(prompts, attention_mask=mask, **options).cpu()
        return time.perf_counter() - began

    return generate
