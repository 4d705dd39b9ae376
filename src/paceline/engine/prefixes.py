"""What was read once is not read again: which rows hold the beginning of a new prompt.

A key and a value depend on the tokens up to their position and on nothing else. So a prompt may copy those of the
longest beginning that it shares with the text of any row: one that decodes, one that is being prefilled, or one that is
free, for free rows keep what they hold until they are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

LEAST = 16  # tokens: fewer are read as fast as they are copied
WORTH_WAITING = 64  # tokens that another prompt is about to read, too
_STEP = 64  # tokens compared at once


@dataclass(frozen=True, eq=False)
class Scope:
    """Who may copy from whom: the answers to one request, which have one scope, and others by name.

    copies: the name of the texts that it may copy, besides its own; None: no others. kept: the name under which others
    may copy its own; None: nobody else may.
    """

    copies: str | None = None
    kept: str | None = None

    def may_copy(self, other: Scope | None) -> bool:
        """Whether texts of this scope may copy from texts of the other."""
        return other is self or (other is not None and self.copies is not None and self.copies == other.kept)


def common_prefix_length(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """How many tokens at the beginning of two texts are the same; ``most`` is enough."""
    most = min(most, len(one), len(other))
    for at in range(0, most, _STEP):
        stop = min(at + _STEP, most)
        if one[at:stop] != other[at:stop]:
            return at + sum(1 for _ in takewhile(_same, zip(one[at:stop], other[at:stop], strict=True)))
    return most


def _same(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


@dataclass
class CachedPrefix:
    """What a free row still holds: the target's keys and values of ``tokens``; a draft model may have read fewer.

    used: when it was last of use, by the shelf's count; rows that never held anything came first.
    """

    tokens: list[int] = field(default_factory=list)
    scope: Scope | None = None
    used: int = -1

    @property
    def is_kept(self) -> bool:
        """Whether requests to come may copy it."""
        return self.scope is not None and self.scope.kept is not None

    def loss(self, kept: int) -> int:
        """Tokens that would have to be read again, perhaps, if all but the first ``kept`` were overwritten."""
        return len(self.tokens) - kept if self.is_kept else 0


class FreeSlotPool:
    """The free rows, in the order of their places, and what they hold."""

    def __init__(self, rows: int) -> None:
        self._count = count()
        self.rows = [CachedPrefix() for _ in range(rows)]

    def shared_with(self, prompt: Sequence[int], scope: Scope) -> list[int]:
        """Of each free row, how many of its first tokens the prompt may have for its own."""
        return [reusable_tokens(held.tokens, prompt) if scope.may_copy(held.scope) else 0 for held in self.rows]

    def choose(self, fits: Sequence[int], elsewhere: int) -> int:
        """The place of the row to give away, if the rows have so much of the prompt and one in use ``elsewhere``.

        It is the row that has most of the prompt, unless what else it holds is worth more than all that the row holds
        which was of no use for the longest time: that one is overwritten then.
        """
        oldest = self.by_use[0]
        best = max(range(len(fits)), key=lambda place: (fits[place], -self.rows[place].loss(fits[place])))
        if fits[best] == 0 or fits[best] < elsewhere:
            return oldest
        return best if self.rows[best].loss(fits[best]) <= self.rows[oldest].loss(fits[oldest]) else oldest

    @property
    def by_use(self) -> list[int]:
        """The places, those first whose rows were of no use for the longest time."""
        return sorted(range(len(self.rows)), key=lambda place: (self.rows[place].is_kept, self.rows[place].used))

    def use(self, held: CachedPrefix) -> None:
        """It was of use just now."""
        held.used = next(self._count)

    def put(self, held: CachedPrefix) -> None:
        """The row before the first free one is free, too."""
        self.use(held)
        self.rows.insert(0, held)

    def longest(self, *places: int) -> int:
        """Tokens that any of these rows holds."""
        return max(len(self.rows[place].tokens) for place in places)

    def swap(self, one: int, other: int) -> None:
        """Two free rows have changed places."""
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]

    def forget(self, rows: int) -> None:
        """So many rows are free, and hold nothing that is of any use."""
        self.rows = [CachedPrefix() for _ in range(rows)]


def may_share_prefix(text: Sequence[int], prompt: Sequence[int]) -> bool:
    """Whether a look at the first tokens leaves it open that they have a beginning in common that is worth copying."""
    begins = min(LEAST, len(text), len(prompt) - 1)
    return text[:begins] == prompt[:begins]


def reusable_tokens(text: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens of a text a prompt may copy: all but its last, which is to be the unseen one; 0 if too few."""
    most = len(prompt) - 1
    tokens = common_prefix_length(text, prompt, most)
    return tokens if tokens >= min(LEAST, most) else 0


def best_source(
    texts: Iterable[tuple[int, Sequence[int], Scope | None]], prompt: Sequence[int], scope: Scope
) -> tuple[int, int]:
    """(row, tokens): whose text, of (row, tokens that its caches hold, scope), begins most like the prompt; (-1, 0)."""
    best = -1, 0
    for row, text, other in texts:
        if scope.may_copy(other) and (tokens := reusable_tokens(text, prompt)) > best[1]:
            best = row, tokens
            if tokens == len(prompt) - 1:
                break  # there may be hundreds of rows, and of answers to this prompt
    return best
