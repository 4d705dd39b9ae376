"""Count the kernels that prompts and drafts of new lengths would compile; test_compile.py runs it without the
    interpreter.

Nothing is compiled or launched: a driver without a device chooses the kernels, and a hook records what would be
    compiled. Prints the number after warm-up, which is the number of stalls that users would see.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from kernels.gpu.rows import make_batch
from paceline.core.batch import Batch
from paceline.core.draft_tensors import DraftTensors
from paceline.core.rows import StepFeatures
from paceline.core.slots import Slots
from paceline.core.values import Purpose
from paceline.kernels.attention.ragged import FIXED, RaggedAttention, Tiles
from paceline.kernels.gpu import linear
from paceline.kernels.gpu.accept import coupled, own_logprobs, rejection
from paceline.kernels.gpu.draw import Noise, draw
from paceline.kernels.gpu.linear import LARGEST_ROWS, Linears
from paceline.kernels.gpu.rotary import turn_and_store
from paceline.kernels.gpu.shape import shaped
from paceline.kernels.gpu.state import Norm, PackedHeads
from paceline.kernels.gpu.steps import TritonSteps
from paceline.kernels.spec import LinearWeights

HEADS, GROUPS, DIM, CACHE = 8, 4, 64, 2048
WARM_UP = (1, 16, 32, 64, LARGEST_ROWS)  # a decode step, and prompts whose tiles are of the other sizes
seen: set[str] = set()


class NoDevice:
    """The driver for choosing kernels; CPU tensors stand for the device's."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def note(*, key: Any, fn: Any, **_: Any) -> bool:
    """Called where a kernel would be compiled; True prevents it."""
    seen.add(f"{fn.name} {key}")
    return True


def read_prompt(attention: RaggedAttention, linears: Linears, rows: int, length: int, before: int) -> None:
    """One layer's kernels for ``rows`` prompts of ``length`` new tokens after ``before`` others."""
    table = torch.zeros(rows, length, HEADS + 2 * GROUPS, DIM, dtype=torch.bfloat16)
    angles = torch.zeros(rows, length, DIM, dtype=torch.bfloat16)
    cache = torch.zeros(2, rows, GROUPS, CACHE, DIM, dtype=torch.bfloat16)
    positions = (before + torch.arange(length)).repeat(rows, 1)
    packed = PackedHeads(table, HEADS, GROUPS, (angles, angles), None, 0.0)
    plan = attention.plan(positions, before + length)
    plan.cache_rows = Slots(torch.arange(rows))
    q = turn_and_store(packed, plan, cache[0], cache[1])
    attention.attend(q, cache[0], cache[1], plan)
    x = torch.zeros(min(LARGEST_ROWS, rows * length), 256, dtype=torch.bfloat16)
    steps = TritonSteps()
    steps.gate(steps.add_norm(x, x, Norm(256, 1e-5, x[0]))[1], "silu")
    linears(LinearWeights(torch.zeros(128, 256, dtype=torch.bfloat16)))(x)


def finish_round(batch: Batch, k: int, *, independent: bool) -> None:
    """The kernels that follow the logits of a round of ``k`` draft tokens, and those of the last draft token's draw."""
    rows = batch.state(batch.rows)
    logits = torch.zeros(rows.rows, k + 1, batch.vocab_size)
    tokens, counts = torch.zeros(rows.rows, k, dtype=torch.int64), torch.zeros(rows.rows, dtype=torch.int64)
    draft = DraftTensors(tokens, counts, logits=logits[:, :k] if independent and k else None)
    asks = StepFeatures(adjusts=True, cuts=True)
    logits = shaped(logits, rows, asks, tokens)
    record = (coupled if draft.logits is None else rejection)(draft, logits, rows)
    own_logprobs(logits, record)
    if k:
        draw(shaped(logits[:, :1], rows, asks, tokens, k - 1), Noise.of(rows), k - 1, Purpose.DRAW)


def count_of_drafts(lengths: Sequence[int]) -> int:
    """Kernels that rounds of these lengths would compile."""
    before, batch = len(seen), make_batch([0.0, 1.0], 5000)
    for k in lengths:
        for independent in (False, True):
            finish_round(batch, k, independent=independent)
    return len(seen) - before


def main() -> None:
    triton.runtime.driver.set_active(NoDevice())
    triton.knobs.runtime.jit_cache_hook = note
    linear.is_right = lambda *_: True  # products are not computed
    rng = random.Random(1)
    sides: list[tuple[Tiles, str, bool]] = [(Tiles(), "int8", False), (Tiles(), "int4", False), (FIXED, "same", True)]
    for tiles, to, deterministic in sides:
        attention, linears = RaggedAttention(tiles=tiles), Linears(to, deterministic=deterministic)  # type: ignore[arg-type]
        for length in WARM_UP:
            read_prompt(attention, linears, 1, length, 0)
        warm = len(seen)
        assert warm, "nothing was noted: the hook has no effect"
        for _ in range(30):
            read_prompt(attention, linears, rng.randint(1, 5), rng.randint(1, 700), rng.choice([0, 0, 16, 301, 1024]))
        print(len(seen) - warm, file=sys.stdout)
    assert count_of_drafts([0, 1, 3, 7, 15, 16]) > 0
    print(count_of_drafts(range(17)), file=sys.stdout)
    print("\n".join(sorted(seen)), file=sys.stderr)


if __name__ == "__main__":
    main()
