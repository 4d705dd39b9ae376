"""What a head learns from, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.config.limits import MAX_COUNT, MAX_PREFILL_CHUNK, MAX_ROWS, MAX_SECONDS, Count, Share
from paceline.config.ranges import Number, OneOf, Whole, check_fields

HEAD_KINDS = ("feature", "parallel", "hidden_transfer")
DRAFT_KINDS = (*HEAD_KINDS, "model")


@dataclass(frozen=True)
class DraftData:
    """What a target's head learns from: texts that the target writes itself.

    tokens: at least so many, of prompts and answers. seed: of everything that is drawn.
    prompt_tokens, answer_tokens: most of each that are written. held_out: conversations that nothing is learnt from.
    shard: conversations of a file; what an interrupted run loses is one file at most.
    disk_budget: GiB that data and checkpoints may take.
    """

    tokens: Annotated[int, Whole(1, MAX_COUNT)] = 400_000
    seed: Annotated[int, Whole(0, 2**63 - 1)] = 0
    prompt_tokens: Count = 128
    answer_tokens: Count = 256
    held_out: Annotated[int, Whole(1, MAX_COUNT)] = 64
    shard: Annotated[int, Whole(1, MAX_ROWS)] = 128
    disk_budget: Annotated[float, Number(1e-6, 2**20)] = 20.0

    TEMPERATURES = (0.0, 0.7, 1.0)  # of the answers, in turn; held-out answers are greedy

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class DraftTraining:
    """How a head learns.

    kind: feature reads its own draft tokens one by one (EAGLE-3), parallel a mask for each, all in one pass (P-EAGLE).
        hidden_transfer maps a late hidden state of the target to pseudo states of the next tokens (2404.12022). model
        is no head: some of the target's layers are distilled to a draft model.
    layers: of a draft model; None: one for eight of the target's, two at least. Other kinds refuse it.
    epochs: how often it sees every text. minutes: train for so long instead, however often that is; the head then
        depends on the machine's speed, too.
    vocab: tokens that it can say, the most frequent ones; a draft model can say all, and looks at these as it learns.
        mlp_width: None is the target's.
    learning_rate: AdamW's highest, after a warm-up over the first ``warm_up`` of all work; then half a cosine down.
    batch_tokens: of a step. clip: the longest gradient.
    unroll: draft tokens of a draft that are learnt (test-time training), each weighing ``decay`` of the one before; one
        alone in the first ``alone`` of all work. total_variation: the last share of it, which learns acceptance itself
        instead of the target's distribution.
    evaluate_every: minutes between two looks at the held-out texts. checkpoint_every: likewise, between checkpoints.
    """

    kind: Annotated[str, OneOf(DRAFT_KINDS)] = "feature"
    epochs: Annotated[float, Number(1e-3, 1e6)] = 8.0
    minutes: Annotated[float, Number(1e-3, MAX_SECONDS / 60)] | None = None
    layers: Annotated[int, Whole(1, MAX_COUNT)] | None = None
    vocab: Annotated[int, Whole(2, MAX_COUNT)] = 8192
    mlp_width: Annotated[int, Whole(1, MAX_COUNT)] | None = None
    learning_rate: Annotated[float, Number(1e-7, 1)] = 2e-3
    warm_up: Share = 0.03
    batch_tokens: Annotated[int, Whole(8, MAX_PREFILL_CHUNK)] = 2048
    clip: Annotated[float, Number(1e-3, 1e3)] = 1.0
    unroll: Annotated[int, Whole(1, 8)] = 3
    decay: Share = 0.8
    alone: Share = 1 / 3
    total_variation: Share = 0.25
    evaluate_every: Annotated[float, Number(1e-4, MAX_SECONDS)] = 3.0
    checkpoint_every: Annotated[float, Number(1e-4, MAX_SECONDS)] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
