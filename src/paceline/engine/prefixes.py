"""Prefix cache: finds the slot whose cache holds the longest prefix of a new prompt.

A key and a value depend only on the tokens up to their position, so a prompt can copy the cached keys and values of any
slot with a common prefix. Its sequence may decode, be in prefill, or have ended: free slots keep their caches until
they are needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, NamedTuple

LEAST = 16  # tokens: copying fewer is not faster than reading them
STATES_APART = 512  # tokens between the saved states of a prompt with recurrent layers, besides one at its end
WORTH_WAITING = 64  # tokens: a prompt waits for another that is about to read as many of its first ones
# Tokens of a prefix for which it counts as used one request later. Not measured: an agent's transcript of 8,000 tokens
# outlives 31 requests of others.
TOKENS_PER_USE = 256
_STEP = 64  # tokens that two texts are first compared by


@dataclass(frozen=True, eq=False)
class Scope:
    """Restricts prefix reuse. Samples of one request share one Scope object and always reuse each other's prefixes.

    copies: name of the prefixes that a prompt may reuse beside those of its own request; None for no others.
    kept: name under which other requests may reuse its prefix; None keeps it private.
    least: fewest tokens that a prompt copies. worth_waiting: fewest that it waits for while another reads them.
    """

    copies: str | None = None
    kept: str | None = None
    least: int = LEAST
    worth_waiting: int = WORTH_WAITING

    def may_copy(self, other: Scope) -> bool:
        """Whether prompts of this scope may reuse prefixes of the other."""
        return other is self or (self.copies is not None and self.copies == other.kept)


def common_prefix_length(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """Return how many first tokens two texts have in common, at most ``limit``. Both must be of one type.

    Slices double until one differs, which is then halved: texts are compared by few operations.
    """
    common, limit, step = 0, min(limit, len(one), len(other)), _STEP
    while common < limit:
        stop = min(common + step, limit)
        if one[common:stop] == other[common:stop]:
            common, step = stop, 2 * step
        else:
            limit, step = stop - 1, max(1, (stop - common) // 2)
    return common


@dataclass
class CachedPrefix:
    """The tokens whose keys and values a free slot's target cache holds; a draft model's cache may hold fewer of them.

    bytes: memory of the slot. has_adapter: whether it was computed with one.
    last_use: reading of the pool's clock when the slot was last useful.
    """

    tokens: array[int]
    scope: Scope
    bytes: int = 0
    has_adapter: bool = False
    last_use: int = -1

    @property
    def is_kept(self) -> bool:
        """Whether later requests may reuse it."""
        return self.scope.kept is not None

    @property
    def keep_until(self) -> int:
        """Reading of the clock up to which it is worth more than an empty row: a long text costs more to read again."""
        return self.last_use + len(self.tokens) // TOKENS_PER_USE

    def loss(self, kept: int) -> int:
        """Return the reusable tokens that are lost if all but the first ``kept`` are overwritten."""
        return len(self.tokens) - kept if self.is_kept else 0


class FreeSlotPool:
    """The free slots: empty ones, and those that keep a prefix.

    prefixes: by slot. bytes: memory of all of them. counts: what became of prefixes.
    """

    def __init__(self, slots: Iterable[int], counts: PrefixCounts | None = None) -> None:
        self._clock = count()
        self.empty, self.prefixes, self.bytes = set(slots), dict[int, CachedPrefix](), 0
        self.counts = PrefixCounts() if counts is None else counts

    def __len__(self) -> int:
        return len(self.empty) + len(self.prefixes)

    def __iter__(self) -> Iterator[int]:
        yield from self.empty
        yield from self.prefixes

    def describe(self) -> str:
        """Say how many prefixes are kept, and what became of others."""
        if not (self.prefixes or self.counts.dropped):
            return ""
        counts = self.counts
        return (
            f" ({len(self.prefixes)} kept in {self.bytes / 2**30:.2f} GiB, {counts.reused} prompts began with one, "
            f"{counts.dropped} dropped)"
        )

    def reusable_by(self, prompt: Sequence[int], scope: Scope) -> dict[int, int]:
        """Return how many of its first tokens the prompt can reuse, for each slot that has some."""
        text = array("i", prompt)
        found = {
            slot: reusable_tokens(prefix.tokens, text, scope.least)
            for slot, prefix in self.prefixes.items()
            if scope.may_copy(prefix.scope)
        }
        return {slot: tokens for slot, tokens in found.items() if tokens}

    def choose(self, reusable: Mapping[int, int], in_use: int, *, is_full: bool) -> int:
        """Return the free slot to give to a prompt.

        reusable: tokens of the prompt that free slots hold. in_use: most tokens of the prompt that a slot in use holds.
        is_full: whether a prefix has to go if the prompt gets an empty slot.

        The slot with the longest prefix is taken, unless more would be lost by overwriting it than by dropping the
        least recently used one. Then an empty slot is taken, or that one, and the prefix is copied.
        """
        oldest = min(self.prefixes, key=self._order, default=-1)
        other = min(self.empty, default=oldest)
        losses = {slot: self.prefixes[slot].loss(tokens) for slot, tokens in reusable.items()}
        best = max(reusable, key=lambda slot: (reusable[slot], -losses[slot]), default=other)
        if best == other or reusable[best] < in_use:
            return other
        goes = is_full or not self.empty
        lost = self.prefixes[oldest].loss(reusable.get(oldest, 0)) if goes else 0
        return best if losses[best] <= max(lost, LEAST - 1) else other

    @property
    def by_use(self) -> list[int]:
        """The slots with prefixes in the order of dropping: private prefixes, then those used longest ago.

        Long prefixes count as used more recently, so that an agent's transcript outlives other clients' short prompts.
        """
        return sorted(self.prefixes, key=self._order)

    def _order(self, slot: int) -> tuple[bool, int, int]:
        prefix = self.prefixes[slot]
        return prefix.is_kept, prefix.keep_until, slot

    def use(self, prefix: CachedPrefix) -> None:
        """Mark a prefix as used now."""
        prefix.last_use = next(self._clock)

    def put(self, slot: int, prefix: CachedPrefix) -> None:
        """Add a slot with the prefix that it holds."""
        if prefix.tokens:
            self.use(prefix)
            self.prefixes[slot] = prefix
            self.bytes += prefix.bytes
        else:
            self.empty.add(slot)

    def drop(self, slot: int) -> None:
        """Forget the prefix of a free slot, if it has one: it is empty."""
        if (prefix := self.prefixes.pop(slot, None)) is not None:
            self.bytes -= prefix.bytes
        self.empty.add(slot)

    def take(self, slot: int) -> None:
        """Remove a slot, which is free no longer, and its prefix."""
        self.drop(slot)
        self.empty.discard(slot)

    def forget(self, slots: Iterable[int]) -> None:
        """Reset the pool to these slots, without prefixes."""
        self.empty, self.prefixes, self.bytes = set(slots), {}, 0


@dataclass
class PrefixCounts:
    """What became of cached prefixes since the start.

    reused: prompts that began with one. tokens: of these prompts, that were not read again. dropped: prefixes that
    later requests might have reused, and that gave way in memory. written, read, refused: their files: those written,
    those that prompts went on from, and those that were damaged.
    """

    EVENTS: ClassVar = ("reused", "dropped", "written", "read", "refused")
    reused: int = 0
    tokens: int = 0
    dropped: int = 0
    written: int = 0
    read: int = 0
    refused: int = 0


class PrefixSource(NamedTuple):
    """A slot, and how many of its first tokens a prompt can copy; (-1, 0): there is none."""

    slot: int
    tokens: int


def longest_source(source: PrefixSource, others: Mapping[int, int]) -> PrefixSource:
    """Return the one with most tokens. others: tokens by slot."""
    return max([source, *map(PrefixSource._make, others.items())], key=lambda each: each.tokens)


def may_share_prefix(text: Sequence[int], prompt: Sequence[int], least: int = LEAST) -> bool:
    """Whether the first tokens allow a common prefix that is worth copying; a quick test before ``reusable_tokens``."""
    size = min(least, len(text), len(prompt) - 1)
    return text[:size] == prompt[:size]


def reusable_tokens(text: Sequence[int], prompt: Sequence[int], least: int = LEAST) -> int:
    """Return how many tokens of a text a prompt can copy: never its last one, which must be read; 0 if too few."""
    limit = len(prompt) - 1
    tokens = common_prefix_length(text, prompt, limit)
    return tokens if tokens >= min(least, limit) else 0


def best_source(
    texts: Iterable[tuple[int, Sequence[int], Scope]],
    prompt: Sequence[int],
    scope: Scope,
    cut: Callable[[int, int], int] = lambda _slot, tokens: tokens,
) -> PrefixSource:
    """Return the text with the longest reusable prefix.

    texts: (slot, tokens that its caches hold, scope) of each candidate.
    cut: returns, for a slot and a number of its first tokens, how many of them its caches can be cut to.
    """
    best = PrefixSource(-1, 0)
    for slot, text, other in texts:
        if scope.may_copy(other) and (tokens := cut(slot, reusable_tokens(text, prompt, scope.least))) > best.tokens:
            best = PrefixSource(slot, tokens)
            if tokens == len(prompt) - 1:
                break  # nothing can be longer; there may be hundreds of slots with this prompt
    return best
