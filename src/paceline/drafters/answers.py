"""Answers of requests, from which n-gram drafts are copied: an index for each scope."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count

from paceline.core.batch import RequestGroup
from paceline.drafters.lookup import TextContents, TextIndex


class AnswerTexts:
    """Indexes of answers by scope, of at most ``most`` tokens in all.

    The oldest answers of a scope go first, and scopes that were not used for longest.

    make: returns an empty index of at most ``most`` tokens.
    """

    def __init__(self, make: Callable[[], TextIndex], most: int) -> None:
        self._make, self.most, self.held = make, most, 0
        self._scopes: OrderedDict[bytes, _Scope] = OrderedDict()  # by hash of the scope

    def of(self, group: RequestGroup) -> tuple[TextIndex, int]:
        """The index of a request group's scope, and the number of a new text in it."""
        entry = self._scope(_hashed(group.scope), group.shared)
        return entry.texts, next(entry.numbers)

    def count(self, group: RequestGroup) -> None:
        """Note that a request group's scope has grown, and forget others if they are too many tokens together."""
        if (entry := self._scopes.get(_hashed(group.scope))) is not None:
            self._count(entry)

    def _scope(self, hashed: bytes, shared: bool) -> _Scope:
        """The entry of a scope, which is the latest used now."""
        entry = self._scopes.get(hashed) or self._scopes.setdefault(hashed, _Scope(self._make(), shared))
        self._scopes.move_to_end(hashed)
        return entry

    def _count(self, entry: _Scope) -> None:
        before, entry.held = entry.held, entry.texts.held
        self.held += entry.held - before
        while self.held > self.most and len(self._scopes) > 1:
            self.held -= self._scopes.popitem(last=False)[1].held

    def shared(self) -> dict[bytes, TextContents]:
        """A copy of all answers that requests share, by the SHA-256 of their scope; the latest used scope is last."""
        return {hashed: entry.texts.contents() for hashed, entry in self._scopes.items() if entry.shared}

    def add(self, hashed: bytes, answers: Sequence[Sequence[int]]) -> None:
        """Add answers to a scope that requests share. hashed: the SHA-256 of the scope."""
        entry = self._scope(hashed, shared=True)
        for answer in answers:
            entry.texts.append(next(entry.numbers), answer)
        self._count(entry)

    def clear(self) -> None:
        """Forget all answers. Those of rows that run are forgotten when they end."""
        self._scopes.clear()
        self.held = 0


class _Scope:
    """The answers of one scope, the numbers of further ones, and the tokens that were counted.

    shared: whether requests share them (``RequestGroup.shared``).
    """

    def __init__(self, texts: TextIndex, shared: bool) -> None:
        self.texts, self.shared, self.numbers, self.held = texts, shared, count(), 0


def _hashed(scope: tuple[str, ...]) -> bytes:
    """The SHA-256 of a scope. Only its last part may have NUL: different scopes, other hashes."""
    return hashlib.sha256("\0".join(scope).encode("utf-8", "surrogatepass")).digest()
