"""What a drafter is, and what it may be built from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from paceline.config.registry import DrafterKind
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft, Verdict
from paceline.core.row_keeper import RowKeeper, RowKeepers
from paceline.errors import ParameterError
from paceline.models.base import AnyModel
from paceline.models.decoder import Decoder, FeatureReader


@dataclass(frozen=True)
class Equipment:
    """What an engine has for a drafter.

    acceptance: the rule, as in ``EngineConfig``. draft: the draft model, where one was given. documents: token ids to
    copy from. decoder: gives a model a cache of the engine's rows and positions. width: of a kind of
    drafter, most draft tokens of a row for the same place; 1: chains.
    """

    target: Decoder
    acceptance: str
    draft: AnyModel | None
    documents: Sequence[Sequence[int]]
    decoder: Callable[[AnyModel], Decoder]
    width: Callable[[DrafterKind], int] = lambda _kind: 1

    def draft_decoder(self) -> Decoder:
        """The draft model with a cache of its own. Raises ParameterError if none was given."""
        if self.draft is None:
            raise ParameterError("draft_model", None, "a model; a drafter that asks for it says needs_draft_model")
        return self.decoder(self.draft)


class Drafter(RowKeeper):
    """Draft tokens the next tokens of every row. Whatever it draft tokens, answers stay what they are; only the speed
    changes.

    A drafter owns what it knows of rows, and is told when they begin, move and end (``RowKeeper``). Caches that follow
    the text it gives as ``decoders``: they are fed, copied and cut with the target's.

    What it needs is said by its class, before anything is loaded:

    needs_draft_model: whether it runs one. copies: whether it draft tokens from references, documents and siblings,
    which cost nothing. on_device: whether what it draft tokens is what rounds of the device draft token: its one
    decoder's draws, or nothing. uses_torch: whether it works with tensors; where it does not, rounds of the CPU kernels
    go without torch.
    auto_width: how many draft tokens stand side by side where ``speculation_width`` is "auto"; 0: its draft tokens
    never branch.

    width: how many do; 1: its draft tokens are chains. sources: what the kinds of its last draft tokens are, in words.
    paying_rows: most rows at which what it runs was measured to pay; None: that was not measured.
    """

    name: ClassVar[str]
    needs_draft_model: ClassVar[bool] = False
    copies: ClassVar[bool] = False
    on_device: bool = False
    uses_torch: bool = True
    auto_width: ClassVar[int] = 0
    width = 1
    sources: Sequence[str] = ("guesses",)
    paying_rows: int | None = None

    @classmethod
    def build(cls, equipment: Equipment, /) -> Drafter:  # noqa: ARG003
        """One for an engine. Raises ParameterError where the engine has not got what it needs."""
        return cls()

    @property
    def decoders(self) -> Sequence[Decoder]:
        """The models it runs, whose caches the scheduler keeps as it does the target's."""
        return ()

    @property
    def reader(self) -> FeatureReader | None:
        """Who gets the target's inner streams: they exist only while it reads a token. None: nobody."""
        return None

    @property
    def has_probabilities(self) -> bool:
        """Whether its draft tokens may come with the distribution that they were drawn from."""
        return False

    def propose(self, batch: Batch, wish: SpeculationPlan) -> Draft:
        """At most wish.k draft tokens for every row; wish.k >= 1."""
        raise NotImplementedError

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        """Learn what became of the draft tokens; called after every round, also those without draft tokens (k = 0)."""

    def describe(self, draft: str | None) -> str:
        """Who draft tokens, for the line that says what runs; empty if nobody does. draft: its draft model, in
        words.
        """
        return self.name if draft is None else f"{self.name} with {draft}"


class Wrapper(RowKeepers, Drafter):
    """Another drafter with something about it changed; the rest is the ``inner`` one's."""

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
    def decoders(self) -> Sequence[Decoder]:
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

    def propose(self, batch: Batch, wish: SpeculationPlan) -> Draft:
        return self.inner.propose(batch, wish)

    def observe(self, batch: Batch, verdict: Verdict) -> None:
        self.inner.observe(batch, verdict)

    def describe(self, draft: str | None) -> str:
        return f"{self.inner.describe(draft)} ({self.name})"


def make_drafter(kind: DrafterKind, equipment: Equipment) -> Drafter:
    """One for an engine of its own. Raises ParameterError."""
    return copy.deepcopy(kind) if isinstance(kind, Drafter) else cast(Drafter, kind.build(equipment))
