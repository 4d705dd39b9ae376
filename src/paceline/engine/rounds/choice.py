"""The choice of a place for each round, and every reason why a place cannot run one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paceline.core.acceptance import RULES, AcceptanceRule, supports_trees
from paceline.core.batch import Batch
from paceline.core.draft import Draft
from paceline.core.rows import DEVICE_BIASES, SamplingRows
from paceline.drafters.heads.native import NativeFusedStates
from paceline.engine.rounds.place import Obstacle, RoundPlace
from paceline.engine.rounds.round import Speculation
from paceline.models.base import AnyModel, FlatModel
from paceline.models.decoding.decoder import Decoder

log = logging.getLogger("paceline")


class RoundChoice:
    """The places of an engine, in order of preference: captured graphs, the CPU kernels, step by step.

    graphs: none if the engine has none; the last of them says why a round is no graph. kernels: None if the engine has
        none. steps: runs every round.
    reasons: why rounds were not run as captured graphs so far.
    """

    def __init__(self, steps: RoundPlace, kernels: RoundPlace | None = None, graphs: Sequence[RoundPlace] = ()) -> None:
        self.steps, self.kernels, self.graphs = steps, kernels, graphs
        self.reasons: dict[str, None] = {}
        self._kernel_reasons: dict[str, None] = {}

    @property
    def places(self) -> list[RoundPlace]:
        return [place for place in (*self.graphs, self.kernels, self.steps) if place is not None]

    def place_for(self, batch: Batch) -> RoundPlace:
        """Return the first place that can run the next round of the batch. Logs each obstacle once."""
        obstacle = None
        for place in self.graphs:
            obstacle = place.why_not(batch)
            if obstacle is None:
                return place
        if obstacle is not None:
            graph = self.graphs[-1].name
            text = f"rounds run on the {self.steps.name} while a request needs it (%s); the {graph} runs all others"
            log_once(self.reasons, obstacle, text, logging.WARNING)
        if self.kernels is not None:
            obstacle = self.kernels.why_not(batch)
            if obstacle is None:
                return self.kernels
            log_once(self._kernel_reasons, obstacle, STEP_BY_STEP)
        return self.steps


STEP_BY_STEP = "rounds run step by step while a request needs it (%s); one call of the CPU kernels runs all others"


def log_once(known: dict[str, None], obstacle: Obstacle, text: str, level: int = logging.INFO) -> None:
    """Log why rounds run at a slower place, and what to do about it. known: the reasons that have been logged."""
    if obstacle.reason not in known:
        known[obstacle.reason] = None
        log.log(level, f"{text}. %s", *obstacle)


# Captured graphs


def why_no_graph(parts: Speculation) -> str | None:
    """Return why no round of these parts can be captured; None if rounds can."""
    if obstacle := _why_speculation_on_host(parts):
        return obstacle.reason
    models: list[AnyModel] = [decoder.model for decoder in parts.decoders]
    if any(isinstance(model, FlatModel) for model in models):
        return "the CPU kernels are called from the host"
    if any(decoder.vocabulary is not None for decoder in parts.drafter.decoders):
        return "the draft vocabulary is chosen on the host"
    if obstacles := [obstacle for model in models if (obstacle := getattr(model, "device_obstacle", None))]:
        return str(obstacles[0])
    if any(decoder.backend.name == "split" for decoder in parts.decoders):
        return "attention 'split' needs the lengths on the host"
    return None


def why_no_graph_now(parts: Speculation, width: int, batch: Batch) -> Obstacle | None:
    """Return why the next round of the batch cannot be one captured graph; None if it can. width: of trees."""
    return _CONSTRAINT if batch.sampling.any_constraint else _why_no_graph_now(parts, width, batch)


def why_no_masked_graph_now(parts: Speculation, width: int, batch: Batch) -> Obstacle | None:
    """Return why the next round cannot be captured graphs with masks of the host between; None if it can."""
    if batch.sampling.any_constraint and width > 1:
        return Obstacle("trees under a grammar", "Set speculation_width=1")
    if batch.sampling.any_constraint and parts.accept is RULES["rejection"] and parts.drafter.decoders:
        return Obstacle("a grammar under the rejection rule", "Set acceptance='coupled'")
    return _why_no_graph_now(parts, width, batch)


def _why_no_graph_now(parts: Speculation, width: int, batch: Batch) -> Obstacle | None:
    sampling = batch.sampling
    features = sampling.step_features
    if width > 1 and (features.adjusts or features.logprobs is not None):
        return Obstacle("trees with penalties, min_tokens or log-probabilities", "Set speculation_width=1")
    if sampling.needs_host:
        return _why_sampling_on_host(sampling)
    return _why_speculation_on_host(parts)


def _why_speculation_on_host(parts: Speculation) -> Obstacle | None:
    if not parts.drafter.on_device:
        return Obstacle("the drafter runs on the host", "Choose another drafter")
    remedy = "Set num_speculative_tokens to a number or 'auto'"
    return Obstacle("the length policy reads draft tokens on the host", remedy) if parts.policy.reads_drafts else None


def _why_sampling_on_host(sampling: SamplingRows) -> Obstacle:
    if sampling.any_processor:
        return Obstacle("a logits processor", "Use logit_bias, penalties or a grammar where one of them does the same")
    if sampling.any_long_bias:
        return Obstacle(f"a logit_bias of more than {DEVICE_BIASES} tokens", "Name fewer tokens")
    return Obstacle("min_tokens with many stop tokens", "Name fewer stop tokens, or leave out min_tokens")


# The CPU kernels, for models that they run


def why_no_kernels(target: Decoder, rule: AcceptanceRule) -> str | None:
    """Return why the kernels run no round with this target and rule; None if they do."""
    if not isinstance(target.reader, NativeFusedStates | None):  # the call feeds only heads of the kernels
        return "the drafter reads the target's hidden states"
    return None if rule in RULES.values() else "the kernels do not have this acceptance rule"


def why_no_kernels_now(parts: Speculation, own: AcceptanceRule, batch: Batch) -> Obstacle | None:
    """Return why the kernels cannot run the next round; None if they can. own: the rule that they were made for."""
    if parts.accept is not own:
        return Obstacle("another acceptance rule", "Give the rule to the engine as acceptance")
    return None if batch.sampling.logprobs is None else _LOGPROBS


def why_no_kernels_for(draft: Draft, rule: AcceptanceRule, batch: Batch) -> Obstacle | None:
    """Return why the kernels cannot verify a draft; None if they can."""
    if draft.probabilities is not None:
        return Obstacle("draft tokens with probabilities", "Set acceptance='coupled'")
    if draft.parents is not None and not supports_trees(rule):  # which raises its error step by step
        return Obstacle("trees under this acceptance rule", "Set acceptance='coupled'")
    if not batch.sampling.any_constraint:
        return None
    if draft.parents is not None:
        return Obstacle("trees under a grammar or logits processor", "Set speculation_width=1")
    rows = zip(batch.sampling.constraints, draft.draft_tokens, strict=True)
    if all(constraint is None or constraint.is_free(tokens) for constraint, tokens in rows):
        return None  # any token may come at all positions
    return _CONSTRAINT


_CONSTRAINT = Obstacle("a grammar or logits processor", "Nothing avoids it: the host makes its masks")
_LOGPROBS = Obstacle("log-probabilities", "Leave out logprobs where nobody reads them")
