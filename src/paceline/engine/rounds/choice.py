"""The choice of a place for each round, and every reason why a place cannot run one."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from paceline.core.acceptance import RULES, AcceptanceRule, supports_trees
from paceline.core.batch import Batch
from paceline.core.draft import Draft
from paceline.core.rows import DEVICE_BIASES, SamplingRows
from paceline.drafters.heads.native import NativeFusedStates
from paceline.engine.rounds.place import RoundPlace
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

    @property
    def places(self) -> list[RoundPlace]:
        return [place for place in (*self.graphs, self.kernels, self.steps) if place is not None]

    def place_for(self, batch: Batch) -> RoundPlace:
        """Return the first place that can run the next round of the batch."""
        reason = None
        for place in self.graphs:
            reason = place.why_not(batch)
            if reason is None:
                return place
        if reason is not None and reason not in self.reasons:
            self._note(self.graphs[-1], reason)
        if self.kernels is not None and self.kernels.why_not(batch) is None:
            return self.kernels
        return self.steps

    def _note(self, graph: RoundPlace, reason: str) -> None:
        """Log, once per reason, that the host runs rounds that would otherwise be captured."""
        self.reasons[reason] = None
        text = "rounds run on the %s while a request needs it (%s); the %s runs all others"
        log.warning(text, self.steps.name, reason, graph.name)


# Captured graphs


def why_no_graph(parts: Speculation) -> str | None:
    """Return why no round of these parts can be captured; None if rounds can."""
    if reason := _why_speculation_on_host(parts):
        return reason
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


def why_no_graph_now(parts: Speculation, width: int, batch: Batch) -> str | None:
    """Return why the next round of the batch cannot be one captured graph; None if it can. width: of trees."""
    return "a grammar or logits processor" if batch.sampling.any_constraint else _why_no_graph_now(parts, width, batch)


def why_no_masked_graph_now(parts: Speculation, width: int, batch: Batch) -> str | None:
    """Return why the next round cannot be captured graphs with masks of the host between; None if it can."""
    if batch.sampling.any_constraint and width > 1:
        return "trees under a grammar"
    if batch.sampling.any_constraint and parts.accept is RULES["rejection"] and parts.drafter.decoders:
        return "a grammar under the rejection rule"
    return _why_no_graph_now(parts, width, batch)


def _why_no_graph_now(parts: Speculation, width: int, batch: Batch) -> str | None:
    sampling = batch.sampling
    features = sampling.step_features
    if width > 1 and (features.adjusts or features.logprobs is not None):
        return "trees with penalties, min_tokens or log-probabilities"
    if sampling.needs_host:
        return _why_sampling_on_host(sampling)
    return _why_speculation_on_host(parts)


def _why_speculation_on_host(parts: Speculation) -> str | None:
    if not parts.drafter.on_device:
        return "the drafter runs on the host"
    return "the length policy reads draft tokens on the host" if parts.policy.reads_drafts else None


def _why_sampling_on_host(sampling: SamplingRows) -> str:
    if sampling.any_processor:
        return "a logits processor"
    if sampling.any_long_bias:
        return f"a logit_bias of more than {DEVICE_BIASES} tokens"
    return "min_tokens with many stop tokens"


# The CPU kernels, for models that they run


def why_no_kernels(target: Decoder, rule: AcceptanceRule) -> str | None:
    """Return why the kernels run no round with this target and rule; None if they do."""
    if not isinstance(target.reader, NativeFusedStates | None):  # the call feeds only heads of the kernels
        return "the drafter reads the target's hidden states"
    return None if rule in RULES.values() else "the kernels do not have this acceptance rule"


def why_no_kernels_now(parts: Speculation, own: AcceptanceRule, batch: Batch) -> str | None:
    """Return why the kernels cannot run the next round; None if they can. own: the rule that they were made for."""
    if parts.accept is not own:
        return "another acceptance rule"
    return None if batch.sampling.logprobs is None else "log-probabilities"


def why_no_kernels_for(draft: Draft, rule: AcceptanceRule, batch: Batch) -> str | None:
    """Return why the kernels cannot verify a draft; None if they can."""
    if draft.probabilities is not None:
        return "draft tokens with probabilities"
    if draft.parents is not None and not supports_trees(rule):
        return "trees under this acceptance rule"  # which raises its error step by step
    if not batch.sampling.any_constraint:
        return None
    if draft.parents is not None:
        return "trees under a grammar or logits processor"
    rows = zip(batch.sampling.constraints, draft.draft_tokens, strict=True)
    if all(constraint is None or constraint.is_free(tokens) for constraint, tokens in rows):
        return None  # any token may come at all positions
    return "a grammar or logits processor"
