"""How many tokens of its vocabulary a draft model scores: time saved against tokens that can no longer be drafted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config import DEFAULT_SPECULATION_LENGTH, EngineConfig
from paceline.drafters.heads.decoder import HeadModel
from paceline.errors import ParameterError
from paceline.models.base import AnyModel, FlatModel, PassBytes, Shortenable

# Fraction of the answers' tokens that a subset of the vocabulary covers, by its size: the most frequent tokens
# (FOLLOWING) or the smallest ids (FIXED). Counted on 8,521 tokens that Qwen2.5-Coder-1.5B (151,936 tokens) wrote; see
# docs/drafters.md and benchmarks/short_vocabulary.py.
FOLLOWING: Mapping[int, float] = {8192: 0.91, 16384: 0.94, 32768: 0.97, 65536: 0.99}
FIXED: Mapping[int, float] = {8192: 0.80, 16384: 0.88, 32768: 0.93, 65536: 0.97}
USUAL_ACCEPTANCE = 0.7  # of a draft token whose predecessors were accepted; the choice hardly depends on it
LEAST_GAIN = 1.02  # coverage is an estimate, so a smaller gain is left


@dataclass(frozen=True)
class DraftCost:
    """Costs in any one unit: milliseconds that were measured, or bytes of weights that are read.

    layers: a draft pass without its output head. token: the head, for each token that it scores. verify: a pass of the
    target.
    """

    layers: float
    token: float
    verify: float

    def round(self, size: int, k: int) -> float:
        """Return the cost of a round with ``k`` draft tokens, chosen from ``size`` tokens."""
        return k * (self.layers + size * self.token) + self.verify


def tokens_per_round(acceptance: float, k: int) -> float:
    """Return the mean tokens that a row gains in a round of ``k`` draft tokens (2211.17192, equation 1)."""
    return sum(acceptance**count for count in range(k + 1))


def best_size(vocabulary: int, cost: DraftCost, coverage: Mapping[int, float], k: int) -> int:
    """Return the size of a subset with the most tokens per cost; 0 if none beats the whole vocabulary.

    coverage: by size, the fraction of the target's tokens in the subset. k: draft tokens a round.
    """

    def worth(size: int, covered: float) -> float:
        return tokens_per_round(USUAL_ACCEPTANCE * covered, k) / cost.round(size, k)

    worths = {size: worth(size, covered) for size, covered in coverage.items() if size < vocabulary}
    best = max(worths, key=worths.__getitem__, default=0)
    return best if best and worths[best] >= LEAST_GAIN * worth(vocabulary, 1.0) else 0


def draft_vocab_size(target: AnyModel, draft: AnyModel | None, config: EngineConfig) -> int:
    """Return the number of tokens that the draft model or head scores; 0: its whole vocabulary.

    A pass reads its weights once, so bytes stand for milliseconds: both draft model and target run at the same rate,
    and the choice is the same on every machine. Raises ParameterError for a size that this drafter cannot have.
    """
    size, kind = config.draft_vocab_size, config.drafter_kind
    if size == 0 or draft is None or not config.asks_draft_model or not config.draft_tokens:
        return 0
    reason = _why_whole(draft, getattr(kind, "scores_subset", False), config)
    if size is not None:
        if reason is not None:
            raise ParameterError("draft_vocab_size", size, f"None or 0 here: {reason}")
        return size
    pass_bytes = None if reason is not None else _pass_bytes(draft)
    beside = _pass_bytes(target)
    if pass_bytes is None or beside is None or not isinstance(draft, FlatModel | HeadModel):
        return 0
    verify = beside.layers + target.vocab_size * beside.token
    k = config.num_speculative_tokens
    length = k if isinstance(k, int) else DEFAULT_SPECULATION_LENGTH
    coverage = FIXED if config.acceptance == "rejection" else FOLLOWING
    return best_size(draft.vocab_size, DraftCost(pass_bytes.layers, pass_bytes.token, verify), coverage, k=length)


def short_head_bytes(target: AnyModel, draft: AnyModel | None, config: EngineConfig) -> int:
    """Return the bytes of the output head that scores the draft vocabulary; 0 without one."""
    pass_bytes = None if draft is None else _pass_bytes(draft)
    return 0 if pass_bytes is None else draft_vocab_size(target, draft, config) * pass_bytes.token


def _pass_bytes(model: AnyModel) -> PassBytes | None:
    return model.pass_bytes if isinstance(model, Shortenable) else None


def _why_whole(draft: AnyModel, scores_subset: bool, config: EngineConfig) -> str | None:
    """Return why the whole vocabulary is scored; None if a part can be."""
    if not scores_subset:
        return f"the drafter {config.drafter!r} scores its whole vocabulary"
    if draft.device.type != "cpu" or config.rounds == "device":
        return "rounds of a device score the whole vocabulary"
    if _pass_bytes(draft) is None:
        own = "a short vocabulary of its own, or capped logits"
        return f"{draft.name} has {own if isinstance(draft, HeadModel) else 'no output head that can be divided'}"
    return None
