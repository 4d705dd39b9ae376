"""Training of heads and draft models: the data and the hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.config.help import Help, described
from paceline.config.limits import MAX_COUNT, MAX_PREFILL_CHUNK, MAX_ROWS, MAX_SECONDS, Count, Share
from paceline.config.ranges import Number, OneOf, Whole, check_fields

HEAD_KINDS = ("feature", "parallel", "hidden_transfer", "chimera", "dspark")
DRAFT_KINDS = (*HEAD_KINDS, "model")


@described
@dataclass(frozen=True)
class DraftData:
    """Training data: texts that the target writes itself."""

    tokens: Annotated[int, Whole(1, MAX_COUNT), Help("Minimum tokens of prompts and answers.")] = 400_000
    seed: Annotated[int, Whole(0, 2**63 - 1), Help("Seed of all draws; the same seed gives the same head.")] = 0
    prompt_tokens: Annotated[Count, Help("Maximum tokens of a prompt that the target writes.")] = 128
    answer_tokens: Annotated[Count, Help("Maximum tokens of an answer.")] = 256
    held_out: Annotated[int, Whole(1, MAX_COUNT), Help("Conversations for evaluation only.")] = 64
    shard: Annotated[
        int, Whole(1, MAX_ROWS), Help("Conversations of a file; an interrupted run loses at most one file.")
    ] = 128
    disk_budget: Annotated[float, Number(1e-6, 2**20), Help("GiB that data and checkpoints may take.")] = 20.0

    TEMPERATURES = (0.0, 0.7, 1.0)  # of the answers, in turn; held-out answers are greedy

    def __post_init__(self) -> None:
        check_fields(self)


@described
@dataclass(frozen=True)
class DraftTraining:
    """Options for training a head or a draft model."""

    kind: Annotated[
        str,
        OneOf(DRAFT_KINDS),
        Help(
            "feature: a head that drafts token by token (EAGLE-3); parallel: all tokens in one pass (P-EAGLE); "
            "hidden_transfer: with the target's last layers, all tokens in one pass (2404.12022); chimera: with "
            "trigrams of tokens and a residual head per draft token (2402.15758); dspark: a block drafter, with all "
            "tokens in one pass and each tied to the one before; model: a draft model of some of the target's layers."
        ),
    ] = "feature"
    epochs: Annotated[float, Number(1e-3, 1e6), Help("Passes over the data.")] = 8.0
    minutes: Annotated[
        float | None,
        Number(1e-3, MAX_SECONDS / 60),
        Help(
            "Minutes of training in place of --epochs, writing data not included.",
            more="The head then depends on the machine's speed, too.",
        ),
    ] = None
    layers: Annotated[
        int | None,
        Whole(1, MAX_COUNT),
        Help(
            "Layers of a draft model, by default one in eight of the target's and at least two, or of a block drafter, "
            "by default two; heads refuse it."
        ),
    ] = None
    vocab: Annotated[
        int,
        Whole(2, MAX_COUNT),
        Help(
            "Most frequent tokens, the only ones that a head can draft.",
            more="A draft model can draft all tokens, and compares these in training.",
        ),
    ] = 8192
    mlp_width: Annotated[int | None, Whole(1, MAX_COUNT), Help("Width of a head's MLP. Default: the target's.")] = None
    learning_rate: Annotated[
        float,
        Number(1e-7, 1),
        Help(
            "Peak learning rate of AdamW.",
            more="It rises over the first ``warm_up`` of all steps, then falls along half a cosine.",
        ),
    ] = 2e-3
    warm_up: Annotated[Share, Help("Fraction of all steps in which the learning rate rises.")] = 0.03
    batch_tokens: Annotated[int, Whole(8, MAX_PREFILL_CHUNK), Help("Tokens of a training step.")] = 2048
    clip: Annotated[float, Number(1e-3, 1e3), Help("Maximum norm of a gradient.")] = 1.0
    unroll: Annotated[int, Whole(1, 8), Help("Draft tokens of a draft that are trained (test-time training).")] = 3
    decay: Annotated[Share, Help("Weight of each draft token's loss, relative to the one before.")] = 0.8
    alone: Annotated[
        Share,
        Help(
            "Fraction of all steps, from the first, that train one draft token alone.",
            more="Block drafters and draft models train all of them from the first step.",
        ),
    ] = 1 / 3
    total_variation: Annotated[
        Share, Help("Fraction of all steps, to the last, that train acceptance in place of the target's distribution.")
    ] = 0.25
    evaluate_every: Annotated[
        float, Number(1e-4, MAX_SECONDS), Help("Minutes between two evaluations on the held-out texts.")
    ] = 3.0
    checkpoint_every: Annotated[float, Number(1e-4, MAX_SECONDS), Help("Minutes between two checkpoints.")] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
