"""The base class of drafters, and the equipment that an engine offers for building one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from paceline.config.registry import DrafterKind
from paceline.core.batch import Batch, ParallelSample, SpeculationPlan
from paceline.core.draft import Draft, Verdict
from paceline.core.row_keeper import RowKeeper, RowKeepers
from paceline.drafters.answers import AnswerTexts
from paceline.errors import ParameterError
from paceline.models.base import AnyModel
from paceline.models.decoding.decoder import Decoder
from paceline.models.decoding.draft_decoder import DraftDecoder
from paceline.models.decoding.passes import FeatureReader


@dataclass(frozen=True)
class Equipment:
    """Parts of an engine that a drafter is built from.

    target: the target model with its cache.
    acceptance: the acceptance rule, as in ``EngineConfig``.
    draft: the draft model or head; None if none was given.
    documents: token ids of reference documents, for n-gram lookup. lookup_tokens: as in ``EngineConfig``.
    decoder: returns a draft model with a cache for the engine's rows and positions.
    width: for a class of drafters, the most draft tokens of a row at one position; 1: chains.
    """

    target: Decoder
    acceptance: str
    draft: AnyModel | None
    documents: Sequence[Sequence[int]]
    decoder: Callable[[AnyModel], DraftDecoder]
    width: Callable[[DrafterKind], int] = lambda _kind: 1
    lookup_tokens: int = 0

    def draft_decoder(self) -> DraftDecoder:
        """The draft model with a cache of its own. Raises ParameterError if none was given."""
        if self.draft is None:
            raise ParameterError("draft_model", None, "a model, which this drafter needs (needs_draft_model)")
        return self.decoder(self.draft)


class Drafter(RowKeeper):
    """Proposes the next tokens of every row. The output does not depend on the proposals, only the speed does.

    A drafter owns its per-slot state: ``join`` and ``leave`` say when sequences begin and end (``RowKeeper``). The
    models in ``decoders`` have caches, which the scheduler feeds, copies and cuts with the target's.

    Class attributes, read before anything is loaded:

    needs_draft_model: whether it runs a draft model.
    copies: whether it takes draft tokens from references, documents and other answers, which cost nothing.
    on_device: whether captured rounds on a device can make its draft tokens: samples of its one decoder, or none.
    uses_torch: whether it needs tensors. If not, rounds on the CPU kernels avoid torch.
    auto_width: draft tokens per position for ``speculation_width="auto"``; 0: its drafts never branch.
    scores_subset: whether its draft model may score a part of its vocabulary (``draft_vocab_size``). It then tells
        ``Decoder.vocabulary`` of sequences that join and of each round.

    Attributes of an object:

    width: draft tokens per position; 1: its drafts are chains.
    sources: names of the kinds of its last draft tokens (``Draft.kinds``).
    paying_rows: largest batch for which drafting was measured to pay; None: not measured.
    one_pass: whether a draft takes the same time whatever its number of tokens.
    answers: answers of requests that it copies from; None: it copies from none.
    """

    name: ClassVar[str]
    needs_draft_model: ClassVar[bool] = False
    copies: ClassVar[bool] = False
    on_device: bool = False
    uses_torch: bool = True
    auto_width: ClassVar[int] = 0
    scores_subset: ClassVar[bool] = False
    width = 1
    sources: Sequence[str] = ("draft tokens",)
    paying_rows: int | None = None
    one_pass = False
    answers: AnswerTexts | None = None

    @classmethod
    def build(cls, equipment: Equipment, /) -> Drafter:  # noqa: ARG003
        """A drafter for one engine. Raises ParameterError if the engine lacks something that it needs."""
        return cls()

    @property
    def decoders(self) -> Sequence[DraftDecoder]:
        """The models that it runs, with their caches."""
        return ()

    @property
    def reader(self) -> FeatureReader | None:
        """Receives the target's hidden states during its forward passes, the only time they exist. None: not needed."""
        return None

    @property
    def has_probabilities(self) -> bool:
        """Whether its drafts may carry the distributions that their tokens were drawn from."""
        return False

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        """At most ``plan.k`` draft tokens for every row of the batch. plan: of this round, with k >= 1."""
        raise NotImplementedError

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Learn which draft tokens were accepted. Called after every round, also after rounds without draft tokens."""

    def end(self, slot: int, sample: ParallelSample, text: Sequence[int]) -> None:
        """Learn from the answer in ``slot``, which has ended. text: the row's tokens from ``sample.prompt_tail`` on."""

    def describe(self, draft: str | None) -> str:
        """The drafter in words, for the start-up message; empty if it drafts nothing. draft: its draft model's name."""
        return self.name if draft is None else f"{self.name} with {draft}"


class Wrapper(RowKeepers, Drafter):
    """Base class for drafters that change one thing about another, ``inner``, and forward the rest."""

    name = "wrapper"

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.inner.width

    @property
    def sources(self) -> Sequence[str]:  # type: ignore[override]
        return self.inner.sources

    @property
    def paying_rows(self) -> int | None:  # type: ignore[override]
        return self.inner.paying_rows

    @property
    def one_pass(self) -> bool:  # type: ignore[override]
        return self.inner.one_pass

    @property
    def answers(self) -> AnswerTexts | None:  # type: ignore[override]
        return self.inner.answers

    @property
    def decoders(self) -> Sequence[DraftDecoder]:
        return self.inner.decoders

    @property
    def reader(self) -> FeatureReader | None:
        return self.inner.reader

    @property
    def has_probabilities(self) -> bool:
        return self.inner.has_probabilities

    @property
    def keepers(self) -> tuple[RowKeeper, ...]:
        return (self.inner,)

    def propose(self, batch: Batch, plan: SpeculationPlan) -> Draft:
        return self.inner.propose(batch, plan)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self.inner.observe(batch, verdict)

    def end(self, slot: int, sample: ParallelSample, text: Sequence[int]) -> None:
        self.inner.end(slot, sample, text)

    def describe(self, draft: str | None) -> str:
        return f"{self.inner.describe(draft)} ({self.name})"


def make_drafter(kind: DrafterKind, equipment: Equipment) -> Drafter:
    """A drafter of this kind for one engine. An object is copied. Raises ParameterError, as ``Drafter.build``."""
    return copy.deepcopy(kind) if isinstance(kind, Drafter) else cast(Drafter, kind.build(equipment))
