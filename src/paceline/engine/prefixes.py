"""Prefix cache: finds the slot whose cache holds the longest prefix of a new prompt.

A key and a value depend only on the tokens up to their position, so a prompt can copy the cached keys and values of any
slot with a common prefix. Its sequence may decode, be in prefill, or have ended: free slots keep their caches until
they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

LEAST = 16  # tokens: copying fewer is not faster than reading them
STATES_APART = 512  # tokens between the saved states of a prompt with recurrent layers, besides one at its end
WORTH_WAITING = 64  # tokens: a prompt waits for another that is about to read as many of its first ones
# Tokens of a prefix for which it counts as used one request later. Not measured: an agent's transcript of 8,000 tokens
# outlives 31 requests of others.
TOKENS_PER_USE = 256
_STEP = 64  # tokens per comparison of list slices


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

    def may_copy(self, other: Scope | None) -> bool:
        """Whether prompts of this scope may reuse prefixes of the other."""
        return other is self or (other is not None and self.copies is not None and self.copies == other.kept)


def common_prefix_length(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """Return how many first tokens two texts have in common, at most ``limit``."""
    limit = min(limit, len(one), len(other))
    for start in range(0, limit, _STEP):
        stop = min(start + _STEP, limit)
        if one[start:stop] != other[start:stop]:
            return next(at for at in range(start, stop) if one[at] != other[at])
    return limit


@dataclass
class CachedPrefix:
    """The tokens whose keys and values a free slot's target cache holds; a draft model's cache may hold fewer of them.

    last_use: reading of the pool's clock when the slot was last useful; -1 for slots that never held a text.
    """

    tokens: list[int] = field(default_factory=list)
    scope: Scope | None = None
    last_use: int = -1

    @property
    def is_kept(self) -> bool:
        """Whether later requests may reuse it."""
        return self.scope is not None and self.scope.kept is not None

    @property
    def keep_until(self) -> int:
        """Reading of the clock up to which it is worth more than an empty row: a long text costs more to read again."""
        return self.last_use + len(self.tokens) // TOKENS_PER_USE

    def loss(self, kept: int) -> int:
        """Return the reusable tokens that are lost if all but the first ``kept`` are overwritten."""
        return len(self.tokens) - kept if self.is_kept else 0


class FreeSlotPool:
    """The free slots, and the prefixes that they hold.

    prefixes: the prefix of each free slot.
    """

    def __init__(self, slots: int) -> None:
        self._clock = count()
        self.prefixes = {slot: CachedPrefix() for slot in range(slots)}

    def reusable_by(self, prompt: Sequence[int], scope: Scope) -> dict[int, int]:
        """Return, for each free slot, how many of its first tokens the prompt can reuse."""
        return {
            slot: reusable_tokens(prefix.tokens, prompt, scope.least) if scope.may_copy(prefix.scope) else 0
            for slot, prefix in self.prefixes.items()
        }

    def choose(self, reusable: Mapping[int, int], in_use: int) -> int:
        """Return the free slot to give to a prompt.

        reusable: tokens of the prompt that each free slot holds.
        in_use: most tokens of the prompt that a slot in use holds.

        The slot with the longest prefix is taken, unless more would be lost by overwriting it than by overwriting the
        least recently used one. Then that one is taken, and the prefix is copied.
        """
        oldest, losses = self.by_use[0], {slot: self.prefixes[slot].loss(kept) for slot, kept in reusable.items()}
        best = max(reusable, key=lambda slot: (reusable[slot], -losses[slot]))
        if reusable[best] == 0 or reusable[best] < in_use:
            return oldest
        return best if losses[best] <= losses[oldest] else oldest

    @property
    def by_use(self) -> list[int]:
        """The free slots in the order of overwriting: private prefixes, then those used longest ago.

        Long prefixes count as used more recently, so that an agent's transcript outlives other clients' short prompts.
        """

        def order(slot: int) -> tuple[bool, int, int]:
            prefix = self.prefixes[slot]
            return prefix.is_kept, prefix.keep_until, slot

        return sorted(self.prefixes, key=order)

    def use(self, prefix: CachedPrefix) -> None:
        """Mark a prefix as used now."""
        prefix.last_use = next(self._clock)

    def put(self, slot: int, prefix: CachedPrefix) -> None:
        """Add a slot with the prefix that it holds."""
        self.use(prefix)
        self.prefixes[slot] = prefix

    def forget(self, slots: Iterable[int]) -> None:
        """Reset the pool to these slots, without prefixes."""
        self.prefixes = {slot: CachedPrefix() for slot in slots}


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
    texts: Iterable[tuple[int, Sequence[int], Scope | None]],
    prompt: Sequence[int],
    scope: Scope,
    cut: Callable[[int, int], int] = lambda _slot, tokens: tokens,
) -> tuple[int, int]:
    """Return (slot, tokens) of the text with the longest reusable prefix; (-1, 0) if there is none.

    texts: (slot, tokens that its caches hold, scope) of each candidate.
    cut: returns, for a slot and a number of its first tokens, how many of them its caches can be cut to.
    """
    best = -1, 0
    for slot, text, other in texts:
        if scope.may_copy(other) and (tokens := cut(slot, reusable_tokens(text, prompt, scope.least))) > best[1]:
            best = slot, tokens
            if tokens == len(prompt) - 1:
                break  # nothing can be longer; there may be hundreds of slots with this prompt
    return best
